"""How large buckets should be, from what a small and a large sum take."""

from __future__ import annotations

import pytest

from meshwright.doctor.links import SUMMED_BYTES, AllReduceTiming
from meshwright.doctor.report import buckets_line

RATE = 1e9
"""Bytes of a message per second."""


def summed(latency_s: float, axis: str = "dp") -> AllReduceTiming:
    return AllReduceTiming(axis, (0, 1), latency_s + SUMMED_BYTES / RATE, 0.0, latency_s)


def test_the_share_of_latency() -> None:
    """10 ms before the first byte, 1 ns for each."""
    slow = summed(0.010)
    assert slow.latency_share(10**7) == pytest.approx(0.5)
    assert slow.bytes_for(0.5) == pytest.approx(10**7, abs=2)
    assert slow.latency_share(slow.bytes_for(0.05)) == pytest.approx(0.05)


def test_it_says_when_buckets_are_too_small() -> None:
    """The slowest group counts; other axes have no buckets."""
    [_, fast] = buckets_line([summed(1e-4), summed(1e-5)], 25 * 2**20)
    assert (
        fast
        == "gradients in buckets of 25.0 MiB: 0.4% of a sum over dp is latency; 5% with 2.0 MiB"
    )
    [_, slow] = buckets_line([summed(0.010), summed(1e-5)], 25 * 2**20)
    assert slow.endswith("5% with 182.0 MiB: set parallel.bucket_bytes = 190840832")
    assert buckets_line([summed(0.010, "tp")], 25 * 2**20) == []
