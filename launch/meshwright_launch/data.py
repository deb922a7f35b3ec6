"""Commands ``meshwright data ...``, and the progress bar of a preparation."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.errors import ConfigError, DataError
from meshwright.terminal.format import format_count, format_duration, format_number_of
from meshwright.terminal.output import put, tell

if TYPE_CHECKING:
    from meshwright.data.prepare import Progress

LINE_EVERY_S = 10.0
"""Time between progress lines if stderr is no terminal."""
SHOWN_TOKENS = 256
"""Tokens of a sample that `data show` prints."""


def prepare(options: argparse.Namespace, _: list[str]) -> int:
    """Prepare text, JSONL and parquet files with an existing tokenizer."""
    from meshwright.data import prepare as data

    keys = data.RecordKeys(*_keys_of(options))
    display = PreparationProgress()
    try:
        outcome = data.prepare(
            data.Options(
                options.sources,
                options.tokenizer,
                options.out,
                form=data.Form(options.format),
                keys=keys,
                chat_template=options.chat_template,
                max_tokens=options.max_tokens,
                globs=options.glob,
                end_token=options.eod,
                begin_token=options.bos,
                validation_share=options.validation_share,
                test_share=options.test_share,
                seed=options.seed,
                split=data.SplitRule(options.split),
                num_workers=options.workers,
                skip_broken=options.skip_broken,
                replace=options.replace,
            ),
            display,
        )
    finally:
        display.close()
    put(outcome)
    return 0


def _keys_of(options: argparse.Namespace) -> list[str]:
    """Return the keys of texts, prompts and responses. Raises ConfigError:
    one is given that the format has not.
    """
    keys = list[str]()
    for name, form in (("text", "text"), ("prompt", "pairs"), ("response", "pairs")):
        key = getattr(options, f"{name}_key")
        if key is not None and options.format != form:
            raise ConfigError(
                "MW-LAUNCH-099",
                f"--{name}-key {key} has no effect with --format {options.format}: it is for"
                f" --format {form}",
            )
        keys.append(name if key is None else key)
    return keys


def prepare_stdlib(options: argparse.Namespace, _: list[str]) -> int:
    """Prepare the source text of Python's standard library, with a tokenizer trained on it."""
    from meshwright.data import prepare as data

    share = options.validation_share
    put(
        data.prepare_stdlib(
            options.out, options.vocab_size, share, replace=options.replace, say=tell
        )
    )
    return 0


def prepare_files(options: argparse.Namespace, _: list[str]) -> int:
    """Prepare text files and folders of them, with a tokenizer trained on them."""
    from meshwright.data import prepare as data

    outcome = data.prepare_files(
        options.paths,
        options.out,
        options.vocab_size,
        options.validation_share,
        split=data.SplitRule(options.split),
        replace=options.replace,
        say=tell,
    )
    put(outcome)
    return 0


def show(options: argparse.Namespace, _: list[str]) -> int:
    """Print samples of each split of a corpus as text; of a configuration,
    its data stages and their corpora.
    """
    from meshwright.data import prepare as data

    if options.place.suffix == ".toml":
        return _show_stages(options)
    for number, prefix in enumerate(data.splits_of(options.place)):
        if number:
            put()
        tokenizer = options.tokenizer or prefix.with_name("tokenizer.json")
        context = data.ContextReport(options.cp, options.cp_order)
        length = options.sequence_length or SHOWN_TOKENS
        packing: Literal["stream", "documents"] = options.packing or "stream"
        data.show(prefix, Path(tokenizer), options.samples, length, packing, context)
    return 0


