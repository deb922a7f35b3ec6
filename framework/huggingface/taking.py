"""A checkpoint of ours, of any layout -> a directory that transformers, vLLM and lm-eval open.

    weights/*  -> model-00001-of-0000N.safetensors   rules.py: one tensor of ours in hand, theirs written one by one
    config     -> config.json                        what our options decide, over the config.json that it came with
    tokenizer  -> tokenizer.json, tokenizer_config.json, generation_config.json, ...

Written into a temporary directory beside ``out``, which gets its name by one rename.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.checkpoint import Checkpoint, Kind, open_checkpoint
from framework.checkpoint.files import explained, sync_directory
from framework.checkpoint.shard import TORCH_DTYPES
from framework.config import RunConfig, parse
from framework.errors import CheckpointError
from framework.huggingface import companions
from framework.huggingface.families import complete, family_of_model
from framework.huggingface.family import Family
from framework.huggingface.places import OnBytes, keep_quiet, named, published
from framework.huggingface.rules import Rule
from framework.huggingface.source import CONFIG, INDEX, ONE_FILE
from framework.parameters import ParameterInfo

SHARD_BYTES = 5 * 10**9
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
WORDS = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""As safetensors and as config.json name them."""
BY_WORD = {word: dtype for dtype, word in WORDS.items()}
BYTES_AT_ONCE = 16 * 2**20


