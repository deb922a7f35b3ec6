"""Import of a Hugging Face model directory as a run directory,
so that training starts from its weights.

    PATH/config.json   -> model.builder, model.options   family.py: a table for each model type
    PATH/*.safetensors -> checkpoints/step-00000000      rules.py: one tensor at a time; any layout can load it
    PATH/tokenizer*    -> huggingface/                   data.tokenizer points there

One meshwright tensor is in memory at a time, besides the file that is being written. The output
goes into a temporary directory beside the run directory, which is published by one rename.
"""

from __future__ import annotations

import functools
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint import (
    CheckpointMetadata,
    Manifest,
    TensorKind,
    TensorPiece,
    begin,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import MAX_FILE_BYTES, final_directory
from meshwright.config import (
    Model,
    Run,
    RunConfig,
    given_keys,
    load_saved,
    resolve,
    to_toml,
    write_snapshot,
)
from meshwright.errors import ConfigError, ModelError
from meshwright.parameters import ParameterInfo, Slice
from meshwright.run.directory import check_own_directory
from meshwright_interop.huggingface.convert import side_files
from meshwright_interop.huggingface.convert.families import with_defaults
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.convert.mup import refuse_multipliers
from meshwright_interop.huggingface.convert.opening import checked_rules, open_model
from meshwright_interop.huggingface.convert.weights import dtype_notes, other_architecture
from meshwright_interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)
from meshwright_interop.huggingface.files import (
    CONFIG,
    DTYPES,
    TOKENIZER,
    copy_side_files,
)
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.source import SafetensorsDirectory

LONGEST_SEQUENCE = 2048
"""Upper limit, in tokens, of the default data.sequence_length:
the memory of a step grows with it.
"""
CORPUS = "data"
"""Subdirectory of the run directory: default place of the corpus in its config.toml."""


class ImportResult(NamedTuple):
    """Result of an import: the run directory's contents, and notes for the user."""

    path: Path
    manifest: Manifest
    config: RunConfig
    family: Family
    notes: list[str]
    side_files: list[str]


def import_model(
    source_path: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_bytes: OnBytes = ignore_progress,
) -> ImportResult:
    """Import the model in ``source_path`` as a run directory.

    Args:
        source_path: the Hugging Face directory.
        out: the run directory to write, new or empty.
        overrides: configuration overrides, which go into its config.toml.
        max_file_bytes: size limit of one checkpoint file.
        on_bytes: progress callback.

    Raises:
        CheckpointError, ModelError, DataError, ConfigError: the input is damaged, not supported or
        does not fit.
            Nothing is written then.
    """
    out = check_output_directory(out)
    opened = open_model(source_path)
    family, options, settings, source = opened
    side_files.check(source_path)
    config = _config(family, options, source, out, overrides)
    final = _checked_options(config.model.options, options, family, source_path)
    notes = [*settings.notes, *_vocabulary(source_path, config.model)]
    source, rules, shapes = checked_rules(opened, config.model, final, config.run.seed)
    notes += dtype_notes(source, rules, config.train)
    resolved = resolve(config)
    num_bytes = sum(source.num_bytes(name) for rule in rules for name in rule.theirs)
    with published_directory(out, num_bytes) as temporary:
        copied = copy_side_files(source_path, temporary / side_files.DIRECTORY)
        shutil.copyfile(source_path / CONFIG, temporary / side_files.DIRECTORY / CONFIG)
        manifest = _write(source, rules, shapes, resolved, temporary, max_file_bytes, on_bytes)
        write_snapshot(temporary, resolved)
        (temporary / "config.toml").write_text(
            _header_comment(source_path, family, config.run) + to_toml(config), encoding="utf-8"
        )
    return ImportResult(final_directory(out, 0), manifest, resolved, family, notes, copied)


def _checked_options(
    given: Mapping[str, Any], read: Mapping[str, Any], family: Family, source_path: Path
) -> dict[str, Any]:
    """Return the options of the model, defaults included;
    refuse parts that the files have no weights for.

    ``given``: with the overrides; ``read``: from the files.
    """
    if given.get("mtp_layers"):
        raise ModelError(
            "MW-INTEROP-097",
            f"model.options.mtp_layers = {given['mtp_layers']}: {source_path} has no weights for"
            " modules of multi-token prediction, and an import draws none: leave it out",
        )
    options = with_defaults(family.builder, given)
    for table in ("moe", "mla"):
        if (options.get(table) is None) != (read.get(table) is None):
            raise other_architecture(family, f"model.options.{table} = {options[table]}")
    refuse_multipliers(options)
    return options


