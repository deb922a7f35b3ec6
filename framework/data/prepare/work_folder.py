"""State of a preparation on the disk: killed at any moment, it goes on from there.

    .NAME.preparing/          beside the corpus to be, removed when that exists
        request.json          inputs and options: files that have been read must not change
        state.json            the place up to which the sources are read, and the length of each file then
        lock                  locked by the process that works here; the system releases it when the process dies
        skipped.txt           records that were left out, a line each
        train.lengths         tokens of each document (int32)
        corpus/train.bin      tokens; train.mask beside it

The files only grow. ``state.json`` is replaced as a whole, after the data that it counts is on the disk. Whatever a
file has beyond that is cut off before the work goes on. So nothing is there twice, and nothing is left out.

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

from meshwright.data.fingerprint import File
from meshwright.data.prepare.input_files import InputFile
from meshwright.data.prepare.readers import BEGINNING, ReadPosition
from meshwright.data.splits import SPLITS
from meshwright.errors import DataError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_bytes
from meshwright.system.process import FileLock

SKIPPED_FILE = "skipped.txt"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Request(_Part):
    """All that decides the bytes of a corpus, but for the sources' contents."""

    files: list[File]
    tokenizer_sha256: str
    end_of_document: str
    begin_of_document: str | None
    form: str
    text_key: str
    validation_share: float
    test_share: float
    seed: int

    def up_to(self, place: ReadPosition) -> Request:
        """Return the request with only those files that have been read in part or in full."""
        return self.model_copy(update={"files": self.files[: place.file + (place.position > 0)]})

    def differences(self, other: Request) -> list[str]:
        """Return the changes of ``other``, a line each."""
        lines = []
        before, after = ({file.path: file for file in each.files} for each in (self, other))
        lines += [f"{path} is no longer there" for path in before if path not in after]
        lines += [f"{path} is new" for path in after if path not in before]
        for path in before.keys() & after.keys():
            was, now = before[path], after[path]
            if was.num_bytes != now.num_bytes:
                lines.append(f"{path} had {was.num_bytes:,} bytes and has {now.num_bytes:,}")
            elif was.mtime_ns != now.mtime_ns:
                lines.append(f"{path} was written to since ({now.num_bytes:,} bytes as before)")
        lines.sort()
        if not lines and list(before) != list(after):
            lines.append("the files come in another order")
        for name in type(self).model_fields:
            one, another = getattr(self, name), getattr(other, name)
            if name != "files" and one != another:
                lines.append(f"{name} was {one!r} and is {another!r}")
        return lines


class SplitState(_Part):
    """One split so far."""

    documents: int = 0
    tokens: int = 0


class State(_Part):
    """Progress of the work."""

    place: tuple[int, int] = (0, 0)
    line: int = 0
    """Lines of the file there that are behind."""
    records: int = 0
    """Documents so far, broken and empty ones too: a document's number decides its split."""
    empty: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    """Length of skipped.txt."""
    text_bytes: int = 0
    source_bytes: int = 0
    digest: str = ""
    splits: dict[str, SplitState]


