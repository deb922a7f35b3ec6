"""Splits of a corpus: train, validation and test, by whole documents or by position in the text.

``documents``  a hash of the seed and of the document's number chooses its split. With few documents
the shares of the
               tokens are far from those asked for, and one document cannot be split at all.
``position``   the last tokens of a document go to validation and test, as many as are owed at that point of the text:
               the shares of the tokens are exact, and validation has text of every long document.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
FEW_DOCUMENTS = 1_000
"""Corpora of fewer documents are split by position: of 1,000 with a share of 5 %,
50 +- 7 would be for validation.
"""
SHORTEST_PART = 32
"""Tokens that are owed to a split before a document is cut for it;
shorter parts have hardly a token to predict.
"""


class SplitRule(Enum):
    """Ways to split a corpus."""

    AUTO = "auto"
    """By position if there are fewer than FEW_DOCUMENTS documents, else by document."""
    DOCUMENTS = "documents"
    POSITION = "position"

    def settle(self, num_documents: int) -> SplitRule:
        """Return the rule for a corpus of so many documents: AUTO becomes one of the others."""
        if self is not SplitRule.AUTO:
            return self
        return SplitRule.POSITION if num_documents < FEW_DOCUMENTS else SplitRule.DOCUMENTS


def split_of(
    numbers: NDArray[np.int64], seed: int, validation_share: float, test_share: float
) -> NDArray[np.int64]:
    """Return the index in :data:`SPLITS` of each document, (documents,).
    It follows from seed and number alone.
    """
    key = blake2b(f"split of documents/{seed}".encode(), digest_size=8).digest()
    places = (
        _mixed(numbers.astype(np.uint64) + np.uint64(int.from_bytes(key, "little"))).astype(
            np.float64
        )
        / 2.0**64
    )
    return np.where(
        places < validation_share, 1, np.where(places < validation_share + test_share, 2, 0)
    )


def owed_tokens(share: float, seen: int, given: int) -> int:
    """Return the tokens that a split is still owed.

    Args:
        share: the split's share of all tokens.
        seen: number of tokens of the corpus so far, with the present document.
        given: how many of them the split has.
    """
    return max(0, int(share * seen) - given)


def part_of_document(
    length: int, owed: int, *, may_cut: bool, shortest: int = SHORTEST_PART
) -> int:
    """Return how many of a document's last tokens go to a split that is owed some: none,
    the owed ones, or all.

    Args:
        length: tokens that the document has left.
        owed: tokens that the split is owed.
        shortest: units that are owed before a document is cut; the units may also be bytes.
        may_cut: False if a document goes to one split as a whole: half a conversation has no
            labels, or no prompt.
    """
    if owed < min(shortest, length):
        return 0
    if length <= owed:
        return length
    return owed if may_cut else 0


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply :func:`meshwright.data.order.mix` to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
