"""Import of a Hugging Face model directory as a run directory, so that training starts from its weights.

    PATH/config.json   -> model.builder, model.options   family.py: a table for each model type
    PATH/*.safetensors -> checkpoints/step-00000000      rules.py: one tensor at a time; any layout can load it
    PATH/tokenizer*    -> huggingface/                   data.tokenizer points there

One meshwright tensor is in memory at a time, besides the file that is being written. The output goes into a temporary
directory beside the run directory, which is published by one rename.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint import CheckpointMetadata, Manifest, TensorKind, TensorPiece, begin, publish, write_shard
from meshwright.checkpoint.save import final_directory
from meshwright.checkpoint.shard import MAX_FILE_BYTES
from meshwright.config import RunConfig, default_world_size, given_keys, load_saved, resolve, to_toml, write_snapshot
from meshwright.errors import CheckpointError, ConfigError
from meshwright.model.build import build_model
from meshwright.parameters import ParameterInfo
from meshwright.tools.interop.huggingface.convert import side_files
from meshwright.tools.interop.huggingface.convert.families import family_of_type, with_defaults
from meshwright.tools.interop.huggingface.convert.family import Family
from meshwright.tools.interop.huggingface.convert.settings import Settings
from meshwright.tools.interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)
from meshwright.tools.interop.huggingface.files import (
    CONFIG,
    DTYPES,
    INDEX,
    SINGLE,
    TOKENIZER,
    copy_companions,
    read_config,
)
from meshwright.tools.interop.huggingface.rules import TensorMapping
from meshwright.tools.interop.huggingface.source import SafetensorsDirectory, open_source, pickled_files

LONGEST_SEQUENCE = 2048
"""Upper limit, in tokens, of the default data.sequence_length: the memory of a step grows with it."""
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
        CheckpointError, ModelError, DataError, ConfigError: the input is damaged, not supported or does not fit.
            Nothing is written then.
    """
    out = check_output_directory(out)
    fields = read_config(source_path)
    family = family_of_type(fields.get("model_type"), str(source_path / CONFIG))
    source = _opened(source_path)
    settings = Settings(fields, str(source_path / CONFIG), family.aliases)
    options = family.read(settings)
    settings.end()
    side_files.check(source_path)
    source = _named_as_theirs(source, family)
    if family.head_by_file:
        source = _under_first_names(source, family.rules(with_defaults(family.builder, options | {"tied": False})))
        options["tied"] = not _has_own_head(source)
    config = _config(family, options, source, out, overrides)
    notes = [*settings.notes, *_vocabulary(source_path, config)]
    shapes = _shapes(config)
    rules = family.rules(with_defaults(family.builder, config.model.options))
    source = _under_first_names(source, rules)
    _check(source, family, rules, shapes)
    notes += _dtypes(source, rules, config)
    resolved = resolve(config, default_world_size(config, 0))
    num_bytes = sum(source.num_bytes(name) for rule in rules for name in rule.theirs)
    with published_directory(out, num_bytes) as temporary:
        copied = copy_companions(source_path, temporary / side_files.DIRECTORY)
        shutil.copyfile(source_path / CONFIG, temporary / side_files.DIRECTORY / CONFIG)
        manifest = _write(source, rules, shapes, resolved, temporary, max_file_bytes, on_bytes)
        write_snapshot(temporary, resolved)
        (temporary / "config.toml").write_text(_introduction(source_path, family, config) + to_toml(config))
    return ImportResult(final_directory(out, 0), manifest, resolved, family, notes, copied)


def _opened(path: Path) -> SafetensorsDirectory:
    """Open the safetensors weights of a directory.

    Raises:
        CheckpointError: there are no weights, or only pickled ones.
    """
    source = open_source(path)
    if source is not None:
        return source
    found = pickled_files(path)
    if not found:
        raise CheckpointError(
            "MW-INTEROP-034", f"{path} has neither {SINGLE} nor {INDEX}: the weights are missing; get them too"
        )
    raise CheckpointError(
        "MW-INTEROP-035",
        f"{path} has its weights in pickled files only ({', '.join(found[:3])}), which can run code when they are "
        f'opened: they are not read. Where you trust them, write them as safetensors first: python -c "from '
        f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('{path}-safe')\" "
        f"(AutoModelForSeq2SeqLM for T5), copy the tokenizer's files there, and convert that directory",
    )


