"""Marks of single rows: every named row exists, the others keep their marks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.marks import mark_all_rows_but, mark_rows, marked_rows


def items_of(decorator: Any, *rows: str) -> list[Any]:
    """Return what pytest collects of a test with these rows, as far as ``mark_rows`` asks."""
    items = []
    for row in rows:
        given: list[str] = []
        item = SimpleNamespace(
            nodeid=f"tests/test_x.py::test_x[{row}]",
            iter_markers=lambda name: [decorator.mark] if decorator.mark.name == name else [],
            add_marker=given.append,
            given=given,
        )
        items.append(item)
    return items


def test_named_rows_are_marked() -> None:
    items = items_of(marked_rows("long", "b-2"), "a-1", "b-2")
    assert mark_rows(items) == set()
    assert [item.given for item in items] == [[], ["long"]]


def test_all_but_the_named_rows_are_marked() -> None:
    items = items_of(mark_all_rows_but("torture", "b[0]"), "a-1", "b[0]")
    assert mark_rows(items) == set()
    assert [item.given for item in items] == [["torture"], []]


def test_a_row_that_is_gone_is_returned() -> None:
    """Its test would otherwise come back into ``make test`` under another id."""
    for decorator in (marked_rows("long", "c"), mark_all_rows_but("long", "c")):
        assert mark_rows(items_of(decorator, "a", "b")) == {"tests/test_x.py::test_x[c]"}
