"""Dry run of all ranks of a job, once per kind of rank.

16,384 ranks = 16 pipeline ranks x 1,024 columns (dp, tp)      ranks of one pipeline rank are alike: one profile
16 pipeline ranks = 3 kinds: first, 14 between, last           equal stages are run once, with few micro-batches,
                                                               and replayed in each rank's own row
every rank      the profile of its kind and its own view of its groups; a deviating rank has its own profile
compared        members of groups; collectives one by one; each send with its receive; deadlocks
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.blueprint import Blueprint
from meshwright.config import RunConfig, batch_numbers
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.pipeline.plan import outline_of
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedule
from meshwright_plan.dryrun.fake_step import (
    SharedBlueprint,
    grid_of,
    profile_rank,
    record_step,
    share_blueprint,
)
from meshwright_plan.dryrun.periodic import few_chunks, lengthen
from meshwright_plan.dryrun.progress import ReportingRecorder
from meshwright_plan.dryrun.rank_profile import RankProfile
from meshwright_plan.dryrun.replay import replay
from meshwright_plan.dryrun.templates import CHUNKS, ReplayError, build_templates
from meshwright_plan.planner.matrix_step import MatrixCounts, count_sizes, fullest_rank, sizes_of


@dataclass
class Job:
    """Dry run of a job."""

    config: RunConfig
    grid: Grid
    blueprint: Blueprint
    profiles: list[RankProfile]
    """Profile of one rank of each pipeline rank (:func:`profiled_rank`),
    valid for all its ranks.
    """
    representatives: list[int]
    """First pipeline rank with equal stages, for each pipeline rank."""
    own_profiles: dict[int, RankProfile] = field(default_factory=dict)
    """Profiles of ranks with a seeded fault,
    which the profile of their pipeline rank does not describe.
    """
    own_schedules: dict[int, Schedule] = field(default_factory=dict)
    """Schedules of the ranks that run another one, as a seeded fault."""

    def profile_of(self, rank: int) -> RankProfile:
        """Return the profile that holds for a rank."""
        return self.own_profiles.get(rank) or self.profiles[self.grid.coordinates(rank).pp_rank]


def dry_run_job(config: RunConfig, report: Callable[[str], None] = lambda text: None) -> Job:
    """Run the dry run of every kind of rank of a resolved configuration.

    ``report`` receives a line for each kind that has to run all micro-batches, which takes longer,
    and progress lines every few seconds.
    """
    grid, shared = grid_of(config.parallel), share_blueprint(config)
    blueprint, pp = shared.blueprint, grid.pp
    profiled = [profiled_rank(blueprint, pp_rank) for pp_rank in range(pp)]
    kinds = [_kind(blueprint, pp_rank) for pp_rank in range(pp)]
    representatives = [kinds.index(kind) for kind in kinds]
    profiles: dict[int, RankProfile] = {}
    few = _with_few_chunks(config) if batch_numbers(config.batch).chunks > CHUNKS else None
    # by the schedule, saved tensors leave and return
    if few is not None and not config.pipeline.offload_activations:
        short, schedule = few
        shared_short = shared._replace(
            blueprint=replace(blueprint, config=short, schedules=[schedule])
        )
        for first in dict.fromkeys(representatives):
            try:
                run = record_step(
                    short, profiled[first], shared_short, ReportingRecorder(report, first, grid.pp)
                )
                templates = build_templates(run, shared_short.blueprint.schedule, first)
                for pp_rank in [r for r in range(pp) if representatives[r] == first]:
                    profiles[pp_rank] = replay(
                        templates, profiled[pp_rank], shared, blueprint.schedule
                    )
            except ReplayError:
                pass  # some storages outlive their micro-batch: profiled below, without templates
            gc.collect()
    for pp_rank in range(pp):
        if pp_rank not in profiles:
            profiles[pp_rank] = _profile_steps(config, profiled[pp_rank], shared, report)
    return Job(
        config, grid, blueprint, [profiles[pp_rank] for pp_rank in range(pp)], representatives
    )


def matrices_of_rank(blueprint: Blueprint, pp_rank: int) -> list[MatrixCounts]:
    """Return the sizes of the matrices in each stage of a pipeline rank,
    on one tp and ep rank.
    """
    return [
        count_sizes(
            size
            for name, _ in layers.named_parameters()
            for size in sizes_of(blueprint.infos[name])
        )
        for layers in map(blueprint.stage_layers, blueprint.schedule.stages_of(pp_rank))
    ]


def profiled_rank(blueprint: Blueprint, pp_rank: int) -> int:
    """Return the rank whose profile is that of its pipeline rank: the first one;
    with an optimizer of matrices the fullest in STEP.
    """
    parallel, home = blueprint.config.parallel, 0
    if blueprint.config.optimizer.spec.unit == "matrix":
        matrices = matrices_of_rank(blueprint, pp_rank)
        home = fullest_rank(parallel, blueprint.config.train, matrices)
    return pp_rank * parallel.num_replicas * parallel.tp + home


def _profile_steps(
    config: RunConfig, rank: int, shared: SharedBlueprint, report: Callable[[str], None]
) -> RankProfile:
    """Profile a rank with few micro-batches and lengthen the result,
    or run all of them if that fails.
    """
    blueprint, grid = shared.blueprint, grid_of(config.parallel)
    schedule, pp_rank = blueprint.schedule, grid.coordinates(rank).pp_rank
    few = few_chunks(schedule)
    of_few = _with_few_chunks(config, few) if few < schedule.chunks else None
    if of_few is not None:
        short, short_schedule = of_few
        shared_short = shared._replace(
            blueprint=replace(blueprint, config=short, schedules=[short_schedule])
        )
        profile = profile_rank(
            short, rank, shared_short, ReportingRecorder(report, pp_rank, grid.pp)
        )
        try:
            return lengthen(profile, schedule, schedule.chunks - few)
        except ReplayError as error:
            report(f"pipeline rank {pp_rank} runs all micro-batches: {error}")
    elif few < schedule.chunks:
        report(
            f"pipeline rank {pp_rank} runs all micro-batches: its schedule has no row with fewer"
        )
    return profile_rank(config, rank, shared, ReportingRecorder(report, pp_rank, grid.pp))


def _with_few_chunks(config: RunConfig, chunks: int = CHUNKS) -> tuple[RunConfig, Schedule] | None:
    """Return the configuration with few micro-batches, and its schedule;
    None if a user's schedule cannot be so short.

    A file has one number of micro-batches, and a function may refuse some.
    """
    batch = batch_numbers(config.batch)
    few = {
        "chunks": chunks,
        "global_batch": chunks * batch.global_batch // batch.chunks,
        "ramp": None,
    }
    short = config.replace(batch=few)
    try:
        return short, draw_schedule(short.pipeline, short.parallel.pp, short.batch.chunks)
    except UserError:
        return None


def _kind(blueprint: Blueprint, pp_rank: int) -> Any:
    """Return a key that is equal for pipeline ranks with equal stages: layers,
    weights and boundary values.

    A stage with a weight that several stages hold has a key of its own.
    """
    tied = {
        stage
        for stages in blueprint.stage_of_parameter().values()
        if len(stages) > 1
        for stage in stages
    }
    stages: list[Any] = []
    last = len(blueprint.stages) - 1
    recomputed = set(blueprint.recomputed)
    offloaded = blueprint.offloaded
    for stage in blueprint.schedule.stages_of(pp_rank):
        layers = [
            (
                repr(outline_of(layer)).replace(f"{name}.", ""),
                sorted(
                    part.removeprefix(name)
                    for part in recomputed
                    if f"{part}.".startswith(f"{name}.")
                ),
                name in offloaded,
            )
            for name, layer in blueprint.stage_layers(stage).named_children()
        ]
        ends = (stage == 0, stage == last, stage if stage in tied else None)
        before = blueprint.boundaries[stage - 1] if stage else None
        after = blueprint.boundaries[stage] if stage < last else None
        stages.append((layers, ends, before and before.leaves, after and after.leaves))
    return repr(stages)


def set_rank_schedule(job: Job, rank: int, schedule: str) -> None:
    """Seed a fault: let one rank run another schedule than the rest.

    Raises:
        UserError: there is no such schedule for these degrees.
    """
    changed = job.config.replace(
        pipeline={"schedule": schedule, "schedule_file": None, "interleave": None}
    )
    config = RunConfig.model_validate(changed.model_dump())
    job.own_profiles[rank] = profile_rank(config, rank)
    job.own_schedules[rank] = draw_schedule(
        config.pipeline, config.parallel.pp, config.batch.chunks
    )