def _named_as_theirs(source: SafetensorsDirectory, family: Family) -> SafetensorsDirectory:
    """Add the family's prefix to tensor names of a bare model, such as the released GPT-2, saved without head class."""
    names = source.tensors
    if not family.prefix or any(name.startswith(family.prefix) for name in names):
        return source
    renamed = {
        name if name in family.unprefixed else f"{family.prefix}{name}": stored for name, stored in names.items()
    }
    return SafetensorsDirectory(source.path, renamed)


def _under_first_names(source: SafetensorsDirectory, rules: Sequence[TensorMapping]) -> SafetensorsDirectory:
    """Rename each tied weight that the files hold only under a second name to its first name."""
    found = dict(source.tensors)
    for rule in rules:
        others = [name for name in rule.same_as if name in found]
        if others and rule.theirs[0] not in found:
            found[rule.theirs[0]] = found.pop(others[0])
    return SafetensorsDirectory(source.path, found)


def _has_own_head(source: SafetensorsDirectory) -> bool:
    """Return True if the files have a head (``lm_head``) that differs from the embedding (``shared``)."""
    if "lm_head.weight" not in source.tensors or "shared.weight" not in source.tensors:
        return False
    head, shared = source.tensors["lm_head.weight"], source.tensors["shared.weight"]
    return head.shape != shared.shape or not torch.equal(source.read("lm_head.weight"), source.read("shared.weight"))


def _config(
    family: Family, options: Mapping[str, Any], source: SafetensorsDirectory, out: Path, overrides: Sequence[str]
) -> RunConfig:
    """Build a fine-tuning configuration: model fields, conservative defaults for the rest, ``overrides`` on top."""
    length = options.get("max_sequence_length", 512)
    floats = {stored.dtype for stored in source.tensors.values()}
    tree: dict[str, Any] = {
        "run": {"name": out.name, "directory": str(out.parent)},
        "model": {"builder": family.builder, "options": dict(options)},
        "data": {"train": str(out / CORPUS / "train"), "validation": str(out / CORPUS / "validation")},
        "batch": {"micro_batch_size": 1, "global_batch": 16},
        "optimizer": {"learning_rate": 1e-5, "min_learning_rate": 1e-6, "weight_decay": 0.0},
        "train": {"steps": 100, "dtype": "bfloat16" if floats & {"BF16", "F16"} else "float32"},
    }
    given = {key[:2] for key in given_keys(overrides)}
    if ("model", "builder") in given:
        raise ConfigError(
            "MW-INTEROP-036", f"model.builder follows from {source.path / CONFIG}, it is {family.builder}: leave it out"
        )
    if ("data", "train") in given:
        tree["data"] = {}
    tree["data"] |= {"sequence_length": min(length, LONGEST_SEQUENCE), "task": family.task}
    if (source.path / TOKENIZER).is_file():
        tree["data"]["tokenizer"] = str(out / side_files.DIRECTORY / TOKENIZER)
    if ("data", "builder") in given:
        tree["data"] = {}
    return load_saved(tree, overrides, f"the run {out}")


def _vocabulary(source_path: Path, config: RunConfig) -> list[str]:
    tokenizer = source_path / TOKENIZER
    if not tokenizer.is_file():
        return [
            f"{tokenizer} is missing: the run has no data.tokenizer, and `meshwright sample` nothing to write with; "
            f"transformers makes one of other tokenizer files (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        ]
    vocab_size = config.model.options["vocab_size"]
    line = side_files.check_vocabulary(tokenizer, vocab_size, str(source_path / CONFIG))
    return [] if line is None else [line]


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every meshwright parameter by canonical name, tied ones once. Builds on meta."""
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    parameters = model.layers.named_parameters(remove_duplicate=False)
    return {name: tuple(outline.shape) for name, outline in parameters if model.canonical(name) == name}


def _check(
    source: SafetensorsDirectory, family: Family, rules: Sequence[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the files hold exactly the tensors of the model, with its shapes and supported element types.

    Raises:
        CheckpointError: the problems, a line each with file and tensor; at most 20.
    """
    assert {rule.ours for rule in rules} == shapes.keys(), sorted({rule.ours for rule in rules} ^ shapes.keys())
    there, known = source.tensors, set()
    problems = []
    for rule in rules:
        for name, shape in rule.shapes(shapes[rule.ours]).items():
            known.add(name)
            if name not in there:
                problems.append(f"{source.path}: tensor {name} {list(shape)} is in none of the files")
            elif there[name].shape != shape:
                problems.append(
                    f"{there[name].file}: tensor {name} has shape {list(there[name].shape)}, {CONFIG} asks for "
                    f"{list(shape)}"
                )
            elif there[name].dtype not in DTYPES:
                problems.append(
                    f"{there[name].file}: tensor {name} is of {there[name].dtype}: only {', '.join(DTYPES)} are read; "
                    f"take the weights before they were quantised"
                )
        known.update(rule.same_as)
        problems += source.apart(rule.theirs[0], rule.same_as)
    for name, stored in there.items():
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in family.left_out):
            problems.append(f"{stored.file}: tensor {name} {list(stored.shape)} is not of a {family.architecture}")
    if problems:
        more = f"\nand {len(problems) - 20} more" if problems[20:] else ""
        raise CheckpointError(
            "MW-INTEROP-037",
            "\n".join(problems[:20])
            + more
            + f"\nthe weights and {CONFIG} do not belong together, or a file is missing; nothing is written",
        )


