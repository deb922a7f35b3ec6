"""The interface that leads to another machine."""

from __future__ import annotations

import fcntl
import socket
import struct

import pytest

from meshwright.system.host import SIOCGIFADDR, interface_towards


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
