"""Text forms of counts, durations, sizes and tables. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

GIB, MIB = 2**30, 2**20


def format_count(value: float) -> str:
    """Format a count with three digits and a letter: 12,345 -> ``12.3k``. k is 1,000."""
    if not math.isfinite(value):
        return str(value)
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def format_number_of(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 document``, ``1,200 documents``, ``3 batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count != 1)}"


def format_duration(seconds: float) -> str:
    """Format seconds as ``m:ss``, ``h:mm:ss`` or ``Nd h:mm:ss``."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_gib(num_bytes: int) -> str:
    """Format bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def format_size(num_bytes: int) -> str:
    """Format bytes in GiB, MiB or KiB with one decimal: sizes of tensors, files and buffers."""
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def format_table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the lines of a table. ``sides``: ``<`` or ``>`` for each column,
    for names and for numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
