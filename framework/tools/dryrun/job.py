"""Rehearsal of all ranks of a job, once per kind of rank, and the comparison of all ranks.

16,384 ranks = 16 pipeline ranks x 1,024 columns (dp, tp)      ranks of one pipeline rank behave alike: one script
16 pipeline ranks = 3 kinds: first, 14 between, last           equal stages are rehearsed once, in short,
                                                               and played back in each rank's own row
every rank      the script of its kind and its view of its groups, or a script of its own where it differs
compared        members of groups; collectives one by one; each send with its receive; deadlocks
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.blueprint import Blueprint, batch_numbers
from meshwright.config import RunConfig
from meshwright.mesh.grid import Grid
from meshwright.pipeline.outline import outline_of
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedule
from meshwright.tools.dryrun.account import Rehearsal
from meshwright.tools.dryrun.rehearsal import draw, grid_of, record_step, rehearse
from meshwright.tools.dryrun.replay import CHUNKS, ReplayError, build_templates, replay


@dataclass
class Job:
    """Dry run of a job."""

    config: RunConfig
    grid: Grid
    blueprint: Blueprint
    rehearsals: list[Rehearsal]
    """By pipeline rank: rehearsal of its first rank, valid for all its ranks."""
    kinds: list[int]
    """By pipeline rank: the first pipeline rank with equal stages."""
    own: dict[int, Rehearsal] = field(default_factory=dict)
    """Rehearsals of ranks that differ from their pipeline rank."""
    own_schedules: dict[int, Schedule] = field(default_factory=dict)
    """Schedules of those ranks that run another one."""
    missing: list[tuple[str, int]] = field(default_factory=list)
    """(axis, rank) of each rank that is missing in the view of its group's other ranks."""

    def rehearsal_of(self, rank: int) -> Rehearsal:
        """Return the rehearsal that holds for a rank."""
        return self.own.get(rank) or self.rehearsals[self.grid.coordinates(rank).pp_rank]


def plan_job(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> Job:
    """Run the dry run of every kind of rank of a resolved configuration.

    The callback receives a text for each kind that cannot be played back and therefore takes longer.
    """
    grid = grid_of(config)
    drawn = draw(config)
    blueprint, pp = drawn.blueprint, grid.pp
    keys = [_kind(blueprint, pp_rank) for pp_rank in range(pp)]
    kinds = [keys.index(key) for key in keys]
    per_stage = grid.dp * grid.tp
    found: dict[int, Rehearsal] = {}
    if batch_numbers(config).chunks > CHUNKS:
        short = _short(config)
        drawn_short = drawn._replace(blueprint=draw_like(blueprint, short))
        for kind in dict.fromkeys(kinds):
            try:
                run = record_step(short, kind * per_stage, drawn_short)
                templates = build_templates(run, kind * per_stage, drawn_short.blueprint.schedule, kind)
                for pp_rank in [r for r in range(pp) if kinds[r] == kind]:
                    found[pp_rank] = replay(templates, config, pp_rank * per_stage, drawn, blueprint.schedule)
            except ReplayError as reason:
                say(f"pipeline rank {kind} and those like it are run as a whole: {reason}")
            gc.collect()
    for pp_rank in range(pp):
        if pp_rank not in found:
            found[pp_rank] = rehearse(config, pp_rank * per_stage, drawn)
    return Job(config, grid, blueprint, [found[pp_rank] for pp_rank in range(pp)], kinds)


def _short(config: RunConfig) -> RunConfig:
    batch = batch_numbers(config)
    dp = batch.global_batch // batch.chunks // batch.micro_batch_size
    return config.model_copy(
        update={
            "batch": config.batch.model_copy(
                update={"chunks": CHUNKS, "global_batch": CHUNKS * dp * batch.micro_batch_size}
            )
        }
    )


def draw_like(blueprint: Blueprint, config: RunConfig) -> Blueprint:
    """Return the blueprint for a configuration that differs only in schedule or number of micro-batches."""
    return replace(blueprint, config=config, schedule=draw_schedule(config))


def _kind(blueprint: Blueprint, pp_rank: int) -> Any:
    """Return a key that is equal for pipeline ranks with equal stages: layers, weights and boundary values.

    A stage with a weight that several stages hold has a key of its own.
    """
    tied = {stage for stages in blueprint.stage_of_parameter().values() if len(stages) > 1 for stage in stages}
    found: list[Any] = []
    last = len(blueprint.stages) - 1
    again = set(blueprint.recomputed)
    for stage in blueprint.schedule.stages_of(pp_rank):
        layers = [
            (
                repr(outline_of(layer)).replace(f"{name}.", ""),
                sorted(part.removeprefix(name) for part in again if f"{part}.".startswith(f"{name}.")),
            )
            for name, layer in blueprint.stage_layers(stage).named_children()
        ]
        ends = (stage == 0, stage == last, stage if stage in tied else None)
        before = blueprint.boundaries[stage - 1] if stage else None
        after = blueprint.boundaries[stage] if stage < last else None
        found.append((layers, ends, before and before.leaves, after and after.leaves))
    return repr(found)


def set_rank_schedule(job: Job, rank: int, schedule: str) -> None:
    """Give one rank another schedule than the rest, as a deliberate fault.

    Raises:
        UserError: there is no such schedule for these degrees.
    """
    pipeline = job.config.pipeline.model_copy(update={"schedule": schedule, "schedule_file": None, "interleave": None})
    config = RunConfig.model_validate(job.config.model_dump() | {"pipeline": pipeline.model_dump()})
    job.own[rank] = rehearse(config, rank)
    job.own_schedules[rank] = draw_schedule(config)
