"""Decisions of the coordinator of a run with a mirror: what is replaced, who is refused, and signals."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.config import RunConfig
from meshwright_launch.agent import Agent
from meshwright_launch.coordinator import (
    LEAVE_S,
    Coordinator,
    RankFault,
    RankRecovery,
)
from meshwright_launch.failure import RankFailed
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.node_link import End, Hello, LinkLost, NodeLink
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import NodeRanks, SignalForwarder
from meshwright_launch.node_table import Node, NodeTable, OwnLink
from meshwright_launch.nodes import run_work
from meshwright_launch.recovery_notes import note_store

PLACE = NodePlace(0, 3, 1, num_spares=1)
FAULT = RankFault((1,), "rank 1 was ended by SIGKILL", RankFailed("killed", 1))


class Setting:
    """Coordinator of two nodes and a spare one that have not come yet."""

    def __init__(self, directory: Path) -> None:
        keys = {
            "run": {"directory": str(directory)},
            "launch": {"max_restarts": 9, "timeout_s": 60.0},
            "watch": {"mirror": True},
        }
        config = RunConfig.model_validate(keys)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.agents: list[NodeLink] = []
        self.store = dist.HashStore()
        self.mirror = MirrorPlace()
        signals = SignalForwarder(directory / "listening", [])
        ranks = NodeRanks(run_work, config, directory, signals, [])
        own = Node(0, "n0", OwnLink(Agent(ranks, self.mirror, PLACE.num_ranks, PLACE)))
        store = (self.store, 1)
        self.table = NodeTable(PLACE, own, self.listener, "digest")
        self.coordinator = Coordinator(config, PLACE, self.table, store, self.mirror)

    def connect(self) -> NodeLink:
        return NodeLink(socket.create_connection(self.listener.getsockname()))

    def join(self, node: int, name: str) -> list[End]:
        """Send the first message of an agent; return the answer, if it is refused."""
        link = self.connect()
        self.agents.append(link)
        link.send(Hello(node=node, name=name, run=self.table.run))
        for _ in range(5):
            self.table.listen(0.02)
        try:
            return [each for each in link.receive() if isinstance(each, End)]
        except LinkLost:
            return []


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    found = Setting(tmp_path)
    yield found
    found.listener.close()


def test_two_nodes_of_one_name_are_refused(setting: Setting) -> None:
    """Their ranks would take each other for one machine, and copy no mirror."""
    assert setting.join(1, "n1") == []
    (answer,) = setting.join(2, "n1")
    assert answer.exit_code == 2
    assert "'n1' is refused" in answer.message and "set MESHWRIGHT_NODE" in answer.message
    (answer,) = setting.join(2, "n0")
    assert answer.exit_code == 2
    assert setting.join(2, "n2") == [] and len(setting.table.nodes) == 3


def test_a_run_that_has_gone_on_is_repaired_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures at one step, then steps, then another failure."""
    step = 4
    monkeypatch.setattr(setting.mirror, "newest_step", lambda: step)
    for _ in range(3):
        assert setting.coordinator._can_repair(FAULT)
        setting.mirror.count_failure(step)
    assert not setting.coordinator._can_repair(FAULT)
    step = 5
    assert setting.coordinator._can_repair(FAULT)
    setting.mirror.count_failure(step)
    assert setting.coordinator._can_repair(FAULT) and setting.mirror.futile == 1


def test_new_processes_have_longer_than_a_step(setting: Setting) -> None:
    """They import first, and the file system may be slow."""
    coordinator = setting.coordinator
    setting.table.blocks = [0, 0]

    def stuck_after(seconds: float) -> tuple[int, ...]:
        coordinator._recovery = RankRecovery(FAULT, (1,), time.monotonic() - seconds)
        fault = coordinator._find_stuck()
        return () if fault is None else fault.ranks

    assert stuck_after(LEAVE_S - 1) == ()
    assert stuck_after(LEAVE_S + 1) == (0,)
    assert stuck_after(61) == (0, 1)
    note_store(setting.store).set("left/0/0", "")
    assert stuck_after(LEAVE_S + 1) == ()
    assert stuck_after(61) == (1,)


def test_a_connection_without_a_file_descriptor_waits(setting: Setting) -> None:
    """The turn goes on; the agent is accepted once there is one."""
    link = setting.connect()
    link.send(Hello(node=1, name="n1", run=setting.table.run))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        setting.table.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(setting.table.nodes) == 1
    time.sleep(0.02)
    setting.table.accept()
    assert len(setting.table.nodes) == 2


def test_a_signal_while_processes_are_replaced_is_kept(tmp_path: Path) -> None:
    """All ranks of the node are gone, then one of two is there; the other gets the signal too."""
    listening = tmp_path / "listening"
    signals = SignalForwarder(listening, [])
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    pids = [child.pid for child in children]
    with signals.installed({signal.SIGTERM}):
        with signals.changing(is_recovering=True):
            signals.expect(0, [])
            os.kill(os.getpid(), signal.SIGTERM)
            signals.forward_kept()
            shutil.rmtree(listening)  # by a program that cleans the temporary directory
            signals.expect(1, pids[:1])
            (listening / str(pids[0])).touch()
            signals.forward_kept()
            assert not signals.has_forwarded
            signals.expect(2, pids)
        signals.forward_kept()
        assert not signals.has_forwarded
        (listening / str(pids[1])).touch()
        signals.forward_kept()
    assert [child.wait(10) for child in children] == [-signal.SIGTERM] * 2
