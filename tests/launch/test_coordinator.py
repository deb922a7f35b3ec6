"""Decisions of the coordinator of a run with a mirror: what is replaced, who is refused, and signals."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.checkpoint import CheckpointMetadata
from meshwright.checkpoint.memory import MirrorWriter
from meshwright.config import RunConfig, resolve
from meshwright.errors import DriftError, NonFiniteError
from meshwright_launch.agent import Agent
from meshwright_launch.coordinator import (
    JOIN_S,
    LEAVE_S,
    Coordinator,
    RankFault,
    RankRecovery,
)
from meshwright_launch.failure import NodesLost, RankFailed
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.node_link import Beat, End, Hello, LinkLost, NodeLink, Signalled
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import NodeRanks, SignalForwarder
from meshwright_launch.node_table import Node, NodeTable, OwnLink
from meshwright_launch.nodes import run_work
from meshwright_launch.recovery_notes import PHASES, note_store
from meshwright_launch.replicas import Replicas
from tests.end_to_end.driving import GPT2

PLACE = NodePlace(0, 3, 1, num_spares=1)
FAULT = RankFault((1,), "rank 1 was ended by SIGKILL", RankFailed("killed", 1))


class Setting:
    """Coordinator of two nodes and a spare one that have not come yet."""

    def __init__(self, directory: Path) -> None:
        keys = {
            "run": {"directory": str(directory)},
            "launch": {"max_restarts": 9, "timeout_s": 60.0},
            "watch": {"mirror": True},
            "model": {"builder": "meshwright_models.gpt2:build", "options": GPT2},
            "data": {"builder": "tests.framework.watch.hanging:samples"},
            "batch": {"micro_batch_size": 1, "global_batch": 2},
            "parallel": {"dp": 2},
        }
        config = resolve(RunConfig.model_validate(keys))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.agents: list[NodeLink] = []
        self.store = dist.HashStore()
        self.mirror = MirrorPlace()
        self.mirror._path = directory / "mirror"  # that in memory is one for each process
        self.mirror._path.mkdir()
        signals = SignalForwarder(directory / "listening", [])
        ranks = NodeRanks(run_work, config, directory, signals, [])
        own = Node(0, "n0", OwnLink(Agent(ranks, self.mirror, PLACE)))
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
    assert setting.join(1, "n1") == [] == setting.join(2, "n1")
    setting.agents[0].send(Beat())  # the first one is alive
    for _ in range(5):
        setting.table.listen(0.02)
    (answer,) = [each for each in setting.agents[1].receive() if isinstance(each, End)]
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


def test_a_process_that_replaces_one_with_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the signal once it has a handler; no process gets it twice."""
    listening, sent = tmp_path / "listening", []
    signals = SignalForwarder(listening, [])
    signals.expect(2, [1, 2])
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    for pid in (1, 2):
        (listening / str(pid)).touch()
    signals._handle(signal.SIGTERM, None)
    assert sorted(sent) == [(1, signal.SIGTERM), (2, signal.SIGTERM)]
    with signals.changing(is_recovering=True):
        signals.expect(2, [1, 3])
    signals.forward_kept()
    assert len(sent) == 2, "it has no handler yet"
    (listening / "3").touch()
    signals.forward_kept()
    signals.forward_kept()
    assert sent[2:] == [(3, signal.SIGTERM)]


def test_a_node_that_is_back_before_its_loss_was_noticed(setting: Setting) -> None:
    """It waits until the former connection has ended, and is let in then."""
    assert setting.join(1, "n1") == []
    former = setting.agents[0]
    assert setting.join(1, "n1") == [], "nobody knows yet which of the two is alive"
    assert setting.table.nodes[1].link is not None and len(setting.table.nodes) == 2
    before = setting.table.nodes[1]
    former.close()
    for _ in range(5):
        setting.table.listen(0.02)
    assert setting.table.nodes[1] is not before and setting.table.nodes[1].name == "n1"


def test_a_lost_node_with_ranks_is_let_in_once_it_is_replaced(setting: Setting) -> None:
    """Its block goes to another node first."""
    setting.join(1, "n1"), setting.join(2, "n2")
    setting.table.blocks = [0, 1]
    setting.agents[0].close()
    assert setting.join(1, "n1") == []
    assert list(setting.table.lost) == [1] and setting.table.spares() == [2]
    assert setting.table.replace_lost([2]) == ["n2"]
    setting.table.listen(0.02)
    assert setting.table.spares() == [1] and setting.table.blocks == [0, 2]


