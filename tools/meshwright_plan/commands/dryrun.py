"""Command ``meshwright dryrun``: run a job of any size on fake tensors,
and compare the collectives of all ranks.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import TYPE_CHECKING

from meshwright.config import Parallel, Pipeline, RunConfig, Train, load, resolve
from meshwright.errors import ConfigError, UserError
from meshwright.mesh import Grid, check_placement, nodes_of
from meshwright.schedule.build import BUILDERS
from meshwright.system.atomic import writing
from meshwright.system.numbers import whole_number
from meshwright.terminal.output import put, tell
from meshwright_launch.arguments.common import DEVICES_PER_NODE
from meshwright_plan.picture.library import require_matplotlib

if TYPE_CHECKING:
    from meshwright_plan.dryrun.job import Job
    from meshwright_plan.dryrun.report import StepTimeEstimate
    from meshwright_plan.planner.hardware import Hardware

FAULT = "schedule:RANK=NAME"
SUFFIXES = (".svg", ".png", ".pdf")


def dryrun(options: argparse.Namespace, overrides: list[str]) -> int:
    """Dry-run a job; return 1 if ranks disagree or memory runs out, else 0.

    Raises:
        UserError: an impossible configuration, an invalid fault, or a picture that cannot be
            written.
    """
    out, num_nodes = options.out, options.nodes
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(
            "MW-LAUNCH-019",
            f"--out {out}: a picture ends in one of {', '.join(SUFFIXES)}:"
            f" {out.with_suffix('.svg')}",
        )
    if out is not None:
        require_matplotlib()
    config = load(options.config, overrides)
    hardware = _hardware(config.train, options.cluster)
    per_node = options.devices_per_node or (
        DEVICES_PER_NODE if hardware is None else hardware.devices_per_node
    )
    if num_nodes:
        _check_size(config.parallel, num_nodes, per_node)
    config = resolve(config, num_nodes * per_node if num_nodes else None)
    grid = Grid.of(config.parallel.degrees)
    nodes = nodes_of(-(-grid.size // per_node), per_node)[: grid.size]
    across = {key: getattr(config.parallel, key) for key in ("tp_across_nodes", "ep_across_nodes")}
    check_placement(grid, nodes, **across)
    if hardware is not None:
        hardware = hardware.model_copy(update={"devices_per_node": per_node})
    faults = options.seed_fault or []
    parsed = [parse_fault(fault, grid.size, config.pipeline) for fault in faults]
    from meshwright_plan.dryrun.agreement import disagreements
    from meshwright_plan.dryrun.job import dry_run_job
    from meshwright_plan.dryrun.report import describe, figure, runs_out_of_memory

    if hardware is not None:
        _warn_of_sizes(config, hardware, options.skew)
    elif options.skew > 1:
        raise ConfigError(
            "MW-LAUNCH-086",
            f"--skew {options.skew:g} changes only the predicted seconds: name a --cluster for"
            " them",
        )
    gc.freeze()  # exempts existing objects, so that collections stay fast
    job = dry_run_job(config, tell)
    for words, fault in zip(faults, parsed, strict=True):
        _seed_fault(job, words, *fault)
    problems = disagreements(job)
    time = None if hardware is None else _estimate(job, hardware, options.skew)
    put(describe(job, nodes, problems, time))
    if out is not None:
        picture = figure(job, time)
        with writing(out) as file:
            picture.savefig(file, dpi=130)
        put(out)
    sys.stdout.flush()
    return 1 if problems or runs_out_of_memory(job, time) else 0


def _hardware(train: Train, cluster: str | None) -> Hardware | None:
    """Read the hardware for predicted seconds and MFU; default: an H100 for a run on GPUs,
    None for a run on CPU.

    Called before the dry run, so that a wrong name is refused at once.
    """
    from meshwright.model.meter import reference
    from meshwright_plan.planner.hardware import read_hardware

    if cluster is None and not reference(train.device, train.dtype).fused:
        return None
    hardware = read_hardware(cluster or "h100")
    hardware.check_dtype(train.dtype)
    return hardware


def _warn_of_sizes(config: RunConfig, hardware: Hardware, skew: float) -> None:
    """Print a warning for sizes that keep products off tensor cores;
    refuse a ``--skew`` that is impossible here.
    """
    from meshwright_plan.commands.plans import check_skew, execution_options, warn_of_alignment
    from meshwright_plan.planner.model_cache import ModelCache

    cache = ModelCache(config, execution_options(config.train, hardware), skew=skew)
    check_skew(cache)
    if skew > config.parallel.ep:
        raise ConfigError(
            "MW-LAUNCH-090",
            f"--skew {skew:g}: a rank has at most parallel.ep = {config.parallel.ep} times the mean"
            " of its ep group: give a smaller load, or a larger ep",
        )
    warn_of_alignment(cache, hardware, config)


def _estimate(job: Job, hardware: Hardware, skew: float) -> StepTimeEstimate:
    """Return the predicted seconds and MFU of a job. ``skew``:
    rows of the busiest rank's experts over the mean.
    """
    from meshwright_plan.commands.plans import execution_options
    from meshwright_plan.dryrun.report import StepTimeEstimate
    from meshwright_plan.planner.choice import choice_of
    from meshwright_plan.planner.mirror import MirrorLinks
    from meshwright_plan.planner.model_cache import ModelCache
    from meshwright_plan.planner.plan import evaluate
    from meshwright_plan.planner.row_work import row_lines

    cache = ModelCache(job.config, execution_options(job.config.train, hardware), skew=skew)
    found = evaluate(cache, hardware, job.config, choice_of(job.config), job.blueprint.schedule)
    return StepTimeEstimate(
        found.time.total,
        found.mfu,
        found.time.timeline,
        hardware.name,
        hardware.usable_bytes,
        row_lines(cache, hardware, found),
        MirrorLinks.of(hardware),
    )


def _check_size(parallel: Parallel, num_nodes: int, per_node: int) -> None:
    """Check that the degrees fill the nodes.

    Raises:
        ConfigError: they do not; suggests values of this command's options that fit.
    """
    size, dp = num_nodes * per_node, parallel.known_dp
    replica = parallel.ranks_per_batch
    ranks = replica * (dp or max(1, size // replica))
    if ranks == size:
        return
    available = (
        f"{num_nodes:,} node{'s' * (num_nodes > 1)} x {per_node} device{'s' * (per_node > 1)} ="
        f" {size:,}"
    )
    available += f" rank{'s' * (size > 1)}"
    needed = parallel.named_ranks + (
        f" x dp {dp} = {ranks:,}" if dp else f" = {replica:,} a replica"
    )
    works = [f"--parallel.dp={size // replica}"] if size % replica == 0 and dp else []
    if ranks % per_node == 0:
        works.append(f"--nodes {ranks // per_node}")
    elif ranks % num_nodes == 0:
        works.append(f"--devices-per-node {ranks // num_nodes}")
    advice = f"pass {', or '.join(works)}" if works else "leave --nodes and --devices-per-node out"
    raise ConfigError("MW-LAUNCH-020", f"{available}, and the degrees make {needed}: {advice}")


def parse_fault(words: str, size: int, pipeline: Pipeline) -> tuple[int, str]:
    """Parse ``schedule:5=gpipe`` into (5, "gpipe"). ``size``: number of ranks.

    Raises:
        ConfigError: another form, an unknown rank or schedule, or the schedule that all ranks run.
    """
    kind, _, rest = words.partition(":")
    rank, _, schedule = rest.partition("=")
    number = whole_number(rank)
    if kind != "schedule" or number is None or not schedule:
        raise ConfigError("MW-LAUNCH-021", f"--seed-fault {words}: write {FAULT}")
    if number >= size:
        ranks = "the only rank is 0" if size == 1 else f"the ranks are 0 to {size - 1}"
        raise ConfigError("MW-LAUNCH-022", f"--seed-fault {words}: {ranks}")
    of_all = None if pipeline.schedule_file else pipeline.schedule
    others = [name for name in BUILDERS if name != of_all]
    if schedule not in others:
        why = "what all ranks run" if schedule == of_all else "not a schedule"
        raise ConfigError(
            "MW-LAUNCH-023",
            f"--seed-fault {words}: {schedule!r} is {why}: choose from {', '.join(others)}",
        )
    return number, schedule


def _seed_fault(job: Job, words: str, rank: int, schedule: str) -> None:
    from meshwright_plan.dryrun.job import set_rank_schedule

    try:
        set_rank_schedule(job, rank, schedule)
    except UserError as error:
        raise ConfigError("MW-LAUNCH-024", f"--seed-fault {words}: {error.message}") from error
