"""Directories of runs: names of their files, and the search for the run that a command line names.
No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from meshwright.config import Run, given_keys
from meshwright.errors import ConfigError, DataError
from meshwright.system.bounded import MAX_TOML_BYTES, parse_toml, read_bytes, read_text, real_path
from meshwright.terminal.output import abridge

RESOLVED = "resolved.json"
"""File that marks a run directory; written at the first start."""
METRICS, METRICS_AGAIN = "metrics.jsonl", "metrics-again.jsonl"
"""Records of the steps that count, and of the steps that a resume has repeated."""
STARTS, PLACEMENT = "starts.jsonl", "placement.txt"
"""Log of the run's starts, and the nodes and ranks of the last one."""
START = "start.json"
"""Weights that the run has started from (``run.start``)."""
RECOVERIES = "recoveries.jsonl"
"""Log of the recoveries in place."""
PEAKS = "memory.json"
"""Peak memory of every rank."""
STATUS = "status.json"
"""Heartbeats of all ranks."""
MANIFEST = "manifest.json"
"""File that marks a checkpoint."""
AT_STEP = re.compile(r"(?P<run>.+)@(?P<step>\d{1,18})", flags=re.ASCII)
"""``run.start`` with the step of a checkpoint, as in ``runs/base@9000``."""
RUNS = Path("runs")
"""Default parent directory of runs."""


def run_directory(run: Run) -> Path:
    """Return the directory that holds all files of a run."""
    return Path(run.directory) / run.name


def check_own_directory(run: Run, directory: Path) -> None:
    """Check that ``directory``, into which a command writes a run,
    is the one that its configuration names.

    Raises:
        ConfigError: ``run.name`` or ``run.directory`` names another place, where it would train
            from fresh weights.
    """
    own = run_directory(run)
    if real_path(own) != real_path(directory):
        raise ConfigError(
            "MW-RUN-036",
            f"the run is written to {directory}, and run.name and run.directory name {own}, where"
            f" training would not find it: leave them out, or name {own} as the directory to write",
        )


def check_not_moved(run: Run, file: str, overrides: Sequence[str]) -> None:
    """Check that a configuration that lies in a run's directory is of that run,
    or that overrides name another one.

    Raises:
        ConfigError: the directory was moved, copied or renamed: its checkpoints would be ignored,
            without a message.
    """
    folder, own = real_path(file).parent, run_directory(run)
    named = {("run", "name"), ("run", "directory")} & {key[:2] for key in given_keys(overrides)}
    if named or not is_run(folder) or real_path(own) == folder:
        return
    raise ConfigError(
        "MW-RUN-037",
        f"{file} lies in the run {folder}, and names {own} as its run: it was moved, copied or"
        " renamed, or the working directory is another. To continue the run that it lies in, add"
        f" --run.directory={folder.parent} --run.name={folder.name}; for that in {own}, add"
        f" --run.name={run.name}",
    )


class Peaks(BaseModel):
    """Contents of ``memory.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["meshwright memory 1"] = "meshwright memory 1"
    step: NonNegativeInt
    """Step after which the peaks were gathered."""
    device: str
    grid: Annotated[tuple[PositiveInt, ...], Field(min_length=3, max_length=5)]
    """Degrees (pp, dp, tp, cp, ep); older files may lack the last ones."""
    peaks: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**60)], ...], Field(max_length=2**20)]
    """Peak bytes of each rank since its start."""

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Peaks:
        if len(self.peaks) != math.prod(self.grid[:4]):
            raise ValueError(f"{len(self.peaks)} peaks of {math.prod(self.grid[:4])} ranks")
        return self


def read_peaks(run: Path) -> Peaks | None:
    """Read the peaks of a run; None: none were gathered yet.

    Raises:
        DataError: the file is damaged.
    """
    place = run / PEAKS
    try:
        return Peaks.model_validate_json(read_bytes(place))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise DataError(
            "MW-RUN-015", f"{place} is damaged ({problem}): the next checkpoint rewrites it"
        ) from None


def is_run(place: Path) -> bool:
    """Return True for the directory of a run that has been started."""
    return (place / RESOLVED).is_file()


def is_checkpoint(place: Path) -> bool:
    """Return True for a checkpoint, in a run or copied out of one."""
    return (place / MANIFEST).is_file()


def runs_in(place: Path) -> list[Path]:
    """Return the runs directly below a directory, the last started first."""
    try:
        found = [path for path in place.iterdir() if is_run(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: (-(path / RESOLVED).stat().st_mtime, path.name))


def find_run(place: Path) -> Path:
    """Find the directory of a run: ``place`` itself, or the run whose checkpoint it is.

    Raises:
        ConfigError: there is no such run; names the runs nearby.
    """
    if is_run(place):
        return place
    around = real_path(place).parent
    for above in (around, around.parent):  # RUN/checkpoints, RUN/checkpoints/step-00000100
        if (place.name == "checkpoints" or is_checkpoint(place)) and is_run(above):
            return above
    raise ConfigError("MW-RUN-008", _not_a_run(place))


def _not_a_run(place: Path) -> str:
    """Return the error message for a path that is not a run, with the next move."""
    if place.suffix == ".toml" and place.is_file():
        return f"{place} is a configuration, not a run: {_run_of(place)}"
    if not place.exists():
        return f"{place} does not exist: {_runs_near(place)}"
    if not place.is_dir():
        return f"{place} is a file, not a run directory: {_runs_near(place)}"
    inside = runs_in(place)
    if inside:
        return f"{place} is not a run, but contains {abridge(inside)}: name one of them"
    if is_checkpoint(place):
        return f"{place} is a checkpoint outside of a run: name the directory of a run"
    return (
        f"{place} is not a run directory, or its run was never started: {RESOLVED} is missing;"
        f" {_runs_near(place)}"
    )


def _run_of(config: Path) -> str:
    """Return the run of a configuration, or the command that starts it."""
    try:
        section = parse_toml(read_text(config, MAX_TOML_BYTES)).get("run", {})
        directory = Path(section.get("directory", RUNS)) / section.get("name", "run")
    except (OSError, ValueError, AttributeError, TypeError):
        return _runs_near(config)
    if is_run(directory):
        return f"{directory} is its run"
    return f"its run is {directory}, which does not exist yet: `meshwright train {config}` first"


def _runs_near(place: Path) -> str:
    """Return the runs beside a path, or in the default directory."""
    for directory in (place.parent, RUNS, Path()):
        found = [run for run in runs_in(directory) if run != place]
        if found:
            return f"there {'are' if found[1:] else 'is'} {abridge(found)}"
    return f"name a run directory, such as {RUNS / 'demo'}; `meshwright train CONFIG` creates one"
