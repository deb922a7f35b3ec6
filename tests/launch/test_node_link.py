"""Messages between the agents of nodes: exact, bounded, and a dead or silent peer is noticed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from meshwright_launch.failure import FailureRecord
from meshwright_launch.node_link import (
    BEAT_S,
    KEEPALIVE_S,
    MAX_HELLO_BYTES,
    MAX_LINE_BYTES,
    MAX_TEXT,
    SILENT_S,
    Beat,
    End,
    Exit,
    Failure,
    Hello,
    LinkLost,
    NodeLink,
    NodeMessage,
    Order,
)
from meshwright_launch.node_ranks import RankExit


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, NodeLink]]:
    """A plain socket, and a link at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    link = NodeLink(accepted)
    yield plain, link
    plain.close()
    link.close()


def received(link: NodeLink, wanted: int = 1) -> list[NodeMessage]:
    """Return the messages that arrive within a second."""
    found: list[NodeMessage] = []
    deadline_s = time.monotonic() + 10
    while len(found) < wanted and time.monotonic() < deadline_s:
        found += link.receive()
        time.sleep(0.01)
    return found


def long_exit(rank: int) -> Exit:
    """Return the report of a rank with a long traceback."""
    failure = Failure(
        message="m" * MAX_TEXT, trace="t" * MAX_TEXT, exit_code=1, lost_peer=False, age_s=0.0
    )
    return Exit(rank=rank, generation=0, code=1, failure=failure)


def test_long_failures_of_many_ranks_arrive(pair: tuple[socket.socket, NodeLink]) -> None:
    """More than a socket takes at once, and more than one message may have."""
    plain, link = pair
    plain.setblocking(False)
    other = NodeLink(plain)
    sent = [long_exit(rank) for rank in range(64)]
    assert sum(len(each.model_dump_json()) for each in sent) > 4 * MAX_LINE_BYTES
    for each in sent:
        other.send(each)
    found: list[NodeMessage] = []
    deadline_s = time.monotonic() + 10
    while len(found) < len(sent) and time.monotonic() < deadline_s:
        assert other.receive() == []
        found += link.receive()
    assert found == sent


def test_messages_arrive_as_they_were(pair: tuple[socket.socket, NodeLink]) -> None:
    """Also in pieces, and several at once."""
    plain, link = pair
    order = Order(generation=3, port=2000, num_ranks=6, ranks=(4, 5), begin=(5,), is_recovery=True)
    text = order.model_dump_json().encode() + b"\n" + Beat().model_dump_json().encode() + b"\n"
    plain.sendall(text[:20])
    assert link.receive() == []
    plain.sendall(text[20:])
    assert received(link, 2) == [order, Beat()]


def test_a_failure_keeps_its_age_and_not_its_clock() -> None:
    """A long traceback is cut: its end matters."""
    record = FailureRecord(3, time.monotonic() - 5, "m", "x" * 2 * MAX_TEXT + "end", 1, True)
    sent = Exit.pack(RankExit(3, 2, 1, record))
    again = Exit.model_validate_json(sent.model_dump_json()).record()
    assert again is not None and again.trace.endswith("end") and len(again.trace) == MAX_TEXT
    assert (again.rank, again.message, again.exit_code, again.lost_peer) == (3, "m", 1, True)
    assert again.at_s == pytest.approx(time.monotonic() - 5, abs=1)


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b'{"kind": "end", "exit_code": 0, "more": 1}\n',
        b'{"kind": "end", "exit_code": "0"}\n',
        b'{"kind": "end", "exit_code": 1000}\n',
        b'{"kind": "order", "generation": 0, "port": 0, "num_ranks": 1, "ranks": [], "begin": [],'
        b' "is_recovery": true}\n',
        b'{"kind": "exit", "rank": -1, "generation": 0, "code": 0}\n',
        b"[" * 200_000 + b"\n",
        b"x" * (2 * MAX_LINE_BYTES),
    ],
    ids=range(8),
)
def test_what_is_no_message_ends_the_link(
    line: bytes, pair: tuple[socket.socket, NodeLink]
) -> None:
    """And is not kept: at most a line of it is in memory."""
    plain, link = pair
    plain.settimeout(0.2)
    with pytest.raises(LinkLost, match="what is no message"):
        for start in range(0, len(line), 1 << 18):
            plain.send(line[start : start + (1 << 18)])
            time.sleep(0.02)
            assert not received_now(link)
        received(link)