class WorkFolder:
    """Held by one process at a time. Opened with what it had at the last commit."""

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
        """Open or make the folder. ``replace``: begin anew where it cannot go on. ``may_skip``: broken records may be
        left out.

        Raises:
            DataError: another process works there, or it cannot go on from what is there (unless ``replace``).
        """
        self.path = _place_of(out)
        self.corpus = self.path / "corpus"
        self.dtype, self.has_mask = dtype, has_mask
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self.path)
        try:
            self.state = self._open(out, request, replace, may_skip)
            self._streams = {path: _at_end(path, size) for path, size in self._sizes(self.state).items()}
        except BaseException:
            self._lock.close()
            raise
        self.went_on = self.state.place != (0, 0)

    def _open(self, out: Path, request: Request, replace: bool, may_skip: bool) -> State:
        asked, state = self.path / "request.json", self.path / "state.json"
        begun = _read(asked, Request)
        # without the corpus it was published, and whoever did so was killed before the rest was removed
        known = _read(state, State) if begun is not None and self.corpus.is_dir() else None
        if known is not None and ReadPosition(*known.place) == BEGINNING:
            known = None
        if begun is not None and known is not None:
            obstacle = self._obstacle(out, begun, request, known, may_skip)
            if obstacle and not replace:
                raise DataError("MW-DATA-084", obstacle)
            known = None if obstacle else known
        if known is None:
            state.unlink(missing_ok=True)
            shutil.rmtree(self.corpus, ignore_errors=True)
            for left in self.path.glob("*.lengths"):
                left.unlink()
            known = State(splits={name: SplitState() for name in SPLITS})
        if begun != request:  # files that nobody has read yet may be others now
            write_atomic(asked, request.model_dump_json(indent=1))
        self.corpus.mkdir(exist_ok=True)
        return known

    def _obstacle(self, out: Path, begun: Request, request: Request, known: State, may_skip: bool) -> str:
        """Return the reason why the work cannot go on; empty: it can."""
        place = ReadPosition(*known.place)
        changes = begun.up_to(place).differences(request.up_to(place))
        if changes:
            return (
                f"{out} is half prepared from something else:\n"
                + "\n".join(f"  {change}" for change in changes[:10])
                + ("\n  ..." if len(changes) > 10 else "")
                + "\nset it back to go on, name another folder, or begin anew with --replace"
            )
        for path, size in self._sizes(known).items():
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                return (
                    f"{path} has {there:,} bytes where {size:,} were written: something else has changed it. Begin "
                    f"anew with --replace"
                )
        if known.skipped and not may_skip:
            return (
                f"{known.skipped:,} broken records were left out so far: say --skip-broken again to go on, or begin "
                f"anew with --replace"
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
        self, split: str, tokens: NDArray[Any], lengths: NDArray[np.int64], counts: NDArray[np.uint8] | None
    ) -> None:
        """Append whole documents to the files of a split."""
        self._streams[self.file_of(split, "bin")].write(np.ascontiguousarray(tokens, self.dtype).tobytes())
        self._streams[self.file_of(split, "lengths")].write(lengths.astype(np.int32).tobytes())
        if self.has_mask:
            assert counts is not None and len(counts) == len(tokens)
            self._streams[self.file_of(split, "mask")].write(counts.tobytes())
        self.state.splits[split].documents += len(lengths)
        self.state.splits[split].tokens += len(tokens)

    def skip(self, lines: Iterable[str]) -> None:
        """Note records that were left out."""
        for line in lines:
            raw = f"{line}\n".encode(errors="backslashreplace")
            self._streams[self.path / SKIPPED_FILE].write(raw)
            self.state.skipped += 1
            self.state.skipped_bytes += len(raw)

    def commit(self, place: ReadPosition) -> None:
        """Flush the appended data to the disk, then record it."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        self.state.place = (place.file, place.position)
        write_atomic(self.path / "state.json", self.state.model_dump_json(indent=1))

    def close(self) -> None:
        """Close the files and release the lock. Uncommitted data will be cut off."""
        for stream in self._streams.values():
            stream.close()
        self._lock.close()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def request_of(files: Sequence[InputFile]) -> list[File]:
    """Return the files of a request: bytes of a name that are no UTF-8 as ``\\xff``."""
    names = [os.fsencode(file.path).decode("utf-8", "backslashreplace") for file in files]
    return [
        File(path=name, num_bytes=file.num_bytes, mtime_ns=file.mtime_ns)
        for name, file in zip(names, files, strict=True)
    ]


def clear_away(out: Path) -> None:
    """Remove the work folder of a published corpus, which a kill may have left."""
    path = _place_of(out)
    if path.is_dir() and not (path / "corpus").exists():
        with contextlib.suppress(DataError), _take_lock(path):
            shutil.rmtree(path, ignore_errors=True)


def _place_of(out: Path) -> Path:
    return out.parent / f".{out.name}.preparing"


def _take_lock(path: Path) -> FileLock:
    lock, is_ours = FileLock(path / "lock"), False
    with contextlib.suppress(OSError):
        is_ours = lock.take()
    if not is_ours:
        lock.close()
        raise DataError("MW-DATA-085", f"another process is preparing here ({path}): wait for it, or end it")
    return lock


def _at_end(path: Path, size: int) -> IO[bytes]:
    """Open a file for appending, cut to its length at the last commit."""
    stream = path.open("ab")
    stream.truncate(size)
    stream.seek(size)
    return stream


def _read(path: Path, kind: type[Any]) -> Any:
    """Read a JSON file; None where there is none that can be read: then the work begins anew."""
    try:
        return kind.model_validate_json(read_bytes(path))
    except (FileNotFoundError, ValidationError):
        return None
