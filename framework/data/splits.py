"""Split of documents into train, validation and test, by a hash of the seed and of the document's number."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")


def split_of(numbers: NDArray[np.int64], seed: int, validation_share: float, test_share: float) -> NDArray[np.int64]:
    """Return the index in :data:`SPLITS` of each document, (documents,). It follows from seed and number alone."""
    key = blake2b(f"split of documents/{seed}".encode(), digest_size=8).digest()
    places = _mixed(numbers.astype(np.uint64) + np.uint64(int.from_bytes(key, "little"))).astype(np.float64) / 2.0**64
    return np.where(places < validation_share, 1, np.where(places < validation_share + test_share, 2, 0))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply :func:`meshwright.data.order.mix` to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
