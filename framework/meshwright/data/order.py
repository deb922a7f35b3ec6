"""The global sample order: the sample of the corpus that is the i-th of the run, for any i,
without a table.

    global index i  ->  epoch = i // N, place = i % N  ->  sample number = permutation(seed, epoch)(place)

Every epoch is a permutation of 0..N-1, keyed by (seed, epoch): a Feistel network over the smallest
even number of bits that holds N, iterated until the value is below N (Black and Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002). A shuffled table of 10^9 samples costs 8 GB per rank
or a shared file, and minutes at each start. The network costs two to nine microseconds a sample,
and a resumed run needs only the index. Pure: no torch and no rank.

      left | right          one round; w bits each side
        |  \\   |            left, right = right, left ^ mix(right + key)
        |   f  |            invertible for any mix, so the network is a permutation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import lcm

NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """Hash 64 bits by the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@lru_cache(maxsize=64)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the 64-bit round keys: a hash,
    so that neighbouring epochs and seeds give unrelated orders.
    """
    raw = blake2b(f"sample order/{seed}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    return tuple(int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8))


def permute(place: int, size: int, keys: tuple[int, ...]) -> int:
    """Return the image of ``place`` in 0..size-1 under the permutation with these keys.

    The network permutes 4^w >= size values, fewer than 4 x size, so fewer than four iterations are
    needed on average.
    """
    assert 0 <= place < size, (place, size)
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    value = place
    while True:
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        value = left << half_bits | right
        if value < size:
            return value


@dataclass(frozen=True)
class SampleOrder:
    """Order of training samples: reshuffled in each epoch, endless."""

    num_samples: int
    seed: int

    def __call__(self, global_index: int) -> int:
        """Return the number of the run's sample ``global_index``."""
        epoch, place = divmod(global_index, self.num_samples)
        return permute(place, self.num_samples, round_keys(self.seed, epoch))


@dataclass(frozen=True)
class BlendOrder:
    """Order of several data sets, drawn in proportion to their weights,
    each in its own shuffled order.

    The n-th draw follows from n alone, by bisection: of the first n samples floor(n a / b + 1/2)
    come from the first half of the sets, where a / b is that half's share of the weights, and so on
    within the half. Integers avoid the drift of float sums. After any number of samples each set is
    within (bisections / 2) samples of its share.
    """

    orders: tuple[SampleOrder, ...]
    weights: tuple[int, ...]

    def __call__(self, global_index: int) -> int:
        """Return the sample number; the samples of all sets are numbered consecutively."""
        at, local = self.place(global_index)
        return sum(order.num_samples for order in self.orders[:at]) + self.orders[at](local)

    def place(self, global_index: int) -> tuple[int, int]:
        """Return (index of the set, position in its order)."""
        first, last, n = 0, len(self.weights), global_index
        while last - first > 1:
            middle = (first + last) // 2
            part, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
            before, after = ((2 * i * part + whole) // (2 * whole) for i in (n, n + 1))
            if after > before:
                last, n = middle, before
            else:
                first, n = middle, n - before
        return first, n

    def drawn(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first ``num_samples`` samples come from each set."""
        counts: list[int] = []

        def split(first: int, last: int, n: int) -> None:
            if last - first == 1:
                counts.append(n)
                return
            middle = (first + last) // 2
            part, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
            before = (2 * n * part + whole) // (2 * whole)
            split(first, middle, before)
            split(middle, last, n - before)

        split(0, len(self.weights), num_samples)
        return tuple(counts)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in exactly the ratio of the decimal weights: 0.7, 0.3 -> 7, 3."""
    parts = [Fraction(repr(float(weight))) for weight in weights]
    common = lcm(*(part.denominator for part in parts))
    return tuple(int(part * common) for part in parts)


@dataclass(frozen=True)
class OnceInOrder:
    """Order of validation samples: 0, 1, 2, ... once each, and none past the last."""

    num_samples: int

    def __call__(self, global_index: int) -> int | None:
        """Return the sample number, or None past the end."""
        return global_index if global_index < self.num_samples else None
