"""State of the translation of a foreign configuration: its keys, the meshwright keys so far,
and decisions to report.

    key of the file --read----> put(meshwright key) --> tree --> config.load_saved --> RunConfig
                    --drop----> dropped, with the reason
                    --refuse--> an error that names the key: the run would train something else
                    --unread--> dropped, as unknown: no key of the file is lost silently

Most keys are rows of a table: a :class:`Row` for a key that becomes one key here, a
:class:`~source_keys.KeyRule` for keys without a translation. A meshwright key that the file does not
give is left open: no command accepts the file before it is set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, overload

from meshwright.config.keys import format_value
from meshwright.errors import ConfigError
from meshwright_interop.configs.source_keys import (
    DEGREES,
    DroppedKey,
    DropReason,
    KeyRule,
    Refusal,
    SourceKey,
    is_off,
    is_variable,
)


class Translation:
    """Configuration under translation. Moved keys
    of the file are stored under their newest names.
    """

    def __init__(
        self,
        items: Mapping[str, SourceKey],
        framework: str,
        *,
        own_model: bool = False,
        without: Collection[str] = (),
    ) -> None:
        self.items = dict(items)
        self.framework = framework
        self.own_model = own_model
        """True if the command line sets model.builder: the model of the file is ignored."""
        self.without = frozenset(without)
        """Keys named by ``--without``: dropped where they would be refused."""
        self.read: set[str] = set()
        self.tree: dict[str, Any] = {}
        """Dotted meshwright key -> value."""
        self.decided: list[str] = []
        self.assumed: list[str] = []
        """Keys missing from the file, with the defaults of their framework: ``key = value``."""
        self.dropped: list[DroppedKey] = []
        self.open: dict[str, str] = {}
        """Dotted meshwright key whose value is not in the file -> the reason.
        The tree has a stand-in for checks.
        """
        self.refused: list[ConfigError] = []

    # -- keys of the file

    def has(self, name: str) -> bool:
        """Return True if the file sets a key; ``null`` does not count."""
        return name in self.items and self.items[name].value is not None

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value in the file, or the default.
        A default that has an effect is recorded in ``assumed``.
        """
        if name in self.items:
            self.read.add(name)
        if self.has(name):
            return self.items[name].value
        is_plain_one = type(default) is int and default in (1, -1)
        note = f"{name} = {format_value(default)}"
        if not is_off(default) and not is_plain_one and note not in self.assumed:
            self.assumed.append(note)
        return default

    @overload
    def number(self, name: str, default: float, *, minimum: float = ...) -> float: ...
    @overload
    def number(self, name: str, default: None = None, *, minimum: float = ...) -> float | None: ...
    def number(
        self, name: str, default: float | None = None, *, minimum: float = -math.inf
    ) -> float | None:
        """Return a finite number from ``minimum`` up, also from text,
        since YAML 1.1 reads ``3e-4`` as text.
        """
        raw = self.value(name, default)
        if raw is None:
            return None
        if isinstance(raw, bool) or (isinstance(raw, str) and not raw.isascii()):
            raise self._wrong(name, "a number")
        try:
            value = float(raw)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, "a number") from None
        if not math.isfinite(value):
            raise self._wrong(name, "a number")
        if value < minimum:
            raise self._wrong(name, f"a number from {minimum:g} up")
        return value

    @overload
    def integer(self, name: str, default: int) -> int: ...
    @overload
    def integer(self, name: str, default: None = None) -> int | None: ...
    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number; ``1e3`` is accepted."""
        raw = self.number(name, default)
        if raw is not None and raw != int(raw):
            raise self._wrong(name, "a whole number")
        return None if raw is None else int(raw)

    @overload
    def count(self, name: str, default: int, *, maximum: int = ...) -> int: ...
    @overload
    def count(self, name: str, default: None = None, *, maximum: int = ...) -> int | None: ...
    def count(self, name: str, default: int | None = None, *, maximum: int = 10**9) -> int | None:
        """Return a whole number from 1 to ``maximum``; None if the file has none."""
        raw = self.integer(name, default)
        if raw is not None and not 1 <= raw <= maximum:
            raise self._wrong(name, f"a whole number from 1 to {maximum}")
        return raw

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean; a flag without a value is true."""
        raw = self.value(name, default)
        if isinstance(raw, str) and raw.lower() in ("true", "false"):
            return raw.lower() != "false"
        if not isinstance(raw, bool):
            raise self._wrong(name, "true or false")
        return raw

    @overload
    def text(self, name: str, default: str) -> str: ...
    @overload
    def text(self, name: str, default: None = None) -> str | None: ...
    def text(self, name: str, default: str | None = None) -> str | None:
        """Return text; numbers are converted to text."""
        raw = self.value(name, default)
        if isinstance(raw, dict | list | bool) or is_variable(raw):
            raise self._wrong(name, "plain text")
        return None if raw is None else str(raw)

    def label(self, name: str, default: str | None = None) -> str | None:
        """Return text that changes no number, such as the name of a run;
        a variable is left to be set by hand.
        """
        if name in self.items and is_variable(self.items[name].value):
            self.drop(name, DropReason.BY_HAND, "the file does not define this variable")
            return None
        return self.text(name, default)

    def why_missing(self, *names: str) -> str:
        """Return the reason why none of the keys gives a value: a file without them."""
        dashes = "--" if self.framework.startswith("Megatron") else ""
        return f"the file has no {' or '.join(dashes + name for name in names)}"

    def place(self, name: str) -> str:
        """Return ``file:line: key = value`` for an error message,
        or a note that a missing key has its default.
        """
        if name not in self.items:
            return f"{name} (at {self.framework}'s default)"
        item = self.items[name]
        return f"{item.place}: {item.written}"

    # -- errors

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(
            "MW-INTEROP-029",
            f"{self.place(name)}: {self.framework} expects {wanted} here: correct the file",
        )

    def unsupported_model(self, name: str, what: str) -> ConfigError:
        """Build the error for a model that meshwright does not have."""
        return ConfigError(
            "MW-INTEROP-030",
            f"{self.place(name)}: meshwright has no model with {what}; provide one with "
            f"--model.builder=module:function and its --model.options.*",
        )

    def refuse(self, name: str, why: str) -> None:
        """Record an error for a key that changes the training and has no counterpart;
        convert.py raises all at the end.

        Args:
            name: the key, or one at the framework's default.
            why: the reason, for the error; ``--without NAME`` drops the key instead.
        """
        if name in self.without:
            self.drop(name, DropReason.NONE, f"{why}; left out by --without")
            return
        self.read.add(name)
        end = f"; `--without {name}` imports the file without it"
        self.refused.append(ConfigError("MW-INTEROP-089", f"{self.place(name)}: {why}{end}"))

    # -- meshwright keys

    def put(self, key: str, value: Any, reason: str = "") -> None:
        """Set a meshwright key; no effect if the value is None.

        ``reason``: for the report, if the value is not obvious from the file.
        """
        if value is None:
            return
        self.tree[key] = value
        if reason:
            self.decide(f"{key} = {format_value(value)}: {reason}")

    def put_rows(self, rows: Sequence[Row]) -> None:
        """Set the meshwright keys of a table."""
        for row in rows:
            value = row.read(self, row.key, row.default)
            if value is not None and row.convert is not None:
                value = row.convert(value)
            if value != row.unless:
                self.put(row.to, value)

    def leave_open(self, key: str, stand_in: Any, reason: str) -> None:
        """Leave a meshwright key open for the user. ``stand_in``:
        value with which this import is checked.
        """
        self.open[key] = reason
        self.tree[key] = stand_in

    def put_or_leave_open(self, key: str, name: str, value: Any, stand_in: Any) -> Any:
        """Set a meshwright key, or leave it open if the file has no ``name``; return its value."""
        if value is None:
            self.leave_open(key, stand_in, self.why_missing(name))
        self.put(key, value)
        return self.tree[key]

    def decide(self, note: str) -> None:
        """Append a line to the report."""
        self.decided.append(note)

    # -- keys that are not carried over

    def drop(self, name: str, reason: DropReason, note: str = "") -> None:
        """Record that a key of the file is not carried over;
        no effect if the file does not have it.
        """
        if name in self.items:
            self.read.add(name)
            self.dropped.append(DroppedKey(self.items[name], reason, note))

    def skip(self, *patterns: str) -> None:
        """Mark keys as read that have no effect in this file,
        such as those of a disabled feature.
        """
        self.read |= {
            name for name in self.items if any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    def refuse_by(self, rules: Sequence[KeyRule]) -> None:
        """Refuse all keys in use whose rule is a refusal. A model of the user's has any feature."""
        for name, item in self.items.items():
            rule = next((rule for rule in rules if rule.matches(name)), None)
            if rule is None or is_off(item.value) or item.value in rule.usual:
                continue
            if rule.fate is Refusal.RECIPE:
                self.refuse(name, rule.note)
            elif rule.fate is Refusal.MODEL and not self.own_model:
                self.refused.append(self.unsupported_model(name, rule.note))

    def drop_rest(self, rules: Sequence[KeyRule]) -> None:
        """Record all unread keys as not carried over, by the first matching rule or as unknown;
        pass over options that are not in use.
        """
        for name in [name for name in self.items if name not in self.read]:
            value = self.items[name].value
            rule = next((rule for rule in rules if rule.matches(name)), None)
            is_one = name.endswith(DEGREES) and value in (1, "1")
            if value is None or (rule and (is_off(value) or is_one or value in rule.usual)):
                self.read.add(name)
            elif rule is None:
                self.drop(name, DropReason.UNKNOWN, f"unknown key of {self.framework}")
            elif isinstance(rule.fate, DropReason):
                self.drop(name, rule.fate, rule.note)
            else:  # a feature of the user's own model
                self.drop(name, DropReason.NEEDLESS)

    # -- the result

    @staticmethod
    def run_name(text: str) -> str:
        """Convert text to a valid ``run.name``."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or "imported"

    def nested(self) -> dict[str, Any]:
        """Return the tree as nested sections."""
        tree: dict[str, Any] = {}
        for key, value in self.tree.items():
            *tables, last = key.split(".")
            table = tree
            for name in tables:
                table = table.setdefault(name, {})
            table[last] = value
        return tree


class Row(NamedTuple):
    """Row of a table of keys of a file that become one key here."""

    key: str
    to: str
    """Dotted meshwright key."""
    read: Callable[..., Any]
    """Method of Translation that reads the value: ``Translation.number`` and its like."""
    default: Any = None
    """Value of the framework where the file has none; None: the key here keeps its own default."""
    convert: Callable[[Any], Any] | None = None
    unless: Any = None
    """Converted value that is the default here, and not written."""
