"""Table of refused combinations in docs/limits.md, from the table of pairs.

python -m tests.support.combination_table          writes it anew
"""

from __future__ import annotations

from pathlib import Path

from meshwright.config.combinations.features import keys_of
from meshwright.config.combinations.refused import REFUSED, REFUSED_TRAITS

DOCUMENT = Path(__file__).parents[2] / "docs" / "limits.md"
HEAD = ("| refused | with | why | code |", "|---|---|---|---|")


def table() -> str:
    """Return the table, one row per pair; pairs of which one merely has no effect are left out."""
    rows = []
    for row in REFUSED:
        if not row.has_no_effect:
            rows.append((_cell(row.first), _cell(row.second), row.why, row.code))
    for pair in REFUSED_TRAITS:
        why = f"{pair.why} (where {pair.only})" if pair.only else pair.why
        rows.append((_cell(pair.first), _cell(pair.second), why, pair.code))
    return "\n".join([*HEAD, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def _cell(name: str) -> str:
    """Return a feature with the keys that ask for it."""
    keys = ", ".join(f"`{key}`" for key in keys_of(name))
    return f"{name} ({keys})" if keys else name


def page() -> str:
    """Return docs/limits.md with the table in the place of the present one."""
    text = DOCUMENT.read_text()
    start = text.index(HEAD[0])
    end = text.index("\n\n", start) + 1
    return text[:start] + table() + text[end:]


if __name__ == "__main__":
    DOCUMENT.write_text(page())
