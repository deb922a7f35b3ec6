"""Patterns of names of modules, parameters and layers: one language for all keys that name some.

    "block*.mlp.up"     * any letters, dots included
    "block?.mlp"        ? one letter
    "block[0-3].mlp"    [..] one of these letters

As in ``fnmatch``, with upper and lower case apart. A pattern that matches nothing is an error: it
is a typo, and the feature would be left out in silence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import translate
from typing import TypeVar

from meshwright.errors import ModelError

V = TypeVar("V")
MOST_NEAR = 3
"""Names that a message suggests."""


@functools.cache
def _compiled(pattern: str) -> Callable[[str], object]:
    # fnmatch itself keeps 256 patterns: a deep model with recompute has more
    return re.compile(translate(pattern)).match


def fits(name: str, *patterns: str) -> bool:
    """Return whether one of the patterns matches a name."""
    return any(isinstance(each, str) and _compiled(each)(name) is not None for each in patterns)


def fits_around(name: str, *patterns: str) -> bool:
    """Return whether a pattern matches a module's name or that of a module around it."""
    return any(fits(each, *patterns) for each in (*enclosing(name), name))


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that some pattern matches, in their order."""
    patterns = tuple(patterns)
    return [name for name in names if fits(name, *patterns)]


def entry_for(name: str, entries: Mapping[str, V]) -> V | None:
    """Return the value of the first pattern of ``entries`` that matches a name; None: no match."""
    return next((value for pattern, value in entries.items() if fits(name, pattern)), None)


def entries_for(name: str, entries: Mapping[str, V]) -> list[V]:
    """Return the values of all patterns of ``entries`` that match a name, in their order."""
    return [value for pattern, value in entries.items() if fits(name, pattern)]


def enclosing(name: str) -> list[str]:
    """Return the names of the modules around a module or parameter, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """Check that each pattern matches a name.

    Args:
        key: the configuration key, or the model's attribute, that holds the patterns.
        what: the word for what the names are of, such as "layer".

    Raises:
        ModelError: the first pattern that matches none.
    """
    for error in unmatched(key, patterns, names, what):
        raise error


def unmatched(
    key: str, patterns: Iterable[str], names: Sequence[str], what: str
) -> list[ModelError]:
    """Return an error for each pattern that matches no name; see :func:`check_patterns`."""
    return [
        ModelError(
            "MW-PLACEMENT-001",
            f"{key}: {pattern!r} matches no {what} of the model; {_hint(str(pattern), names)}",
        )
        for pattern in patterns
        if not any(fits(name, pattern) for name in names)
    ]


def _hint(pattern: str, names: Iterable[str]) -> str:
    """Return names near a pattern, or the first ones; one for blocks that differ by a number."""
    first_of: dict[str, str] = {}
    for name in names:
        first_of.setdefault(_without_numbers(name), name)
    close = get_close_matches(_without_numbers(pattern), first_of, MOST_NEAR, cutoff=0.4)
    if close:
        return f"near names: {', '.join(first_of[each] for each in close)}"
    return f"they are {', '.join(list(first_of.values())[:5])}, ..."


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)
