"""Checks of errors by their stable codes."""

from __future__ import annotations

from collections.abc import Callable


def has_code(*codes: str) -> Callable[[BaseException], bool]:
    """Return a check for ``pytest.raises(..., check=...)``: the error has one of these codes."""

    def check(error: BaseException) -> bool:
        found = getattr(error, "code", None)
        assert found in codes, f"the code of the error is {found}, not {' or '.join(codes)}: {error}"
        return True

    return check
