"""Keys of a foreign file, reasons not to carry them over,
and notes that apply to several frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from meshwright.config.keys import format_value
from meshwright.config.sources import find_secrets
from meshwright.system.secret_text import hide_secrets, is_secret_name


class DropReason(StrEnum):
    """Reason why a key was not carried over."""

    UNKNOWN = "unknown here, and may change the training"
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
    text: str = ""
    """Text to show in place of ``key = value``, where the file has another form;
    never of a key that looks secret.
    """

    @property
    def written(self) -> str:
        """Text of the item: ``key = value``, or a flag with its words.
        Values of keys that look secret are hidden.
        """
        if is_secret_name(self.key) or any(find_secrets(self.value, ("", ""))):
            return f"{self.key} = (not shown)"
        if self.text:
            return hide_secrets(self.text)
        if not self.key.startswith("-") and not self.key.endswith(".py"):
            return f"{self.key} = {format_value(self.value)}"
        words = (
            self.value
            if isinstance(self.value, list)
            else []
            if self.value is True
            else [self.value]
        )
        return hide_secrets(" ".join(map(str, [self.key, *words])))


class DroppedKey(NamedTuple):
    """Key that was not carried over, or only with another meaning."""

    item: SourceKey
    reason: DropReason
    note: str


class Refusal(Enum):
    """Kind of error for a key that is in use and cannot be imported."""

    RECIPE = "the run would train something else; ``--without KEY`` imports the file without it"
    MODEL = "no builder makes such a model; ignored with ``--model.builder``"


class KeyRule(NamedTuple):
    """Row of a table of keys without a translation: their patterns, and what becomes of them.

    A key of an option that is not in use loses nothing, and is passed over.
    """

    patterns: str
    """Patterns of keys, separated by blanks."""
    fate: DropReason | Refusal
    note: str = ""
    usual: tuple[Any, ...] = ()
    """Further values with which the key changes nothing."""

    def matches(self, name: str) -> bool:
        """Return True if one of the patterns matches the key."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns.split())


def rules(fate: DropReason | Refusal, notes: Mapping[str, str]) -> tuple[KeyRule, ...]:
    """Return the rules of one fate. ``notes``: patterns -> note."""
    return tuple(KeyRule(patterns, fate, note) for patterns, note in notes.items())


TOKENIZER = "data.tokenizer, the path of a tokenizer.json; only `sample` reads it"
PREPARED = "{}; here the path of a corpus prepared by `meshwright data`"
CORPUS = "data.train, the path of a corpus prepared by `meshwright data`"
PRETRAINED = (
    "the run would start from random weights: first convert these with `meshwright convert`, whose"
    " run directory `meshwright train` continues"
)
TRACING = "tracking.trace_step measures one step of each start; `meshwright draw RUN` shows it"
METRICS = "metrics.jsonl has every step; tracking.wandb sends it to Weights & Biases"
FLOAT8 = (
    'train.linear = "fp8", with one scale per row: other numbers than with other recipes;'
    " train.fp8_keep"
)
BALANCE = "pipeline.balance, as numbers of layers"
SPECTRAL_MUP = (
    "spectral muP scales by out / in of each matrix, and muP here (model.options.mup_base_size) by"
    " the width: the same learning rate would train another model"
)
DEPTH_INIT = (
    "as torchtitan's depth_init; it draws embedding (std 1), head (1 / sqrt(dim)) and up projection"
    " otherwise"
)
HALVES = "halves are rotated, not neighbours: it only matters for imported weights"


OFF = ("", "0", "none", "false", "disabled", "off")
"""Values of an option that is not in use, in lower case; None, False, 0, empty lists and tables
count as well.
"""
DEGREES = ("_degree", "_size", "-size")
"""Suffixes of keys that hold a parallel degree, for which 1 means not in use."""


def is_off(value: Any) -> bool:
    """Return True if an option with this value is not in use."""
    if isinstance(value, str):
        return value.lower() in OFF
    return value is None or value in (0, [], {})


def is_variable(value: Any) -> bool:
    """Return True for text with a variable, such as ``${DATA_PATH}``,
    that the file does not define.
    """
    return isinstance(value, str) and ("$" in value or "`" in value)
