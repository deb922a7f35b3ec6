"""Report of an import for the user: decisions, assumed defaults,
and keys that were not carried over.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    name = NAMES[imported.framework]
    of_reason: dict[DropReason, list[DroppedKey]] = {reason: [] for reason in DropReason}
    for key in imported.dropped:
        of_reason[key.reason].append(key)
    needless = dict.fromkeys(key.item.key for key in of_reason[DropReason.NEEDLESS])
    num_kept = imported.num_keys - sum(len(of_reason[reason]) for reason in ORDER)
    sections = {
        f'to be set before training: "{OPEN_VALUE}" in the file': _open_lines(imported.open),
        "decided": imported.decided,
        f"not in the file, so at the defaults of {name}": _joined(imported.assumed),
        **{f"not carried over: {reason}": _dropped_lines(of_reason[reason]) for reason in ORDER},
        DropReason.NEEDLESS: _joined(needless),
    }
    report = [
        f"read as a {name} configuration: {imported.num_keys} keys, {num_kept} of them carried over"
        " or not needed"
    ]
    for title, lines in sections.items():
        wrapped = list(map(_wrapped, lines))
        report += ["", title, *wrapped] if wrapped else []
    return "\n".join(report)


def file_text(imported: ImportedConfig, source: str) -> str:
    """Format the configuration as a TOML file that opens with the report in comments.

    The file can be read back, but is refused until every open key is set.
    """
    comments = "\n".join(
        f"# {line}".rstrip() for line in f"From {source}, {format_report(imported)}".splitlines()
    )
    tree = imported.config.model_dump(exclude_defaults=True, exclude_none=True)
    for dotted in imported.open:
        *tables, name = dotted.split(".")
        table = tree
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = OPEN_VALUE
    sections = type(imported.config).model_fields
    ordered = {section: tree[section] for section in sections if section in tree}
    return f"{comments}\n\n{_toml(ordered, imported)}"


def _toml(tree: Mapping[str, Mapping[str, Any]], imported: ImportedConfig) -> str:
    """Format sections as TOML; open values have the reason on their line."""
    parts: list[str] = []
    for section, table in tree.items():
        inner = {
            f"{section}.{name}": value
            for name, value in table.items()
            if value and isinstance(value, dict)
        }
        own = {name: value for name, value in table.items() if f"{section}.{name}" not in inner}
        for heading, rows in {section: own, **inner}.items():
            lines = [
                _row(heading, name, value, imported)
                for name, value in rows.items()
                if value is not None
            ]
            parts += ["\n".join([f"[{heading}]", *lines, ""])] if lines else []
    return "\n".join(parts)


def _row(heading: str, name: str, value: Any, imported: ImportedConfig) -> str:
    words = imported.open.get(f"{heading}.{name}", "").split()
    reason = "".join(filter(str.isprintable, " ".join(words)))
    comment = f"  # SET: {reason}" if reason else ""
    return f"{toml_name(name)} = {toml_value(value)}{comment}"


def _joined(words: Iterable[str]) -> list[str]:
    line = ", ".join(words)
    return [line] if line else []


def _open_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each distinct reason, with all keys that share it."""
    for reason in dict.fromkeys(reasons.values()):
        yield f"{', '.join(key for key in reasons if reasons[key] == reason)}: {reason}"


def _dropped_lines(dropped: Sequence[DroppedKey]) -> Iterator[str]:
    """Yield a line for each distinct explanation, with all keys that share it."""
    for note in dict.fromkeys(key.note for key in dropped):
        keys = ", ".join(_key(key) for key in dropped if key.note == note)
        yield f"{keys}: {note}" if note else keys


def _key(dropped: DroppedKey) -> str:
    """Format a key as ``key = value (line 7)``; a flag without a value is only its name."""
    line = dropped.item.place.rpartition(":")[2]
    of_line = f" (line {line})" if whole_number(line) is not None else ""
    return f"{dropped.item.written}{of_line}"


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
