"""Report of an import for the user: decisions, assumed defaults, and keys that were not carried over."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.config.keys import OPEN_VALUE, toml_name, toml_value
from meshwright.system.numbers import whole_number
from meshwright_interop.configs.convert import NAMES, ImportedConfig
from meshwright_interop.configs.source_keys import DroppedKey, DropReason

WIDTH = 118
ORDER = (DropReason.UNKNOWN, DropReason.BY_HAND, DropReason.DIFFERS, DropReason.NONE)
"""Order of the reasons in the report: keys that the user has to act on come first."""


def format_report(imported: ImportedConfig) -> str:
    """Format the report of an import, as several lines of text."""
    dropped = [key for key in imported.dropped if key.reason is not DropReason.NEEDLESS]
    name = NAMES[imported.framework]
    kept = imported.num_keys - len(dropped)
    lines = [f"read as a {name} configuration: {imported.num_keys} keys, {kept} of them carried over or not needed"]
    if imported.open:
        lines += ["", f'to be set before training: "{OPEN_VALUE}" in the file', *_wrapped(_mark_lines(imported.open))]
    if imported.guessed:
        lines += ["", "guessed, marked on its line in the file", *_wrapped(_mark_lines(imported.guessed))]
    if imported.decided:
        lines += ["", "decided", *_wrapped(imported.decided)]
    if imported.assumed:
        lines += ["", f"not in the file, so at the defaults of {name}", *_wrapped([", ".join(imported.assumed)])]
    for reason in ORDER:
        keys = [key for key in dropped if key.reason is reason]
        if keys:
            lines += ["", f"not carried over: {reason}", *_wrapped(_dropped_lines(keys))]
    needless = [key.item.key for key in imported.dropped if key.reason is DropReason.NEEDLESS]
    if needless:
        lines += ["", DropReason.NEEDLESS, *_wrapped([", ".join(dict.fromkeys(needless))])]
    return "\n".join(lines)


def file_text(imported: ImportedConfig, source: str) -> str:
    """Format the configuration as a TOML file that opens with the report in comments.

    The file can be read back, but is refused until every open key is set.
    """
    comments = "\n".join(f"# {line}".rstrip() for line in f"From {source}, {format_report(imported)}".splitlines())
    tree = imported.config.model_dump(exclude_defaults=True, exclude_none=True)
    whole = imported.config.model_dump()
    for dotted in (*imported.guessed, *imported.open):
        *tables, name = dotted.split(".")
        table, values = tree, whole
        for part in tables:
            table, values = table.setdefault(part, {}), values[part]
        value = values.get(name)  # an option of the model has no value where the file gives none to follow
        table[name] = _opened(value) if dotted in imported.open else value
    ordered = {section: tree[section] for section in whole if section in tree}
    return f"{comments}\n\n{_toml(ordered, imported)}"


def _opened(value: Any) -> Any:
    """Return OPEN_VALUE in place of a value. In tables, such as the corpora of stages, it only replaces the paths."""
    if not isinstance(value, list | dict):
        return OPEN_VALUE
    if isinstance(value, list):
        return [_opened(each) for each in value]
    return {name: _opened(each) if name in ("path", "train") else each for name, each in value.items()}


def _toml(tree: Mapping[str, Mapping[str, Any]], imported: ImportedConfig) -> str:
    """Format sections as TOML; open and guessed values have the reason on their line."""
    parts: list[str] = []
    for section, table in tree.items():
        inner = {f"{section}.{name}": value for name, value in table.items() if value and isinstance(value, dict)}
        own = {name: value for name, value in table.items() if f"{section}.{name}" not in inner}
        for heading, rows in {section: own, **inner}.items():
            lines = [_row(heading, name, value, imported) for name, value in rows.items() if value is not None]
            parts += ["\n".join([f"[{heading}]", *lines, ""])] if lines else []
    return "\n".join(parts)


def _row(heading: str, name: str, value: Any, imported: ImportedConfig) -> str:
    key = f"{heading}.{name}"
    reason = "".join(
        filter(str.isprintable, " ".join((imported.open.get(key) or imported.guessed.get(key, "")).split()))
    )
    comment = f"  # GUESSED: {reason}" if reason and key in imported.guessed else f"  # SET: {reason}" if reason else ""
    return f"{toml_name(name)} = {toml_value(value)}{comment}"


def _mark_lines(marks: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each distinct reason, with all keys that share it."""
    for reason in dict.fromkeys(marks.values()):
        yield f"{', '.join(key for key in marks if marks[key] == reason)}: {reason}"


def _dropped_lines(dropped: list[DroppedKey]) -> Iterator[str]:
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
    return f"{dropped.item.written} (line {line})" if whole_number(line) is not None else dropped.item.written


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield textwrap.fill(
            line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
