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


def format_report(adopted: ImportedConfig) -> str:
    """Format the report of an import, as several lines of text."""
    lost = [left for left in adopted.left if left.why is not DropReason.NEEDLESS]
    name = NAMES[adopted.framework]
    lines = [
        f"read as {name}'s: {adopted.num_keys} keys, {adopted.num_keys - len(lost)} of them carried over or not needed"
    ]
    if adopted.decided:
        lines += ["", "decided", *_wrapped(adopted.decided)]
    if adopted.assumed:
        lines += ["", f"not in the file, so at {name}'s defaults", *_wrapped([", ".join(adopted.assumed)])]
    for why in ORDER:
        those = [left for left in lost if left.why is why]
        if those:
            lines += ["", f"not carried over: {why}", *_wrapped(_lines(those))]
    needless = ", ".join(dict.fromkeys(left.item.key for left in adopted.left if left.why is DropReason.NEEDLESS))
    if needless:
        lines += ["", DropReason.NEEDLESS, *_wrapped([needless])]
    return "\n".join(lines)


def file_text(adopted: ImportedConfig, source: str) -> str:
    """Format the configuration as a TOML file that opens with the report in comments."""
    told = "\n".join(f"# {line}".rstrip() for line in f"From {source}, {format_report(adopted)}".splitlines())
    return f"{told}\n\n{to_toml(adopted.config)}"


def _lines(those: list[DroppedKey]) -> Iterator[str]:
    """Yield a line for each distinct explanation, with all keys that share it."""
    said: dict[str, list[DroppedKey]] = {}
    for left in those:
        said.setdefault(left.said, []).append(left)
    for text, group in said.items():
        keys = ", ".join(map(_key, group))
        yield f"{keys}: {text}" if text else keys


def _key(left: DroppedKey) -> str:
    """Format a key as ``key = value (line 7)``; a flag without a value is only its name."""
    line = left.item.place.rpartition(":")[2]
    return f"{left.item.written} (line {line})" if line.isdigit() else left.item.written


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield textwrap.fill(
            line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
