"""Where ranks meet that nobody has counted: who does not come is named."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from meshwright.errors import CommunicationError, MissingRanksError
from meshwright.mesh import rendezvous
from meshwright.system import host
from meshwright.system.host import open_listener
from tests.support.errors import raises


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def come(
    rank: int,
    world_size: int,
    port: int,
    limit_s: float,
    said: Queue[tuple[int, str, tuple[str, ...]]],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MESHWRIGHT_NODES="a,b,c")
    os.environ["SLURMD_NODENAME"] = "ab"[rank % 2]
    rendezvous.LONGER_S = 5.0
    try:
        store = rendezvous.open_rendezvous(rank, world_size, limit_s)
        said.put((rank, store.get(f"came/{world_size - 1}").decode(), ()))
        store.add("gone", 1)
        while rank == 0 and store.add("gone", 0) < world_size:  # it holds the store
            time.sleep(0.01)
    except MissingRanksError as error:
        said.put((rank, str(error), error.nodes))
    except CommunicationError as error:
        said.put((rank, str(error), ()))


def told(
    ranks: list[int], world_size: int, limit_s: float
) -> dict[int, tuple[str, tuple[str, ...]]]:
    """What each of these ranks says in the end."""
    context, port = multiprocessing.get_context("fork"), free_port()
    said: Queue[tuple[int, str, tuple[str, ...]]] = context.Queue()
    processes = [
        context.Process(target=come, args=(rank, world_size, port, limit_s, said)) for rank in ranks
    ]
    for process in processes:
        process.start()
    found = {rank: (text, nodes) for rank, text, nodes in (said.get(timeout=60) for _ in ranks)}
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    return found


def test_all_come() -> None:
    assert told([0, 1, 2, 3], 4, 30.0) == dict.fromkeys(range(4), ("b", ()))


def test_who_does_not_come_is_named_by_rank_and_node() -> None:
    found = told([0, 1], 4, 1.0)
    assert found[0] == (
        (
            "2 of 4 ranks have come within 1 s, not ranks 2, 3: nobody from c. Is the node up, and"
            " does its network reach 127.0.0.1? [MW-MESH-017]"
        ),
        ("c",),
    )
    assert "rank 0 at 127.0.0.1:" in found[1][0] and "has left" in found[1][0]


@pytest.mark.torture
def test_rank_0_does_not_come() -> None:
    text, nodes = told([1], 2, 0.1)[1]
    assert text.startswith("b cannot reach rank 0 at 127.0.0.1:") and nodes == ("b",)


@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        ({}, False),
        ({"MASTER_ADDR": "h1"}, True),
        ({"MASTER_ADDR": "h1", "TORCHELASTIC_RUN_ID": "7"}, False),
    ],
)
def test_an_elastic_agent_has_a_store_of_its_own(
    environment: dict[str, str], needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.needs_rendezvous() is needed


def listening_at(port: int) -> set[str]:
    """Return the addresses at which somebody listens on that port, as ``ss -ltn`` shows them."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                words = [
                    bytes.fromhex(address)[at : at + 4][::-1]
                    for at in range(0, len(address) // 2, 4)
                ]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.mark.parametrize(
    ("host", "means", "expected"),
    [
        ("127.0.0.1", None, {"127.0.0.1"}),
        ("localhost", "127.0.0.1", {"127.0.0.1"}),
        ("node7", "127.0.0.2", {"::"}),
        ("node7", None, {"own"}),
        ("203.0.113.9", None, {"::"}),
    ],
)
def test_rank_0_listens_at_the_address_of_the_job_alone(
    host: str, means: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a name of the loopback may be another address,
    and an address of no interface is one before it.
    """
    own = next((one for one in own_addresses() if not one.startswith("127.")), None)
    if expected == {"own"}:
        if own is None:
            pytest.skip("no interface but the loopback")
        means, expected = own, {own}
    if means is not None:
        place = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (means, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: place)
    port = free_port()
    listener = open_listener(host, port)
    try:
        assert (listening_at(port) or {"::"}) == expected, (
            "torch listens on all interfaces where nobody listens yet"
        )
    finally:
        if listener is not None:
            listener.close()


def own_addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = [host._address_of(name, probe) for _, name in socket.if_nameindex()]
    return [address for address in found if address is not None]


def test_the_store_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    store = rendezvous.open_rendezvous(0, 1, 30.0)
    assert listening_at(port) == {"127.0.0.1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with raises("MW-MESH-014", "127.0.0.1"):
            rendezvous.open_rendezvous(0, 1, 30.0)
    del store
