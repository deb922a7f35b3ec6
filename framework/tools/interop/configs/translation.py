"""State of the translation of a foreign configuration: its keys, the meshwright keys so far, and decisions to report.

Item per key of the file --read--> Draft.put(meshwright key) --> tree ----> config.change --> RunConfig
                         --drop--> dropped, with the reason
                         --neither-> dropped, as unknown: no key of the file is lost silently
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from meshwright.config.keys import format_value
from meshwright.config.sources import is_secret_name
from meshwright.errors import ConfigError


class DropReason(StrEnum):
    """Reason why a key was not carried over."""

    BY_HAND = "set by hand"
    DIFFERS = "differs in meaning"
    NONE = "no counterpart"
    NEEDLESS = "not needed here"


class SourceKey(NamedTuple):
    """One key of the file."""

    key: str
    """Name of the key as written in the file."""
    value: Any
    place: str
    """Location in the file, ``file:line``."""

    @property
    def written(self) -> str:
        """Text of the item: ``key = value``, or a flag with its words. Values of keys that look secret are hidden."""
        if is_secret_name(self.key):
            return f"{self.key} = (not shown)"
        if not self.key.startswith("-") and not self.key.endswith(".py"):
            return f"{self.key} = {format_value(self.value)}"
        words = self.value if isinstance(self.value, list) else [] if self.value is True else [self.value]
        return " ".join(map(str, [self.key, *words]))


class DroppedKey(NamedTuple):
    """Key that was not carried over, or only with another meaning."""

    item: SourceKey
    reason: DropReason
    note: str


class DropRule(NamedTuple):
    """Row of a table of keys without a translation: their patterns, and the reason to drop them."""

    patterns: str
    """Patterns of keys, separated by blanks."""
    reason: DropReason
    note: str = ""

    def matches(self, name: str) -> bool:
        """Return True if one of the patterns matches the key."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns.split())


TOKENIZER = "data.tokenizer, the path of a tokenizer.json; only `sample` reads it"
CORPUS = "data.train, the path of a corpus prepared by `meshwright data`"
PRETRAINED = "convert the weights first, with `meshwright convert`"
TRACING = "tracking.trace_step measures one step of each start; `meshwright draw RUN` shows it"
METRICS = "metrics.jsonl has every step; tracking.wandb sends it to Weights & Biases"
BALANCE = "pipeline.balance, as numbers of layers"
FLOAT16 = 'float16, which needs loss scaling, is not supported: train.dtype = "bfloat16"'
HALVES = "halves are rotated, not neighbours: it only matters for imported weights"


OFF = (None, False, "", "none", "disabled", "off")
"""Values of an option that is not in use, so that nothing is lost. 0, empty lists and empty tables count as well."""


DEGREES = ("_degree", "_size", "-size")
"""Suffixes of keys that hold a parallel degree, for which 1 means not in use."""


def is_off(value: Any) -> bool:
    """Return True if an option with this value is not in use."""
    return value in ([], {}, 0) or any(value is each or (value == each and isinstance(each, str)) for each in OFF)


