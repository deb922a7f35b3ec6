"""Table of the files that a command has written."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.terminal.format import format_size, format_table


def table_of_files(sizes: Mapping[str, int], most: int | None = None) -> list[str]:
    """Return the lines of a table of files with their sizes in bytes,
    and a line with their number and total.

    ``most``: largest number of files that are all listed; of more, the middle ones are left out.
    """
    rows = [(f"  {name}", format_size(size)) for name, size in sizes.items()]
    if most is not None and len(rows) > most:
        rows = [*rows[:4], (f"  ... {len(rows) - 6:,} more", ""), *rows[-2:]]
    total = f"{len(sizes):,} file{'s' * (len(sizes) != 1)}, {format_size(sum(sizes.values()))}"
    return [*format_table(rows, "<>"), total]
