"""Entry point of ``python -m meshwright_launch``: the same program as ``meshwright``,
with the same import path.

``-m`` puts the working directory first on ``sys.path``. It is removed, so that a local
``random.py`` hides no module.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib is not imported yet
    sys.path.pop(0)

from meshwright_launch.cli import main
from meshwright_launch.failure import leave_exit_code

if __name__ == "__main__":
    code = main()
    leave_exit_code(code)
    sys.exit(code)