class Planned(NamedTuple):
    """One tensor of theirs, before a number is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class Taken(NamedTuple):
    """What was written, and what there is to say about it."""

    path: Path
    family: Family
    files: dict[str, int]
    """Name -> bytes, of the weights."""
    num_tensors: int
    dtypes: list[str]
    notes: list[str]


def take(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes = keep_quiet,
) -> Taken:
    """Write the checkpoint ``source`` as the directory ``out``, new or empty.

    ``dtype``: of all tensors; None: each as it was saved. float32 of a run in bfloat16 are its master weights.
    ``shard_bytes``: of one file at most, but for a single tensor that is larger.

    Raises:
        CheckpointError, ModelError, DataError: the checkpoint is damaged, the model or its tokenizer do not fit.
    """
    out = named(out)
    with open_checkpoint(source) as checkpoint:
        checkpoint.verify()
        config = parse(json.dumps(checkpoint.manifest.config), f"{source}/manifest.json")
        beside = companions.place_of(source.parent.parent, config)
        family = family_of_model(config, companions.base_of(beside).get("model_type"))
        options = complete(family.builder, config.model.options)
        rules = family.rules(options)
        _check_names(checkpoint, rules)
        kinds = _kinds(checkpoint, dtype)
        planned = _plan(checkpoint, rules, kinds, dtype)
        notes = _vocabulary(beside, config, options)
        with published(out, sum(each.num_bytes for each in planned)) as temporary:
            files = _write(checkpoint, rules, kinds, planned, temporary, shard_bytes, on_bytes)
            ids = companions.write(beside, temporary, config)
            base = companions.base_of(beside, family.model_type)
            companions.write_json(temporary / CONFIG, _fields(family, options, base, ids, planned))
            if not (temporary / companions.TOKENIZER).is_file():
                notes.append("there is no tokenizer.json beside it: the run has none (data.tokenizer)")
            _sync(temporary)
    return Taken(out, family, files, len(planned), sorted({WORDS[each.dtype] for each in planned}), notes)


def _check_names(checkpoint: Checkpoint, rules: Sequence[Rule]) -> None:
    expected, there = {rule.ours for rule in rules}, set(checkpoint.parameters(Kind.WEIGHTS))
    problems = [f"it has no weights of {name}" for name in sorted(expected - there)]
    problems += [f"its weights of {name} have no place there" for name in sorted(there - expected)]
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} is not of the model that its configuration names: {problems[0]}"
            + (f", and {len(problems) - 1} more" if problems[1:] else "")
        )


def _kinds(checkpoint: Checkpoint, dtype: str | None) -> dict[str, Kind]:
    """Parameter -> what is taken of it: master weights, where they are kept and as many bits are asked for."""
    masters = set(checkpoint.parameters(Kind.MASTER)) if dtype in ("float32", "float64") else set()
    weights = checkpoint.parameters(Kind.WEIGHTS)
    return {name: Kind.MASTER if name in masters else Kind.WEIGHTS for name in weights}


def _plan(checkpoint: Checkpoint, rules: Sequence[Rule], kinds: Mapping[str, Kind], dtype: str | None) -> list[Planned]:
    planned = []
    for rule in rules:
        entry = checkpoint.manifest.tensors[kinds[rule.ours].of(rule.ours)]
        written = TORCH_DTYPES[entry.dtype] if dtype is None else BY_WORD[dtype]
        planned += [Planned(name, shape, written) for name, shape in rule.shapes(entry.shape).items()]
    return planned


def _vocabulary(beside: Path | None, config: RunConfig, options: Mapping[str, Any]) -> list[str]:
    candidates = [] if beside is None else [beside / companions.TOKENIZER]
    candidates += [] if config.data.tokenizer is None else [Path(config.data.tokenizer)]
    for path in candidates:
        if path.is_file():
            line = companions.check_vocabulary(path, options["vocab_size"], "the checkpoint")
            return [] if line is None else [line]
    return []


def _fields(
    family: Family,
    options: Mapping[str, Any],
    base: Mapping[str, Any],
    ids: Mapping[str, Any],
    planned: Sequence[Planned],
) -> dict[str, Any]:
    """The config.json: what our options decide wins over ``base``, the one that the model came with."""
    most = max(
        {each.dtype for each in planned}, key=lambda dtype: sum(p.num_bytes for p in planned if p.dtype == dtype)
    )
    decided = family.write(options)
    # A name that transformers 5 and 4 share means what it says; one that ``base`` has beside ours might contradict it.
    fields = {name: value for name, value in base.items() if name not in ("rope_scaling", "rope_theta", "torch_dtype")}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: value for name, value in fields.items() if name not in ("architectures", "model_type")},
        **({} if base else ids),
        **decided,
        "torch_dtype": WORDS[most],
        "dtype": WORDS[most],
    }


def _write(
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    kinds: Mapping[str, Kind],
    planned: Sequence[Planned],
    directory: Path,
    shard_bytes: int,
    on_bytes: OnBytes,
) -> dict[str, int]:
    """All tensors into as many files as they take, and the index where they are several; file name -> bytes."""
    shards: list[list[Planned]] = [[]]
    for each in planned:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + each.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(each)
    names = [ONE_FILE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        index = {
            "metadata": {"total_size": sum(each.num_bytes for each in planned)},
            "weight_map": {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard},
        }
        companions.write_json(directory / INDEX, index)
    tensors, files, done = _theirs(checkpoint, rules, kinds), {}, 0
    total = sum(each.num_bytes for each in planned)

    def on_tensor(written: Planned) -> None:
        nonlocal done
        done += written.num_bytes
        on_bytes(done, total)

    for name, shard in zip(names, shards, strict=True):
        files[name] = write_in_order(directory / name, shard, tensors, on_tensor)
    return files


def _theirs(checkpoint: Checkpoint, rules: Sequence[Rule], kinds: Mapping[str, Kind]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of theirs in the order of the plan; one of ours is read at a time, from any layout's pieces."""
    for rule in rules:
        kind = kinds[rule.ours]
        ours = checkpoint.read(kind, ParameterInfo(rule.ours, checkpoint.shape(kind, rule.ours)))
        assert ours is not None, rule.ours
        checkpoint.close()  # what was mapped for it
        yield from rule.split(ours)


def write_in_order(
    path: Path,
    planned: Sequence[Planned],
    tensors: Iterator[tuple[str, Tensor]],
    on_tensor: Callable[[Planned], None] = lambda written: None,
) -> int:
    """One safetensors file of the next tensors, each written as it comes; its size in bytes.

    The header stands before the numbers, and says where each of them will be: that is known from the plan.
    """
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    # Wide elements first, as the library has it: each tensor is then aligned to its own element size.
    start, places = 0, {}
    for each in sorted(planned, key=lambda each: -each.dtype.itemsize):
        places[each.name] = start
        start += each.num_bytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for each in sorted(planned, key=lambda each: places[each.name]):
        offsets = [places[each.name], places[each.name] + each.num_bytes]
        header[each.name] = {"dtype": NAMES[each.dtype], "shape": list(each.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with explained(path), path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in planned:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape)) == (each.name, each.shape), (name, tuple(tensor.shape), each)
            file.seek(8 + len(text) + places[name])
            for part in torch.split(tensor.reshape(-1), BYTES_AT_ONCE // each.dtype.itemsize):
                file.write(part.to(each.dtype).view(torch.uint8).numpy().data)
            on_tensor(each)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + start


def _sync(directory: Path) -> None:
    """The small files too, and their names."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)
