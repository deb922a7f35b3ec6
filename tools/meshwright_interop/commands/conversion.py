"""Command ``meshwright convert``: import from and export to Hugging Face's format,
with its messages. No ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from meshwright.checkpoint import Candidate, open_checkpoint
from meshwright.errors import CheckpointError, ConfigError
from meshwright.system.store import Place, check_local
from meshwright.terminal.format import format_duration, format_size
from meshwright.terminal.output import put, tell
from meshwright_interop.commands.files import table_of_files
from meshwright_interop.huggingface.adapters import MergedWeights, export_adapter
from meshwright_interop.huggingface.convert.adapters import base_of_run
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import CORPUS, ImportResult, import_model
from meshwright_interop.huggingface.export import ExportResult
from meshwright_interop.huggingface.peft_import import ImportedAdapter, import_adapters
from meshwright_interop.huggingface.restructure.adapters import base_of_directory
from meshwright_interop.huggingface.restructure.export import SCHEME
from meshwright_interop.huggingface.restructure.export import export as export_restructured
from meshwright_interop.huggingface.writing import SHARD_BYTES
from meshwright_launch.checkpoints import find_checkpoint, size_of

PEFT, MERGED = "peft", "merged"
"""Formats of a run with adapters: the adapters alone,
or the model with them merged into its weights.
"""
LINE_EVERY_S = 5.0
"""Time between progress lines."""


def run_conversion(options: argparse.Namespace, overrides: list[str]) -> int:
    """Import or export a model, and print a summary with the next commands."""
    run, step, dtype, shard_bytes = options.place, options.step, options.dtype, options.shard_size
    target = options.target
    if options.merge:
        if target is None or target[0] != "hf":
            raise ConfigError(
                "MW-LAUNCH-073",
                "--merge adds adapters to the weights of an export: give --to hf PATH",
            )
        target = (MERGED, target[1])
    if options.base is not None:
        put(convert_onto(options.base, run, options.source, overrides))
    else:
        put(convert(run, options.source, target, overrides, step, dtype, shard_bytes))
    return 0


@contextmanager
def _unreadable_paths_as_errors() -> Iterator[None]:
    """Convert an OSError, of a failed read, into a CheckpointError;
    failed writes raise errors of their own.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "MW-LAUNCH-009", f"{error.filename}: {error.strerror} (errno {error.errno})"
        ) from error


@_unreadable_paths_as_errors()
def convert(
    run: Place,
    source: Sequence[str] | None,
    target: Sequence[str] | None,
    overrides: Sequence[str],
    step: int | None,
    dtype: str | None,
    shard_bytes: int | None,
) -> str:
    """Import a model into ``run``, or export one from it, and return a summary.

    ``source``, ``target``: (format, path), one of them None.

    Raises:
        UserError: the conversion is impossible; nothing is written then.
    """
    form, path = source or target or ("", "")
    if form not in ("hf", PEFT, *((MERGED,) if target is not None else ())):
        raise ConfigError(
            "MW-LAUNCH-010",
            f"{form!r} is not a known format of models: give hf, for Hugging Face; or peft",
        )
    if target is not None:
        check_local(path, "--to")
    if source is not None:
        check_local(run, "RUN")
        assert isinstance(run, Path)
        only_export = {"--step": step, "--dtype": dtype, "--shard-size": shard_bytes}
        unused = [name for name, value in only_export.items() if value is not None]
        if unused:
            raise ConfigError(
                "MW-LAUNCH-011",
                f"{' and '.join(unused)} without effect with --from: they are for --to",
            )
        if form == PEFT:
            return summarise_adapters(
                path, run, import_adapters(Path(path), run, base_of_directory, overrides)
            )
        return summarise_import(
            Path(path), run, import_model(Path(path), run, overrides, on_bytes=ConversionProgress())
        )
    if overrides:
        raise ConfigError(
            "MW-LAUNCH-012", f"--to takes no configuration keys: {' '.join(overrides)}"
        )
    chosen = find_checkpoint(run, step)
    with open_checkpoint(chosen.path) as checkpoint:
        builder = str(checkpoint.manifest.config.get("model", {}).get("builder", ""))
        rank = checkpoint.manifest.config.get("adapter", {}).get("rank", 0)
    export = export_restructured if builder.startswith(SCHEME) else export_checkpoint
    if form == "hf" and rank:
        raise ConfigError(
            "MW-LAUNCH-074",
            f"{chosen.path} holds adapters beside a frozen model: --to hf {path} --merge writes"
            f" both as one model, --to peft {path} the adapters",
        )
    if form == PEFT:
        if shard_bytes is not None:
            raise ConfigError(
                "MW-LAUNCH-075", "--shard-size has no effect with --to peft, which writes one file"
            )
        return summarise_export(
            chosen, export_adapter(export.args[0], chosen.path, Path(path), dtype=dtype)
        )
    result = export(
        chosen.path,
        Path(path),
        dtype=dtype,
        shard_bytes=shard_bytes or SHARD_BYTES,
        on_bytes=ConversionProgress(),
        merge=MergedWeights if form == MERGED else None,
    )
    return summarise_export(chosen, result)


