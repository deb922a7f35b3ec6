"""Reachability between nodes: one connection per pair,
before anything that would hang on a dead link.

first rank of each node     listens, and connects to other nodes in rounds, in the same order as links.measure_links
rank 0                      collects the failures; all other ranks wait for the result
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from meshwright.doctor.findings import Finding
from meshwright.doctor.links import MAX_ROUNDS, rounds
from meshwright.errors import CommunicationError
from meshwright.system.host import node_name, own_address
from meshwright.terminal.output import abridge

CONNECT_S = 5.0
"""Seconds after which a connection attempt counts as failed and the link as dead."""
ATTEMPTS_TIMEOUT = timedelta(seconds=CONNECT_S * MAX_ROUNDS)
"""Time that a node needs for its attempts if it reaches no other node."""


class Reachability(NamedTuple):
    """Result of the connection attempts between all nodes."""

    pairs: list[tuple[str, str]]
    """Pairs of nodes; the first cannot connect to the second."""
    silent: list[str]
    """Nodes that joined the rendezvous but did not report a result."""
    nodes: list[str]
    """All nodes."""


def try_links(
    store: Any, rank: int, local_rank: int, world_size: int, limit_s: float
) -> Reachability:
    """Connect the first ranks of the nodes pairwise, in at most ``MAX_ROUNDS`` rounds,
    and return the result.

    Every rank calls it and gets the same result; blocks. Results are exchanged through ``store``,
    the store of the rendezvous.

    Raises:
        CommunicationError: rank 0 has left.
    """
    timeout = timedelta(seconds=limit_s)
    try:
        if rank == 0:
            arrived = store.multi_get([f"came/{each}" for each in range(world_size)])
            store.set("nodes", json.dumps(list(dict.fromkeys(name.decode() for name in arrived))))
        if local_rank == 0:
            with _listening(own_address(os.environ["MASTER_ADDR"])) as address:
                _connect_to_others(store, address, timeout)
                return _collect_results(store, rank, timeout)
        return _collect_results(store, rank, timeout)
    except RuntimeError as error:
        raise CommunicationError(
            "MW-DOCTOR-001", f"rank {rank}: the test of node links failed: {error}"
        ) from None


def _connect_to_others(store: Any, address: str, timeout: timedelta) -> None:
    mine, names = node_name(), json.loads(store.get("nodes"))
    store.set(f"listens/{mine}", address)
    attempts = itertools.chain.from_iterable(itertools.islice(rounds(names), MAX_ROUNDS))
    others = [b if a == mine else a for a, b in attempts if mine in (a, b)]
    # a node that does not listen in time will not report a result either
    with contextlib.suppress(RuntimeError):
        store.wait([f"listens/{other}" for other in others], timeout)
    addresses = {
        other: store.get(f"listens/{other}").decode()
        for other in others
        if store.check([f"listens/{other}"])
    }
    failed = [
        other for other, place in addresses.items() if address and place and not _connects(place)
    ]
    store.set(f"failed/{mine}", json.dumps(failed))


def _collect_results(store: Any, rank: int, timeout: timedelta) -> Reachability:
    if rank == 0:
        names = json.loads(store.get("nodes"))
        with contextlib.suppress(RuntimeError):
            store.wait([f"failed/{name}" for name in names], timeout + ATTEMPTS_TIMEOUT)
        reports = {
            name: json.loads(store.get(f"failed/{name}"))
            for name in names
            if store.check([f"failed/{name}"])
        }
        pairs = [(name, other) for name, failed in reports.items() for other in failed]
        store.set(
            "reach", json.dumps([pairs, [name for name in names if name not in reports], names])
        )
    store.wait(["reach"], 3 * (timeout + ATTEMPTS_TIMEOUT))
    pairs, silent, names = json.loads(store.get("reach"))
    return Reachability([(a, b) for a, b in pairs], silent, names)


def judge_reach(found: Reachability) -> list[Finding]:
    """Return the findings on unreachable nodes.

    A node with several dead links should be left out, unless most nodes have them. A single dead
    link does not show which of its two nodes is at fault.
    """
    links = list(dict.fromkeys((min(pair), max(pair)) for pair in found.pairs))
    findings, remaining = [], links
    while remaining:
        node, times = Counter(node for link in remaining for node in link).most_common(1)[0]
        if times == 1:
            findings += [
                Finding(f"the link between {a} and {b} is dead: no connection")
                for a, b in remaining
            ]
            break
        others = [a if b == node else b for a, b in remaining if node in (a, b)]
        findings.append(
            Finding(f"the link of {node} is dead: no connection with {abridge(others)}", (node,))
        )
        remaining = [link for link in remaining if node not in link]
    findings += [
        Finding(f"{node} joined the rendezvous, but does not answer", (node,))
        for node in found.silent
    ]
    num_nodes, num_named = len(found.nodes), sum(len(each.nodes) for each in findings)
    if (findings and 2 * num_named >= num_nodes) or 1 < num_nodes * (num_nodes - 1) // 2 == len(
        links
    ):
        pairs = abridge([f"{a} - {b}" for a, b in links])
        silent = f"; {abridge(found.silent)} did not answer" if found.silent else ""
        text = (
            f"most nodes do not reach each other ({pairs}{silent}): ports between nodes must be"
            " open"
        )
        return [Finding(text)]
    return findings


@contextlib.contextmanager
def _listening(host: str | None) -> Iterator[str]:
    """Accept connections inside the context and yield ``host:port``, or "" if ``host`` is None."""
    if host is None:
        yield ""
        return
    with socket.create_server((host, 0), backlog=128) as server:
        threading.Thread(target=_accept_connections, args=[server], daemon=True).start()
        try:
            yield f"{host}:{server.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


def _accept_connections(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            return connection.recv(1) == b""  # accepted, then closed
    except OSError:
        return False
