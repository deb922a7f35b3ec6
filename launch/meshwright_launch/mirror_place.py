"""Place of a run's mirror in memory, and what its restarts and recoveries have in common.
No torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright_launch.leftovers import MEMORY, memory_directory


class MirrorPlace:
    """Directory in memory for the mirror of a run (``watch.mirror``), kept over its restarts."""

    def __init__(self) -> None:
        self.generation = 0
        """Number of the newest launch of ranks; no two write the same step under one number."""
        self.recoveries = 0
        """Failures that were repaired in place so far."""
        self.futile = 0
        """Those in a row since the run has taken a step."""
        self._failed_step = -1
        self._path: Path | None = None

    def count_failure(self, step: int) -> None:
        """Count a failure that is repaired; ``step``: the newest that was mirrored."""
        self.recoveries += 1
        self.futile = self.count_futile(step) + 1
        self._failed_step = step

    def count_futile(self, step: int) -> int:
        """Return the repaired failures in a row before one that comes now; ``step``: the newest that is
        mirrored. 0: the run has gone on since the last one.
        """
        return 0 if step > self._failed_step else self.futile

    def open(self) -> Path:
        """Return the directory; make it at the first call. It is removed when this process exits.

        Raises:
            ConfigError: there is no file system in memory.
        """
        if self._path is None:
            try:
                path = memory_directory() / "mirror"
                path.mkdir(mode=0o700)
            except OSError as error:
                raise ConfigError(
                    "MW-LAUNCH-115",
                    f"watch.mirror = true needs a file system in memory, and {MEMORY} cannot be"
                    f" written: {error.strerror}. Mount one (a container's --shm-size), or leave"
                    " watch.mirror out",
                ) from None
            self._path = path
        return self._path

    def newest_step(self) -> int:
        """Return the newest step in memory; 0: none."""
        from meshwright.checkpoint.memory import newest_step

        return newest_step(self.open())

    def has_step(self) -> bool:
        """Return True if a step of the newest launch of ranks is in memory. Where the mirror was switched
        off for want of space, there is none.
        """
        from meshwright.checkpoint.memory import read_marks

        return any(mark.generation == self.generation for _, _, mark in read_marks(self.open()))

    def clear(self) -> None:
        """Forget all steps: a restart must not resume from them."""
        for slot in self.open().iterdir():
            shutil.rmtree(slot, ignore_errors=True)
