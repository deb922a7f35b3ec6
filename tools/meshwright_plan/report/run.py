"""Contents of a run directory, read once. The run may be live, have a torn last line,
or have taken no step.

Nothing here needs torch, and nothing is written. An unreadable file becomes a remark, not an error:
the page is most needed when something is wrong.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.config import Data, RunConfig, parse
from meshwright.data import fingerprint
from meshwright.errors import ConfigError, DataError, UserError
from meshwright.mesh.grid import Grid
from meshwright.mesh.placement import MAX_DEVICES
from meshwright.run.directory import (
    METRICS,
    METRICS_AGAIN,
    PLACEMENT,
    RECOVERIES,
    RESOLVED,
    STARTS,
    STATUS,
    Peaks,
    find_run,
    read_peaks,
)
from meshwright.run.recoveries import LoggedRecovery, read_recoveries
from meshwright.system.bounded import (
    MIB,
    check_values,
    lines,
    open_regular,
    parse_json,
    read_text,
    real_path,
)
from meshwright.tracking.record import MAX_COUNT, StepRecord, from_json
from meshwright.watch.hang.status import read_status, run_state
from meshwright_plan.report.checkpoints import CheckpointInfo, read_checkpoints
from meshwright_plan.report.trace_file import LoadedTrace, newest
from meshwright_plan.report.trace_file import read as read_trace

MAX_REMARKS = 12
MAX_TEXT_BYTES = 64 * MIB
"""Largest size of a small text file of a run, in bytes."""


class Attempt(NamedTuple):
    """One start of a run and its steps."""

    number: int
    """Index of the start, from 0; equals ``restarts`` in its records."""
    start: dict[str, Any]
    """Its line in ``starts.jsonl``; empty if that is lost."""
    kept: tuple[StepRecord, ...]
    """Records of the steps that count."""
    repeated: tuple[StepRecord, ...]
    """Records of the steps that were lost and repeated by a later start."""

    @property
    def layout(self) -> str:
        return str(self.start.get("layout", "?"))

    @property
    def from_step(self) -> int:
        """Step of the checkpoint from which this start resumed."""
        known = self.start.get("step")
        records = (*self.kept, *self.repeated)
        return (
            known
            if isinstance(known, int) and abs(known) < MAX_COUNT
            else min((record.step for record in records), default=1) - 1
        )


class ReportedState(NamedTuple):
    """State of a run as its status file has it."""

    name: Literal["running", "finished", "stopped", "failed", "no heartbeat", "unknown"]
    text: str
    """Since when, and in which phase; of an end its time."""
    message: str = ""
    """Message of a run that was stopped or has failed."""


@dataclass(frozen=True)
class RunContents:
    """Contents of a run directory, as far as they could be read."""

    directory: Path
    name: str
    config: dict[str, Any]
    """Resolved configuration, as in the file."""
    resolved: RunConfig | None
    """Parsed configuration; None if this version does not understand the file."""
    records: tuple[StepRecord, ...]
    """One record for each step that counts, in order."""
    attempts: tuple[Attempt, ...]
    recoveries: tuple[LoggedRecovery, ...]
    """Recoveries in place, in order."""
    checkpoints: tuple[CheckpointInfo, ...]
    """Checkpoints, oldest first."""
    trace: LoadedTrace | None
    state: ReportedState
    placement: str
    """Placement of the ranks as text."""
    grid: Grid | None
    """Grid of the last start, if ``nodes`` are known."""
    nodes: tuple[str, ...]
    """Node of each rank at the last start; empty: not recorded."""
    hang: str
    """Report of the last hang; "" if there is none."""
    peaks: Peaks | None
    """Peak memory of each rank; None also if they were gathered on another layout
    than the present one.
    """
    unigram_entropy: float | None
    """Unigram baseline of the validation text, in nats per token."""
    remarks: tuple[str, ...]
    """Messages about files that could not be read."""

    @property
    def is_live(self) -> bool:
        """True while the run trains."""
        return self.state.name == "running"

    @property
    def recovered_steps(self) -> set[int]:
        """Steps after which a start was a recovery in place."""
        return {each.step - 1 for each in self.recoveries if each.step}

    @property
    def layout(self) -> str:
        """Layout of the last start that has one, such as ``pp2 dp2 tp2``."""
        known = (attempt.layout for attempt in reversed(self.attempts) if attempt.layout != "?")
        return next(known, "?")

    @property
    def present(self) -> tuple[StepRecord, ...]:
        """Records of the steps taken on the present layout: those of the last starts,
        as long as they agree on it.
        """
        starts = takewhile(
            lambda attempt: attempt.layout in (self.layout, "?"), reversed(self.attempts)
        )
        numbers = {attempt.number for attempt in starts}
        return tuple(record for record in self.records if record.restarts in numbers)

    @property
    def traced_on(self) -> str:
        """Layout of the traced step; "" if that is the present one or unknown."""
        step = self.trace.trace.step if self.trace is not None else None
        starts = {record.restarts for record in self.records if record.step == step}
        layouts = [attempt.layout for attempt in self.attempts if attempt.number in starts]
        return next((layout for layout in layouts if layout != self.layout), "")

    @property
    def steps(self) -> int | None:
        """Configured number of training steps."""
        found = self.config.get("train", {}).get("steps")
        return found if type(found) is int and 0 < found < MAX_COUNT else None


def read_run(place: Path) -> RunContents:
    """Read a run directory.

    Raises:
        ConfigError: there is no run.
    """
    directory = find_run(place)
    remarks: list[str] = []
    config, resolved = _config(directory, remarks)
    in_order = _records(directory / METRICS, remarks)
    repeated = {
        (record.restarts, record.step): record
        for record in _records(directory / METRICS_AGAIN, remarks)
    }
    kept: dict[int, StepRecord] = {}
    for record in in_order:
        before = kept.get(record.step)
        if before is not None:
            repeated[before.restarts, before.step] = before
        kept[record.step] = record
    records = tuple(kept[step] for step in sorted(kept))
    attempts = _attempts(directory / STARTS, records, list(repeated.values()), remarks)
    grid, nodes = _nodes(attempts, config)
    return RunContents(
        directory=directory,
        name=real_path(directory).name,
        config=config,
        resolved=resolved,
        records=records,
        attempts=attempts,
        recoveries=_recoveries(directory, remarks),
        checkpoints=read_checkpoints(directory / "checkpoints", remarks),
        trace=_trace(directory, remarks),
        state=_state(directory, attempts, remarks),
        placement=_text(directory / PLACEMENT),
        grid=grid,
        nodes=nodes,
        hang=_text(directory / "hang" / "report.txt"),
        peaks=_peaks(directory, attempts, remarks),
        unigram_entropy=None if resolved is None else _unigrams(resolved.data),
        remarks=_shortened(remarks, directory),
    )


def _config(directory: Path, remarks: list[str]) -> tuple[dict[str, Any], RunConfig | None]:
    path = directory / RESOLVED
    text = _text(path)
    try:
        config = parse(text, str(path))
        return parse_json(text), config
    except ConfigError as error:
        remarks.append(f"{path} is not understood by this version: {error.problems[0]}")
        found = {}
        with contextlib.suppress(ValueError):
            found = parse_json(text)
            check_values(found)
    except ValueError as error:
        remarks.append(f"{path} is damaged: {error}")
        found = {}
    sections = found.items() if isinstance(found, dict) else ()
    return {name: table for name, table in sections if isinstance(table, dict)}, None


def _records(path: Path, remarks: list[str]) -> list[StepRecord]:
    """Read step records in file order. Lines that are no record are left out,
    each with a remark.
    """
    if not path.exists():
        return []
    records: list[StepRecord] = []
    damaged: list[int] = []
    number = 0
    try:
        with open_regular(path) as file:
            for number, line in lines(file, MIB):
                try:
                    records.append(from_json(line.decode(errors="replace")))
                except ValueError:
                    damaged.append(number)
    except OSError as error:
        remarks.append(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        remarks.append(f"{path}: {error}; left out, with the lines after it")
    for line_number in damaged:
        end = (
            ", the last: still being written, or its writer was killed"
            if line_number == number
            else ""
        )
        remarks.append(f"{path}:{line_number}: incomplete record{end}; left out")
    return records


def _attempts(
    starts: Path, kept: Sequence[StepRecord], repeated: Sequence[StepRecord], remarks: list[str]
) -> tuple[Attempt, ...]:
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(_text(starts).splitlines(), start=1):
        try:
            start = parse_json(line)
        except ValueError:
            remarks.append(f"{starts}:{number} is damaged; left out")
            start = {}
        lines.append(start if isinstance(start, dict) else {})
    kept_by_start: dict[int, list[StepRecord]] = defaultdict(list)
    repeated_by_start: dict[int, list[StepRecord]] = defaultdict(list)
    for records, into in ((kept, kept_by_start), (repeated, repeated_by_start)):
        for record in sorted(records, key=lambda each: each.step):
            into[record.restarts].append(record)
    return tuple(
        Attempt(
            number,
            lines[number] if 0 <= number < len(lines) else {},
            tuple(kept_by_start.get(number, ())),
            tuple(repeated_by_start.get(number, ())),
        )
        for number in sorted({*range(len(lines)), *kept_by_start, *repeated_by_start})
    )


def _recoveries(directory: Path, remarks: list[str]) -> tuple[LoggedRecovery, ...]:
    """Read the log of recoveries in place; most runs have none."""
    found: list[LoggedRecovery] = []
    try:
        for each in read_recoveries(directory):
            if isinstance(each, LoggedRecovery):
                found.append(each)
            else:
                remarks.append(each)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        remarks.append(f"{directory / RECOVERIES} cannot be read: {error}")
    return tuple(found)


def _trace(directory: Path, remarks: list[str]) -> LoadedTrace | None:
    try:
        path = newest(directory)
    except DataError:
        return None
    try:
        return read_trace(path)
    except UserError as error:
        remarks.append(str(error))
        return None


def _state(directory: Path, attempts: Sequence[Attempt], remarks: list[str]) -> ReportedState:
    if not (directory / STATUS).is_file():
        return ReportedState("unknown", "there is no status.json")
    try:
        status = read_status(directory / STATUS)
    except DataError as error:
        remarks.append(str(error))
        return ReportedState("unknown", "status.json is damaged")
    started = (
        f"started {str(attempts[-1].start.get('at', '?'))[:16]}" if attempts else "not started"
    )
    if status.ended is not None:
        ended = f"{started}, {status.ended.how} {clock(status.at_s)}"
        return ReportedState(status.ended.how, ended, status.ended.message)
    found = run_state(status)
    return ReportedState("running" if found.is_live else "no heartbeat", f"{started}, {found.text}")


def _peaks(directory: Path, attempts: Sequence[Attempt], remarks: list[str]) -> Peaks | None:
    """Read the peaks; leave out those of another layout than the last start's,
    until its own are gathered.
    """
    try:
        peaks = read_peaks(directory)
    except DataError as error:
        remarks.append(str(error))
        return None
    if peaks is None or not attempts or "layout" not in attempts[-1].start:
        return peaks
    return peaks if Grid.of(peaks.grid).layout == attempts[-1].layout else None


def _nodes(
    attempts: Sequence[Attempt], config: dict[str, Any]
) -> tuple[Grid | None, tuple[str, ...]]:
    """Return the last start's grid, and the node of each of its ranks; (None, ())
    if they are not recorded.
    """
    start = attempts[-1].start if attempts else {}
    degrees = {
        axis: int(degree)
        for axis, degree in re.findall(r"\b(pp|dp|cp|tp)(\d{1,7})\b", str(start.get("layout")))
    }
    pieces = start.get("ranks_on")
    if not degrees or not isinstance(pieces, list) or math.prod(degrees.values()) > MAX_DEVICES:
        return None, ()
    nodes: list[str] = []
    for piece in pieces:
        match piece:
            case [str(node), int(count)] if 0 < count <= MAX_DEVICES - len(nodes):
                nodes += [node] * count
            case _:
                return None, ()
    grid = Grid(**degrees)
    if grid.size == 0 or len(nodes) != grid.size:
        return None, ()
    ep = config.get("parallel", {}).get("ep", 1)
    fits = type(ep) is int and ep > 0 and (grid.num_replicas * grid.tp) % ep == 0
    return replace(grid, ep=ep if fits else 1), tuple(nodes)


def _unigrams(data: Data) -> float | None:
    if data.builder is not None or data.task != "causal":
        return None
    where = data.validation or data.train
    if not isinstance(where, str):  # several corpora have no frequencies in common
        return None
    corpus = Path(where)
    try:
        known = fingerprint.read(corpus.parent)
    except DataError:
        return None
    if known is None or corpus.name not in known.splits:
        return None
    return known.unigram_baseline_nats(corpus.name)


def _shortened(remarks: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Return the first remarks with paths relative to the run, and the number of the others."""
    near = [remark.replace(f"{directory}/", "") for remark in remarks[:MAX_REMARKS]]
    more = len(remarks) - MAX_REMARKS
    return (*near, f"and {more:,} more") if more > 0 else tuple(near)


def _text(path: Path) -> str:
    """Read a small file; return "" if it cannot be read."""
    try:
        return read_text(path, MAX_TEXT_BYTES, errors="replace")
    except OSError:
        return ""


def clock(at_s: float) -> str:
    """Format a time as ``2026-11-22 14:05``, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
