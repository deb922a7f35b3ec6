"""One run on disk: directory, lock, files. `observers` saves checkpoints, `resume` reads them.
No torch here.
"""

from meshwright.run.collector import StepCollector
from meshwright.run.files import RunFiles, check_run_files, make_directory
from meshwright.run.lock import RunLock, lock_directory

__all__ = [
    "RunFiles",
    "RunLock",
    "StepCollector",
    "check_run_files",
    "lock_directory",
    "make_directory",
]