@pytest.mark.parametrize("sent", [b"x" * (1 << 16), b"hello\n", b"\n" * 5000], ids=range(3))
def test_a_stranger_is_read_up_to_its_first_message(
    sent: bytes, pair: tuple[socket.socket, NodeLink]
) -> None:
    """Whoever reaches the port can connect, and may send much."""
    plain, link = pair
    plain.sendall(sent)
    time.sleep(0.05)
    with pytest.raises(LinkLost, match=r"it has sent (no message|what is no message)"):
        link.receive_first()
    if len(sent) > MAX_HELLO_BYTES:
        assert len(link.connection.recv(1 << 17)) == len(sent) - MAX_HELLO_BYTES


def test_what_follows_a_hello_is_kept(pair: tuple[socket.socket, NodeLink]) -> None:
    """Also when the hello comes in pieces."""
    plain, link = pair
    hello = Hello(node=1, name="\x00" * 255, run="r" * 64)
    text = hello.model_dump_json().encode() + b"\n" + Beat().model_dump_json().encode()
    assert link.receive_first() is None
    plain.sendall(text[:20])
    time.sleep(0.02)
    assert link.receive_first() is None
    plain.sendall(text[20:])
    time.sleep(0.02)
    assert link.receive_first() == hello
    plain.sendall(b"\n")
    assert received(link) == [Beat()]
    plain.close()
    with pytest.raises(LinkLost, match="closed its connection"):
        received(link)


def test_a_failure_may_name_a_file_that_is_no_utf8() -> None:
    """Lone surrogates, which no JSON has."""
    record = FailureRecord(3, time.monotonic(), "no file a\udcff", "\ud800", 1, False)
    sent = Exit.pack(RankExit(3, 2, 1, record))
    assert sent.failure is not None and sent.failure.message == "no file a?"
    assert Exit.model_validate_json(sent.model_dump_json()) == sent


def received_now(link: NodeLink) -> list[NodeMessage]:
    return link.receive()


def test_a_closed_connection(pair: tuple[socket.socket, NodeLink]) -> None:
    """What was sent before still arrives."""
    plain, link = pair
    plain.sendall(End(exit_code=85).model_dump_json().encode() + b"\n")
    plain.close()
    assert received(link) == [End(exit_code=85)]
    with pytest.raises(LinkLost, match="closed its connection"):
        link.receive()
    link.send(Beat())
    link.send(Beat())  # no error: the next receive has it
    with pytest.raises(LinkLost):
        link.receive()


def test_the_kernel_looks_for_a_dead_machine(pair: tuple[socket.socket, NodeLink]) -> None:
    """After seconds instead of two hours (keepalive) or a quarter of one (data on the way)."""
    connection = pair[1].connection
    value = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, each) for each in options)
    assert value == 1 and idle + interval * count == KEEPALIVE_S
    unacknowledged = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert unacknowledged == 1000 * KEEPALIVE_S


def test_a_silent_agent_is_lost(pair: tuple[socket.socket, NodeLink]) -> None:
    """Unless this process was stopped meanwhile: a long turn counts as a beat."""
    plain, link = pair
    link.count_silence(10 * SILENT_S)
    assert link.silent_s == BEAT_S and link.receive() == []
    plain.sendall(Beat().model_dump_json().encode() + b"\n")
    assert received(link) == [Beat()] and link.silent_s == 0
    for _ in range(int(SILENT_S / BEAT_S) + 1):
        link.count_silence(BEAT_S)
    with pytest.raises(LinkLost, match="no sign of life for 60 s"):
        link.receive()
