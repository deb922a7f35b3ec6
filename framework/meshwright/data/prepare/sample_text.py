"""Samples of a corpus as text, with document starts and tokens that do not count
as labels made visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from meshwright.data.corpus import IGNORE, Corpus, CorpusExample, DocumentRules, Packing
from meshwright.data.indexed import idx_path
from meshwright.data.prepare.length_report import ContextReport, describe_balance, describe_lengths
from meshwright.data.splits import SPLITS
from meshwright.data.tokenizer import load
from meshwright.errors import DataError
from meshwright.terminal.output import visible


class TextRun(NamedTuple):
    """Text of neighbouring tokens of one document that all count as labels, or all do not."""

    text: str
    counts: bool
    begins: bool
    """True if a document starts here."""


def splits_of(place: Path) -> list[Path]:
    """Return the prefixes of the corpora in a folder, or ``place`` itself if it is a prefix.
    Raises DataError.
    """
    if not place.is_dir():
        if not idx_path(place).is_file():
            raise DataError(
                "MW-DATA-087",
                f"there is no corpus at {place}: name a prepared folder, or a .bin/.idx without the"
                " suffix",
            )
        return [place]
    prefixes = [path.with_suffix("") for path in place.glob("*.idx")]
    if not prefixes:
        raise DataError(
            "MW-DATA-088",
            f"{place} holds no .idx file: name a folder that `meshwright data prepare` has written",
        )
    rank = {name: index for index, name in enumerate(SPLITS)}
    return sorted(prefixes, key=lambda prefix: (rank.get(prefix.name, len(SPLITS)), prefix.name))


def show(
    prefix: Path,
    tokenizer_file: Path,
    num_samples: int,
    sequence_length: int,
    packing: Packing,
    context: ContextReport | None = None,
) -> None:
    """Print the counts, document lengths and first samples of one corpus to stdout.

    Text that does not count as labels is dimmed on a terminal, and in braces elsewhere.

    Raises DataError: the corpus is damaged, or was encoded with another tokenizer.
    """
    tokenizer = load(tokenizer_file)
    vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    context = context or ContextReport()
    length = sequence_length
    longest = max(1, len(Corpus(prefix, 1).stream) - 1)
    # a small corpus: one sample, which cp cuts into equal parts
    if length > longest and packing != "documents":
        length = max(1, longest // context.cp * context.cp)
    corpus = Corpus(prefix, length, rules=DocumentRules(packing, boundaries=True))
    console = Console(highlight=False, soft_wrap=True)
    for line in _describe(corpus, packing, context):
        console.print(Text(line, style="bold"))
    for number in range(min(num_samples, corpus.num_samples)):
        example = corpus.example(number)
        largest = int(example.tokens.max())
        if largest >= vocab_size:
            raise DataError(
                "MW-DATA-089",
                f"{prefix} holds token id {largest:,}, and {tokenizer_file} has {vocab_size:,}:"
                " name the one that made the corpus with --tokenizer",
            )
        used = _num_used(example)
        labels = int((example.labels[:used] != IGNORE).sum())
        starts = int(example.starts[:used].sum())
        console.print(
            Text(f"--- sample {number}: {used:,} tokens, {labels:,} labels, {starts} documents")
        )
        console.print(_text(runs_of(example, tokenizer, used), dims=console.is_terminal))


def _describe(corpus: Corpus, packing: Packing, context: ContextReport) -> Iterator[str]:
    """Yield lines with the counts and document lengths of a corpus."""
    num_documents, counting, cut = len(corpus.documents), "", ""
    if corpus.known is not None and corpus.known.split.counting is not None:
        counting = f", {corpus.known.split.counting:,} of them labels"
    if corpus.packed is not None and corpus.packed.num_cut:
        cut = f", {corpus.packed.num_cut:,} documents are longer and cut"
    yield (
        f"{visible(str(corpus.prefix))}: {num_documents:,} documents, {len(corpus.stream):,}"
        f" tokens{counting}"
    )
    length = corpus.sequence_length
    yield f'  as samples of {length:,} tokens, packing = "{packing}": {corpus.num_samples:,}{cut}'
    for line in (describe_lengths(corpus.documents, length), *describe_balance(corpus, context)):
        yield f"  {line}"


def _num_used(example: CorpusExample) -> int:
    """Return the number of tokens before the padding of a sample."""
    last = int(np.flatnonzero(example.starts)[-1])
    is_padding = (
        last and not example.tokens[last:].any() and (example.labels[last:] == IGNORE).all()
    )
    return last if is_padding else len(example.tokens)


def runs_of(example: CorpusExample, tokenizer: Tokenizer, used: int) -> Iterator[TextRun]:
    """Split a sample into runs of tokens that count as labels, or do not. ``used``:
    number of tokens before padding.

    A token counts if it is the label of the previous one. The first token of a document is no
    label, and is shown like the second.
    """
    counts = np.concatenate([[True], example.labels[:-1] != IGNORE])
    for first in np.flatnonzero(example.starts):
        is_alone = first + 1 >= used or example.starts[first + 1]
        counts[first] = is_alone or counts[first + 1]
    document = np.cumsum(example.starts)
    for (number, counting), run in groupby(
        range(used), key=lambda i: (int(document[i]), bool(counts[i]))
    ):
        positions = list(run)
        ids = [int(example.tokens[i]) for i in positions]
        text = visible(str(tokenizer.decode(ids, skip_special_tokens=False)))
        yield TextRun(text, counting, begins=bool(example.starts[positions[0]]) and number > 0)


def _text(runs: Iterator[TextRun], *, dims: bool) -> Text:
    whole = Text()
    for run in runs:
        if run.begins:
            whole.append("\n" if whole.plain and not whole.plain.endswith("\n") else "")
            whole.append("[document] ", style="bold cyan")
        if run.counts:
            whole.append(run.text)
        elif dims:
            whole.append(run.text, style="dim")
        else:
            whole.append("{" + run.text + "}")
    return whole
