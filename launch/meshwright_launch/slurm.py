"""Command ``meshwright slurm``: a job script,
rendered from one template that users may copy and edit, and submitted.

    CONFIG, nodes, devices per node, options for sbatch
      -> refused here: degrees that do not fill the nodes, a tensor-parallel group that straddles
      two
      -> RUN/slurm/job.sbatch, printed    srun starts one task for each rank; with torchrun, or with the agents
                                          of watch.mirror, one for each node
      -> with --submit: sbatch

The last lines of the script decide what follows the end of the ranks. A run that saved on request
(exit code 85) and a transient failure are requeued. A failure that would recur is not, nor a run
after
``meshwright_launch.restarts.MAX_FUTILE_RESTARTS`` restarts in a row without a new checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import deque
from pathlib import Path

from meshwright.config import Run, RunConfig, load, resolve
from meshwright.errors import ConfigError, UserError
from meshwright.mesh import Grid, check_placement, draw_placement, nodes_of
from meshwright.run import check_run_files
from meshwright.run.directory import METRICS, check_not_moved, run_directory
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_text
from meshwright.terminal.output import print_warning, put, tell
from meshwright.tracking.jsonl import read_records
from meshwright_launch.agent import COORDINATOR_LOST
from meshwright_launch.job_paths import missing_paths
from meshwright_launch.rendering import render_template
from meshwright_launch.restarts import GIVEN_UP_EXIT_CODE, MAX_FUTILE_RESTARTS, RECURRING_EXIT_CODES
from meshwright_launch.slurm_values import (
    as_word,
    check_container,
    check_lines,
    check_options,
    read_prologue,
    seconds_of,
)

SIGNAL = "USR2"
"""Signal that makes the ranks of a job save; neither NCCL nor Slurm uses it."""
SLURM_EARLY_S = 60
"""Time by which Slurm may send a signal too early; it is never late."""
MAX_LEAD_S = 30 * 86_400.0
"""Upper limit of a duration in the records; longer ones are taken as damaged."""
UNKNOWN_LEAD_S = 300
"""Lead (see :func:`measure_lead`) of a run without measurements."""
CHECKSUM = "# as rendered, sha256 "
"""Start of a script's last line, which ends in the hash of the lines above:
it shows if the script was edited.
"""
LAST = 50
"""Number of latest steps and saves from which the lead is measured."""


def slurm(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write the job script of a run, and print it or submit it, with the placement of the ranks.

    Raises:
        UserError: the degrees do not fill the nodes, an option cannot stand in a script, or sbatch
            refuses it.
    """
    config, picture = resolve_for_nodes(
        load(options.config, overrides), options.nodes, options.devices_per_node
    )
    check_not_moved(config.run, options.config, overrides)
    check_spares(config, options.spares, options.torchrun)
    script = render(config, overrides, options)
    script = with_checksum(script)
    place = write(script, config.run, replaces=options.force)
    if missing := missing_paths(config):
        print_warning(missing)
    if not options.submit:
        print(script, end="")
        tell(picture)  # to stderr: stdout is the script
        tell(f"written to {place}; `sbatch {place}` submits it, or --submit")
        return 0
    put(picture)
    numbers = submit(place, options.chain)
    put(
        f"submitted {place}: job{'s' * (len(numbers) > 1)} {', '.join(numbers)}; logs in"
        f" {place.parent}"
    )
    return 0


def resolve_for_nodes(config: RunConfig, num_nodes: int, per_node: int) -> tuple[RunConfig, str]:
    """Resolve the configuration for these nodes; return it and a picture of the ranks on the nodes.

    Raises:
        UserError: the degrees do not fill the nodes' devices, or a tensor-parallel group would
            straddle nodes.
    """
    num_ranks = num_nodes * per_node
    try:
        resolved = resolve(config, num_ranks)
    except ConfigError as error:
        raise ConfigError(
            "MW-LAUNCH-043",
            f"{num_nodes} nodes x {per_node} devices = {num_ranks} ranks: {error.message}",
        ) from None
    grid, nodes = Grid.of(resolved.parallel.degrees), nodes_of(num_nodes, per_node)
    across = {
        key: getattr(resolved.parallel, key) for key in ("tp_across_nodes", "ep_across_nodes")
    }
    check_placement(grid, nodes, **across)
    return resolved, draw_placement(grid, nodes)


def check_spares(config: RunConfig, spares: int, uses_torchrun: bool) -> None:
    """Refuse spare nodes that could replace none.

    Raises:
        UserError: the run has no mirror, or torchrun starts its ranks.
    """
    if spares and (uses_torchrun or not config.watch.mirror):
        with_it = "and --torchrun" if uses_torchrun else "without watch.mirror = true"
        raise UserError(
            "MW-LAUNCH-123",
            f"--spares {spares} {with_it}: spare nodes take the ranks of a dead node only where"
            " meshwright's own agents start them. Set watch.mirror = true and launch.max_restarts,"
            " without --torchrun, or leave --spares out",
        )


def measure_lead(run: Path) -> tuple[int, str]:
    """Return the lead of a job's signal before its time limit, in seconds, and the reason.

    It is 1.5 x (slowest step + slowest validation + 2 x slowest save), plus ``SLURM_EARLY_S``: a
    save in progress is finished first.
    """
    steps: deque[float] = deque(maxlen=LAST)
    saves: deque[float] = deque(maxlen=LAST)
    validations: deque[float] = deque([0.0], maxlen=LAST)
    metrics = run / METRICS
    if metrics.exists():
        for record in read_records(metrics):
            of_record = (
                (steps, record.step_s),
                (saves, record.save_s),
                (validations, record.validation_s),
            )
            for found, seconds in of_record:
                if seconds is not None and 0 <= seconds < MAX_LEAD_S:
                    found.append(seconds)
    if not steps or not saves:
        return (
            UNKNOWN_LEAD_S,
            "this run has no measurements yet, submit again when it has saved twice",
        )
    step_s, save_s, validation_s = max(steps), max(saves), max(validations)
    needed_s = math.ceil(1.5 * (step_s + validation_s + 2 * save_s)) + SLURM_EARLY_S
    validation = f", a validation {validation_s:.3g} s" if validation_s else ""
    median_s = statistics.median(steps)
    return (
        needed_s,
        (
            f"of late a step took up to {step_s:.3g} s (median {median_s:.3g}){validation} and a"
            f" save {save_s:.3g} s"
        ),
    )