class Draft:
    """Configuration under translation. Keys of the file have canonical names: the newest one if a key was moved."""

    def __init__(self, items: Mapping[str, SourceKey], framework: str, *, own_model: bool = False) -> None:
        self.items = dict(items)
        self.framework = framework
        self.own_model = own_model
        """True if the command line sets model.builder; the model of the file is then ignored."""
        self.read: set[str] = set()
        self.tree: dict[str, Any] = {}
        """Dotted meshwright key -> value."""
        self.decided: list[str] = []
        self.assumed: list[str] = []
        """Keys missing from the file, with the defaults of their framework: ``key = value``."""
        self.dropped: list[DroppedKey] = []

    # -- keys of the file

    def has(self, name: str) -> bool:
        """Return True if the file sets a key; ``null`` does not count."""
        return name in self.items and self.items[name].value is not None

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value in the file, or the default. A default that has an effect is recorded in ``assumed``."""
        if self.has(name):
            self.read.add(name)
            return self.items[name].value
        if name in self.items:
            self.read.add(name)
        if default is not None and not is_off(default) and not (type(default) is int and default in (1, -1)):
            note = f"{name} = {format_value(default)}"
            self.assumed += [] if note in self.assumed else [note]
        return default

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number; ``1e3`` is accepted."""
        raw = self.number(name, default)
        if raw is None:
            return None
        if raw != int(raw):
            raise self._wrong(name, "a whole number")
        return int(raw)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number, also from text, since YAML 1.1 reads ``3e-4`` as text."""
        raw = self.value(name, default)
        if raw is None:
            return None
        if isinstance(raw, bool):
            raise self._wrong(name, "a number")
        try:
            value = float(raw)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, "a number") from None
        if not math.isfinite(value):
            raise self._wrong(name, "a number")
        return value

    def count(self, name: str, default: int, *, maximum: int = 10**9) -> int:
        """Return a whole number from 1 to ``maximum``."""
        raw = self.integer(name, default)
        assert raw is not None
        if not 1 <= raw <= maximum:
            raise self._wrong(name, f"a whole number from 1 to {maximum}")
        return raw

    def optional_count(self, name: str) -> int | None:
        """Return a whole number from 1 up; None if the file has none."""
        return self.count(name, 1) if self.has(name) else None

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean; a flag without a value is true."""
        raw = self.value(name, default)
        if isinstance(raw, str) and (raw.lower() in ("true", "false") or raw.startswith("$")):
            return raw.lower() != "false"
        if not isinstance(raw, bool):
            raise self._wrong(name, "true or false")
        return raw

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return text; numbers are converted to text."""
        raw = self.value(name, default)
        if isinstance(raw, dict | list | bool):
            raise self._wrong(name, "text")
        return None if raw is None else str(raw)

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        if str(self.items[name].value).startswith("$"):
            return ConfigError(
                "MW-INTEROP-028",
                f"{self.place(name)}: the file does not define this variable: write its value there instead",
            )
        return ConfigError(
            "MW-INTEROP-029", f"{self.place(name)}: {self.framework} expects {wanted} here: correct the file"
        )

    def place(self, name: str) -> str:
        """Return ``file:line: key = value`` for an error message, or a note that a missing key has its default."""
        if name not in self.items:
            return f"{name} (at {self.framework}'s default)"
        item = self.items[name]
        return f"{item.place}: {item.written}"

    def unsupported_model(self, name: str, what: str) -> ConfigError:
        """Build the error for a model that meshwright does not have."""
        return ConfigError(
            "MW-INTEROP-030",
            f"{self.place(name)}: meshwright has no model with {what}; provide one with "
            f"--model.builder=module:function and its --model.options.*",
        )

    @staticmethod
    def run_name(text: str) -> str:
        """Convert text to a valid ``run.name``."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or "imported"

    # -- meshwright keys

    def put(self, key: str, value: Any, reason: str = "") -> None:
        """Set a meshwright key; no effect if the value is None.

        ``reason``: for the report, if the value is not obvious from the file.
        """
        if value is None:
            return
        self.tree[key] = value
        if reason:
            self.decided.append(f"{key} = {format_value(value)}: {reason}")

    def decide(self, note: str) -> None:
        """Append a line to the report that belongs to no single key."""
        self.decided.append(note)

    def drop(self, name: str, reason: DropReason, note: str = "") -> None:
        """Record that a key of the file is not carried over; no effect if the file does not have it."""
        if name in self.items:
            self.read.add(name)
            self.dropped.append(DroppedKey(self.items[name], reason, note))

    def skip(self, *patterns: str) -> None:
        """Mark keys as read that have no effect in this file, such as those of a disabled feature."""
        self.read |= {name for name in self.items if any(fnmatchcase(name, pattern) for pattern in patterns)}

    def drop_rest(self, rest: Sequence[DropRule]) -> None:
        """Record all unread keys as not carried over, by the first matching row or as unknown; skip unused options."""
        for name in [name for name in self.items if name not in self.read]:
            row = next((row for row in rest if row.matches(name)), None)
            if row is None and self.items[name].value is not None:
                self.drop(name, DropReason.NONE, f"unknown key of {self.framework}")
            elif (
                row is None
                or is_off(self.items[name].value)
                or (name.endswith(DEGREES) and self.items[name].value in (1, "1"))
            ):
                self.read.add(name)
            else:
                self.drop(name, row.reason, row.note)

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
