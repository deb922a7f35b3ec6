"""Files of a run's corpora while the run reads them:
one that is overwritten in place is trained on from then on.

Samples are read from the open files step by step, so a write to one changes the samples of a live
run without an error. Size, times and inode of each file cost one stat. Where they differ, sampled
blocks, as in a fingerprint, separate a change of bytes from one of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshwright.data.fingerprint import sampled_sha256


class FileState(NamedTuple):
    """State of a file at one time."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    """Time of the last change of bytes, name or owner; a program cannot set it."""


class LiveFiles:
    """Files as they were when a run opened them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Remember the state and the sampled bytes of each file. Reads at most 1 MiB of each."""
        self._states = {path: _state(path) for path in paths}
        self._sampled = {path: _sampled(path) for path in self._states}

    def changes(self) -> list[str]:
        """Describe the files that have changed since the last call, each once.
        One stat of each file.
        """
        found = []
        for path, before in self._states.items():
            now = _state(path)
            if now == before:
                continue
            self._states[path] = now
            problem = self._describe(path, before, now)
            if problem is not None:
                found.append(f"{path} {problem}")
        return found

    def _describe(self, path: Path, before: FileState | None, now: FileState | None) -> str | None:
        """Return what has happened to a file; None: nothing that matters, such as another owner."""
        if now is None:
            return (
                "was removed, or cannot be read any more: the run goes on with its open file, a"
                " resume cannot"
            )
        sampled, earlier = _sampled(path), self._sampled[path]
        self._sampled[path] = sampled
        is_other = before is not None and (before.device, before.inode) != (now.device, now.inode)
        if sampled == earlier:
            is_written = before is None or (before.num_bytes, before.modified_ns) != (
                now.num_bytes,
                now.modified_ns,
            )
            if is_written and not is_other:
                return "was written to; its sampled bytes are as before"
            return None
        if is_other:
            return (
                "was replaced by another file: the run goes on with the one it opened, and a resume"
                " is refused"
            )
        return (
            "was overwritten with other bytes, and the run trains on them: steps since the last"
            " checkpoint may have seen either, and a resume is refused"
        )


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    )


def _sampled(path: Path) -> str | None:
    try:
        return sampled_sha256(path)
    except OSError:
        return None
