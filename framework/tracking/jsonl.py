"""``metrics.jsonl``: one strict JSON object per step, whole lines only. This file is the truth about a run.

Every line is handed to the operating system in one write as soon as its step is done, so killing the process at any
moment loses at most the end of the last line. A torn last line is passed over by :func:`read_records` and cut off when
the run resumes. Records of steps after the resumed one are moved into ``metrics-again.jsonl`` then, by rewriting the
file aside and renaming it: those steps are about to be made again, and what they have cost is not forgotten. No fsync
per line, but one before each checkpoint appears: after a power cut the lines up to it are there.
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
from meshwright.system.bounded import MIB, lines, open_regular, parse_json
from meshwright.system.durable import sync_directory
from meshwright.tracking.record import StepRecord, from_json, to_json

FILE_NAME, AGAIN = "metrics.jsonl", "metrics-again.jsonl"
MOST_PENDING = 10_000
"""Lines kept in memory (about 5 MB) while the file cannot be written; then the oldest go."""
CLOSE_PAUSES_S = 0.2, 1.0, 3.0
"""Between the last tries to write what waits, at the end of a run."""


def read_records(path: Path) -> Iterator[StepRecord]:
    """The records of a file, in its order. A last line that is not whole is passed over.

    Raises DataError for a missing file and for a damaged line that is not the last.
    """
    torn: tuple[int, ValueError] | None = None
    try:
        file = open_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Name the metrics.jsonl of a run.") from error
    with file:
        for number, line in _lines(path, file):
            if torn is not None:
                raise DataError(f"{path}:{torn[0]}: {torn[1]}. Remove this line to read the others.")
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
        raise DataError(f"{path}: {error}. Remove this line to read the others.") from None


def keep_until(path: Path, step: int) -> None:
    """Keep the records whose step is at most ``step``; damaged lines go too. Atomic: the old file or the new one.

    The others are appended to ``metrics-again.jsonl``, if that can be; who is killed meanwhile may write some twice.
    """
    if not path.exists():
        return
    kept_path = path.with_name(path.name + ".kept")
    changed = False
    with contextlib.ExitStack() as files:
        old, new = files.enter_context(path.open("rb")), files.enter_context(kept_path.open("wb"))
        again: FileIO | None = None
        for _, line in _lines(path, old):
            found = _step_of(line)
            kept = line.rstrip(b"\n") + b"\n" if found is not None and found <= step else b""
            if found is not None and not kept:
                with contextlib.suppress(OSError):
                    again = again or files.enter_context(path.with_name(AGAIN).open("ab", buffering=0))
                    again.write(line.rstrip(b"\n") + b"\n")
            changed = changed or kept != line
            new.write(kept)
        new.flush()
        os.fsync(new.fileno())
        if again is not None:
            with contextlib.suppress(OSError):
                os.fsync(again.fileno())
    if changed:
        kept_path.replace(path)
        sync_directory(path.parent)
    else:
        kept_path.unlink()


def _step_of(line: bytes) -> int | None:
    """None: it is no record."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


class JsonlSink:
    """Appends to ``path``; ``resumed_step`` is the step of the checkpoint that the run goes on from (0: the start).

    When a write fails (a full disk), the error is raised, the file is cut back to its last whole line, and the lines
    that did not fit are kept in memory and written with the next record. When the file was deleted, or another one was
    put in its place, the lines of the open file that are missing at the path are written there.
    """

    def __init__(self, path: Path, resumed_step: int = 0, is_ours: Callable[[], bool] = lambda: True) -> None:
        """``is_ours``: whether the directory is still this run's; called before a file is followed to a new one."""
        self.path = path
        self.resumed_step = resumed_step
        self._is_ours = is_ours
        self._descriptor = -1
        self._pending: deque[bytes] = deque()
        self.dropped = 0
        """Lines that were kept in memory until there were too many."""

    @property
    def waiting(self) -> int:
        """Lines in memory that are not in the file."""
        return len(self._pending)

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_until(self.path, self.resumed_step)
        self._descriptor = _open(self.path)

    def write(self, record: StepRecord) -> None:
        self._pending.append(to_json(record).encode() + b"\n")
        while len(self._pending) > MOST_PENDING:
            self._pending.popleft()
            self.dropped += 1
        if self._descriptor < 0:
            self.open()
        self._flush()

    def close(self, failed: bool = False) -> None:
        """Write what waits, in a few tries. Raises OSError, with the lines still waiting, when it cannot be."""
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
        self._follow()
        whole_bytes = os.fstat(self._descriptor).st_size
        waiting = memoryview(b"".join(self._pending))
        try:
            while waiting:
                waiting = waiting[os.write(self._descriptor, waiting) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, whole_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._pending.clear()

    def _follow(self) -> None:
        """Where the path is no longer the open file: go on in the file at the path, with all lines that it misses."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        if not self._is_ours() or not self.path.parent.is_dir():
            if not self._pending:
                return
            raise FileNotFoundError(errno.ENOENT, "the run's directory is gone, or another's", str(self.path))
        target = _open(self.path)
        try:
            have = _last_step(target)
            lines = bytearray()
            while block := os.pread(self._descriptor, 1 << 20, len(lines)):
                lines += block
            missing = b"".join(line + b"\n" for line in lines.split(b"\n") if (_step_of(bytes(line)) or 0) > have)
            whole_bytes, left = os.fstat(target).st_size, memoryview(missing)
            try:
                while left:
                    left = left[os.write(target, left) :]
            except OSError:
                os.ftruncate(target, whole_bytes)
                raise
        except BaseException:
            os.close(target)
            raise
        os.close(self._descriptor)
        self._descriptor = target


def _open(path: Path) -> int:
    """Open for reading too: a deleted file can be read as long as it is open."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _last_step(descriptor: int) -> int:
    """Return the step of the last whole line of a file; 0: it has none."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 1 << 16, max(0, size - (1 << 16)))
    return next((step for line in reversed(tail.splitlines()) if (step := _step_of(line)) is not None), 0)
