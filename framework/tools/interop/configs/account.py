"""Report of an import for the user: decisions, assumed defaults, and keys that were not carried over."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from meshwright.config import to_toml
from meshwright.tools.interop.configs.convert import NAMES, ImportedConfig
from meshwright.tools.interop.configs.translation import DroppedKey, DropReason

WIDTH = 118
ORDER = (DropReason.BY_HAND, DropReason.DIFFERS, DropReason.NONE)
"""Order of the reasons in the report: keys that the user has to act on come first."""


def format_report(imported: ImportedConfig) -> str:
    """Format the report of an import, as several lines of text."""
    dropped = [key for key in imported.dropped if key.reason is not DropReason.NEEDLESS]
    name = NAMES[imported.framework]
    kept = imported.num_keys - len(dropped)
    lines = [f"read as {name}'s: {imported.num_keys} keys, {kept} of them carried over or not needed"]
    if imported.decided:
        lines += ["", "decided", *_wrapped(imported.decided)]
    if imported.assumed:
        lines += ["", f"not in the file, so at the defaults of {name}", *_wrapped([", ".join(imported.assumed)])]
    for reason in ORDER:
        keys = [key for key in dropped if key.reason is reason]
        if keys:
            lines += ["", f"not carried over: {reason}", *_wrapped(_lines(keys))]
    needless = [key.item.key for key in imported.dropped if key.reason is DropReason.NEEDLESS]
    if needless:
        lines += ["", DropReason.NEEDLESS, *_wrapped([", ".join(dict.fromkeys(needless))])]
    return "\n".join(lines)


def file_text(imported: ImportedConfig, source: str) -> str:
    """Format the configuration as a TOML file that opens with the report in comments."""
    comments = "\n".join(f"# {line}".rstrip() for line in f"From {source}, {format_report(imported)}".splitlines())
    return f"{comments}\n\n{to_toml(imported.config)}"


def _lines(dropped: list[DroppedKey]) -> Iterator[str]:
    """Yield a line for each distinct explanation, with all keys that share it."""
    by_note: dict[str, list[DroppedKey]] = {}
    for key in dropped:
        by_note.setdefault(key.note, []).append(key)
    for text, group in by_note.items():
        keys = ", ".join(map(_key, group))
        yield f"{keys}: {text}" if text else keys


def _key(dropped: DroppedKey) -> str:
    """Format a key as ``key = value (line 7)``; a flag without a value is only its name."""
    line = dropped.item.place.rpartition(":")[2]
    return f"{dropped.item.written} (line {line})" if line.isdigit() else dropped.item.written


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield textwrap.fill(
            line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
