"""A job script for Slurm, rendered from one template that users may copy and edit; and its submission.

    CONFIG, nodes, devices per node, what the cluster wants to know
      -> refused here: degrees that do not fill the nodes, a tensor-parallel group that straddles two
      -> RUN/slurm/job.sbatch, printed    srun starts one task for each rank, or torchrun one for each node
      -> with --submit: sbatch

What the script does when the ranks have ended is its last lines: 85 (saved, as asked) and what may pass go back into
the queue, what would come again does not, nor what failed without a newer checkpoint as often as
``meshwright.launch.restarts.IN_VAIN`` says.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import jinja2

from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError, UserError
from meshwright.launch.restarts import GIVEN_UP, IN_VAIN
from meshwright.mesh.grid import Grid, check_placement, nodes_of
from meshwright.mesh.view import draw
from meshwright.tracking.jsonl import read_records

TEMPLATES = Path(__file__).with_name("templates")
SIGNAL = "USR2"
"""NCCL and Slurm itself leave it alone."""
SLURM_EARLY_S = 60
"""Slurm may send a signal so much earlier than it was asked to, and never later."""
UNKNOWN_LEAD_S = 300
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
WORDS = {
    "time": (r"[0-9A-Za-z:-]+", "minutes, h:mm:ss or days-hours"),
    "partition": (rf"{NAME}(,{NAME})*", "names of letters, digits and _.@+-, with commas between"),
    "account": (NAME, "a name of letters, digits and _.@+-"),
    "qos": (NAME, "a name of letters, digits and _.@+-"),
    "constraint": (r"[A-Za-z0-9_\[(][A-Za-z0-9_.*&|,()\[\]-]*", "features, combined by &|,*()[]"),
    "exclude": (r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*", "nodes such as n1,n[3-4]"),
}
"""Option of sbatch -> what its value may be, and how that is said."""
LAST = 50
"""Steps and saves that a lead is measured from."""


@dataclass(frozen=True)
class Ask:
    """What a job asks the cluster for, in Slurm's own words; None: nothing is said of it."""

    nodes: int
    devices_per_node: int
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    cpus_per_task: int | None = None
    container: str | None = None
    """An image, where Slurm has pyxis."""
    mounts: str | None = None
    torchrun: bool = False
    """One torchrun on each node instead of one task for each rank."""
    doctor: bool = False
    """Look at nodes and links before each start."""
    requeue: bool = True
    chain: int = 1
    """Jobs of one name to submit, of which one runs at a time: for clusters that let nobody requeue."""


def placed(config: RunConfig, ask: Ask) -> tuple[RunConfig, str]:
    """The configuration resolved for these nodes, and the picture of who stands where.

    Raises:
        UserError: the degrees do not make up the nodes' devices, or a tensor-parallel group would straddle nodes.
    """
    num_ranks = ask.nodes * ask.devices_per_node
    try:
        resolved = resolve(config, num_ranks)
    except ConfigError as error:
        raise ConfigError(f"{ask.nodes} nodes x {ask.devices_per_node} devices = {num_ranks} ranks: {error}") from None
    parallel = resolved.parallel
    assert isinstance(parallel.dp, int)
    grid, nodes = Grid(parallel.pp, parallel.dp, parallel.tp), nodes_of(ask.nodes, ask.devices_per_node)
    check_placement(grid, nodes, tp_across_nodes=parallel.tp_across_nodes)
    return resolved, draw(grid, nodes)


def lead(run: Path) -> tuple[int, str]:
    """How many seconds before its end a job must be told, and why so many: a step, a save, and half as much again."""
    steps: deque[float] = deque(maxlen=LAST)
    saves: deque[float] = deque(maxlen=LAST)
    metrics = run / "metrics.jsonl"
    if metrics.exists():
        for record in read_records(metrics):
            steps.append(record.step_s)
            if record.save_s is not None:
                saves.append(record.save_s)
    if not steps or not saves:
        return UNKNOWN_LEAD_S, "nothing of this run is measured yet, submit again when it has saved twice"
    step_s, save_s = max(steps), max(saves)
    needed_s = math.ceil(1.5 * (step_s + save_s)) + SLURM_EARLY_S
    median_s = statistics.median(steps)
    return needed_s, f"of late a step took up to {step_s:.3g} s (median {median_s:.3g}) and a save {save_s:.3g} s"


