"""``python -m launch`` is ``meshwright``, with the same import path.

Python puts the working directory first for ``-m``: here its ``framework``, ``models`` or ``random.py`` hide nothing.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib is not imported yet
    here = sys.path.pop(0)
    if __file__ == os.path.join(here, "launch", "__main__.py"):  # noqa: PTH118 - not installed: a checkout of the source
        sys.path.append(here)

from launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
