"""What ``meshwright dryrun`` does: a job of any size rehearsed on paper, its ranks held against each other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from framework.config import RunConfig, default_world_size, load, resolve
from framework.errors import ConfigError
from framework.mesh.grid import Grid, check_placement, nodes_of

if TYPE_CHECKING:
    from framework.dryrun.job import Job
    from framework.dryrun.report import StepTime, TimeModel

FAULTS = "schedule:RANK=NAME or missing:AXIS:RANK"
SUFFIXES = (".svg", ".png", ".pdf")


def dryrun(
    path: str,
    overrides: Sequence[str],
    num_nodes: int | None,
    per_node: int,
    faults: Sequence[str],
    out: Path | None,
    cluster: str | None = None,
) -> int:
    """The command, with its words as they were given; 1 when ranks do not agree.

    ``cluster``: whose device tells seconds and MFU; left out: an H100 where the run is for a GPU, else nobody.

    Raises:
        UserError: a configuration that cannot work, a fault that is not understood, a picture that cannot be written.
    """
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(f"--out {out}: a picture ends in one of {', '.join(SUFFIXES)}")
    config = load(path, overrides)
    config = resolve(config, num_nodes * per_node if num_nodes else default_world_size(config, 0))
    grid, nodes = _placed(config, per_node)
    check_placement(grid, nodes, tp_across_nodes=config.parallel.tp_across_nodes)
    time_model = _time_model(config, cluster, per_node)
    seeds = [parse_fault(fault, grid) for fault in faults]
    from framework.dryrun.agree import disagreements
    from framework.dryrun.job import plan_job
    from framework.dryrun.report import describe, figure, save
    from framework.stderr import tell

    gc.freeze()  # what is here stays: looking for garbage is then quick
    job = plan_job(config, tell)
    for seed in seeds:
        _seed(job, *seed)
    found = disagreements(job)
    print(describe(job, nodes, found, time_model))
    if out is not None:
        try:
            save(figure(job, time_model), out)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror}): choose another place") from error
        print(out)
    sys.stdout.flush()
    return 1 if found else 0


def _time_model(config: RunConfig, cluster: str | None, per_node: int) -> TimeModel | None:
    """What tells seconds; the hardware is read now, so that a name that is none is refused before long work."""
    from framework.meter import reference
    from framework.planner.hardware import read_hardware

    if cluster is None and not reference(config.train.device, config.train.dtype).fused:
        return None
    hardware = read_hardware(cluster or "h100").model_copy(update={"devices_per_node": per_node})

    def time_model(job: Job) -> StepTime:
        from framework.dryrun.report import StepTime
        from framework.planner.choices import choice_of
        from framework.planner.search import examine
        from framework.planner.sketch import Workbench
        from launch.planning import practice_for

        workbench = Workbench(job.config, practice_for(job.config, hardware))
        found = examine(workbench, hardware, job.config, choice_of(job.config), job.blueprint.schedule)
        return StepTime(found.time.total, found.mfu, found.time.timeline, hardware.name)

    return time_model


def _placed(config: RunConfig, per_node: int) -> tuple[Grid, list[str]]:
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    grid = Grid(parallel.pp, parallel.dp, parallel.tp)
    return grid, nodes_of(-(-grid.size // per_node), per_node)[: grid.size]


def parse_fault(words: str, grid: Grid) -> tuple[str, int, str]:
    """``schedule:5=gpipe`` -> ("schedule", 5, "gpipe"); ``missing:dp:5`` -> ("missing", 5, "dp").

    Raises:
        ConfigError: it is neither, or there is no such rank, axis or schedule.
    """
    from framework.mesh.grid import Axis
    from framework.schedule.build import BUILDERS

    kind, _, rest = words.partition(":")
    rank, _, what = rest.partition("=") if kind == "schedule" else reversed(rest.partition(":"))
    known: list[str] = list(BUILDERS) if kind == "schedule" else [axis for axis in Axis if grid.degree(axis) > 1]
    if kind not in ("schedule", "missing") or not rank.isdecimal():
        raise ConfigError(f"--seed-fault {words}: write {FAULTS}")
    if int(rank) >= grid.size:
        raise ConfigError(f"--seed-fault {words}: the ranks are 0 to {grid.size - 1}")
    if what not in known:
        which = "a schedule" if kind == "schedule" else "an axis with groups"
        raise ConfigError(f"--seed-fault {words}: {what!r} is not {which}: choose of {', '.join(known) or 'none'}")
    return kind, int(rank), what


def _seed(job: Job, kind: str, rank: int, what: str) -> None:
    from framework.dryrun.job import seed_schedule

    if kind == "schedule":
        seed_schedule(job, rank, what)
    else:
        job.missing.append((what, rank))
