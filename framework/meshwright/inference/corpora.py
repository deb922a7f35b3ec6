"""Corpora of an evaluation: selection by --data, check of the tokenizer,
and the bytes of text behind the labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from meshwright.config import Data
from meshwright.data import fingerprint
from meshwright.data.sources import AnySource, causal_corpora
from meshwright.data.tokenizer import TOKENIZER_FILE, begin_id, load
from meshwright.errors import ConfigError, DataError
from meshwright.inference.token_bytes import bytes_of_tokens, leading_blank_bytes, starts_of_texts
from meshwright.pipeline.values import IGNORED_LABEL

WINDOWS_AT_ONCE = 256
"""Number of samples whose label bytes are counted together."""


class TextSize(NamedTuple):
    """Number of labels that are not ignored, and the bytes of their text."""

    tokens: int
    bytes: int


def check_tokenizer(data: Data, source: AnySource) -> None:
    """Check that data.tokenizer encoded the corpus; else bits per byte would be wrong.
    Raises DataError: it did not.
    """
    if data.tokenizer is None:
        return
    named = Path(data.tokenizer)
    for corpus in causal_corpora(source):
        known = fingerprint.read(corpus.prefix.parent)
        original = corpus.prefix.with_name(TOKENIZER_FILE)
        sha256 = None if known is None else known.files.get(TOKENIZER_FILE)
        if sha256 is None or fingerprint.file_sha256(named) == sha256:
            continue
        is_original = original.is_file() and fingerprint.file_sha256(original) == sha256
        if not is_original or load(original).to_str() != load(named).to_str():
            raise DataError(
                "MW-INFERENCE-002",
                f"data.tokenizer = {named} is not the tokenizer that made {corpus.prefix}, as its"
                f" {fingerprint.FILE_NAME} has it: name that one, or prepare the text again with"
                " this one",
            )


def with_corpus(data: Data, place: Path) -> Data:
    """Return the section with another corpus as the validation set.

    ``place``: path of a .bin/.idx pair without its suffix, or a folder with one pair, or with one
        called validation.

    Raises:
        ConfigError: the model was not trained on tokens of a corpus.
        DataError: there is no corpus, or several, or it was made with another tokenizer.
    """
    if data.builder is not None:
        raise ConfigError(
            "MW-INFERENCE-003",
            f"the run reads its samples with data.builder = {data.builder!r}: --data does"
            " not apply",
        )
    prefix = place
    if place.is_dir():
        names = sorted(path.stem for path in place.glob("*.idx"))
        if not names:
            raise DataError(
                "MW-INFERENCE-004",
                f"--data {place}: the folder holds no corpus (a .bin/.idx pair); `meshwright data`"
                " makes one",
            )
        if "validation" not in names and names[1:]:
            raise DataError(
                "MW-INFERENCE-005",
                f"--data {place}: the folder holds {', '.join(names)}: name one, as in"
                f" {place / names[0]}",
            )
        prefix = place / ("validation" if "validation" in names else names[0])
    tokenizer, own = data.tokenizer, prefix.parent / "tokenizer.json"
    if own.is_file() and prefix.with_name(f"{prefix.name}.idx").is_file():
        if tokenizer is None:
            tokenizer = str(own)
        elif Path(tokenizer).is_file() and load(own).to_str() != load(Path(tokenizer)).to_str():
            raise DataError(
                "MW-INFERENCE-006",
                f"--data {place}: its tokens were made with {own}, which is another tokenizer than"
                f" the run's, {tokenizer}: prepare that text with the run's own",
            )
    return data.model_copy(update={"validation": str(prefix), "tokenizer": tokenizer})


def count_text(source: AnySource, file: str | None, num_samples: int) -> TextSize | None:
    """Return the number of labels that are not ignored in the first samples,
    and the bytes of their text. ``file``: ``data.tokenizer``.

    None if the labels are not plain text: a user's dataset, span corruption, or no tokenizer.

    Raises:
        DataError: a token that the tokenizer does not have.
    """
    corpora = causal_corpora(source)
    if not corpora or file is None:
        return None
    tokenizer = load(Path(file))
    table = bytes_of_tokens(tokenizer)
    blank, before = leading_blank_bytes(tokenizer, table), _tokens_before_texts(source, tokenizer)
    tokens = total = 0
    for start in range(0, num_samples, WINDOWS_AT_ONCE):
        inputs, found = source.read(range(start, min(start + WINDOWS_AT_ONCE, num_samples)))
        ids = (inputs["tokens"] if isinstance(inputs, dict) else inputs).numpy()
        labels = found.numpy()
        counted = labels[labels != IGNORED_LABEL]
        if counted.size and int(counted.max()) >= len(table):
            names = ", ".join(str(each.prefix) for each in corpora)
            raise DataError(
                "MW-INFERENCE-007",
                f"{names} holds token id {int(counted.max()):,}, and {file} has"
                f" {len(table):,}: that tokenizer did not make the corpus; prepare the corpus again"
                " with it",
            )
        tokens += counted.size
        total += int(table[counted].sum())
        if blank:
            first = starts_of_texts(
                ids, labels, before, has_mask=any(each.mask for each in corpora)
            )
            total -= blank * int((table[labels[first]] > 0).sum())
    return TextSize(tokens, total)


def _tokens_before_texts(source: AnySource, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens after which a text begins: ends of documents,
    and tokens that precede each document.
    """
    corpora = causal_corpora(source)
    found = {each.eod_id for each in corpora}
    found |= {begin_id(fingerprint.read(each.prefix.parent), tokenizer) for each in corpora}
    return {number for number in found if number is not None}
