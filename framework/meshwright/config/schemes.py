"""Schemes of ``model.builder``: ``SCHEME:PLACE`` instead of a function, such as ``hf:DIRECTORY``. No torch.

A package adds one by an entry point of the group ``meshwright.schemes``: the scheme's name, and a module with

    builder(place) -> function that builds the model        vocabulary(place) -> its vocabulary size, or None
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

GROUP = "meshwright.schemes"
DISTRIBUTION = "meshwright"


class Scheme(NamedTuple):
    """Builder ``SCHEME:PLACE`` of a configuration."""

    place: str
    module: str
    """Module with the scheme's functions ``builder`` and ``vocabulary``. It is not imported here."""


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name not in found or _is_ours(entry):  # of two with one name ours, or the first
            found[entry.name] = entry
    return found


def _is_ours(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == DISTRIBUTION


def scheme_of(builder: str) -> Scheme | None:
    """Return the scheme of a builder; None for a function ``package.module:function``."""
    name, _, place = builder.partition(":")
    if "." in name or name not in _entries():
        return None
    return Scheme(place, _entries()[name].value)


def is_own_scheme(builder: str) -> bool:
    """Return whether a builder's scheme is of this distribution. Such a one runs no code of its place."""
    return scheme_of(builder) is not None and _is_ours(_entries()[builder.partition(":")[0]])


def is_scheme(builder: str) -> bool:
    """Return whether a builder has the form of a scheme, registered or not: ``hf:`` always has."""
    return builder.startswith("hf:") or scheme_of(builder) is not None
