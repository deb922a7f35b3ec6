"""One run on disk: directory, lock, files. `observers` saves checkpoints, `resume` reads them. No torch here."""

from meshwright.run.collector import StepCollector
from meshwright.run.files import RunFiles, make_directory
from meshwright.run.lock import RunLock, lock_directory

__all__ = ["RunFiles", "RunLock", "StepCollector", "lock_directory", "make_directory"]
