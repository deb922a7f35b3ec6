"""The interface that leads to another machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.system.host import SIOCGIFADDR, interface_towards, shut_connections


def addresses() -> dict[str, str]:
    """Of this machine's interfaces that have an IPv4 address, asked one by one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode())
                )
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


@pytest.mark.parametrize("host", ["localhost", "127.0.1.1", "no-such-host.invalid", ""])
def test_no_interface_leads_to_another_machine_by_the_loopback_or_a_name_that_is_none(host) -> None:
    assert interface_towards(host) is None


def test_an_own_address_is_that_interfaces() -> None:
    own = {name: address for name, address in addresses().items() if not address.startswith("127.")}
    if not own:
        pytest.skip("this machine has the loopback only")
    assert {name: interface_towards(address) for name, address in own.items()} == {
        name: name for name in own
    }


def test_connections_to_a_lost_machine_are_shut() -> None:
    """A thread that waits for it fails at once; others, and other files with their locks, stay."""
    lost, kept = "127.0.0.2", "127.0.0.3"
    with contextlib.ExitStack() as stack:
        peers = {}
        for address in (lost, kept):
            listener = stack.enter_context(socket.create_server((address, 0)))
            connection = stack.enter_context(socket.create_connection(listener.getsockname()))
            connection.settimeout(20)
            peers[address] = connection, stack.enter_context(listener.accept()[0])
        for unix in socket.socketpair():  # of a fork server, without an address
            stack.enter_context(unix)
        before = set(Path("/proc/self/fd").iterdir())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(peers[lost][0].recv, 1)
            shut_connections({lost})
            assert waiting.result(10) == b""
        assert set(Path("/proc/self/fd").iterdir()) == before, "a copy of a file is left"
        peers[kept][1].sendall(b"x")
        assert peers[kept][0].recv(1) == b"x"
