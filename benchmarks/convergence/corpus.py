"""The corpus: the Python source text of the installed packages torch and transformers, 99 MB.

    python benchmarks/convergence/corpus.py DIR

Equal versions give equal tokens; ``meshwright data verify DIR`` prints their hashes.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("torch", "transformers")


def main(out: str) -> int:
    """Collect the files, and prepare them with a vocabulary of 4,096."""
    with tempfile.TemporaryDirectory() as name:
        for package in PACKAGES:
            found = importlib.util.find_spec(package)
            assert found is not None and found.origin is not None
            root = Path(found.origin).parent
            for file in sorted(root.rglob("*.py")):
                target = Path(name) / package / file.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        command = [
            "data",
            "files",
            "--out",
            out,
            "--vocab-size",
            "4096",
            "--validation-share",
            "0.01",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "meshwright_launch", *command, name], check=False
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
