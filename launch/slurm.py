"""Command ``meshwright slurm``: a job script, rendered from one template that users may copy and edit, and submitted.

    CONFIG, nodes, devices per node, options for sbatch
      -> refused here: degrees that do not fill the nodes, a tensor-parallel group that straddles two
      -> RUN/slurm/job.sbatch, printed    srun starts one task for each rank, or torchrun one for each node
      -> with --submit: sbatch

The last lines of the script decide what follows the end of the ranks. A run that saved on request (exit code 85) and a
transient failure are requeued. A failure that would recur is not, nor a run after
``meshwright.launch.restarts.MAX_FUTILE_RESTARTS`` restarts in a row without a newer checkpoint.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import deque
from pathlib import Path

from meshwright.config import RunConfig, load, resolve
from meshwright.errors import ConfigError, UserError
from meshwright.launch.rendering import render_template
from meshwright.launch.restarts import GIVEN_UP_EXIT_CODE, MAX_FUTILE_RESTARTS
from meshwright.mesh.grid import Grid, nodes_of
from meshwright.run.directory import METRICS, run_directory
from meshwright.terminal.output import put, tell
from meshwright.tracking.jsonl import read_records

SIGNAL = "USR2"
"""Signal that makes the ranks of a job save; neither NCCL nor Slurm uses it for itself."""
SLURM_EARLY_S = 60
"""Time by which Slurm may send a signal too early; it never sends one too late."""
UNKNOWN_LEAD_S = 300
"""Lead of a run without measurements."""
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


def slurm(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write the job script of a run, and print it or submit it.

    Raises:
        UserError: the degrees do not fill the nodes, an option cannot stand in a script, or sbatch refuses it.
    """
    config, picture = resolve_for_nodes(load(options.config, overrides), options.nodes, options.devices_per_node)
    script = render(config, overrides, options)
    place = write(script, config)
    if not options.submit:
        print(script, end="")
        tell(f"written to {place}; `sbatch {place}` submits it, or --submit")
        return 0
    put(picture)
    numbers = submit(place, options.chain)
    put(f"submitted {place}: job{'s' * (len(numbers) > 1)} {', '.join(numbers)}; logs in {place.parent}")
    return 0


def resolve_for_nodes(config: RunConfig, num_nodes: int, per_node: int) -> tuple[RunConfig, str]:
    """Resolve the configuration for these nodes; return it and a picture of the ranks on the nodes.

    Raises:
        UserError: the degrees do not fill the nodes' devices, or a tensor-parallel group would straddle nodes.
    """
    num_ranks = num_nodes * per_node
    try:
        resolved = resolve(config, num_ranks)
    except ConfigError as error:
        raise ConfigError(
            "MW-LAUNCH-043", f"{num_nodes} nodes x {per_node} devices = {num_ranks} ranks: {error.message}"
        ) from None
    grid, nodes = Grid(*resolved.parallel.degrees), nodes_of(num_nodes, per_node)
    grid.check_placement(nodes, tp_across_nodes=resolved.parallel.tp_across_nodes)
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
        return UNKNOWN_LEAD_S, "this run has no measurements yet, submit again when it has saved twice"
    step_s, save_s = max(steps), max(saves)
    needed_s = math.ceil(1.5 * (step_s + save_s)) + SLURM_EARLY_S
    median_s = statistics.median(steps)
    return needed_s, f"of late a step took up to {step_s:.3g} s (median {median_s:.3g}) and a save {save_s:.3g} s"


def render(config: RunConfig, overrides: list[str], options: argparse.Namespace) -> str:
    """Render the script. ``config``: resolved; ``overrides``: configuration keys that `train` gets too.

    Raises:
        UserError: a value cannot stand in a script, or the time limit is too short to save before it.
    """
    run = run_directory(config).absolute()
    cwd = Path.cwd()
    container = options.container
    check_lines(options.config, *overrides, str(run), container or "", options.mounts or "")
    lead_s, why = measure_lead(run)
    if options.time is not None and (limit_s := seconds_of(options.time)) is not None and lead_s >= limit_s:
        raise UserError(
            "MW-LAUNCH-044",
            f"--time {options.time} is {limit_s} s, and the ranks must be signalled {lead_s} s before it ends ({why}): "
            f"nothing would be trained. Request more time",
        )
    check_options(options)
    mounts = options.mounts or ",".join(dict.fromkeys(f"{place}:{place}" for place in (cwd, run.parent)))
    pp, dp, tp = config.parallel.degrees
    return render_template(
        "job.sbatch.j2",
        vars(options)
        | {
            "run_name": config.run.name,
            "job_name": re.sub(r"[^\w.-]", "-", config.run.name),
            "pp": pp,
            "dp": dp,
            "tp": tp,
            "num_ranks": config.launch.processes,
            "gpus": config.train.device == "cuda" or (config.train.device == "auto" and may_have_gpus()),
            "chdir": _word(cwd),
            "logs": _word(run / "slurm"),
            "run": shlex.quote(str(run)),
            "lead_s": lead_s,
            "lead_why": why,
            "signal": SIGNAL,
            "container": container and shlex.quote(container),
            "mounts": shlex.quote(mounts),
            "workdir": shlex.quote(str(cwd)),
            "python": "python3" if container else shlex.quote(sys.executable),
            "arguments": shlex.join([options.config, *overrides, *["--trust-code"] * options.trust_code]),
            "in_vain": MAX_FUTILE_RESTARTS,
            "given_up": GIVEN_UP_EXIT_CODE,
        },
    )


def may_have_gpus() -> bool:
    """Return True if some node of the cluster has a GPU, or if that cannot be determined here."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return True
    done = subprocess.run([sinfo, "--noheader", "--format=%G"], capture_output=True, text=True, check=False)
    return done.returncode != 0 or "gpu" in done.stdout


def write(script: str, config: RunConfig) -> Path:
    """Write the script into the run's directory, next to the job's logs: Slurm creates no directory for them."""
    place = run_directory(config) / "slurm" / "job.sbatch"
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
        UserError: there is no sbatch here, or it refuses the script; quotes its message.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("MW-LAUNCH-046", f"sbatch is not installed on this machine: submit {place} where it is")
    jobs: list[str] = []
    for _ in range(times):
        done = subprocess.run([sbatch, "--parsable", str(place)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            earlier = f"; submitted before: {', '.join(jobs)}" if jobs else ""
            raise UserError(
                "MW-LAUNCH-047", f"sbatch refuses {place}: {done.stderr.strip() or done.stdout.strip()}{earlier}"
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
            f"--time {time!r} is not a time limit of Slurm: give minutes, h:mm:ss or days-hours (90, 4:00:00, 2-12)",
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
            f"an #SBATCH line takes only paths of letters, digits and ./_-+,:=@~, and not {text!r}: choose another "
            f"place",
        )
    return text


def check_options(options: argparse.Namespace) -> None:
    """Refuse values for #SBATCH lines that do not match their pattern: the shell does not unquote these lines.

    Raises:
        UserError: a value does not match; has the allowed form.
    """
    for name, (pattern, allowed) in WORDS.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError("MW-LAUNCH-050", f"--{name} {value!r} cannot stand in a job script: give {allowed}")


def check_lines(*values: str) -> None:
    """Refuse values with a line break or another control character; quoting does not make them safe.

    Raises:
        UserError: has the value.
    """
    for value in values:
        if not value.isprintable():
            raise UserError(
                "MW-LAUNCH-051", f"{value!r} cannot stand in a job script: it has a line break or a control character"
            )
