"""Hints for messages: the valid word, or the module name, closest to the given one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def close_word(word: str, possible: Sequence[str]) -> str:
    """Return the hint for an unknown word: the closest of ``possible``; "" if none is close."""
    found = difflib.get_close_matches(word, possible, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the hint for the message "names no module": the name closest to the pattern."""
    found = difflib.get_close_matches(pattern.replace("*", "0"), list(names), 1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; its modules are {', '.join(list(names)[:8])}, ..."