def render(config: RunConfig, overrides: list[str], options: argparse.Namespace) -> str:
    """Render the script. ``config``: resolved; ``overrides``:
    configuration keys that `train` gets too.

    Raises:
        UserError: a value cannot stand in a script, or the time limit is too short to save before
            it.
    """
    run = run_directory(config.run).absolute()
    cwd = Path.cwd()
    container = options.container
    check_lines(
        options.config,
        *overrides,
        str(run),
        container or "",
        options.mounts or "",
        options.prologue or "",
    )
    lead_s, why = measure_lead(run)
    if (
        options.time is not None
        and (limit_s := seconds_of(options.time)) is not None
        and lead_s >= limit_s
    ):
        raise UserError(
            "MW-LAUNCH-044",
            f"--time {options.time} is {limit_s} s, and the ranks must be signalled {lead_s} s"
            f" before it ends ({why}): nothing would be trained. Request more time",
        )
    check_options(options)
    check_container(container, options.mounts, options.runtime)
    mounts = options.mounts or ",".join(
        dict.fromkeys(f"{place}:{place}" for place in (cwd, run.parent))
    )
    return render_template(
        "job.sbatch.j2",
        vars(options)
        | {
            "run_name": config.run.name,
            "job_name": job_name(run, options.chain),
            "degrees": Grid.of(config.parallel.degrees),
            "num_ranks": config.launch.processes,
            "gpus": (
                config.train.device == "cuda" or (config.train.device == "auto" and may_have_gpus())
            ),
            "chdir": as_word(cwd),
            "logs": as_word(run / "slurm"),
            "prologue": None if options.prologue is None else read_prologue(options.prologue),
            "asks_for_gpus": options.gres is None,
            "run": shlex.quote(str(run)),
            "lead_s": lead_s,
            "lead_why": why,
            "signal": SIGNAL,
            "container": container and shlex.quote(container),
            "by_apptainer": container is not None and options.runtime == "apptainer",
            "mounts": shlex.quote(mounts),
            "workdir": shlex.quote(str(cwd)),
            "lost": COORDINATOR_LOST if config.watch.mirror and not options.torchrun else None,
            "python": "python3" if container else shlex.quote(sys.executable),
            "arguments": shlex.join(
                [options.config, *overrides, *["--trust-code"] * options.trust_code]
            ),
            "in_vain": MAX_FUTILE_RESTARTS,
            "given_up": GIVEN_UP_EXIT_CODE,
            "recurring": RECURRING_EXIT_CODES,
        },
    )


def job_name(run: Path, chain: int) -> str:
    """Return the name of a run's job.

    The name of a chain ends in a hash of the run's directory: Slurm runs the jobs of one name one
    at a time, and the end of a run cancels those that wait.
    """
    name = re.sub(r"[^\w.-]", "-", run.name)
    return name if chain == 1 else f"{name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def may_have_gpus() -> bool:
    """Return True if some node of the cluster has a GPU, or if that cannot be determined here."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return True
    done = subprocess.run(
        [sinfo, "--noheader", "--format=%G"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return done.returncode != 0 or "gpu" in done.stdout


def with_checksum(script: str) -> str:
    """Return the script with a last line that shows whether it was edited since."""
    return f"{script}{CHECKSUM}{hashlib.sha256(script.encode()).hexdigest()}\n"


def is_edited(script: str) -> bool:
    """Return True unless a script is as :func:`with_checksum` returned it."""
    text, checksum, _ = script.rpartition(CHECKSUM)
    return not checksum or with_checksum(text) != script


def write(script: str, run: Run, *, replaces: bool = False) -> Path:
    """Write the script into the run's directory, next to the job's logs:
    Slurm creates no directory for them.

    Raises:
        ConfigError: the present script was edited, and ``replaces`` is False; or the directory is
            not writable.
    """
    place = run_directory(run) / "slurm" / "job.sbatch"
    check_run_files(place.parents[1])
    try:
        old = read_text(place, errors="replace") if not replaces and place.exists() else script
        if old != script and is_edited(old):
            raise ConfigError(
                "MW-LAUNCH-066",
                f"{place} was edited, or is of an earlier version, and would be lost: submit it"
                f" with `sbatch {place}`, move it away, or replace it with --force",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, script)
        place.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            "MW-LAUNCH-045",
            f"the job script cannot be written to {place}: {error.strerror}; choose another"
            " run.directory or run.name",
        ) from None
    return place


def submit(place: Path, times: int) -> list[str]:
    """Submit the script ``times`` times and return the job numbers.

    Raises:
        UserError: there is no sbatch here, or it refuses the script; quotes its message.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(
            "MW-LAUNCH-046", f"sbatch is not installed on this machine: submit {place} where it is"
        )
    jobs: list[str] = []
    for _ in range(times):
        done = subprocess.run(
            [sbatch, "--parsable", str(place)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            earlier = f"; submitted before: {', '.join(jobs)}" if jobs else ""
            raise UserError(
                "MW-LAUNCH-047",
                f"sbatch refuses {place}: {done.stderr.strip() or done.stdout.strip()}{earlier}",
            )
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs
