"""The time of parallel.offload: copies over the host link,
and sums and steps in the host's memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright_plan.planner.cost import StepTime, step_time
from meshwright_plan.planner.hardware import Link
from meshwright_plan.planner.rates import FrameworkTraits, PerformanceModel
from tests.plan.planner.test_cost import DEVICE, IDEAL, config, layout

FREE = Link(bytes_per_s=1e18, latency_s=0.0)


def took(zero: int, chunks: int, **hardware: Any) -> StepTime:
    """Time of a step on 4 devices with nothing overlapped and free links between them."""
    of = config(parallel={"dp": 4, "zero": zero, "offload": True}, chunks=chunks)
    device = DEVICE.model_copy(
        update={"node_link": FREE, "host_memory_bytes_per_s": 1e18} | hardware
    )
    traits = FrameworkTraits(overlaps_reduce=False, overlaps_gather=False)
    return step_time(layout(of), PerformanceModel(device, IDEAL, traits))


def shard() -> float:
    """Number of elements that each of 4 replicas keeps."""
    return sum(each.trained for each in layout(config()).elements) / 4


@pytest.mark.parametrize("chunks", [1, 8])
def test_zero_3_copies_its_shards_in_every_micro_batch(chunks: int) -> None:
    """4 bytes per element to the device for forward, 4 for backward,
    and 4 of the gradient to the host.
    """
    found = took(3, chunks, host_link=Link(bytes_per_s=1e6, latency_s=0.0))
    assert found.gather == pytest.approx(chunks * 4 * shard() / 1e6, rel=1e-3)
    # both directions at once
    assert found.reduce == pytest.approx(chunks * 4 * shard() / 1e6, rel=1e-3)


@pytest.mark.parametrize("chunks", [1, 8])
def test_zero_1_copies_gradients_and_weights_once_a_step(chunks: int) -> None:
    slow, fast = (
        took(1, chunks, host_link=Link(bytes_per_s=rate, latency_s=0.0)) for rate in (1e6, 1e18)
    )
    assert slow.optimizer - fast.optimizer == pytest.approx(6 * shard() / 1e6, rel=1e-3)
    assert slow.gather == fast.gather and slow.reduce == fast.reduce


def test_the_host_adds_gradients_and_steps_at_its_own_bandwidth() -> None:
    """8 devices share 8e8 bytes/s: a sum moves 12 bytes per element of each, AdamW 38."""
    device = {"host_link": FREE, "host_memory_bytes_per_s": 8e8}
    found = took(3, 5, **device)
    assert found.reduce == pytest.approx(5 * 12 * shard() / 1e8, rel=1e-3)
    assert found.optimizer == pytest.approx(38 * shard() / 1e8, rel=1e-3)
