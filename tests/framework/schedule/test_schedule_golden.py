"""Whole schedules as text, built, lowered and drawn: a change of one is a diff to read in a review.

After a wanted change write them again with ``python
tests/framework/schedule/test_schedule_golden.py``; read the diff.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    ("gpipe", 1, 1, 1),
    ("gpipe", 2, 4, 1),
    ("gpipe", 4, 2, 1),
    ("gpipe", 4, 8, 1),
    ("1f1b", 1, 3, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 3, 1, 1),
    ("1f1b", 4, 2, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 8, 8, 1),
    ("interleaved_1f1b", 2, 4, 2),
    ("interleaved_1f1b", 2, 5, 3),
    ("interleaved_1f1b", 4, 8, 2),
    ("zb_h1", 4, 8, 1),
    ("zb_h1", 3, 2, 1),
    ("zb_h2", 4, 8, 1),
    ("zb_h2", 3, 4, 1),
    ("zb_v", 1, 2, 2),
    ("zb_v", 2, 4, 2),
    ("zb_v", 4, 8, 2),
    ("zb_v", 3, 2, 2),
    ("v_half", 4, 8, 2),
    ("v_min", 4, 8, 2),
    ("dualpipe_v", 2, 6, 2),
    ("dualpipe_v", 3, 4, 2),
]


def golden_path(name: str, pp: int, chunks: int, interleave: int) -> Path:
    return (
        GOLDEN
        / f"{name}-pp{pp}-chunks{chunks}{f'-interleave{interleave}' if interleave > 1 else ''}.txt"
    )


def golden_text(name: str, pp: int, chunks: int, interleave: int) -> str:
    from meshwright.schedule.build import build
    from meshwright.schedule.drawing import text
    from meshwright.schedule.load import format_schedule
    from meshwright.schedule.lower import lower

    built = build(name, pp, chunks, interleave)
    return "\n".join([format_schedule(built), format_schedule(lower(built)), text(built), ""])


@pytest.mark.parametrize(("name", "pp", "chunks", "interleave"), CASES)
def test_golden(name: str, pp: int, chunks: int, interleave: int) -> None:
    written = golden_path(name, pp, chunks, interleave).read_text(encoding="utf-8")
    assert golden_text(name, pp, chunks, interleave) == written


def test_no_golden_file_is_forgotten() -> None:
    assert set(GOLDEN.iterdir()) == {golden_path(*case) for case in CASES}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    for case in CASES:
        golden_path(*case).write_text(golden_text(*case), encoding="utf-8")
