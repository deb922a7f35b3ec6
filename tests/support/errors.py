"""Checks of errors by their stable codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright_launch.pool import RankError


def has_code(*codes: str) -> Callable[[BaseException], bool]:
    """Return a check for ``pytest.raises(..., check=...)``: the error has one of these codes."""

    def check(error: BaseException) -> bool:
        found = getattr(error, "code", None)
        assert found in codes, (
            f"the code of the error is {found}, not {' or '.join(codes)}: {error}"
        )
        return True

    return check


@contextmanager
def raises(code: str | tuple[str, ...], *values: object) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Check that the block raises the error with ``code`` (or one of several), and that its
    message has ``values``: names, numbers, places.

    A code belongs to one class of errors and one text (tests/golden/errors), so that neither the
    class nor the text is repeated here. The error of another rank has its code in the text.
    """
    codes = (code,) if isinstance(code, str) else code
    with pytest.raises((UserError, RankError)) as caught:
        yield caught
    text = str(caught.value)
    if isinstance(caught.value, RankError):
        assert any(f"[{each}]" in text for each in codes), f"not {codes}: {text}"
    else:
        assert caught.value.code in codes, f"not {codes}: {text}"
    missing = [value for value in values if not has_value(text, str(value))]
    assert not missing, f"{missing} not in: {text}"


def has_value(text: str, value: str) -> bool:
    """Return whether ``text`` has ``value``, and not as a part of a longer word or number."""
    before = r"(?<!\w)" if value[:1].isalnum() else ""
    after = r"(?!\w)" if value[-1:].isalnum() else ""
    return re.search(before + re.escape(value) + after, text) is not None
