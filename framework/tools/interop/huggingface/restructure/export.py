"""Export of a checkpoint of an ``hf:DIRECTORY`` model, saved under any layout, to a directory for transformers.

Tensors get their transformers names back, with one tensor in memory at a time. ``config.json`` is the directory's own,
with the changes of ``model.options``. Tokenizer files are copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import CheckpointReader, newest_valid, open_checkpoint
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config import RunConfig, parse
from meshwright.errors import CheckpointError, ModelError
from meshwright.model.build import PlainModel, build_model
from meshwright.tools.interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)
from meshwright.tools.interop.huggingface.files import CONFIG, TOKENIZER, copy_companions, write_json
from meshwright.tools.interop.huggingface.restructure.directory import fields_of
from meshwright.tools.interop.huggingface.restructure.layers import OWN_OPTIONS, names_in_transformers
from meshwright.tools.interop.huggingface.rules import TensorMapping
from meshwright.tools.interop.huggingface.writing import SHARD_BYTES, WeightExport, dtype_of

SCHEME = "hf:"


class RestructuredExportResult(NamedTuple):
    """Result of an export: the written files."""

    path: Path
    num_tensors: int
    files: dict[str, int]
    """Weight files: name -> size in bytes."""
    copied: list[str]


def is_of_transformers(config: RunConfig) -> bool:
    """Return True if the model was built from ``hf:DIRECTORY``."""
    return config.model.builder.startswith(SCHEME)


def export(
    checkpoint_dir: Path,
    out_dir: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes = ignore_progress,
) -> RestructuredExportResult:
    """Export a checkpoint as a Hugging Face directory.

    Args:
        checkpoint_dir: a checkpoint, or a run directory, whose newest valid checkpoint is used.
        out_dir: the directory to write, new or empty.
        dtype: element type of all tensors; None keeps the saved ones. "float32" of a bfloat16 run exports its master
            weights.
        shard_bytes: tensor bytes per file at most; a single larger tensor gets a file of its own.
        on_bytes: progress callback.

    Raises:
        CheckpointError, ModelError: the checkpoint is damaged or of another builder, or the model directory is gone.
    """
    wanted = dtype_of(dtype)
    out_dir = check_output_directory(out_dir)
    with _opened(checkpoint_dir) as checkpoint:
        config = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
        if not is_of_transformers(config):
            raise ModelError(
                "MW-INTEROP-062",
                f"{checkpoint.path} is of {config.model.builder}, and written back here are models that "
                f'model.builder = "hf:DIRECTORY" built: only they have names in transformers',
            )
        model = build_model(config.model.builder, config.model.options | {"weights": False}, config.run.seed)
        source = Path(config.model.builder.removeprefix(SCHEME)).expanduser()
        outgoing = WeightExport(checkpoint, _rules(model), wanted, f"{source / CONFIG} by now")
        with published_directory(out_dir, outgoing.num_bytes) as temporary:
            files = outgoing.write(temporary, shard_bytes, on_bytes)
            write_json(temporary / CONFIG, _config(source, config.model.options, outgoing.dtypes()[0]))
            copied = _copy_companions(source, temporary, config)
    return RestructuredExportResult(out_dir, len(outgoing.planned), files, copied)


def _opened(path: Path) -> CheckpointReader:
    """Open and verify a checkpoint, or the newest valid one of a run directory.

    Raises:
        CheckpointError: ``path`` is neither.
    """
    if (path / MANIFEST).is_file():
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    found = newest_valid(path)
    if found is None:
        raise CheckpointError("MW-INTEROP-063", f"{path} is neither a checkpoint nor a run directory that has one")
    return found


def _rules(model: PlainModel) -> list[TensorMapping]:
    """Return one rule per parameter. Tied ones go under their first name, as in files saved by transformers."""
    names = names_in_transformers(model.layers)
    ours = {model.canonical(name): names[model.canonical(name)] for name in names}
    return [TensorMapping(name, (theirs,)) for name, theirs in ours.items()]


def _config(source: Path, options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config.json of ``source`` with the changes of ``options`` and the exported dtype."""
    raw = fields_of(source)
    changed = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if "num_hidden_layers" in changed and isinstance(raw.get("layer_types"), list) and "layer_types" not in changed:
        changed["layer_types"] = raw["layer_types"][: changed["num_hidden_layers"]]
    return raw | changed | {key: dtype for key in ("dtype", "torch_dtype") if key in raw or key == "dtype"}


def _copy_companions(source: Path, target: Path, config: RunConfig) -> list[str]:
    """Copy the run's tokenizer, and return the names of the copied files.

    If it is the tokenizer of the model directory ``source``, that directory's other side files are copied too.
    """
    own, theirs = config.data.tokenizer, source / TOKENIZER
    is_theirs = own is None or (theirs.is_file() and theirs.read_bytes() == Path(own).read_bytes())
    copied = copy_companions(source, target) if is_theirs else []
    if not is_theirs and own is not None and Path(own).is_file():
        shutil.copyfile(own, target / TOKENIZER)
        copied.append(TOKENIZER)
    return copied
