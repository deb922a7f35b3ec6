"""What is known while a foreign configuration is read: its keys, ours as far as they are put, and what was decided.

Item per key of the file --read--> Draft.put(our key) --> tree ----> config.change --> RunConfig
                         --leave-> left, with the reason
                         --neither--> left, as unknown: no key of the file gets lost in silence
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from meshwright.config.keys import shown
from meshwright.config.secrets import names_a_secret
from meshwright.errors import ConfigError


class Why(StrEnum):
    """Why a key did not come along."""

    BY_HAND = "to be said by hand"
    DIFFERS = "differs in meaning"
    NONE = "no counterpart"
    NEEDLESS = "not needed here"


class Item(NamedTuple):
    """One key of the file."""

    key: str
    """As it is written there."""
    value: Any
    place: str
    """``file:line``."""

    @property
    def written(self) -> str:
        """``key = value``, a flag with its words; the value of what looks like a secret is not told."""
        if names_a_secret(self.key):
            return f"{self.key} = (not shown)"
        if not self.key.startswith("-") and not self.key.endswith(".py"):
            return f"{self.key} = {shown(self.value)}"
        words = self.value if isinstance(self.value, list) else [] if self.value is True else [self.value]
        return " ".join(map(str, [self.key, *words]))


class Left(NamedTuple):
    """A key that was not carried over, or not as it was meant."""

    item: Item
    why: Why
    said: str


class Rest(NamedTuple):
    """What becomes of keys that have no reader of their own: a row of a table."""

    pattern: str
    why: Why
    said: str = ""


OFF = (None, False, "", "none", "disabled", "off")
"""Values of an option that is not in use: there is nothing to carry over. Empty lists and tables are such, too."""


ALONE = ("_degree", "_size", "-size")
"""Ends of degrees: 1 is none."""


def is_off(value: Any) -> bool:
    """Whether an option of this value does nothing."""
    return value in ([], {}, 0) or any(value is each or (value == each and isinstance(each, str)) for each in OFF)


class Draft:
    """A configuration in the making. Names of theirs are canonical: where a key has moved, the newest place."""

    def __init__(self, items: Mapping[str, Item], framework: str, *, own_model: bool = False) -> None:
        self.items = dict(items)
        self.framework = framework
        self.own_model = own_model
        """The command line names model.builder: theirs is not looked at."""
        self.read: set[str] = set()
        self.tree: dict[str, Any] = {}
        """Our dotted key -> value."""
        self.decided: list[str] = []
        self.assumed: list[str] = []
        """Keys that the file does not have, at their framework's default."""
        self.left: list[Left] = []

    # -- theirs

    def given(self, name: str) -> bool:
        """Whether the file sets it; ``null`` does not."""
        return name in self.items and self.items[name].value is not None

    def value(self, name: str, default: Any = None) -> Any:
        """What the file says, or the default, which is noted when it is of any use."""
        if self.given(name):
            self.read.add(name)
            return self.items[name].value
        if name in self.items:
            self.read.add(name)
        if default is not None and not is_off(default) and not (type(default) is int and default in (1, -1)):
            note = f"{name} = {shown(default)}"
            self.assumed += [] if note in self.assumed else [note]
        return default

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number; ``1e3`` is one."""
        found = self.number(name, default)
        if found is None:
            return None
        if found != int(found):
            raise self._wrong(name, "a whole number")
        return int(found)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; YAML 1.1 takes ``3e-4`` for text."""
        found = self.value(name, default)
        if found is None:
            return None
        if isinstance(found, bool):
            raise self._wrong(name, "a number")
        try:
            value = float(found)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, "a number") from None
        if not math.isfinite(value):
            raise self._wrong(name, "a number")
        return value

    def count(self, name: str, default: int, *, most: int = 10**9) -> int:
        """A whole number from 1 up."""
        found = self.integer(name, default)
        assert found is not None
        if not 1 <= found <= most:
            raise self._wrong(name, f"a whole number from 1 to {most}")
        return found

    def maybe_count(self, name: str) -> int | None:
        """A whole number from 1 up, if the file has one."""
        return self.count(name, 1) if self.given(name) else None

    def truth(self, name: str, default: bool = False) -> bool:
        """true or false; a flag that stands alone is true."""
        found = self.value(name, default)
        if isinstance(found, str) and (found.lower() in ("true", "false") or found.startswith("$")):
            return found.lower() != "false"
        if not isinstance(found, bool):
            raise self._wrong(name, "true or false")
        return found

    def text(self, name: str, default: str | None = None) -> str | None:
        """One word or sentence; numbers are taken as they are written."""
        found = self.value(name, default)
        if isinstance(found, dict | list | bool):
            raise self._wrong(name, "text")
        return None if found is None else str(found)

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        if str(self.items[name].value).startswith("$"):
            return ConfigError(f"{self.place(name)}: the file does not define it: put its value in its place")
        return ConfigError(f"{self.place(name)}: {self.framework} has {wanted} here; mend it in the file")

    def place(self, name: str) -> str:
        """``file:line: key = value`` for an error; of a key that is not given, that it stands at its default."""
        if name not in self.items:
            return f"{name} (at {self.framework}'s default)"
        item = self.items[name]
        return f"{item.place}: {item.written}"

    def no_such_model(self, name: str, what: str) -> ConfigError:
        """The refusal of a model that there is not here."""
        return ConfigError(
            f"{self.place(name)}: there is no model with {what} here; bring one of your own with "
            f"--model.builder=module:function and its --model.options.*"
        )

    @staticmethod
    def named(text: str) -> str:
        """Text as a name that ``run.name`` takes."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or "imported"

    # -- ours

    def put(self, key: str, value: Any, why: str = "") -> None:
        """Set a key of ours. ``why``: where it is not plain from the file."""
        self.tree[key] = value
        if why:
            self.decided.append(f"{key} = {shown(value)}: {why}")

    def decide(self, said: str) -> None:
        """Something to be known that is not one key's."""
        self.decided.append(said)

    def leave(self, name: str, why: Why, said: str = "") -> None:
        """Say that a key of theirs stays behind, if the file has it."""
        if name in self.items:
            self.read.add(name)
            self.left.append(Left(self.items[name], why, said))

    def skip(self, *patterns: str) -> None:
        """Keys that have no effect in this file, such as those of a feature that is switched off."""
        self.read |= {name for name in self.items if any(fnmatchcase(name, pattern) for pattern in patterns)}

    def leave_rest(self, rest: Sequence[Rest]) -> None:
        """All keys that nobody has read: by the first row that fits, or as unknown."""
        for name in [name for name in self.items if name not in self.read]:
            row = next((row for row in rest if fnmatchcase(name, row.pattern)), None)
            if row is None and self.items[name].value is not None:
                self.leave(name, Why.NONE, f"not a key of {self.framework} that is known here")
            elif (
                row is None
                or is_off(self.items[name].value)
                or (name.endswith(ALONE) and self.items[name].value in (1, "1"))
            ):
                self.read.add(name)
            else:
                self.leave(name, row.why, row.said)

    def nested(self) -> dict[str, Any]:
        """The tree as sections."""
        found: dict[str, Any] = {}
        for key, value in self.tree.items():
            *tables, last = key.split(".")
            table = found
            for name in tables:
                table = table.setdefault(name, {})
            table[last] = value
        return found