@_unreadable_paths_as_errors()
def convert_onto(
    base: Place, run: Place, source: Sequence[str] | None, overrides: Sequence[str]
) -> str:
    """Import peft's adapters into ``run``, onto the weights of the run ``base``,
    and return a summary.

    Raises:
        UserError: the import is impossible; nothing is written then.
    """
    if source is None or source[0] != PEFT:
        raise ConfigError(
            "MW-LAUNCH-084", f"--base {base} is a run for --from peft PATH, whose adapters it gets"
        )
    check_local(run, "RUN")
    assert isinstance(run, Path)
    return summarise_adapters(
        source[1], run, import_adapters(Path(source[1]), run, partial(base_of_run, base), overrides)
    )


def summarise_adapters(source: str, run: Path, done: ImportedAdapter) -> str:
    """Return the summary of imported adapters, with the command to train them."""
    return (
        f"{source}: adapters of rank {done.config.adapter.rank} on {done.num_targets} modules\n"
        f"{done.path}: beside {done.config.model.builder}\n"
        f"train with:  meshwright train {run / 'config.toml'}"
    )


class ConversionProgress:
    """Progress printer: a line every few seconds on stderr, because a large model takes minutes."""

    def __init__(self) -> None:
        self.start_s = self.printed_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self.printed_s < LINE_EVERY_S:
            return
        self.printed_s = now_s
        per_s = done / (now_s - self.start_s)
        left_s = (total - done) / per_s
        tell(
            f"{format_size(done)} of {format_size(total)}, {format_size(int(per_s))}/s,"
            f" {format_duration(left_s)} left"
        )


def summarise_import(source: Path, run: Path, done: ImportResult) -> str:
    """Return the summary of an imported model, with the commands to train it."""
    tensors = done.manifest.tensors.values()
    options = ", ".join(
        f"{name} {value}" for name, value in done.config.model.options.items() if value is not None
    )
    corpus = Path(str(done.config.data.train))
    lines = [
        f"{source}: {done.family.architecture}, {done.config.model.builder}",
        f"  {options}",
        f"{done.path}: {len(tensors):,} tensors, {format_size(sum(map(size_of, tensors)))}",
        *([f"{run / 'huggingface'}: {', '.join(done.side_files)}"] if done.side_files else []),
        *(f"note: {note}" for note in done.notes),
    ]
    if corpus == run / CORPUS / "train" and not corpus.with_name(f"{corpus.name}.bin").exists():
        lines.append(f"data.train = {corpus} is still missing: text in the tokens of this model")
        if done.config.data.tokenizer is not None:
            tokenizer = Path(done.config.data.tokenizer)
            lines.append(
                f"prepare it with: meshwright data prepare TEXT --tokenizer {tokenizer} --out"
                f" {corpus.parent}"
            )
    lines.append(f"fine-tune with:  meshwright train {run / 'config.toml'}")
    if done.config.data.tokenizer and done.family.task == "causal":
        lines.append(f"generate with:   meshwright sample {run} --prompt TEXT")
    return "\n".join(lines)


def summarise_export(source: Candidate, done: ExportResult) -> str:
    """Return the summary of an exported model, with the code to load it."""
    return "\n".join(
        [
            f"{source.path}: step {source.step}",
            f"{done.path}: {done.model}, {done.num_tensors:,} tensors, {', '.join(done.dtypes)}",
            *table_of_files(done.files, most=8),
            *([f"beside them: {', '.join(done.side_files)}"] if done.side_files else []),
            *(f"note: {note}" for note in done.notes),
            (
                f"open it with: transformers.{done.loader}.from_pretrained({str(done.path)!r})"
                if done.loader
                else f"open it with: peft.PeftModel.from_pretrained(model, {str(done.path)!r})"
            ),
        ]
    )
