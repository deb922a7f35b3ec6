"""Times of one stage, and the stages of each pipeline rank."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.schedule.action import Placement, Schedule


class StageTime(NamedTuple):
    """Seconds of one micro-batch of one stage."""

    forward: float
    backward: float
    weight_half: float
    message: float
    """Seconds of the message to the next stage."""
    tp: float
    """Seconds of tensor-parallel messages in forward and backward."""
    cp: float = 0.0
    """Seconds of context-parallel messages in forward and backward."""
    ep: float = 0.0
    """Seconds of expert-parallel messages in forward and backward."""
    ep_forward: float = 0.0
    """Part of them in forward."""


@lru_cache(maxsize=1024)
def _by_rank(pp: int, num_stages: int, placement: Placement) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        stages[placement.pp_rank(stage, pp)].append(stage)
    return stages


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """Return the stages of each pipeline rank."""
    return _by_rank(schedule.pp, schedule.num_stages, schedule.placement)
