"""From a name, pp and chunks to who computes what in which order: only F and B here, :mod:`lower` adds the rest.

The pictures are for pp=3 and chunks=4, F as long as B; their numbers stand at the lines that make what they point at.
"""

from __future__ import annotations

from collections.abc import Callable

from framework.errors import ScheduleError
from framework.schedule.action import Action, Kind, Schedule


def gpipe(pp: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (Huang 2019).

                 |--- (1) ---|           |--- (2) ---|
        rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    Bubble (pp-1) / (chunks+pp-1) of total time; every rank holds the activations of all ``chunks`` micro-batches.
    """

    def row(stage: int) -> tuple[Action, ...]:
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(chunks)]  # (1)
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(chunks)]  # (2)
        return (*forwards, *backwards)

    return _one_stage_per_rank("gpipe", pp, chunks, row)


def one_f_one_b(pp: int, chunks: int) -> Schedule:
    """As soon as a backward can run it runs, and takes turns with a forward (Narayanan 2019, "1F1B-flush").

                 |(1)| |----- (2) -----| |-- (3) --|
        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     (1) pp-1-rank forwards fill the pipeline
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      (2) one forward and one backward, in turns
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      (3) the backwards that are left

    The bubble of gpipe, (pp-1) / (chunks+pp-1) of total time, but rank r never holds more than ``min(pp-r, chunks)``
    micro-batches. With fewer micro-batches than ranks the fill is cut short; with one this is naive model parallelism.
    """

    def row(stage: int) -> tuple[Action, ...]:
        num_fill = min(pp - 1 - stage, chunks)
        actions = [Action(Kind.F, stage, microbatch) for microbatch in range(num_fill)]  # (1)
        for microbatch in range(num_fill, chunks):  # (2)
            actions += [Action(Kind.F, stage, microbatch), Action(Kind.B, stage, microbatch - num_fill)]
        actions += [Action(Kind.B, stage, microbatch) for microbatch in range(chunks - num_fill, chunks)]  # (3)
        return tuple(actions)

    return _one_stage_per_rank("1f1b", pp, chunks, row)


BUILDERS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules by the name that the configuration gives them."""


def build(name: str, pp: int, chunks: int) -> Schedule:
    """The compute schedule of a name. Raises :class:`ScheduleError` for an unknown name or a degree below one."""
    if name not in BUILDERS:
        raise ScheduleError(f"pipeline.schedule={name!r} is not known: choose one of {', '.join(BUILDERS)}")
    if pp < 1 or chunks < 1:
        raise ScheduleError(f"pp={pp}, chunks={chunks}: a step needs at least one pipeline rank and one micro-batch")
    return BUILDERS[name](pp, chunks)


def _one_stage_per_rank(name: str, pp: int, chunks: int, row: Callable[[int], tuple[Action, ...]]) -> Schedule:
    return Schedule(name, pp=pp, num_stages=pp, chunks=chunks, rows=tuple(row(stage) for stage in range(pp)))
