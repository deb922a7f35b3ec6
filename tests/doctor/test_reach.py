"""Links that take no connection: whose they are."""

from __future__ import annotations

import pytest

from framework.doctor.reach import _connects, _listening, judge_reach


@pytest.mark.parametrize(
    ("pairs", "said", "nodes"),
    [
        ([], [], []),
        ([("h2", "h3"), ("h3", "h2")], ["the link between h2 and h3 is dead: no connection"], [()]),
        ([("h2", "h1"), ("h3", "h2")], ["the link of h2 is dead: no connection with h1, h3"], [("h2",)]),
        (
            [("h1", "h2"), ("h2", "h3"), ("h2", "h4"), ("h5", "h6")],
            [
                "the link of h2 is dead: no connection with h1, h3, h4",
                "the link between h5 and h6 is dead: no connection",
            ],
            [("h2",), ()],
        ),
    ],
)
def test_who_is_named(pairs: list[tuple[str, str]], said: list[str], nodes: list[tuple[str, ...]]) -> None:
    found = judge_reach(pairs)
    assert [each.text for each in found] == said and [each.nodes for each in found] == nodes


def test_a_connection_is_taken_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with _listening() as address:
        assert _connects(address) and _connects(address)
    assert not _connects(address)
