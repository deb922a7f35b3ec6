"""Several hosts on one Linux machine: each has a network, a host name,
a process tree and a /dev/shm of its own.

    h1 [eth0] ---- p1 \\
    h2 [eth0] ---- p2 -- br0, the switch, in "ctl"        10.77.0.1, .2, ... and .254 for ctl
    h3 [eth0] ---- p3 /

A host is a network namespace and, in it, the first process of uts, ipc, pid and mount namespaces.
The disk is shared, as a cluster's is, but for /mnt. Links can be limited and cut. Needs root,
iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDS = ("ip", "tc", "unshare", "nsenter", "pgrep")
CONTROL = "ctl"
LIMIT_S = 30.0

FIRST_PROCESS = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs none /dev/shm
mount --bind "$2/$1/node" /mnt
echo ready > "$2/$1/ready"
trap "exit 0" TERM
while :; do sleep 3600 & wait $!; done
"""


def why_not() -> str | None:
    """Why this machine cannot have hosts; None: it can."""
    if os.geteuid() != 0:
        return "namespaces want root"
    missing = [program for program in NEEDS if shutil.which(program) is None]
    if missing:
        return f"there is no {', '.join(missing)} on this machine"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else "this machine gives nobody a namespace"


def call(*words: str) -> str:
    """Return what a command prints; an error shows it too."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class Hosts:
    """``num`` hosts h1, h2, ... and the switch; within: they are up."""

    def __init__(
        self, root: Path, num: int, *, prefix: str = "mw-", network: str = "10.77.0"
    ) -> None:
        self.root = root
        self.names = [f"h{number}" for number in range(1, num + 1)]
        self._prefix = prefix
        self._network = network

    def __enter__(self) -> Hosts:
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_namespaces()  # of a test that was killed
        lines = ["127.0.0.1 localhost", f"{self.address(CONTROL)} {CONTROL}"]
        # the second form keeps torch from warning that it cannot name a client
        for name in self.names:
            lines += [f"{self.address(name)} {name}", f"::ffff:{self.address(name)} {name}"]
        (self.root / "hosts").write_text("\n".join(lines) + "\n")
        try:
            self._wire()
            # all networks first: each host's mount namespace then sees them all
            for name in (CONTROL, *self.names):
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (*self.names, CONTROL):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self._init(name), signal.SIGKILL)
        self._remove_namespaces()

    def address(self, name: str) -> str:
        """IPv4."""
        return f"{self._network}.{254 if name == CONTROL else name.removeprefix('h')}"

    def _space(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _port(self, name: str) -> str:
        """Of the switch."""
        return f"p{name.removeprefix('h')}"

    def _wire(self) -> None:
        switch = self._space(CONTROL)
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "set", "lo", "up")
        call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        call("ip", "-n", switch, "addr", "add", f"{self.address(CONTROL)}/24", "dev", "br0")
        call("ip", "-n", switch, "link", "set", "br0", "up")
        for name in self.names:
            space, port = self._space(name), self._port(name)
            call("ip", "netns", "add", space)
            call("ip", "-n", space, "link", "set", "lo", "up")
            call(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            call("ip", "-n", switch, "link", "set", port, "master", "br0")
            call("ip", "-n", switch, "link", "set", port, "up")
            call("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "up")

    def _remove_namespaces(self) -> None:
        for name in (*self.names, CONTROL):
            subprocess.run(
                ["ip", "netns", "del", self._space(name)], capture_output=True, check=False
            )

    def boot(self, name: str) -> None:
        """Start a host; again after ``crash`` and ``heal``."""
        place = self.root / name
        (place / "node").mkdir(parents=True, exist_ok=True)
        (place / "ready").unlink(missing_ok=True)
        with (place / "init.log").open("ab") as log:
            unshare = [
                "unshare",
                "--uts",
                "--ipc",
                "--pid",
                "--mount",
                "--fork",
                "--mount-proc",
                "--kill-child",
            ]
            first = ["bash", "-c", FIRST_PROCESS, f"init-{name}", name, str(self.root)]
            outer = subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), *unshare, *first],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(lambda: (place / "ready").exists(), f"{name} is up")
        (place / "init.pid").write_text(call("pgrep", "-P", str(outer.pid)).strip())

    def _init(self, name: str) -> int:
        return int((self.root / name / "init.pid").read_text())

    def within(self, name: str, *words: str) -> list[str]:
        """Return the command line that runs a command in a host, in the same directory."""
        namespaces = ["-n", "-u", "-i", "-p", "-m"]
        return [
            "nsenter",
            "-t",
            str(self._init(name)),
            *namespaces,
            f"--wd={Path.cwd()}",
            "--",
            *words,
        ]

    def run(self, name: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in a host and wait for it."""
        return subprocess.run(
            self.within(name, *words), capture_output=True, text=True, check=False, **options
        )

    def start(self, name: str, *words: str, log: Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in a host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.within(name, *words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                **options,
            )

    def pids(self, name: str) -> list[int]:
        """Return all processes of a host, as this machine numbers them; none after a crash."""
        try:
            found = subprocess.run(
                ["pgrep", "--ns", str(self._init(name)), "--nslist", "pid"],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            return []
        return [int(pid) for pid in found.stdout.split()]

    def commands(self, name: str) -> list[str]:
        """Return the command lines of all processes of a host."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                found.append(
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                )
        return found

    def limit(self, name: str, rate: str | None) -> None:
        """Both directions of a host's link, such as ``1gbit``; None: as fast as the machine."""
        for space, device in (
            (self._space(name), "eth0"),
            (self._space(CONTROL), self._port(name)),
        ):
            there = ["tc", "-n", space, "qdisc"]
            subprocess.run([*there, "del", "dev", device, "root"], capture_output=True, check=False)
            if rate is not None:
                shape: Sequence[str] = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                call(*there, "add", "dev", device, "root", *shape)

    def cut(self, name: str) -> None:
        """The cable is pulled at the switch: nothing dies."""
        call("ip", "-n", self._space(CONTROL), "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """The cable is back."""
        call("ip", "-n", self._space(CONTROL), "link", "set", self._port(name), "up")

    def part(self, one: str, other: str) -> None:
        """Nothing passes between these two any more; all others still reach both."""
        call("ip", "-n", self._space(one), "route", "add", "blackhole", f"{self.address(other)}/32")

    def join(self, one: str, other: str) -> None:
        """They reach each other again."""
        call("ip", "-n", self._space(one), "route", "del", "blackhole", f"{self.address(other)}/32")

    def crash(self, name: str) -> None:
        """Power off: the link first, so that nothing says good-bye."""
        self.cut(name)
        os.kill(self._init(name), signal.SIGKILL)


def until(done: Any, what: str, limit_s: float = LIMIT_S, pause_s: float = 0.02) -> None:
    """Poll; a failure says what was waited for."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(pause_s)
