"""State of a preparation on the disk, from which it resumes after a kill at any moment.

    .NAME.preparing/          beside the future corpus NAME, removed when NAME is published
        request.json          inputs and options: files that have been read must not change
        state.json            position up to which the inputs are read, and the length of each file at that point
        lock                  locked by the working process; the system releases it when the process dies
        skipped.txt           skipped records, a line each
        train.lengths         tokens of each document (int32)
        corpus/train.bin      tokens; train.mask beside it

The files only grow. ``state.json`` is replaced as a whole, after the data that it counts is on the
disk. A resume truncates each file to the length in ``state.json``, so no document is written twice
and none is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.data.fingerprint import File, Request
from meshwright.data.prepare.input_files import InputFile
from meshwright.data.prepare.readers import BEGINNING, ReadPosition
from meshwright.data.splits import SPLITS
from meshwright.errors import DataError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_bytes
from meshwright.system.process import FileLock
from meshwright.system.working_folder import make_working_folder, why_not_own

SKIPPED_FILE = "skipped.txt"
_MAX_CHANGES = 10
"""Changes of a request that a message lists."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SplitState(_Part):
    """Documents and tokens written to one split."""

    documents: int = 0
    tokens: int = 0


class State(_Part):
    """Progress of a preparation."""

    place: tuple[int, int] = (0, 0)
    """:class:`ReadPosition` up to which the inputs are read."""
    line: int = 0
    """Number of lines read of the file at ``place``."""
    records: int = 0
    """Number of documents read, broken and empty ones included:
    a document's number decides its split.
    """
    empty: int = 0
    skipped: int = 0
    cut: int = 0
    too_long: int = 0
    skipped_bytes: int = 0
    """Length of ``skipped.txt``."""
    text_bytes: int = 0
    source_bytes: int = 0
    digest: str = ""
    splits: dict[str, SplitState]


