"""Which nodes reach which others at all: one connection for each pair, before anything that would hang without it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from framework.doctor.judge import Finding
from framework.doctor.links import MOST_ROUNDS, rounds

CONNECT_S = 5.0
"""A link on which a connection takes longer is dead."""


def unreachable(store: Any, rank: int, world_size: int, limit_s: float) -> list[tuple[str, str]]:
    """Pairs of nodes of which the first cannot connect to the second; the same for every rank. Every rank calls it.

    The first rank of each node listens, and tries those of other nodes in rounds, as their links are measured later.
    """
    nodes = [store.get(f"came/{each}").decode() for each in range(world_size)]
    names, mine = list(dict.fromkeys(nodes)), nodes[rank]
    if len(names) == 1:
        return []
    patience = timedelta(seconds=limit_s)
    if nodes.index(mine) == rank:
        with _listening() as address:
            store.set(f"listens/{mine}", address)
            tried = [pair for pairs in list(rounds(names))[:MOST_ROUNDS] for pair in pairs if mine in pair]
            others = [b if a == mine else a for a, b in tried]
            store.wait([f"listens/{other}" for other in others], patience)
            addresses = {other: store.get(f"listens/{other}").decode() for other in others}
            failed = [other for other, address in addresses.items() if not _connects(address)]
            store.set(f"failed/{mine}", ",".join(failed))
            store.wait([f"failed/{name}" for name in names], patience)  # until then others try to reach this one
    store.wait([f"failed/{name}" for name in names], patience)
    failures = {name: store.get(f"failed/{name}").decode() for name in names}
    return [(name, other) for name, text in failures.items() for other in text.split(",") if other]


def judge_reach(pairs: Sequence[tuple[str, str]]) -> list[Finding]:
    """What to say of them. A node that is in several pairs is left out; of one pair nobody can tell whose it is."""
    links = list(dict.fromkeys(tuple(sorted(pair)) for pair in pairs))
    often = Counter(node for link in links for node in link)
    named = {node for node, times in often.items() if times > 1 and times == max(often.values())}
    found = []
    for node in sorted(named):
        others = [a if b == node else b for a, b in links if node in (a, b)]
        found.append(Finding(f"the link of {node} is dead: no connection with {', '.join(others)}", (node,)))
    rest = [link for link in links if not named & set(link)]
    return [*found, *(Finding(f"the link between {a} and {b} is dead: no connection") for a, b in rest)]


@contextlib.contextmanager
def _listening() -> Any:
    """``host:port`` at which connections are taken, on the network that leads to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))  # sends nothing: asks for the route
        host = probe.getsockname()[0]
    with socket.create_server((host, 0), backlog=128) as server:
        thread = threading.Thread(target=_take, args=[server], daemon=True)
        thread.start()
        try:
            yield f"{host}:{server.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


def _take(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            return connection.recv(1) == b""  # taken, and closed
    except OSError:
        return False