def _show_stages(options: argparse.Namespace) -> int:
    """Print the stages of a configuration with the share of each corpus,
    then samples of each corpus.
    """
    from meshwright.config import load, resolve, samples_after
    from meshwright.data import prepare as data
    from meshwright.data.sources import causal_corpora, describe_source, open_sources
    from meshwright.run.trust import check_file

    check_file(str(options.place), trust_code=options.trust_code)
    config = resolve(load(options.place))
    source, _ = open_sources(config)
    put(describe_source(source, samples_after(config.batch, config.train.steps)))
    for corpus in causal_corpora(source):
        put()
        tokenizer = (
            options.tokenizer or config.data.tokenizer or corpus.prefix.with_name("tokenizer.json")
        )
        context = data.ContextReport(
            options.cp if options.cp > 1 else config.parallel.cp,
            options.cp_order,
            config.data.document_boundaries,
        )
        length = options.sequence_length or config.data.sequence_length
        packing = options.packing or config.data.packing
        data.show(corpus.prefix, Path(tokenizer), options.samples, length, packing, context)
    return 0


def verify(options: argparse.Namespace, _: list[str]) -> int:
    """Compare every byte of prepared corpora with their fingerprint; return 1 if a file differs,
    else 0.
    """
    from meshwright.data import fingerprint

    folder: Path = options.place
    expected = fingerprint.read(folder)
    if expected is None:
        raise DataError(
            "MW-LAUNCH-013",
            f"{folder} has no {fingerprint.FILE_NAME}, which holds the hashes of its files: name a"
            " folder that `meshwright data prepare` has written",
        )
    damaged = fingerprint.damaged_files(folder, expected)
    for name in expected.files:
        put(f"{folder / name}: {'differs, or is missing' if name in damaged else 'unchanged'}")
    return 1 if damaged else 0


class PreparationProgress:
    """Progress of a preparation on stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True)
        self.started_s = time.monotonic()
        self.printed_s = self.started_s
        self.first: Progress | None = None
        """First progress seen; rates count only what this process has added to it."""
        self.bar: Bar | None = None

    def __call__(self, now: Progress) -> None:
        """Show the progress; called before the first block and after each block."""
        if self.first is None:
            self.first = now
            self.started_s = time.monotonic()
            if now.resumed:
                documents = format_number_of(now.documents, "document")
                tell(f"resuming: {documents} and {format_number_of(now.tokens, 'token')} are done")
            return  # the bar has a thread, and workers are about to be forked
        at_s = time.monotonic()
        if self.console.is_terminal:
            self._draw(now, at_s)
        elif at_s - self.printed_s >= LINE_EVERY_S:
            self.printed_s = at_s
            tell(" | ".join([f"{self._share(now):.0%}", *self._numbers(now, at_s)]))

    def close(self) -> None:
        """Stop the bar and leave its last state on the terminal."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _draw(self, now: Progress, at_s: float) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        if self.bar is None:
            columns = (
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:.0f} %"),
                TextColumn("{task.fields[numbers]}"),
            )
            self.bar = Bar(*columns, console=self.console, expand=True, refresh_per_second=4)
            self.bar.add_task("", total=max(now.total_bytes, 1), numbers="")
            self.bar.start()
        self.bar.update(
            self.bar.task_ids[0],
            completed=now.source_bytes,
            numbers="  ".join(self._numbers(now, at_s)),
        )

    def _numbers(self, now: Progress, at_s: float) -> list[str]:
        assert self.first is not None
        passed_s = max(at_s - self.started_s, 1e-9)
        bytes_per_s = (now.source_bytes - self.first.source_bytes) / passed_s
        tokens_per_s = (now.tokens - self.first.tokens) / passed_s
        left_s = (
            (now.total_bytes - now.source_bytes) / bytes_per_s if bytes_per_s > 0 else float("inf")
        )
        return [
            f"{format_count(now.documents)} documents",
            f"{format_count(now.tokens)} tokens",
            f"{format_count(tokens_per_s)} tokens/s",
            f"{bytes_per_s / 1e6:.1f} MB/s",
            f"{format_duration(left_s)} left",
        ]

    @staticmethod
    def _share(now: Progress) -> float:
        return min(now.source_bytes / max(now.total_bytes, 1), 1.0)
