"""``python -m meshwright.launch`` is ``meshwright``, with the same import path.

Python puts the working directory first for ``-m``: here its ``random.py`` or ``torch`` hides nothing.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib is not imported yet
    sys.path.pop(0)

from meshwright.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
