"""A checkpoint of ours, of any layout -> a directory that transformers, vLLM and lm-eval open.

    weights/*  -> model-00001-of-0000N.safetensors   writing.py: one tensor of ours in hand, theirs written one by one
    config     -> config.json                        what our options decide, over the config.json that it came with
    tokenizer  -> tokenizer.json, tokenizer_config.json, generation_config.json, ...

Written into a temporary directory beside ``out``, which gets its name by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import open_checkpoint
from meshwright.config import RunConfig, parse
from meshwright.tools.interop.huggingface.convert import side_files
from meshwright.tools.interop.huggingface.convert.decoders import ORIGINAL_LENGTH
from meshwright.tools.interop.huggingface.convert.families import complete, family_of_model
from meshwright.tools.interop.huggingface.convert.family import Family
from meshwright.tools.interop.huggingface.destination import OnBytes, keep_quiet, named, published
from meshwright.tools.interop.huggingface.files import CONFIG, TOKENIZER, write_json
from meshwright.tools.interop.huggingface.writing import SHARD_BYTES, Outgoing, dtype_of


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
    wanted = dtype_of(dtype)
    out = named(out)
    with open_checkpoint(source) as checkpoint:
        checkpoint.verify()
        config = parse(json.dumps(checkpoint.manifest.config), f"{source}/manifest.json")
        beside = side_files.place_of(source.parent.parent, config)
        family = family_of_model(config, side_files.base_of(beside).get("model_type"))
        options = complete(family.builder, config.model.options)
        outgoing = Outgoing(checkpoint, family.rules(options), wanted, "its configuration")
        notes = _vocabulary(beside, config, options)
        with published(out, outgoing.num_bytes) as temporary:
            files = outgoing.write(temporary, shard_bytes, on_bytes)
            ids = side_files.write(beside, temporary, config)
            base = side_files.base_of(beside, family.model_type)
            write_json(temporary / CONFIG, _fields(family, options, base, ids, outgoing.dtypes()[0]))
            if not (temporary / TOKENIZER).is_file():
                notes.append("there is no tokenizer.json beside it: the run has none (data.tokenizer)")
    return Taken(out, family, files, len(outgoing.planned), sorted(outgoing.dtypes()), notes)


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
    """The config.json: what our options decide wins over ``base``, the one that the model came with."""
    decided = family.write(options)
    # A name that transformers 5 and 4 share means what it says; one that ``base`` has beside ours might contradict it.
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
