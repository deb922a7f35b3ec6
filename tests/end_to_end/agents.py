"""Nodes of a run with a mirror, emulated on this machine: an agent of each, started by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from meshwright.config import RunConfig
from tests.end_to_end.shell import LIMIT_S, Shell, written


class Agents:
    """Agents of a run, each with the ranks of its node."""

    def __init__(
        self, shell: Shell, config: RunConfig, num_nodes: int, per_node: int, spares: int = 0
    ) -> None:
        """Start ``num_nodes`` agents, ``spares`` of them without ranks."""
        self.shell, self.directory = shell, Path(config.run.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = written(config, self.directory)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._variables = {
            "MESHWRIGHT_NNODES": str(num_nodes),
            "MESHWRIGHT_NPROC_PER_NODE": str(per_node),
            "MESHWRIGHT_SPARES": str(spares),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.processes = [self.start(node) for node in range(num_nodes)]

    def start(self, node: int, *words: str) -> subprocess.Popen[str]:
        """Start the agent of a node; ``words``: further keys."""
        own = {"MESHWRIGHT_NODE_RANK": str(node), "MESHWRIGHT_NODE": f"n{node}"}
        self.shell.environment |= self._variables | own
        with (self.directory / f"n{node}.txt").open("a") as said:
            command = ["-m", "meshwright_launch", "train", self._file, *words]
            return self.shell.start(command, stdout=said, stderr=said)

    def said(self, node: int = 0) -> str:
        """Return what an agent has printed."""
        return (self.directory / f"n{node}.txt").read_text()

    def kill(self, node: int) -> None:
        """Kill an agent, and its ranks with it: as good as a dead node."""
        self.processes[node].send_signal(signal.SIGKILL)

    def ranks(self, node: int) -> list[int]:
        """Return the processes of a node's ranks."""
        agent = self.processes[node].pid
        return [pid for server in children(agent) for pid in children(server)]

    def wait(self) -> list[int]:
        """Return the exit codes of all agents."""
        deadline_s = time.monotonic() + LIMIT_S
        return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in self.processes]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return found


def num_lines(path: Path) -> int:
    """Return the number of lines of a file; 0: there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Block until a file has so many lines, or a process has ended."""
    deadline_s = time.monotonic() + LIMIT_S
    while num_lines(path) < number and process.poll() is None:
        assert time.monotonic() < deadline_s, f"{path} has {num_lines(path)} lines"
        time.sleep(0.02)


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
