"""Reading path: the files that together explain a training step, and docs/read-the-code.md,
which lists them.

python -m tests.support.reading_path          writes the line counts of docs/read-the-code.md
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.sources import ROOT, TRAINER

DOCUMENT = ROOT / "docs" / "read-the-code.md"

READING_PATH = (
    *(
        "mesh/grid",
        "schedule/action",
        "schedule/build",
        "schedule/lower",
        "blueprint",
        "parts/rank",
        "placement/rewrite",
    ),
    *(
        "tensor_parallel/plan",
        "tensor_parallel/layers",
        "tensor_parallel/regions",
        "tensor_parallel/column",
        "pipeline/stage",
    ),
    *(
        "pipeline/executor",
        "data_parallel/sharding",
        "data_parallel/buckets",
        "data_parallel/replica",
    ),
    *("optimizer/flat", "optimizer/learning_rate", "build", "step", "train"),
)

_ROW = re.compile(r"\[`([\w/]+)`\]\(\.\./framework/meshwright/[\w/]+\.py\) \| \d+ \|")
_TOTAL = re.compile(r"\d+ files, [\d,]+ lines")


def count_lines(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text().splitlines())


def file_of(entry: str) -> Path:
    """Return the file of an entry of the reading path."""
    return TRAINER / f"{entry}.py"


def described() -> list[str]:
    """Return the entries that the document describes, in its order."""
    return _ROW.findall(DOCUMENT.read_text())


def counted(text: str) -> str:
    """Return the document's text with today's line counts."""
    text = _ROW.sub(
        lambda row: re.sub(r"\d+ \|$", f"{count_lines(file_of(row[1]))} |", row[0]), text
    )
    total = sum(count_lines(file_of(entry)) for entry in READING_PATH)
    return _TOTAL.sub(f"{len(READING_PATH)} files, {total:,} lines", text)


if __name__ == "__main__":
    DOCUMENT.write_text(counted(DOCUMENT.read_text()))
