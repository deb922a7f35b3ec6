"""Samples of a corpus as text: what a model is trained on, with document ends and what does not count made visible."""

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
from meshwright.data.splits import SPLITS
from meshwright.data.tokenizer import load
from meshwright.errors import DataError
from meshwright.terminal.output import visible


class TextRun(NamedTuple):
    """Tokens next to each other, of one document, that all count or all do not."""

    text: str
    counts: bool
    begins: bool
    """A document begins with it."""


def splits_of(place: Path) -> list[Path]:
    """Return the corpora of a prepared folder; or the one that ``place`` names without its suffix. Raises DataError."""
    if not place.is_dir():
        if not idx_path(place).is_file():
            raise DataError(
                "MW-DATA-087",
                f"there is no corpus at {place}: name a prepared folder, or a .bin/.idx without the suffix",
            )
        return [place]
    found = sorted((path.with_suffix("") for path in place.glob("*.idx")), key=_usual_order)
    if not found:
        raise DataError(
            "MW-DATA-088", f"{place} holds no .idx file: name a folder that `meshwright data prepare` has written"
        )
    return found


def _usual_order(prefix: Path) -> tuple[int, str]:
    return (SPLITS.index(prefix.name) if prefix.name in SPLITS else len(SPLITS), prefix.name)


def show(prefix: Path, tokenizer_file: Path, num_samples: int, sequence_length: int, packing: Packing) -> None:
    """Print counts and the first samples of one corpus on stdout: dimmed on a terminal, with braces elsewhere.

    Raises DataError: a damaged corpus, a tokenizer that is not its own.
    """
    tokenizer = load(tokenizer_file)
    vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    whole = Corpus(prefix, 1)
    length = sequence_length if packing == "documents" else min(sequence_length, max(1, len(whole.stream) - 1))
    corpus = Corpus(prefix, length, rules=DocumentRules(packing, boundaries=True))
    console = Console(highlight=False, soft_wrap=True)
    known, documents = corpus.known, len(corpus.documents)
    counting = "" if known is None or known.split.counting is None else f", {known.split.counting:,} of them labels"
    num_cut = 0 if corpus.packed is None else corpus.packed.num_cut
    cut = f", {num_cut:,} documents are longer and cut" if num_cut else ""
    console.print(Text(f"{prefix}: {documents:,} documents, {len(corpus.stream):,} tokens{counting}", style="bold"))
    console.print(
        Text(f'  as samples of {length:,} tokens, packing = "{packing}": {corpus.num_samples:,}{cut}', style="bold")
    )
    for number in range(min(num_samples, corpus.num_samples)):
        example = corpus.example(number)
        largest = int(example.tokens.max())
        if largest >= vocab_size:
            raise DataError(
                "MW-DATA-089",
                f"{prefix} holds token id {largest:,}, and {tokenizer_file} has {vocab_size:,}: name the one that made "
                f"the corpus with --tokenizer",
            )
        used = _used(example)
        labels, begun = int((example.labels[:used] != IGNORE).sum()), int(example.starts[:used].sum())
        console.print(Text(f"--- sample {number}: {used:,} tokens, {labels:,} labels, {begun} documents"))
        console.print(_text(runs_of(example, tokenizer, used), dims=console.is_terminal))


def _used(example: CorpusExample) -> int:
    """Return the tokens before the unused end of a sample of whole documents."""
    last = int(np.flatnonzero(example.starts)[-1])
    return (
        last
        if last and not example.tokens[last:].any() and (example.labels[last:] == IGNORE).all()
        else len(example.tokens)
    )


def runs_of(example: CorpusExample, tokenizer: Tokenizer, used: int) -> Iterator[TextRun]:
    """Split the sample into pieces that count or do not.

    A token counts when it is the label of the one before it. The first of a document is no label, and is shown as its
    neighbour.
    """
    counts = np.concatenate([[True], example.labels[:-1] != IGNORE])
    for first in np.flatnonzero(example.starts):
        alone = first + 1 >= used or example.starts[first + 1]
        counts[first] = alone or counts[first + 1]
    document = np.cumsum(example.starts)
    places = range(used)
    for (number, counting), run in groupby(places, key=lambda i: (int(document[i]), bool(counts[i]))):
        at = list(run)
        ids = [int(example.tokens[i]) for i in at]
        text = visible(str(tokenizer.decode(ids, skip_special_tokens=False)))
        yield TextRun(text, counting, begins=bool(example.starts[at[0]]) and number > 0)


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