class Growing:
    """Coordinator with dp 1 of 2 whose orders are kept, and a node that waits."""

    def __init__(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coordinator, self.setting = setting.coordinator, setting
        self.orders: list[tuple[int, ...]] = []
        monkeypatch.setattr(
            self.coordinator, "_order", lambda ranks, is_recovery: self.orders.append(tuple(ranks))
        )
        setting.join(1, "n1"), setting.join(2, "n2")
        setting.table.blocks = [0, 1]
        self.lose(1)
        self.lose(2)
        self.step()
        self.coordinator._fit_nodes()

    def lose(self, node: int) -> None:
        self.setting.agents[node - 1].close()
        for _ in range(5):
            self.setting.table.listen(0.02)

    def step(self) -> None:
        """Report all phases of all ranks. Orders are kept: the generation of the notes stays 0."""
        notes, num_ranks = note_store(self.setting.store), self.coordinator._num_ranks
        for phase in PHASES:
            for rank in range(num_ranks):
                notes.set(f"{phase}/0/{rank}", "")
            notes.add(f"{phase}/0", num_ranks - notes.add(f"{phase}/0", 0))
        self.mirror_step()

    def grow(self) -> None:
        """Connect node 1, and grow onto it."""
        assert self.setting.join(1, "n1") == []
        self.step()
        self.coordinator._growth.changed_s -= 61
        assert self.coordinator._can_grow()
        self.coordinator._grow()
        assert self.setting.table.blocks == [0, 1]

    def mirror_step(self) -> None:
        """Write what the mirror of a rank of the first node writes."""
        writer = MirrorWriter(self.setting.mirror.open(), "rank", self.setting.mirror.generation)
        writer.write(CheckpointMetadata(2, 4, 0, {}, {}, {}), [])


def test_a_run_grows_after_a_pause(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without a step, nor at once; a failure before the first step leads back, and is not counted."""
    growing = Growing(setting, monkeypatch)
    coordinator, table = growing.coordinator, setting.table
    assert (table.blocks, table.num_ranks) == ([0], 1)
    assert setting.join(1, "n1") == []
    growing.step()
    assert not coordinator._can_grow(), "the pause is not over"
    coordinator._growth.changed_s -= 61
    setting.mirror.clear()
    assert not coordinator._can_grow(), "the mirror was switched off: steps would be lost"
    growing.mirror_step()
    assert coordinator._can_grow()
    coordinator._grow()
    assert (table.blocks, table.num_ranks) == ([0, 1], 2) and growing.orders == [(0, 1)]
    assert coordinator._recovery is not None and coordinator._recovery.is_planned
    assert coordinator._can_repair(FAULT._replace(is_transient=False)), "whatever it is"
    coordinator._repair(FAULT)
    assert (table.blocks, table.num_ranks) == ([0], 1) and growing.orders[-1] == (0,)
    assert setting.mirror.recoveries == 0 and coordinator._growth.num_failed == 1
    coordinator._growth.changed_s -= 61
    assert not coordinator._growth.is_due(), "twice as long"
    coordinator._growth.changed_s -= 60
    assert coordinator._growth.is_due()


def test_a_fault_after_the_first_step_of_a_growth(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be seen in the same turn as the step. It counts, and is no reason to go back."""
    growing = Growing(setting, monkeypatch)
    coordinator = growing.coordinator
    growing.grow()
    growing.step()
    monkeypatch.setattr(coordinator, "_find_fault", lambda: FAULT)
    coordinator._take_turn()
    assert setting.table.blocks == [0, 1] and growing.orders[-1] == (1,)
    assert setting.mirror.recoveries == 1 and coordinator._growth.before is None


def test_a_growth_that_cannot_go_back(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on as after any lost node; the pause before the next growth is twice as long."""
    growing = Growing(setting, monkeypatch)
    coordinator = growing.coordinator
    growing.grow()
    nodes = setting.table.nodes
    nodes[0] = nodes[0]._replace(name="came back")
    assert not coordinator._can_go_back(), "its memory has no mirror"
    coordinator._repair(FAULT)
    assert setting.mirror.recoveries == 1
    assert coordinator._growth.before is None and coordinator._growth.num_failed == 1


def test_a_node_on_which_a_growth_has_failed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no lost node's ranks. Another growth tries it, and so does a run that would end."""
    growing = Growing(setting, monkeypatch)
    coordinator, growth = growing.coordinator, growing.coordinator._growth
    growing.grow()
    coordinator._repair(FAULT)
    assert growth.suspects == {"n1"}
    assert setting.join(2, "n2") == []
    growth.changed_s -= 121
    coordinator._grow()
    assert setting.table.blocks == [0, 2], "the other one first"
    growing.step()
    coordinator._take_turn()
    assert growth.suspects == {"n1"}
    growing.lose(4)
    coordinator._repair(FAULT._replace(ranks=(1,), nodes=("n2",)))
    assert setting.table.blocks == [0] and setting.table.spares() == [1]
    monkeypatch.setattr(coordinator._counts, "_least", 2)
    assert setting.join(2, "n2") == []
    setting.table.place_ranks([0, 2], 2)
    growing.lose(5)
    assert coordinator._fit_nodes() == (["n1"], "") and not growth.suspects


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_nodes_that_come_and_go(
    pause_s: float, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each growth that does not last doubles the pause; one that does ends the row."""
    growing = Growing(setting, monkeypatch)
    growth = growing.coordinator._growth
    growth.pause_s = pause_s
    shortest_s = max(pause_s, 1.0)
    for turn, failed in enumerate((1, 2, 0, 1)):
        growth.changed_s -= 2 * shortest_s
        growing.grow()
        growing.step()
        growing.coordinator._take_turn()
        assert growth.grown_s is not None
        growth.grown_s -= 0 if failed else 4 * shortest_s + 1
        growing.lose(3 + turn)
        growing.coordinator._repair(FAULT)
        assert setting.table.blocks == [0] and growth.num_failed == failed
        pause = shortest_s * 2**failed if failed else pause_s
        growth.changed_s = time.monotonic() - pause - 0.1
        assert growth.is_due()
        growth.changed_s = time.monotonic() - pause / 2
        assert growth.is_due() == (pause == 0)


def test_a_stop_request_while_a_growth_is_decided(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks save and exit; none of them is replaced. Neither is one of a spare node that has gone."""
    growing = Growing(setting, monkeypatch)
    coordinator, find_most = growing.coordinator, growing.coordinator._counts.find_most
    assert setting.join(1, "n1") == []

    def grow(meanwhile: Callable[[], None]) -> None:
        def find_slowly(num_nodes: int, above: int = 0) -> Replicas:
            meanwhile()
            time.sleep(0.1)
            return find_most(num_nodes, above)

        monkeypatch.setattr(coordinator._counts, "find_most", find_slowly)
        coordinator._grow()
        assert growing.orders == [] and setting.table.blocks == [0]

    grow(lambda: setting.agents[2].send(Signalled()))
    assert coordinator._is_requested
    coordinator._is_requested = False
    grow(setting.agents[2].close)
    assert list(setting.table.nodes) == [0]


def test_a_node_that_comes_and_is_silent(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes back after a minute, whatever launch.timeout_s is; the node is not tried at once."""
    growing = Growing(setting, monkeypatch)
    coordinator = growing.coordinator
    coordinator._timeout_s = 7200.0
    growing.grow()
    recovery = coordinator._recovery
    assert recovery is not None
    notes = note_store(setting.store)
    for phase in PHASES:  # those of the step before
        notes.delete_key(f"{phase}/0")
        notes.delete_key(f"{phase}/0/0"), notes.delete_key(f"{phase}/0/1")
    recovery.begun_s -= JOIN_S - 5
    assert coordinator._find_stuck() is None
    recovery.begun_s -= 6
    notes.set("left/0/0", "")
    fault = coordinator._find_stuck()
    assert fault is not None and fault.ranks == (1,) and fault.nodes == ("n1",)
    notes.set("left/0/1", "")
    fault = coordinator._find_stuck()
    assert fault is not None and fault.ranks == (0, 1), "all wait in the rendezvous"
    coordinator._take_turn()
    assert setting.table.blocks == [0] and coordinator._growth.suspects == {"n1"}


def test_a_smaller_layout_that_does_not_run(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as a run without enough nodes does: a job on others may succeed."""
    growing = Growing(setting, monkeypatch)
    fault = FAULT._replace(error=RankFailed("out of memory", 0, 2))
    assert isinstance(growing.coordinator._last_error(fault), NodesLost)
    for code in (NonFiniteError.exit_code, DriftError.exit_code):
        numeric = FAULT._replace(error=RankFailed("the loss is nan", 0, code))
        assert growing.coordinator._last_error(numeric) is numeric.error, "as on any nodes"
    growing.step()
    assert growing.coordinator._last_error(fault) is fault.error


def test_no_smaller_layout_is_permitted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the numbers."""
    monkeypatch.setattr(setting.coordinator._counts, "_least", 2)
    with pytest.raises(NodesLost, match=r"hold at most dp 1 x pp 1 x tp 1, and launch.min_dp = 2"):
        Growing(setting, monkeypatch)