def _dtypes(source: SafetensorsDirectory, rules: Sequence[TensorMapping], config: RunConfig) -> list[str]:
    """Return notes on the treatment of mixed element types, and of float16, which is no training dtype."""
    counted = source.dtypes(name for rule in rules for name in rule.theirs)
    notes = []
    if len(counted) > 1:
        said = ", ".join(f"{number:,} {dtype}" for dtype, number in counted.most_common())
        notes.append(
            f"tensors of several element types ({said}): each is kept as it is, and trained in train.dtype = "
            f'"{config.train.dtype}"'
        )
        for rule in rules:
            mixed = sorted({source.tensors[name].dtype for name in rule.theirs})
            if len(mixed) > 1:
                notes.append(f"{', '.join(rule.theirs)} are one tensor here, in the wider of {' and '.join(mixed)}")
    elif "F16" in counted:
        notes.append(
            f'the weights are F16, which is not trained in: they are kept, and trained in "{config.train.dtype}"'
        )
    return notes


def _write(
    source: SafetensorsDirectory,
    rules: Sequence[TensorMapping],
    shapes: Mapping[str, tuple[int, ...]],
    config: RunConfig,
    run: Path,
    max_file_bytes: int,
    on_bytes: OnBytes,
) -> Manifest:
    """Write the checkpoint of step 0: weights without optimizer state, loadable under any layout."""

    total = sum(source.num_bytes(name) for rule in rules for name in rule.theirs)

    def pieces() -> Iterator[TensorPiece]:
        done = 0
        for rule in rules:
            dtype = torch.float16
            for at, name in enumerate(rule.theirs):
                own = DTYPES[source.tensors[name].dtype]
                dtype = own if at == 0 else torch.promote_types(dtype, own)
            tensor = rule.join(source.read, shapes[rule.ours], dtype)
            yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(rule.ours, shapes[rule.ours]), tensor)
            done += sum(map(source.num_bytes, rule.theirs))
            on_bytes(done, total)

    temporary = begin(run, 0, secrets.token_hex(4))
    write_shard(temporary, "pp0-tp0", pieces(), max_file_bytes=max_file_bytes, copied=True)
    head = CheckpointMetadata(
        step=0,
        samples_seen=0,
        seed=config.run.seed,
        config=config.model_dump(mode="json"),
        data_fingerprint={},
        state={"tokens_seen": 0, "optimizer_steps": 0, "skipped_in_a_row": 0},
    )
    return publish(temporary, final_directory(run, 0), head)


def _introduction(source_path: Path, family: Family, config: RunConfig) -> str:
    """Return the comment at the top of config.toml: the command to train, and the settings to complete."""
    return (
        f"# {family.architecture} of {source_path.name}: training starts from its weights, checkpoints/step-00000000.\n"
        f"#\n"
        f"#   meshwright train {Path(config.run.directory) / config.run.name}/config.toml\n"
        f"#\n"
        f"# on data.train, text in the tokens of this model. The numbers of [batch], [optimizer] and [train] are a "
        f"careful\n# beginning; parallel.* and pipeline.* may be anything. docs/convert.md tells more.\n\n"
    )
