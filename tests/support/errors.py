"""Checks of errors by their stable codes."""

from __future__ import annotations

from collections.abc import Callable


def has_code(*codes: str) -> Callable[[BaseException], bool]:
    """Return a check for ``pytest.raises(..., check=...)``: the error has one of these codes."""
    return lambda error: getattr(error, "code", None) in codes
