"""Hints for messages: the valid word closest to the given one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def close_word(word: str, possible: Sequence[str]) -> str:
    """Return the hint for an unknown word: the closest of ``possible``; "" if none is close."""
    matches = difflib.get_close_matches(word, possible, 1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
