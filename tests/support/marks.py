"""Marks of rows that take long, so that ``make test`` runs a function with its other rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

long_row = partial(pytest.param, marks=pytest.mark.long)
"""``pytest.param`` for a row of ``make long``."""
torture_row = partial(pytest.param, marks=pytest.mark.torture)
"""``pytest.param`` for a row of ``make torture``."""
all_layouts_row = partial(pytest.param, marks=pytest.mark.all_layouts)
"""``pytest.param`` for a row of ``make verify-all``."""


def marked_rows(mark: str, *ids: str) -> Any:
    """Return a decorator that gives ``mark`` to the rows with these ids (the words in brackets).

    For rows that are computed or are products of several ``parametrize``.
    """
    return pytest.mark.rows(mark, ids)


def mark_all_rows_but(mark: str, *ids: str) -> Any:
    """Return a decorator that gives ``mark`` to all rows except those with these ids."""
    return pytest.mark.all_rows_but(mark, ids)


def mark_rows(items: list[pytest.Item]) -> set[str]:
    """Give items the marks that ``marked_rows`` and its like name.

    Return the named ids that none of the items has.
    """
    named = set()
    for item in items:
        function, _, item_row = item.nodeid.removesuffix("]").partition("[")
        for kind in ("rows", "all_rows_but"):
            for mark, rows in (marker.args for marker in item.iter_markers(kind)):
                named |= {f"{function}[{row}]" for row in rows}
                if (item_row in rows) == (kind == "rows"):
                    item.add_marker(mark)
    return named - {item.nodeid for item in items}
