"""Export of a checkpoint, saved under any layout, to a directory that transformers,
vLLM and lm-eval can load.

    weights/*  -> model-00001-of-0000N.safetensors   writing.py: one meshwright tensor in memory at a time
    config     -> config.json                        written by the plan: convert/ or restructure/
    tokenizer  -> tokenizer.json, tokenizer_config.json, generation_config.json, ...

All of it is written into a temporary directory beside ``out``, which is published by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint import CheckpointReader, newest_valid, open_checkpoint
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config import RunConfig, parse
from meshwright.errors import CheckpointError
from meshwright.run.directory import is_checkpoint, run_directory
from meshwright.run.places import saved_places
from meshwright.system.store import Place
from meshwright_interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)
from meshwright_interop.huggingface.files import CONFIG, INDEX
from meshwright_interop.huggingface.rules import ExportRule, TensorMapping
from meshwright_interop.huggingface.writing import (
    SHARD_BYTES,
    WeightExport,
    WeightReader,
    parse_dtype,
)

Merge = Callable[[CheckpointReader, RunConfig], WeightReader]


class ExportPlan(NamedTuple):
    """Part of an export that depends on the model."""

    model: str
    """Name of the model in the report."""
    rules: Sequence[TensorMapping]
    """One rule for each parameter of the model that is exported, with the names of modules."""
    place: str
    """Name of the model's configuration, for error messages."""
    write_files: Callable[[Path, str], list[str]]
    """Function that writes config.json and the tokenizer files to a directory, given the dtype;
    returns notes.
    """
    loader: str = "AutoModelForCausalLM"
    """Class of transformers that loads the directory."""
    left_out: tuple[str, ...] = ()
    """Name patterns of parameters that are not exported."""
    released: Sequence[ExportRule] = ()
    """Rules of the files, if these differ from the modules; (): ``rules``."""


class ExportResult(NamedTuple):
    """Result of an export: the written files, and notes for the user."""

    path: Path
    model: str
    loader: str
    num_tensors: int
    dtypes: list[str]
    files: dict[str, int]
    """Weight files: name -> size in bytes."""
    side_files: list[str]
    """Tokenizer and generation files."""
    notes: list[str]


def export(
    plan_export: Callable[[RunConfig, Path], ExportPlan],
    source: Place,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes = ignore_progress,
    merge: Merge | None = None,
) -> ExportResult:
    """Export a checkpoint as a Hugging Face directory.

    Args:
        plan_export: function that plans the export, given the run's configuration and the
            checkpoint's directory.
        source: a checkpoint, or a run directory, whose newest valid checkpoint is used.
        out: the directory to write, new or empty.
        dtype: element type of all tensors; None keeps the saved ones. "float32" of a bfloat16 run
            exports its master weights.
        shard_bytes: tensor bytes per file at most; a single larger tensor gets a file of its own.
        on_bytes: progress callback.
        merge: function that merges the adapters of a checkpoint into its weights; None: the weights
            as they are.

    Raises:
        CheckpointError, ModelError, DataError: the checkpoint is damaged, or the model or its
        tokenizer do not fit.
    """
    chosen_dtype = parse_dtype(dtype)
    out = check_output_directory(out)
    with open_verified(source) as checkpoint:
        config = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
        plan = plan_export(config, local_place(checkpoint.path, config))
        weights = WeightExport(
            merge(checkpoint, config) if merge else checkpoint,
            plan.released or plan.rules,
            chosen_dtype,
            plan.place,
            plan.left_out,
        )
        with published_directory(out, weights.num_bytes) as temporary:
            files = weights.write(temporary, shard_bytes, on_bytes)
            notes = plan.write_files(temporary, weights.dtypes()[0])
            side_files = sorted(
                {file.name for file in temporary.iterdir()} - {*files, INDEX, CONFIG}
            )
    dtypes = sorted(weights.dtypes())
    return ExportResult(
        out, plan.model, plan.loader, len(weights.planned), dtypes, files, side_files, notes
    )


def local_place(checkpoint: Place, config: RunConfig) -> Path:
    """Return the directory of a checkpoint, beside which an export finds the tokenizer of an imported
    model. Of one in an object store: where its run is, if it is on this machine.
    """
    if isinstance(checkpoint, Path):
        return checkpoint
    return run_directory(config.run) / "checkpoints" / checkpoint.name


def open_verified(path: Place) -> CheckpointReader:
    """Open and verify a checkpoint, or the newest valid one of a run directory.

    Raises:
        CheckpointError: ``path`` is neither, or the checkpoint is damaged.
    """
    if is_checkpoint(path):
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    newest = newest_valid(saved_places(path)[0])
    if newest is None:
        raise CheckpointError(
            "MW-INTEROP-063", f"{path} is neither a checkpoint nor a run directory that has one"
        )
    return newest
