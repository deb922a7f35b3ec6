"""The trainer's tests where neither package of tools/ can be imported.

make trainer-test            an environment in .trainer with the other three source roots, and pytest in it
python -m tests.support.without_tools tests/framework tests/models      every test of the trainer
"""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.sources import ROOT, SOURCE_ROOTS

PLACE = ROOT / ".trainer"
QUICK = (
    "adapters",
    "checkpoint",
    "config",
    "data",
    "doctor",
    "expert_parallel",
    "inference",
    "kernels",
    "mesh",
    "optimizer",
    "run",
    "tensor_parallel",
    "terminal",
    "watch",
)
"""Rooms of the trainer whose tests take minutes together: they read names, files and commands."""
FOLDERS = (*(f"tests/framework/{room}" for room in QUICK), "tests/models")


def make() -> Path:
    """Make the environment and return its Python.

    Its packages are those of this Python. They come by a ``.pth`` file, whose entries are plain
    folders: a ``.pth`` inside such a folder is not read, so that the editable install there does
    not bring back tools/.
    """
    venv.create(PLACE, clear=True)
    (site,) = PLACE.glob("lib/python*/site-packages")
    roots = [str(ROOT / root) for root in SOURCE_ROOTS if root != "tools"]
    (site / "trainer.pth").write_text("\n".join([*roots, sysconfig.get_path("purelib")]) + "\n")
    python = PLACE / "bin" / "python"
    script = PLACE / "bin" / "meshwright"
    script.write_text(
        f"#!{python}\nimport sys\nfrom meshwright_launch.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return python


if __name__ == "__main__":
    python = str(make())
    words = sys.argv[1:] or [*FOLDERS, "-m", "not slow"]
    os.execv(
        python,
        [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *words],
    )
