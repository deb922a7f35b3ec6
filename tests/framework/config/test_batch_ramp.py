"""The batch-size ramp: Megatron-LM's sizes at every sample, phases, and what contradicts it."""

from __future__ import annotations

import pytest

from meshwright.config import RunConfig, batch_numbers, phases, resolve, samples_after
from meshwright.config.sections import Batch
from tests.support.errors import raises


def sizes(start: int, increment: int, over: int, global_batch: int, steps: int) -> list[int]:
    """Return the published rule of Megatron-LM, step by step."""
    increments, seen, found = (global_batch - start) / increment, 0, []
    for _ in range(steps):
        size = global_batch if seen > over else start + int(seen / (over / increments)) * increment
        found.append(size)
        seen += size
    return found


@pytest.mark.parametrize(
    ("start", "increment", "over", "global_batch"),
    [
        (2, 2, 64, 8),
        (4, 4, 100, 16),
        (16, 16, 1000, 64),
        (1, 1, 37, 9),
        (8, 24, 5, 32),
        (2, 2, 3, 8),
        (32, 32, 5859, 1536),
    ],
)
def test_the_sizes_are_those_of_megatron(
    start: int, increment: int, over: int, global_batch: int
) -> None:
    batch = Batch(
        micro_batch_size=1,
        chunks=global_batch,
        global_batch=global_batch,
        ramp=(start, increment, over),
    )
    config, seen, found = RunConfig().replace(batch=batch.model_dump(), parallel={"dp": 1}), 0, []
    for step in range(60):
        assert seen == samples_after(batch, step)
        found.append(batch_numbers(config.batch, seen).global_batch)
        seen += found[-1]
    assert found == sizes(start, increment, over, global_batch, 60)
    assert [phase.global_batch for phase in phases(batch)][-1] == global_batch
    assert batch_numbers(config.batch).global_batch == global_batch


def test_without_a_ramp_there_is_one_phase() -> None:
    batch = Batch(micro_batch_size=2, chunks=2, global_batch=8)
    assert [tuple(phase) for phase in phases(batch)] == [(0, 0, 8)] and samples_after(
        batch, 5
    ) == 40


@pytest.mark.parametrize(
    ("ramp", "value"),
    [
        ((8, 2, 100), "batch.global_batch = 8"),
        ((2, 4, 100), "batch.global_batch = 8"),
        ((2, 2, 100), "micro_batch_size 2 x dp 2 = 4"),
    ],
)
def test_a_ramp_that_does_not_fit_is_refused(ramp: tuple[int, int, int], value: str) -> None:
    config = RunConfig().replace(
        batch={"micro_batch_size": 2, "global_batch": 8, "ramp": ramp}, parallel={"dp": 2}
    )
    with raises("MW-CONFIG-063", value):
        resolve(config, 2)
    fits = config.replace(batch={"ramp": (4, 4, 100)})
    assert resolve(fits, 2).batch.ramp == (4, 4, 100) and resolve(resolve(fits, 2), 2) == resolve(
        fits, 2
    )


def test_a_ramp_whose_schedules_would_take_minutes_is_refused() -> None:
    config = RunConfig().replace(
        batch={"micro_batch_size": 1, "global_batch": 4096}, parallel={"dp": 1, "pp": 2}
    )
    with raises("MW-CONFIG-064"):
        resolve(config.replace(batch={"ramp": (1, 1, 10**9)}), 2)
    assert len(phases(resolve(config.replace(batch={"ramp": (64, 64, 10**9)}), 2).batch)) == 64