class WorkFolder:
    """Folder of a preparation, locked by one process at a time;
    opening it restores the last commit.
    """

    def __init__(
        self,
        out: Path,
        request: Request,
        dtype: np.dtype[Any],
        *,
        has_mask: bool,
        replace: bool = False,
        may_skip: bool = False,
    ) -> None:
        """Open or make the folder.

        Args:
            out: the folder to publish the corpus in.
            request: inputs and options.
            dtype: type of the tokens.
            has_mask: the corpus has a mask of labels.
            replace: start over if the state on the disk cannot be resumed.
            may_skip: broken records may be skipped.

        Raises:
            DataError: another process works there, the state cannot be resumed (unless
                ``replace``), or the folder, or something in it, is a link or another user's.
        """
        self.path = _work_path(out)
        self.corpus = self.path / "corpus"
        self.dtype, self.has_mask = dtype, has_mask
        make_working_folder(self.path, DataError)
        self._lock = _take_lock(self.path)
        try:
            self.state = self._open(out, request, replace, may_skip)
            self._streams = {
                path: _open_truncated(path, size) for path, size in self._sizes(self.state).items()
            }
        except BaseException:
            self._lock.close()
            raise
        self.is_resumed = self.state.place != (0, 0)

    def _open(self, out: Path, request: Request, replace: bool, may_skip: bool) -> State:
        request_file, state_file = self.path / "request.json", self.path / "state.json"
        old_request = _read(request_file, Request)
        # without its corpus folder the work was published, and the publishing process was killed
        # before cleaning up
        state = None
        if old_request is not None and self.corpus.is_dir():
            state = _read(state_file, State)
        if state is not None and ReadPosition(*state.place) == BEGINNING:
            state = None
        if old_request is not None and state is not None:
            obstacle = self._obstacle(out, old_request, request, state, may_skip)
            if obstacle and not replace:
                raise DataError("MW-DATA-084", obstacle)
            state = None if obstacle else state
        if state is None:
            state_file.unlink(missing_ok=True)
            shutil.rmtree(self.corpus, ignore_errors=True)
            for lengths_file in self.path.glob("*.lengths"):
                lengths_file.unlink()
            state = State(splits={name: SplitState() for name in SPLITS})
        if old_request != request:  # files that are not read yet may have changed
            write_atomic(request_file, request.model_dump_json(indent=1))
        self.corpus.mkdir(exist_ok=True)
        return state

    def _obstacle(
        self, out: Path, old_request: Request, request: Request, state: State, may_skip: bool
    ) -> str:
        """Return the reason why the preparation cannot be resumed; empty if it can."""
        place = ReadPosition(*state.place)
        num_read = place.file + (place.position > 0)  # files read in full or in part
        changes = old_request.first_files(num_read).differences(request.first_files(num_read))
        if changes:
            return (
                f"{out} is half prepared from something else:\n{describe_changes(changes)}\n"
                "restore it to continue, name another folder, or start over with --replace"
            )
        for path, size in self._sizes(state).items():
            actual = path.stat().st_size if path.exists() else 0
            if actual < size:
                return (
                    f"{path} has {actual:,} bytes where {size:,} were written: something else has"
                    " changed it. Start over with --replace"
                )
        if state.skipped and not may_skip:
            return (
                f"{state.skipped:,} broken records were left out so far: give --skip-broken again"
                " to continue, or start over with --replace"
            )
        return ""

    def file_of(self, split: str, ending: str) -> Path:
        """Return the path of a file: ``bin`` and ``mask`` are published, ``lengths`` is not."""
        return (self.path if ending == "lengths" else self.corpus) / f"{split}.{ending}"

    def _sizes(self, state: State) -> dict[Path, int]:
        sizes = {self.path / SKIPPED_FILE: state.skipped_bytes}
        for name, split in state.splits.items():
            sizes[self.file_of(name, "bin")] = split.tokens * self.dtype.itemsize
            sizes[self.file_of(name, "lengths")] = split.documents * 4
            if self.has_mask:
                sizes[self.file_of(name, "mask")] = split.tokens
        return sizes

    def append(
        self,
        split: str,
        tokens: NDArray[Any],
        lengths: NDArray[np.int64],
        counts: NDArray[np.uint8] | None,
    ) -> None:
        """Append whole documents to the files of a split."""
        self._streams[self.file_of(split, "bin")].write(
            np.ascontiguousarray(tokens, self.dtype).tobytes()
        )
        self._streams[self.file_of(split, "lengths")].write(lengths.astype(np.int32).tobytes())
        if self.has_mask:
            assert counts is not None and len(counts) == len(tokens)
            self._streams[self.file_of(split, "mask")].write(counts.tobytes())
        self.state.splits[split].documents += len(lengths)
        self.state.splits[split].tokens += len(tokens)

    def skip(self, lines: Iterable[str]) -> None:
        """Append skipped records to ``skipped.txt``."""
        for line in lines:
            raw = f"{line}\n".encode(errors="backslashreplace")
            self._streams[self.path / SKIPPED_FILE].write(raw)
            self.state.skipped += 1
            self.state.skipped_bytes += len(raw)

    def commit(self, place: ReadPosition) -> None:
        """Flush the appended data to the disk, then write ``state.json``."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        self.state.place = (place.file, place.position)
        write_atomic(self.path / "state.json", self.state.model_dump_json(indent=1))

    def close(self) -> None:
        """Close the files and release the lock. A later resume truncates uncommitted data."""
        for stream in self._streams.values():
            stream.close()
        self._lock.close()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def begun_request(out: Path) -> Request | None:
    """Return the request of the preparation of ``out`` that an earlier call has begun;
    None if there is none.
    """
    request: Request | None = _read(_work_path(out) / "request.json", Request)
    return request


def requested_files(files: Sequence[InputFile]) -> list[File]:
    """Return the input files as a request stores them;
    bytes of a name that are not UTF-8 become ``\\xff``.
    """
    names = [os.fsencode(file.path).decode("utf-8", "backslashreplace") for file in files]
    return [
        File(path=name, num_bytes=file.num_bytes, mtime_ns=file.mtime_ns)
        for name, file in zip(names, files, strict=True)
    ]


def describe_changes(changes: Sequence[str]) -> str:
    """Format the changes of a request for a message, a line each."""
    lines = [f"  {change}" for change in changes[:_MAX_CHANGES]]
    return "\n".join([*lines, *(["  ..."] if len(changes) > _MAX_CHANGES else [])])


def remove_leftovers(out: Path) -> None:
    """Remove the work folder of a published corpus, if a killed process left it."""
    path = _work_path(out)
    if why_not_own(path) is None and path.is_dir() and not (path / "corpus").exists():
        with contextlib.suppress(DataError, OSError), _take_lock(path):
            shutil.rmtree(path, ignore_errors=True)


def _work_path(out: Path) -> Path:
    return out.parent / f".{out.name}.preparing"


def _take_lock(path: Path) -> FileLock:
    lock, is_ours = FileLock(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), False
    with contextlib.suppress(OSError):
        is_ours = lock.take()
    if not is_ours:
        lock.close()
        raise DataError(
            "MW-DATA-085", f"another process is preparing here ({path}): wait for it, or end it"
        )
    return lock


def _open_truncated(path: Path, size: int) -> IO[bytes]:
    """Open a file for appending, truncated to its length at the last commit."""
    stream = path.open("ab")
    stream.truncate(size)
    stream.seek(size)
    return stream


def _read(path: Path, kind: type[Any]) -> Any:
    """Read a JSON file; None if it is missing or malformed, so that the preparation starts over."""
    try:
        return kind.model_validate_json(read_bytes(path))
    except (FileNotFoundError, ValidationError):
        return None