def render(config: RunConfig, config_file: str, overrides: list[str], ask: Ask, *, trust_code: bool = False) -> str:
    """The script. ``config``: resolved; ``config_file`` and ``overrides``: as they are to be given to `train`."""
    run = (Path(config.run.directory) / config.run.name).absolute()
    cwd = Path.cwd()
    check_lines(config_file, *overrides, str(run), ask.container or "", ask.mounts or "")
    lead_s, why = lead(run)
    if ask.time is not None and (limit_s := seconds_of(ask.time)) is not None and lead_s >= limit_s:
        raise UserError(
            f"--time {ask.time} is {limit_s} s, and the ranks are to be told {lead_s} s before it ends ({why}): "
            f"nothing would be trained. Ask for more time"
        )
    parallel = config.parallel
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    mounts = ask.mounts or ",".join(dict.fromkeys(f"{place}:{place}" for place in (cwd, run.parent)))
    return environment.get_template("job.sbatch.j2").render(
        vars(ask)
        | checked(ask)
        | {
            "run_name": config.run.name,
            "job_name": re.sub(r"[^\w.-]", "-", config.run.name),
            "pp": parallel.pp,
            "dp": parallel.dp,
            "tp": parallel.tp,
            "num_ranks": config.launch.processes,
            "gpus": config.train.device == "cuda" or (config.train.device == "auto" and may_have_gpus()),
            "chdir": _word(cwd),
            "logs": _word(run / "slurm"),
            "run": shlex.quote(str(run)),
            "lead_s": lead_s,
            "lead_why": why,
            "signal": SIGNAL,
            "container": ask.container and shlex.quote(ask.container),
            "mounts": shlex.quote(mounts),
            "workdir": shlex.quote(str(cwd)),
            "python": "python3" if ask.container else shlex.quote(sys.executable),
            "arguments": shlex.join([config_file, *overrides, *(["--trust-code"] if trust_code else [])]),
            "in_vain": IN_VAIN,
            "given_up": GIVEN_UP,
        }
    )


def may_have_gpus() -> bool:
    """Whether some node of the cluster has a GPU, or nobody here can tell."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return True
    told = subprocess.run([sinfo, "--noheader", "--format=%G"], capture_output=True, text=True, check=False)
    return told.returncode != 0 or "gpu" in told.stdout


def write(script: str, config: RunConfig) -> Path:
    """Into the run's directory, where the job's logs go too: Slurm makes no directory for them."""
    place = Path(config.run.directory) / config.run.name / "slurm" / "job.sbatch"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script)
        place.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"the job script cannot be written to {place}: {error.strerror}; choose another run.directory or run.name"
        ) from None
    return place


def submit(place: Path, times: int) -> list[str]:
    """The numbers of the jobs.

    Raises:
        UserError: there is no sbatch here, or it refuses; with its own words.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError(f"there is no sbatch on this machine: submit {place} where there is one")
    jobs = []
    for _ in range(times):
        done = subprocess.run([sbatch, "--parsable", str(place)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            told = f"; submitted before: {', '.join(jobs)}" if jobs else ""
            raise UserError(f"sbatch refuses {place}: {done.stderr.strip() or done.stdout.strip()}{told}")
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs


def seconds_of(time: str) -> int | None:
    """Of a time limit as Slurm reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[...]].

    None: there is no limit.

    Raises:
        UserError: it is none of these.
    """
    if time.lower() in ("infinite", "unlimited", "0"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        raise UserError(
            f"--time {time!r} is no limit that Slurm reads: give minutes, h:mm:ss or days-hours (90, 4:00:00, 2-12)"
        )
    days, first, second, third = (int(part) if part else None for part in found.groups())
    assert first is not None
    if days is not None:
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


def _word(path: Path) -> str:
    """For an #SBATCH line, which knows no quotes around spaces and, in some options, expands %."""
    text = str(path)
    if not re.fullmatch(r"/[\w./+,:=@~-]*", text):
        raise ConfigError(
            f"an #SBATCH line takes a path of letters, digits and ./_-+,:=@~ only, and not {text!r}: choose another "
            f"place"
        )
    return text


def checked(ask: Ask) -> dict[str, str | None]:
    """Return the values for #SBATCH lines, which the shell does not unquote: each is of its pattern.

    Raises:
        UserError: one is not; with what is allowed.
    """
    found: dict[str, str | None] = {}
    for name, (pattern, allowed) in WORDS.items():
        value = getattr(ask, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError(f"--{name} {value!r} cannot stand in a job script: give {allowed}")
        found[name] = value
    return found


def check_lines(*values: str) -> None:
    """Refuse values that hold a line break or another control character, quoted though they are.

    Raises:
        UserError: with the value.
    """
    for value in values:
        if not value.isprintable():
            raise UserError(f"{value!r} cannot stand in a job script: it holds a line break or a control character")
