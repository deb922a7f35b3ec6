"""The table of docs/extend.md names what exists here, and each of its cells has a source."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from meshwright import StepEvent
from meshwright.config.keys import KEYS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "extend.md").read_text()
ROWS = [
    cells
    for line in TEXT.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 6
    and "---" not in line
]
OF_A_MODEL = {"model.loss", "model.sharding_plan"}
"""Attributes of a model, which docs/models.md lists."""


def test_every_name_in_our_column_exists() -> None:
    head, *rows = ROWS
    assert head[1] == "meshwright" and len(rows) == 12
    named = set(re.findall(r"`(\w+\.\w+)`", " ".join(row[1] for row in rows)))
    known = (
        {f"{section}.{key}" for section, key in KEYS}
        | {f"event.{field.name}" for field in fields(StepEvent)}
        | OF_A_MODEL
    )
    assert (
        {"optimizer.builder", "event.metrics"}
        <= named - {"nn.Sequential", "meshwright.record"}
        <= known
    )
    assert all(f"| `{name.partition('.')[2]}` |" in (DOCS / "models.md").read_text().replace("`, `", "` | `")
               for name in OF_A_MODEL)  # fmt: skip


def test_no_cell_is_empty_and_each_project_has_a_source() -> None:
    assert all(all(row[1:]) for row in ROWS)
    sources = re.findall(
        r"^\| ([\w ]+) \| ([^|]*\d[^|]*|this checkout) \| (.*) \|$", TEXT, re.MULTILINE
    )
    assert [name for name, _, _ in sources] == ROWS[0][1:]
