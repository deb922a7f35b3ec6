"""Job script for Slurm, rendered from one template that users may copy and edit, and its submission.

    CONFIG, nodes, devices per node, options for sbatch
      -> refused here: degrees that do not fill the nodes, a tensor-parallel group that straddles two
      -> RUN/slurm/job.sbatch, printed    srun starts one task for each rank, or torchrun one for each node
      -> with --submit: sbatch

The last lines of the script decide what follows the end of the ranks. A run that saved on request (exit code 85) and a
failure that may pass are requeued. A failure that would recur is not, nor a run after
``meshwright.launch.restarts.IN_VAIN`` restarts in a row without a newer checkpoint.
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
from meshwright.mesh.grid import Grid, nodes_of
from meshwright.run.directory import METRICS
from meshwright.tracking.jsonl import read_records

TEMPLATES = Path(__file__).with_name("templates")
SIGNAL = "USR2"
"""Signal that asks a job to save; neither NCCL nor Slurm uses it for itself."""
SLURM_EARLY_S = 60
"""Time by which Slurm may send a signal too early; it never sends one too late."""
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
"""Option of sbatch -> (pattern of its value, description of that pattern)."""
LAST = 50
"""Number of latest steps and saves from which the lead is measured."""


@dataclass(frozen=True)
class JobOptions:
    """Options of a job, under Slurm's names; None leaves an option to the cluster's default."""

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
    """Container image; needs Slurm with pyxis."""
    mounts: str | None = None
    torchrun: bool = False
    """One torchrun on each node instead of one task for each rank."""
    doctor: bool = False
    """Check of nodes and links before each start."""
    requeue: bool = True
    chain: int = 1
    """Jobs of one name to submit, running one at a time: for clusters where users may not requeue."""


def resolve_for_nodes(config: RunConfig, ask: JobOptions) -> tuple[RunConfig, str]:
    """Resolve the configuration for these nodes; return it and a picture of the ranks on the nodes.

    Raises:
        UserError: the degrees do not fill the nodes' devices, or a tensor-parallel group would straddle nodes.
    """
    num_ranks = ask.nodes * ask.devices_per_node
    try:
        resolved = resolve(config, num_ranks)
    except ConfigError as error:
        raise ConfigError(
            "MW-LAUNCH-043", f"{ask.nodes} nodes x {ask.devices_per_node} devices = {num_ranks} ranks: {error.message}"
        ) from None
    parallel = resolved.parallel
    assert isinstance(parallel.dp, int)
    grid, nodes = Grid(parallel.pp, parallel.dp, parallel.tp), nodes_of(ask.nodes, ask.devices_per_node)
    grid.check_placement(nodes, tp_across_nodes=parallel.tp_across_nodes)
    return resolved, grid.draw(nodes)


def measure_lead(run: Path) -> tuple[int, str]:
    """Return how many seconds before its end a job needs its signal (1.5 x (slowest step + save)), and the reason."""
    steps: deque[float] = deque(maxlen=LAST)
    saves: deque[float] = deque(maxlen=LAST)
    metrics = run / METRICS
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


def render(
    config: RunConfig, config_file: str, overrides: list[str], ask: JobOptions, *, trust_code: bool = False
) -> str:
    """Render the script. ``config``: resolved; ``config_file`` and ``overrides``: the arguments for `train`."""
    run = (Path(config.run.directory) / config.run.name).absolute()
    cwd = Path.cwd()
    check_lines(config_file, *overrides, str(run), ask.container or "", ask.mounts or "")
    lead_s, why = measure_lead(run)
    if ask.time is not None and (limit_s := seconds_of(ask.time)) is not None and lead_s >= limit_s:
        raise UserError(
            "MW-LAUNCH-044",
            f"--time {ask.time} is {limit_s} s, and the ranks are to be told {lead_s} s before it ends ({why}): "
            f"nothing would be trained. Ask for more time",
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
        | check_options(ask)
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
    """Return True if some node of the cluster has a GPU, or if that cannot be determined here."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return True
    told = subprocess.run([sinfo, "--noheader", "--format=%G"], capture_output=True, text=True, check=False)
    return told.returncode != 0 or "gpu" in told.stdout


def write(script: str, config: RunConfig) -> Path:
    """Write the script into the run's directory, next to the job's logs: Slurm creates no directory for them."""
    place = Path(config.run.directory) / config.run.name / "slurm" / "job.sbatch"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script)
        place.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            "MW-LAUNCH-045",
            f"the job script cannot be written to {place}: {error.strerror}; choose another run.directory or run.name",
        ) from None
    return place


def submit(place: Path, times: int) -> list[str]:
    """Submit the script ``times`` times and return the job numbers.

    Raises:
        UserError: there is no sbatch here, or it refuses; quotes its message.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("MW-LAUNCH-046", f"there is no sbatch on this machine: submit {place} where there is one")
    jobs = []
    for _ in range(times):
        done = subprocess.run([sbatch, "--parsable", str(place)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            told = f"; submitted before: {', '.join(jobs)}" if jobs else ""
            raise UserError(
                "MW-LAUNCH-047", f"sbatch refuses {place}: {done.stderr.strip() or done.stdout.strip()}{told}"
            )
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs


def seconds_of(time: str) -> int | None:
    """Return the seconds of a Slurm time limit, or None for no limit.

    Slurm reads minutes, minutes:seconds, hours:minutes:seconds, and days-hours[:minutes[...]].

    Raises:
        UserError: the text has none of these forms.
    """
    if time.lower() in ("infinite", "unlimited", "0"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        raise UserError(
            "MW-LAUNCH-048",
            f"--time {time!r} is no limit that Slurm reads: give minutes, h:mm:ss or days-hours (90, 4:00:00, 2-12)",
        )
    days, first, second, third = (int(part) if part else None for part in found.groups())
    assert first is not None
    if days is not None:
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


def _word(path: Path) -> str:
    """Return a path for an #SBATCH line, where spaces cannot be quoted and some options expand %."""
    text = str(path)
    if not re.fullmatch(r"/[\w./+,:=@~-]*", text):
        raise ConfigError(
            "MW-LAUNCH-049",
            f"an #SBATCH line takes a path of letters, digits and ./_-+,:=@~ only, and not {text!r}: choose another "
            f"place",
        )
    return text


def check_options(ask: JobOptions) -> dict[str, str | None]:
    """Return the values for #SBATCH lines, which the shell does not unquote; each matches its pattern.

    Raises:
        UserError: a value does not match; has the allowed form.
    """
    found: dict[str, str | None] = {}
    for name, (pattern, allowed) in WORDS.items():
        value = getattr(ask, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError("MW-LAUNCH-050", f"--{name} {value!r} cannot stand in a job script: give {allowed}")
        found[name] = value
    return found


def check_lines(*values: str) -> None:
    """Refuse values with a line break or another control character; quoting does not make them safe.

    Raises:
        UserError: has the value.
    """
    for value in values:
        if not value.isprintable():
            raise UserError(
                "MW-LAUNCH-051", f"{value!r} cannot stand in a job script: it holds a line break or a control character"
            )
