"""This machine: network interfaces towards other nodes, a listener, the node's name,
and its compilers.

NCCL and gloo guess interfaces, and fail where a node has a management network, a docker bridge or a
host name that resolves to 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Number of Linux's ioctl that returns the IPv4 address of an interface."""
ANY_PORT = 9
JOBSET = "MESHWRIGHT_JOBSET"
"""Environment variable with the name of the Kubernetes JobSet of this run."""
NODE = "MESHWRIGHT_NODE"
"""Environment variable with the name of this process's node, where a launcher sets it: several
nodes may be emulated on one machine.
"""
NODES = "MESHWRIGHT_NODES"
"""Environment variable with the names of all nodes of the job, where the launcher has them."""


def interface_towards(host: str) -> str | None:
    """Return the interface that routes packets to ``host``; on that host itself,
    the one that has its address.

    None where it cannot be determined: the name is unknown, it means the loopback here (no other
    machine is on that), or no interface has the address (IPv6, not Linux).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), ANY_PORT))  # sends nothing: finds the route
            address = probe.getsockname()[0]
            if address.startswith("127."):
                return None
            for _, name in socket.if_nameindex():
                if _address_of(name, probe) == address:
                    return name
    except (OSError, UnicodeError):  # of a name that is too long for DNS
        return None
    return None


def loopback() -> str:
    """Return the name of the loopback interface,
    so that ranks of one machine need not resolve its host name.
    """
    return "lo" if sys.platform.startswith("linux") else "lo0"


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is a name or address of the loopback by its text alone. (A host name may
    mean 127.0.1.1 here and another address elsewhere.)
    """
    return host == "localhost" or host.startswith("127.") or host == "::1"


def node_name() -> str:
    """Return the name of this node: the launcher's, or Slurm's, which may be shorter than the host
    name.
    """
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(towards: str) -> str | None:
    """Return the IPv4 address at which other nodes reach this one, as gloo will choose it; None if
    it cannot be determined.

    It is that of GLOO_SOCKET_IFNAME, or of the interface that routes packets to ``towards``.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(towards)
    if interface is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = _address_of(interface, probe)
    return None if address is None or address.startswith("127.") else address


def shut_connections(addresses: Collection[str]) -> None:
    """Shut this process's TCP connections to machines that are gone: calls that wait for them fail at
    once, in any thread. (Linux; no effect elsewhere.)
    """
    if not addresses:
        return
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or without a peer
            # a copy of any other file would keep its lock
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    # a Unix socket has no address, or a path
                    is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    host = str(connection.getpeername()[0]) if is_internet else ""
                    if host.removeprefix("::ffff:") in addresses:
                        connection.shutdown(socket.SHUT_RDWR)


def open_listener(host: str, port: int) -> socket.socket | None:
    """Open a socket that listens at the address of ``host`` (MASTER_ADDR) on this node,
    and at no other.

    None where torch has to listen on all interfaces: a name that means the loopback here may mean
    another address elsewhere (Debian's 127.0.1.1), and an address in front of a container is no
    interface's.

    Raises:
        OSError: the port is taken.
    """
    try:
        addresses = [str(ipaddress.ip_address(host))]
    except ValueError:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM) if host else []
        local = host == "localhost"
        addresses = [
            str(place[0]) for *_, place in found if local or not str(place[0]).startswith("127.")
        ]
    for address in addresses[:1]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None


def _address_of(interface: str, via: socket.socket) -> str | None:
    """Return the IPv4 address of an interface; None: it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(via.fileno(), SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def missing_tools() -> list[str]:
    """Return the names of the tools that this machine lacks to compile CUDA kernels (torch.compile,
    Triton).
    """
    found = {
        "Triton": find_spec("triton") is not None,
        "a C compiler": any(
            shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")
        ),
    }
    return [name for name, is_here in found.items() if not is_here]
