"""Links that take no connection: whose they are."""

from __future__ import annotations

import itertools
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.doctor import connectivity
from meshwright.doctor.connectivity import (
    Reachability,
    _connects,
    _listening,
    judge_reach,
    try_links,
)


@pytest.mark.parametrize(
    ("pairs", "said", "nodes"),
    [
        ([], [], []),
        (
            [("h2", "h1"), ("h1", "h3"), ("h2", "h3")],
            [
                "most nodes do not reach each other (h1 - h2, h1 - h3, h2 - h3): ports between"
                " nodes must be open"
            ],
            [()],
        ),
        ([("h2", "h3"), ("h3", "h2")], ["the link between h2 and h3 is dead: no connection"], [()]),
        (
            [("h2", "h1"), ("h3", "h2")],
            ["the link of h2 is dead: no connection with h1, h3"],
            [("h2",)],
        ),
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
def test_who_is_named(
    pairs: list[tuple[str, str]], said: list[str], nodes: list[tuple[str, ...]]
) -> None:
    found = judge_reach(
        Reachability(pairs, [], [f"h{number}" for number in range(1, 4 if len(pairs) == 3 else 8)])
    )
    assert [each.text for each in found] == said and [each.nodes for each in found] == nodes


def test_two_bad_nodes_one_of_which_is_a_little_better() -> None:
    """h1 reaches none of six, h2 none of five."""
    names = [f"h{number}" for number in range(1, 9)]
    pairs = [("h1", name) for name in names[2:]] + [("h2", name) for name in names[3:]]
    assert [each.nodes for each in judge_reach(Reachability(pairs, [], names))] == [
        ("h1",),
        ("h2",),
    ]


def test_a_node_that_came_and_does_not_answer() -> None:
    (found,) = judge_reach(Reachability([], ["h3"], ["h1", "h2", "h3"]))
    assert found == ("h3 joined the rendezvous, but does not answer", ("h3",))


def visited(monkeypatch: pytest.MonkeyPatch, silent: tuple[int, ...] = ()) -> Reachability:
    """Three nodes of two ranks each, as threads; ranks of these nodes come and say no more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stores = [
        dist.TCPStore("127.0.0.1", port, 6, rank == 0, wait_for_workers=False) for rank in range(6)
    ]
    names = threading.local()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(connectivity, "own_address", lambda towards: "127.0.0.1")
    monkeypatch.setattr(connectivity, "node_name", lambda: names.name)
    found: list[Reachability] = []

    def rank(number: int) -> None:
        names.name = f"h{number // 2}"
        stores[number].set(f"came/{number}", names.name)
        if number // 2 not in silent:
            found.append(try_links(stores[number], number, number % 2, 6, 1.0 if silent else 20.0))

    stores[0].set("came/0", "h0")
    threads = [threading.Thread(target=rank, args=[number]) for number in reversed(range(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 - 2 * len(silent) and all(each == found[0] for each in found)
    return found[0]


def test_all_nodes_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visited(monkeypatch) == Reachability([], [], ["h0", "h1", "h2"])


@pytest.mark.long
def test_who_stays_silent_is_told_from_who_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connectivity, "ATTEMPTS_TIMEOUT", timedelta(seconds=2))
    assert visited(monkeypatch, silent=(1,)) == Reachability([], ["h1"], ["h0", "h1", "h2"])


def test_every_dead_link_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "_connects", lambda address: False)
    pairs = visited(monkeypatch).pairs
    assert {frozenset(pair) for pair in pairs} == {
        frozenset(pair) for pair in itertools.combinations(["h0", "h1", "h2"], 2)
    }


def test_a_connection_is_taken_while_somebody_listens() -> None:
    with _listening("127.0.0.1") as address:
        assert _connects(address) and _connects(address)
    assert not _connects(address)
    with _listening(None) as address:
        assert address == "", "nobody knows it: nobody tries"
