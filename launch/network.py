"""Which of this machine's network interfaces leads to another machine: NCCL and gloo guess, and guess wrong where a
node has a management network, a docker bridge or a host name that resolves to 127.0.1.1."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
ANY_PORT = 9


def interface_towards(host: str) -> str | None:
    """The interface from which packets to ``host`` leave; on that host itself, the one that has its address.

    None where nobody can tell: the name is unknown, it means the loopback here (no other machine is on that), or no
    interface has the address (IPv6, not Linux).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), ANY_PORT))  # sends nothing: asks for the route
            address = probe.getsockname()[0]
            if address.startswith("127."):
                return None
            for _, name in socket.if_nameindex():
                if _address_of(name, probe) == address:
                    return name
    except OSError:
        return None
    return None


def _address_of(interface: str, via: socket.socket) -> str | None:
    """Its IPv4 address; None: it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(via.fileno(), SIOCGIFADDR, request)[20:24])
    except OSError:
        return None
