"""What a command does on the network: in a namespace of its own, seen by the kernel;
or by Python's own sockets alone.

unshare -n         no network but the loopback, which also has the name servers' addresses, so that each question to
                   them is heard and refused at once
strace             every connect and every datagram, also of C++ libraries and of children
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

GUARD = '''\
"""Python's own sockets may go nowhere but to this machine: what tries is written down, and refused."""
import ipaddress, os, socket, sys, traceback

def is_here(host):
    if host in ("", "localhost", None) or host == socket.gethostname():
        return True
    try:
        return ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False

def refuse(what, host):
    with open(os.environ["NETWORK_SEEN"], "a") as seen:
        seen.write(f"{what} {host}\\n" + "".join(traceback.format_stack(limit=6)))
    raise ConnectionRefusedError(f"{what} {host}: there is no network in this test")

def on(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        if isinstance(address, tuple) and arguments[0].family in (socket.AF_INET, socket.AF_INET6):
            is_here(address[0]) or refuse(event, address[0])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        is_here(host) or refuse(event, host)

sys.addaudithook(on)
'''
"""A sitecustomize.py, which each Python that finds it on its path runs first."""

OWN_NAMES = re.compile(r"(?:\d+\.){3}127\.in-addr\.arpa|1\.(?:0\.){31}ip6\.arpa")
SIOCSIFADDR, SIOCSIFFLAGS = 0x8916, 0x8914
UP_AND_RUNNING = 0x41
CALL = re.compile(
    r"^(?P<pid>\d+) +(?P<call>connect|sendto|sendmsg|sendmmsg)\((?P<fd>\d+), (?P<rest>.*)$",
    re.MULTILINE,
)
ADDRESS = re.compile(r'sin6?_port=htons\((\d+)\).*?(?:inet_addr\(|inet_pton\(AF_INET6, )"([^"]*)"')


def loopback_alone() -> None:
    """Give this process's network namespace a loopback that the name servers
    of /etc/resolv.conf are on, too.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP_AND_RUNNING))
        servers = re.findall(
            r"^nameserver\s+([\d.]+)", Path("/etc/resolv.conf").read_text(), re.MULTILINE
        )
        for number, server in enumerate(servers):
            address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(server))
            fcntl.ioctl(probe, SIOCSIFADDR, struct.pack("16s16s", f"lo:{number}".encode(), address))


def strangers(trace: str) -> list[str]:
    """Where something outside of this machine was asked for, out of ``strace -f -xx``'s lines.

    torch asks the name server for the name of 127.0.0.1 when it logs a connection (c10d's
    socket.cpp), which no setting of it turns off; such questions are none of ours, all others are
    told with the name that was asked for.
    """
    found: list[str] = []
    asking: set[tuple[str, str]] = set()
    for call in CALL.finditer(trace):
        pid, name, descriptor, rest = call.group("pid", "call", "fd", "rest")
        address = ADDRESS.search(_plain(rest))
        port, host = (int(address[1]), address[2]) if address else (None, None)
        if name == "connect":
            asking.discard((pid, descriptor))
        if name == "connect" and port == 53:
            asking.add((pid, descriptor))
        elif name != "connect" and (port == 53 or (pid, descriptor) in asking):
            found += [
                f"pid {pid} asks for the name {asked}"
                for asked in _asked(rest)
                if not OWN_NAMES.fullmatch(asked)
            ]
        elif (
            host is not None and not ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
        ):
            found.append(f"pid {pid}: {name} to {host}, port {port}")
    return found


def _plain(text: str) -> str:
    """Without -xx's hexadecimal digits where they stand for text."""
    return re.sub(r"(?:\\x[0-9a-f]{2})+", lambda each: _bytes(each[0]).decode("latin-1"), text)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _asked(rest: str) -> Iterator[str]:
    """Yield the names in DNS questions: a header of 12 bytes, then labels, each after its length."""
    for packet in re.findall(r'"((?:\\x[0-9a-f]{2}){17,})"', rest):
        data, labels = _bytes(packet)[12:], []
        while data and data[0]:
            labels.append(data[1 : 1 + data[0]].decode("latin-1"))
            data = data[1 + data[0] :]
        yield ".".join(labels)


def in_namespace(trace: Path, words: Iterable[str]) -> list[str]:
    """Return the command that runs ``words`` on a loopback alone, under strace."""
    calls = ["-e", "trace=connect,sendto,sendmsg,sendmmsg"]
    strace = ["strace", "-f", "-qq", "-xx", "-s", "400", "--seccomp-bpf", *calls, "-o", str(trace)]
    return ["unshare", "--net", sys.executable, __file__, *strace, *words]


if __name__ == "__main__":
    loopback_alone()
    os.execvp(sys.argv[1], sys.argv[1:])
