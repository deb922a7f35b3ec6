"""Sink and reader of ``metrics.jsonl``, the reference record of a run:
one strict JSON object per step.

Every line is written in one system call when its step is done. A kill at any moment loses at most
the end of the last
line: :func:`read_records` skips a torn last line, and a resume removes it. A resume also moves the
records after the resumed step to ``metrics-again.jsonl``, because those steps are repeated and
their time is part of the run's cost. It writes a new file and renames it. There is no fsync per
line, but one before each checkpoint is published: the lines up to that checkpoint survive a power
cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from meshwright.errors import DataError
from meshwright.system.atomic import rename_synced
from meshwright.system.bounded import MIB, lines, open_regular, parse_json
from meshwright.tracking.record import StepRecord, from_json, to_json

MAX_PENDING = 10_000
"""Maximal number of lines kept in memory (about 5 MB) while the file cannot be written;
the oldest are dropped.
"""
CLOSE_PAUSES_S = 0.2, 1.0, 3.0
"""Seconds between the attempts to write pending lines at the end of a run."""


def read_records(path: Path) -> Iterator[StepRecord]:
    """Yield the records of a file in order. An incomplete last line is skipped.

    Raises:
        DataError: The file is missing, or a line before the last is damaged.
    """
    torn: tuple[int, ValueError] | None = None
    try:
        file = open_regular(path)
    except OSError as error:
        raise DataError(
            "MW-TRACKING-001",
            f"{path}: cannot be read ({error.strerror}). Name the metrics.jsonl of a run.",
        ) from error
    with file:
        for number, line in _lines(path, file):
            if torn is not None:
                raise DataError(
                    "MW-TRACKING-002",
                    f"{path}:{torn[0]}: {torn[1]}. Remove this line to read the others.",
                )
            try:
                record = from_json(line.decode(errors="replace"))
            except ValueError as error:
                torn = (number, error)
            else:
                yield record


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    try:
        yield from lines(file, MIB)
    except ValueError as error:
        raise DataError(
            "MW-TRACKING-003", f"{path}: {error}. Remove this line to read the others."
        ) from None


def drop_records_after(path: Path, step: int) -> None:
    """Keep the records whose step is at most ``step``; damaged lines are dropped. Atomic:
    the old file or the new one.

    The other records are appended to ``metrics-again.jsonl`` if possible. A kill meanwhile may
    write some of them twice.
    """
    if not path.exists():
        return
    new_path = path.with_name(path.name + ".kept")
    new_path.unlink(missing_ok=True)  # of a dead process; a link there would be written through
    changed = False
    with contextlib.ExitStack() as files:
        old, new = files.enter_context(open_regular(path)), files.enter_context(new_path.open("wb"))
        again: FileIO | None = None
        for _, line in _lines(path, old):
            line_step, whole_line = _step_of(line), line.rstrip(b"\n") + b"\n"
            is_kept = line_step is not None and line_step <= step
            if is_kept:
                new.write(whole_line)
            elif line_step is not None:
                with contextlib.suppress(OSError):
                    again = again or files.enter_context(
                        path.with_name(f"{path.stem}-again{path.suffix}").open("ab", buffering=0)
                    )
                    again.write(whole_line)
            changed = changed or not is_kept or whole_line != line
        new.flush()
        os.fsync(new.fileno())
        if again is not None:
            with contextlib.suppress(OSError):
                os.fsync(again.fileno())
    if changed:
        rename_synced(new_path, path)
    else:
        new_path.unlink()


def num_repeated(run_directory: Path) -> int:
    """Return the number of lines in ``metrics-again.jsonl``; 0 if it cannot be read."""
    try:
        with open_regular(run_directory / "metrics-again.jsonl") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(MIB), b""))
    except OSError:
        return 0


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, or None if it is no record."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


class JsonlSink:
    """Sink that appends to ``path``. ``resumed_step``:
    step of the checkpoint that the run resumes from; 0: a new run.

    When a write fails (a full disk), the error is raised and the file is truncated to its last
    whole line. The pending lines stay in memory and are written with the next record. If the file
    was deleted or replaced, the sink continues in the file at the path, and first appends the lines
    that it lacks.
    """

    def __init__(
        self, path: Path, resumed_step: int = 0, is_ours: Callable[[], bool] = lambda: True
    ) -> None:
        """Create the sink. ``is_ours`` returns True while the directory belongs to this run;
        called before a switch.
        """
        self.path = path
        self.resumed_step = resumed_step
        self._is_ours = is_ours
        self._descriptor = -1
        self._pending: deque[bytes] = deque()
        self.dropped = 0
        """Number of pending lines dropped because there were more than MAX_PENDING."""

    @property
    def waiting(self) -> int:
        """Number of lines in memory that are not in the file."""
        return len(self._pending)

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_records_after(self.path, self.resumed_step)
        self._descriptor = _open(self.path)

    def write(self, record: StepRecord) -> None:
        self._pending.append(to_json(record).encode() + b"\n")
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self.dropped += 1
        if self._descriptor < 0:
            self.open()
        self._flush()

    def close(self) -> None:
        """Write the pending lines, with a few retries, and close the file.

        Raises:
            OSError: They cannot be written; they stay pending.
        """
        try:
            for pause_s in (*CLOSE_PAUSES_S, None):
                try:
                    if self._descriptor < 0 and self._pending:
                        self.open()
                    if self._descriptor >= 0:
                        self._flush()
                    break
                except OSError:
                    if pause_s is None:
                        raise
                    time.sleep(pause_s)
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _flush(self) -> None:
        self._follow_path()
        try:
            _append(self._descriptor, b"".join(self._pending))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._pending.clear()

    def _follow_path(self) -> None:
        """Switch to the file at the path if it is no longer the open one,
        and append the lines that it lacks.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        if not self._is_ours() or not self.path.parent.is_dir():
            if not self._pending:
                return
            raise FileNotFoundError(
                errno.ENOENT, "the run's directory is gone, or another's", str(self.path)
            )
        target = _open(self.path)
        try:
            last_step = _last_step(target)
            content = bytearray()
            while block := os.pread(self._descriptor, 1 << 20, len(content)):
                content += block
            missing = (
                line for line in bytes(content).split(b"\n") if (_step_of(line) or 0) > last_step
            )
            _append(target, b"".join(line + b"\n" for line in missing))
        except BaseException:
            os.close(target)
            raise
        os.close(self._descriptor)
        self._descriptor = target


def _open(path: Path) -> int:
    """Open for appending and reading: a deleted file stays readable while it is open."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _append(descriptor: int, data: bytes) -> None:
    """Append all of ``data``; on an error truncate the file to its length before."""
    length, remaining = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, length)
        raise


def _last_step(descriptor: int) -> int:
    """Return the step of the last whole line of a file; 0 if there is none."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 1 << 16, max(0, size - (1 << 16)))
    return next(
        (step for line in reversed(tail.splitlines()) if (step := _step_of(line)) is not None), 0
    )
