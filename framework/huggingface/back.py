"""A checkpoint of a model that ``hf:DIRECTORY`` built, of any layout -> a directory that transformers opens.

The names are renamed back, tensor by tensor: one is in memory at a time. ``config.json`` is the directory's own, with
what ``model.options`` changed; tokenizer files go along. Written beside ``out`` and renamed at the end.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.checkpoint import Checkpoint, Kind, newest_valid, open_checkpoint
from framework.checkpoint.files import explained, sync_directory
from framework.checkpoint.manifest import MANIFEST
from framework.checkpoint.shard import TORCH_DTYPES
from framework.config import RunConfig, parse
from framework.errors import CheckpointError, ModelError
from framework.huggingface.directory import CONFIG, INDEX, SINGLE, read_json
from framework.huggingface.restructure import OWN_OPTIONS, names_in_transformers
from framework.model import PlainModel, build_model
from framework.parameters import ParameterInfo

SHARD_BYTES = 5 * 10**9
BYTES_AT_ONCE = 16 * 2**20
SCHEME = "hf:"
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
WORDS = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


class Exported(NamedTuple):
    """What was written."""

    path: Path
    num_tensors: int
    files: dict[str, int]
    """Weights: name -> bytes."""
    copied: list[str]


class _Planned(NamedTuple):
    """A tensor before a number is read."""

    name: str
    ours: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_of_transformers(config: RunConfig) -> bool:
    """Whether the model is one that ``hf:DIRECTORY`` built."""
    return config.model.builder.startswith(SCHEME)


def export(
    checkpoint_dir: Path, out_dir: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write a checkpoint, or the newest one of a run directory, as the directory ``out_dir``, new or empty.

    Args:
        dtype: of all tensors; None: as they were trained. float32 of a run in bfloat16 are its master weights.
        shard_bytes: of one file at most, but for a tensor that is larger.

    Raises:
        CheckpointError, ModelError: the checkpoint is damaged, of another builder, or its directory is gone.
    """
    if dtype is not None and dtype not in WORDS:
        raise ModelError(f"dtype {dtype!r}: choose of {', '.join(WORDS)}")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CheckpointError(f"{out_dir} is {'not empty' if out_dir.is_dir() else 'a file'}: name a new directory")
    with _opened(checkpoint_dir) as checkpoint:
        config = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
        if not is_of_transformers(config):
            raise ModelError(
                f"{checkpoint.path} is of {config.model.builder}, and written back here are models that "
                f'model.builder = "hf:DIRECTORY" built: only they have names in transformers'
            )
        model = build_model(config.model.builder, config.model.options | {"weights": False}, config.run.seed)
        source = Path(config.model.builder.removeprefix(SCHEME)).expanduser()
        planned = _plan(checkpoint, model, dtype)
        temporary = out_dir.parent / f".tmp-{out_dir.name}-{secrets.token_hex(4)}"
        with explained(out_dir.parent):
            temporary.mkdir(parents=True)
        try:
            files = _write_weights(checkpoint, planned, temporary, shard_bytes)
            written = dtype or max(WORDS, key=lambda word: sum(p.num_bytes for p in planned if p.dtype == WORDS[word]))
            _write_json(temporary / CONFIG, _config(source, config.model.options, written))
            copied = _copy_companions(source, temporary, config)
            with explained(out_dir):
                for path in temporary.iterdir():
                    _sync(path)
                sync_directory(temporary)
                if out_dir.is_dir():
                    out_dir.rmdir()
                temporary.rename(out_dir)
                sync_directory(out_dir.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return Exported(out_dir, len(planned), files, copied)


def _opened(path: Path) -> Checkpoint:
    """A verified checkpoint."""
    if (path / MANIFEST).is_file():
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    found = newest_valid(path)
    if found is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run directory that has one")
    return found


def _plan(checkpoint: Checkpoint, model: PlainModel, dtype: str | None) -> list[_Planned]:
    """Every parameter once, tied ones under the first of their names: the one that transformers saves, too."""
    names = names_in_transformers(model.layers)
    ours = {model.canonical(name): names[model.canonical(name)] for name in names}
    there = set(checkpoint.parameters(Kind.WEIGHTS))
    lost, extra = sorted(ours.keys() - there), sorted(there - ours.keys())
    if lost or extra:
        what = f"has no weights of {lost[0]}" if lost else f"has weights of {extra[0]}, which the model has not"
        raise CheckpointError(f"{checkpoint.path} {what}: the configuration in its directory is another one by now")
    entries = {name: checkpoint.manifest.tensors[Kind.WEIGHTS.of(name)] for name in ours}
    return [
        _Planned(
            theirs, name, entries[name].shape, TORCH_DTYPES[entries[name].dtype] if dtype is None else WORDS[dtype]
        )
        for name, theirs in ours.items()
    ]


def _write_weights(
    checkpoint: Checkpoint, planned: list[_Planned], directory: Path, shard_bytes: int
) -> dict[str, int]:
    shards: list[list[_Planned]] = [[]]
    for each in planned:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + each.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(each)
    if len(shards) == 1:
        return {SINGLE: _write_file(directory / SINGLE, shards[0], _tensors(checkpoint, shards[0]))}
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
    total = sum(each.num_bytes for each in planned)
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return {
        name: _write_file(directory / name, shard, _tensors(checkpoint, shard))
        for name, shard in zip(names, shards, strict=True)
    }


def _tensors(checkpoint: Checkpoint, planned: list[_Planned]) -> Iterator[Tensor]:
    """One at a time, from any layout's pieces; master weights where as many bits are asked for."""
    masters = set(checkpoint.parameters(Kind.MASTER))
    for each in planned:
        kind = Kind.MASTER if each.ours in masters and each.dtype.itemsize >= 4 else Kind.WEIGHTS
        tensor = checkpoint.read(kind, ParameterInfo(each.ours, each.shape))
        assert tensor is not None, each.ours
        checkpoint.close()  # what was mapped for it
        yield tensor.to(each.dtype)


def _write_file(path: Path, planned: list[_Planned], tensors: Iterator[Tensor]) -> int:
    """One safetensors file, the tensors in their order; its size in bytes. All of one width: they stay aligned."""
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in planned:
        start, end = end, end + each.num_bytes
        header[each.name] = {"dtype": NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with explained(path), path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, each in zip(tensors, planned, strict=True):
            for part in torch.split(tensor.reshape(-1), BYTES_AT_ONCE // each.dtype.itemsize):
                file.write(part.contiguous().view(torch.uint8).numpy().data)
    return 8 + len(text) + end


def _config(source: Path, options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The directory's own, as it was trained."""
    raw = read_json(source)
    changed = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if "num_hidden_layers" in changed and isinstance(raw.get("layer_types"), list) and "layer_types" not in changed:
        changed["layer_types"] = raw["layer_types"][: changed["num_hidden_layers"]]
    return raw | changed | {key: dtype for key in ("dtype", "torch_dtype") if key in raw or key == "dtype"}


def _copy_companions(source: Path, target: Path, config: RunConfig) -> list[str]:
    """The tokenizer that the run was trained with; with it the directory's other files where it is the directory's."""
    own, theirs = config.data.tokenizer, source / COMPANIONS[0]
    is_theirs = own is None or (theirs.is_file() and theirs.read_bytes() == Path(own).read_bytes())
    copied = [name for name in COMPANIONS if (source / name).is_file()] if is_theirs else []
    for name in copied:
        shutil.copyfile(source / name, target / name)
    if not is_theirs and own is not None and Path(own).is_file():
        shutil.copyfile(own, target / COMPANIONS[0])
        copied.append(COMPANIONS[0])
    return copied


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
