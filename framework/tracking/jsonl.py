"""``metrics.jsonl``: one strict JSON object per step, whole lines only. This file is the truth about a run.

Every line is handed to the operating system in one write as soon as its step is done, so killing the process at any
moment loses at most the end of the last line. A torn last line is passed over by :func:`read_records` and cut off when
the run resumes. Records of steps after the resumed one are moved into ``metrics-again.jsonl`` then, by rewriting the
file aside and renaming it: those steps are about to be made again, and what they have cost is not forgotten. (No fsync
per line: after a power loss the last seconds may be missing.)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from framework.errors import DataError
from framework.tracking.record import StepRecord, from_json, to_json

FILE_NAME, AGAIN = "metrics.jsonl", "metrics-again.jsonl"
MOST_PENDING = 10_000
"""Lines kept in memory (about 5 MB) while the file cannot be written; then the oldest go."""


def read_records(path: Path) -> Iterator[StepRecord]:
    """The records of a file, in its order. A last line that is not whole is passed over.

    Raises DataError for a missing file and for a damaged line that is not the last.
    """
    torn: tuple[int, ValueError] | None = None
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Name the metrics.jsonl of a run.") from error
    with file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise DataError(f"{path}:{torn[0]}: {torn[1]}. Remove this line to read the others.")
            try:
                record = from_json(line)
            except ValueError as error:
                torn = (number, error)
            else:
                yield record


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
        for line in old:
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
    if changed:
        kept_path.replace(path)
    else:
        kept_path.unlink()


def _step_of(line: bytes) -> int | None:
    """None: it is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class JsonlSink:
    """Appends to ``path``; ``resumed_step`` is the step of the checkpoint that the run goes on from (0: the start).

    When a write fails (a full disk), the error is raised, the file is cut back to its last whole line, and the lines
    that did not fit are kept in memory and written with the next record.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        self.resumed_step = resumed_step
        self._descriptor = -1
        self._pending: deque[bytes] = deque(maxlen=MOST_PENDING)

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_until(self.path, self.resumed_step)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: StepRecord) -> None:
        self._pending.append(to_json(record).encode() + b"\n")
        if self._descriptor < 0:
            self.open()
        self._flush()

    def close(self, failed: bool = False) -> None:
        if self._descriptor < 0:
            return
        try:
            self._flush()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _flush(self) -> None:
        whole_bytes = os.fstat(self._descriptor).st_size
        waiting = memoryview(b"".join(self._pending))
        try:
            while waiting:
                waiting = waiting[os.write(self._descriptor, waiting) :]
        except OSError:
            os.ftruncate(self._descriptor, whole_bytes)
            raise
        self._pending.clear()
