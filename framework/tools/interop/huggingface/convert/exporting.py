"""Export of a checkpoint, saved under any layout, to a directory that transformers, vLLM and lm-eval can load.

    weights/*  -> model-00001-of-0000N.safetensors   writing.py: one meshwright tensor in memory at a time
    config     -> config.json                        fields from model.options, over the config.json of the import
    tokenizer  -> tokenizer.json, tokenizer_config.json, generation_config.json, ...

All of it is written into a temporary directory beside ``out``, which is published by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import open_checkpoint
from meshwright.config import RunConfig, parse
from meshwright.tools.interop.huggingface.convert import side_files
from meshwright.tools.interop.huggingface.convert.families import family_of_model, with_defaults
from meshwright.tools.interop.huggingface.convert.family import Family
from meshwright.tools.interop.huggingface.convert.rope import ORIGINAL_LENGTH
from meshwright.tools.interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)
from meshwright.tools.interop.huggingface.files import CONFIG, TOKENIZER, write_json
from meshwright.tools.interop.huggingface.writing import SHARD_BYTES, WeightExport, dtype_of


class ExportResult(NamedTuple):
    """Result of an export: the written files, and notes for the user."""

    path: Path
    family: Family
    files: dict[str, int]
    """Weight files: name -> size in bytes."""
    num_tensors: int
    dtypes: list[str]
    notes: list[str]


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes = ignore_progress,
) -> ExportResult:
    """Export a checkpoint as a Hugging Face directory.

    Args:
        source: the checkpoint directory.
        out: the directory to write, new or empty.
        dtype: element type of all tensors; None keeps the saved ones. "float32" of a bfloat16 run exports its master
            weights.
        shard_bytes: tensor bytes per file at most; a single larger tensor gets a file of its own.
        on_bytes: progress callback.

    Raises:
        CheckpointError, ModelError, DataError: the checkpoint is damaged, or the model or its tokenizer do not fit.
    """
    wanted = dtype_of(dtype)
    out = check_output_directory(out)
    with open_checkpoint(source) as checkpoint:
        checkpoint.verify()
        config = parse(json.dumps(checkpoint.manifest.config), f"{source}/manifest.json")
        beside = side_files.side_file_directory(source.parent.parent, config)
        family = family_of_model(config, side_files.imported_config(beside).get("model_type"))
        options = with_defaults(family.builder, config.model.options)
        outgoing = WeightExport(checkpoint, family.rules(options), wanted, "its configuration")
        notes = _vocabulary(beside, config, options)
        with published_directory(out, outgoing.num_bytes) as temporary:
            files = outgoing.write(temporary, shard_bytes, on_bytes)
            ids = side_files.write(beside, temporary, config)
            base = side_files.imported_config(beside, family.model_type)
            write_json(temporary / CONFIG, _fields(family, options, base, ids, outgoing.dtypes()[0]))
            if not (temporary / TOKENIZER).is_file():
                notes.append("there is no tokenizer.json beside it: the run has none (data.tokenizer)")
    return ExportResult(out, family, files, len(outgoing.planned), sorted(outgoing.dtypes()), notes)


def _vocabulary(beside: Path | None, config: RunConfig, options: Mapping[str, Any]) -> list[str]:
    candidates = [] if beside is None else [beside / TOKENIZER]
    candidates += [] if config.data.tokenizer is None else [Path(config.data.tokenizer)]
    for path in candidates:
        if path.is_file():
            line = side_files.check_vocabulary(path, options["vocab_size"], "the checkpoint")
            return [] if line is None else [line]
    return []


def _fields(
    family: Family,
    options: Mapping[str, Any],
    base: Mapping[str, Any],
    ids: Mapping[str, Any],
    dtype: str,
) -> dict[str, Any]:
    """Build the config.json: fields from ``options`` override ``base``, the config.json of the import.

    Args:
        family: the model type to write.
        options: model.options, complete.
        base: the imported config.json; empty if there was no import.
        ids: special token ids, used if ``base`` is empty.
        dtype: name of the tensors' element type.
    """
    decided = family.write(options)
    # These fields of ``base`` state the same setting under another name, and could contradict ``decided``.
    contradicting = {"rope_scaling", "rope_theta", ORIGINAL_LENGTH, "torch_dtype", *family.aliases}
    fields = {name: value for name, value in base.items() if name not in contradicting}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: value for name, value in fields.items() if name not in ("architectures", "model_type")},
        **({} if base else ids),
        **decided,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