def _config(
    family: Family,
    options: Mapping[str, Any],
    source: SafetensorsDirectory,
    out: Path,
    overrides: Sequence[str],
) -> RunConfig:
    """Build a fine-tuning configuration: model fields, conservative defaults for the rest,
    ``overrides`` on top.
    """
    length = options.get("max_sequence_length", 512)
    dtypes = {stored.dtype for stored in source.tensors.values()}
    tree: dict[str, Any] = {
        "run": {"name": out.name, "directory": str(out.parent)},
        "model": {"builder": family.builder, "options": dict(options)},
        "data": {
            "train": str(out / CORPUS / "train"),
            "validation": str(out / CORPUS / "validation"),
        },
        "batch": {"micro_batch_size": 1, "global_batch": 16},
        "optimizer": {"learning_rate": 1e-5, "min_learning_rate": 1e-6, "weight_decay": 0.0},
        "train": {"steps": 100, "dtype": "bfloat16" if dtypes & {"BF16", "F16"} else "float32"},
    }
    overridden = {key[:2] for key in given_keys(overrides)}
    if ("model", "builder") in overridden:
        raise ConfigError(
            "MW-INTEROP-036",
            f"model.builder follows from {source.path / CONFIG}, it is {family.builder}: leave"
            " it out",
        )
    if ("data", "train") in overridden:
        tree["data"] = {}
    tree["data"] |= {"sequence_length": min(length, LONGEST_SEQUENCE), "task": family.task}
    if (source.path / TOKENIZER).is_file():
        tree["data"]["tokenizer"] = str(out / side_files.DIRECTORY / TOKENIZER)
    if ("data", "builder") in overridden:
        tree["data"] = {}
    config = load_saved(tree, overrides, f"the run {out}")
    check_own_directory(config.run, out)
    return config


def _vocabulary(source_path: Path, model: Model) -> list[str]:
    tokenizer = source_path / TOKENIZER
    if not tokenizer.is_file():
        return [
            f"{tokenizer} is missing: the run has no data.tokenizer, which `meshwright sample`"
            " needs; transformers converts other tokenizer files"
            " (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        ]
    vocab_size = model.options["vocab_size"]
    return side_files.check_vocabulary(tokenizer, vocab_size, str(source_path / CONFIG))


def _write(
    source: SafetensorsDirectory,
    rules: Sequence[TensorMapping],
    shapes: Mapping[str, tuple[int, ...]],
    config: RunConfig,
    run: Path,
    max_file_bytes: int,
    on_bytes: OnBytes,
) -> Manifest:
    """Write the checkpoint of step 0: weights without optimizer state,
    loadable under any layout.
    """
    total, done = sum(source.num_bytes(name) for rule in rules for name in rule.theirs), 0

    def pieces(parts: Sequence[Sequence[TensorMapping]]) -> Iterator[TensorPiece]:
        nonlocal done
        for part in parts:
            names, shape = [name for rule in part for name in rule.theirs], shapes[part[0].ours]
            dtype = functools.reduce(
                torch.promote_types, (DTYPES[source.tensors[name].dtype] for name in names)
            )
            tensors = [rule.join(source.read, shape, dtype) for rule in part]
            first, info = part[0].place, ParameterInfo(part[0].ours, shape)
            if first is not None:
                info = info._replace(slice=Slice(0, first, first + len(part), len(part)))
            yield TensorPiece(
                TensorKind.WEIGHTS, info, tensors[0] if first is None else torch.stack(tensors)
            )
            done += sum(map(source.num_bytes, names))
            on_bytes(done, total)

    temporary = begin(run, 0, secrets.token_hex(4))
    for number, parts in enumerate(_shards(rules, source, max_file_bytes)):
        write_shard(
            temporary, f"pp0-tp{number}", pieces(parts), max_file_bytes=max_file_bytes, copied=True
        )
    head = CheckpointMetadata(
        step=0,
        samples_seen=0,
        seed=config.run.seed,
        config=config.model_dump(mode="json"),
        data_fingerprint={},
        state={"tokens_seen": 0, "optimizer_steps": 0, "skipped_in_a_row": 0},
    )
    return publish(temporary, final_directory(run, 0), head)


def _shards(
    rules: Sequence[TensorMapping], source: SafetensorsDirectory, max_bytes: int
) -> list[list[list[TensorMapping]]]:
    """Return the rules of each shard of the checkpoint, grouped by piece: a tensor,
    or some experts of one.

    A shard has at most one piece of a tensor. Experts of one tensor are spread over several shards,
    so that a piece stays below ``max_bytes``.
    """
    together: dict[str, list[TensorMapping]] = {}
    for rule in rules:
        together.setdefault(rule.ours, []).append(rule)
    shards: list[list[list[TensorMapping]]] = [[]]
    for group in together.values():
        each = max(1, max_bytes // max(1, 2 * sum(map(source.num_bytes, group[0].theirs))))
        for number, start in enumerate(range(0, len(group), each)):
            if number == len(shards):
                shards.append([])
            shards[number].append(group[start : start + each])
    return shards


def _header_comment(source_path: Path, family: Family, run: Run) -> str:
    """Return the comment at the top of config.toml: the command to train,
    and the settings to complete.
    """
    return (
        f"# {family.architecture} of {source_path.name}: training starts from its weights,"
        " checkpoints/step-00000000.\n#\n#   meshwright train"
        f" {Path(run.directory) / run.name}/config.toml\n#\n# on data.train, text in"
        " the tokens of this model. [batch], [optimizer] and [train] have conservative\n# values;"
        " parallel.* and pipeline.* may be anything. See docs/convert.md.\n\n"
    )
