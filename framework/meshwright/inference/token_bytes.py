"""Bytes of text of each token, which make losses of different tokenizers comparable.

bits per byte = sum of the losses in nats / ln 2 / bytes of the text. Special tokens, such as the
end of a document, add to the loss, but have no bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

from meshwright.pipeline.values import IGNORED_LABEL

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PREFIX = "a"
"""Token before each decoded token: decoders drop the blank of the first token of a text."""


def bytes_of_tokens(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the bytes of UTF-8 that each token id adds to a text, (V,) int64;
    0 for special tokens and unused ids.

    Exact where a token always adds the same text, as in byte-level BPE, byte fallback and Unigram.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    counts = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    added = tokenizer.get_added_tokens_decoder()
    decoders = {
        str(each.get("type")) for each in _decoders(json.loads(tokenizer.to_str()).get("decoder"))
    }
    letters = frozenset(pre_tokenizers.ByteLevel.alphabet())
    rest: list[int] = []
    for token, number in vocabulary.items():
        if number in added:
            counts[number] = 0 if added[number].special else len(added[number].content.encode())
        elif "ByteLevel" in decoders and letters.issuperset(token):
            counts[number] = len(token)
        elif "ByteFallback" in decoders and _BYTE.fullmatch(token):
            counts[number] = 1
        else:
            rest.append(number)
    first = tokenizer.token_to_id(_PREFIX)
    before = rest[:1] if first is None else [first]
    own = len(tokenizer.decode(before).encode())
    for number, text in zip(
        rest, tokenizer.decode_batch([[*before, number] for number in rest]), strict=True
    ):
        counts[number] = len(text.encode()) - own
    return counts


def leading_blank_bytes(tokenizer: Tokenizer, table: NDArray[np.int64]) -> int:
    """Return the bytes of the blank that some tokenizers prepend to a text. ``table``:
    from :func:`bytes_of_tokens`.
    """
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    return max(0, int(table[ids].sum()) - 1)


def starts_of_texts(
    tokens: NDArray[np.int64], labels: NDArray[np.int64], before: set[int], *, has_mask: bool
) -> NDArray[np.bool_]:
    """Return a mask (B, S) of the labels at the beginning of a separately encoded text.

    Args:
        tokens: (B, S), the input tokens; each precedes its label.
        labels: (B, S).
        before: tokens that end or begin documents.
        has_mask: the first label after ignored ones begins such a text too.
    """
    begins: NDArray[np.bool_] = np.isin(tokens, list(before))
    if has_mask:
        begins[:, 1:] |= labels[:, :-1] == IGNORED_LABEL
    begins &= labels != IGNORED_LABEL
    return begins


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield a decoder of tokenizer.json and, if it is a sequence, the decoders in it."""
    if isinstance(decoder, dict):
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _decoders(inner)
