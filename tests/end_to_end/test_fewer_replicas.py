"""A lost node without a spare one: the run goes on with fewer replicas, and grows again when a node is back.
Each step has the samples of a run without a failure, and its loss up to rounding.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.agent import COORDINATOR_LOST
from meshwright_launch.pool import RankPool
from tests.end_to_end.agents import Agents, num_lines, wait_for_lines
from tests.end_to_end.driving import GPT2, exact_losses, lines, train
from tests.end_to_end.nodes import Nodes
from tests.end_to_end.shell import LIMIT_S, Shell
from tests.end_to_end.test_neighbours import EXPERTS
from tests.end_to_end.test_nodes import metrics
from tests.end_to_end.test_recovery import mirrored, recoveries, trapped

pytestmark = pytest.mark.slow
FLOAT64: dict[str, Any] = {"dtype": "float64"}
LAYERS: dict[str, Any] = {
    "builder": "meshwright_models.gpt2:build",
    "options": {**GPT2, "num_layers": 4},
}
KILLS = ("tests.end_to_end.killing:AfterSteps",)


def layouts(config: RunConfig) -> list[str]:
    """Return the layout of each start of a run."""
    text = (run_directory(config.run) / "starts.jsonl").read_text()
    return [json.loads(line)["layout"] for line in text.splitlines()]


def changes(config: RunConfig) -> list[str]:
    """Return the changes of layout of a run, in order."""
    return [record["change"] for record in recoveries(config) if record["change"]]


def unbroken(config: RunConfig, runs: Path) -> RunConfig:
    """Return the same run on one machine and without a mirror."""
    tree = config.model_dump()
    tree["run"]["directory"] = str(runs)
    tree["watch"]["mirror"], tree["launch"]["max_restarts"] = False, 0
    tree["launch"]["grow_after_s"], tree["launch"]["min_dp"] = 60.0, 1
    return RunConfig.model_validate(tree)


def assert_same_losses(
    config: RunConfig, same: RunConfig, pool: RankPool, bar: float = 1e-12
) -> None:
    """Train ``same`` without a failure; compare every step: as many samples, and the same loss up to
    rounding.
    """
    train(pool, same)  # a trap has fired
    found, expected = (
        {step: float.fromhex(loss) for step, loss in exact_losses(each).items()}
        for each in (config, same)
    )
    assert found == pytest.approx(expected, rel=bar, abs=0)
    samples = [[line["train/samples"] for line in lines(each)] for each in (config, same)]
    assert samples[0] == samples[1]


def test_a_run_goes_on_with_fewer_replicas(tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """The agent of the third of three nodes is killed in step 3, and there is no spare one. There is no
    checkpoint before the end.
    """
    model = trapped(rank=2, at_call=6, killed="agent", once=str(tmp_path / "fired"))
    config = mirrored(
        tmp_path,
        tmp_path / "runs",
        "dp3",
        model=model,
        batch={"global_batch": 6},
        train=FLOAT64,
    )
    agents = Agents(shell, config, 3, 1)
    assert agents.wait() == [0, 0, -9], agents.said()
    said = agents.said()
    assert (
        "node n2 lost: it has closed its connection; with it rank 2; all ranks start anew" in said
    )
    assert "with dp 3 -> 2, chunks 2 -> 3, recovery 1 of 9" in said
    assert "resuming from /dev/shm/" in said and "changed: parallel.dp: 3 -> 2" in said
    (record,) = recoveries(config)
    assert record["change"] == "dp 3 -> 2, chunks 2 -> 3" and not record["planned"]
    assert layouts(config) == ["pp1 dp3 tp1", "pp1 dp2 tp1"]
    resolved = json.loads((run_directory(config.run) / "resolved.json").read_text())
    assert resolved["parallel"]["dp"] == 3, "the next start has the configured layout"
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "fewer", "nodes", "left", "sections"),
    [
        ("dp4,zero0", "dp2,zero0", "aabb", "aa", {}),
        ("dp4,zero1,shard2", "dp2,zero1,shard2", "abcd", "ac", {}),
        ("dp4,zero2", "dp2,zero2", "abcd", "ac", {}),
        ("dp4,zero3", "dp2,zero3", "aabb", "aa", {}),
        ("dp2,pp2", "dp1,pp2", "aabb", "aa", {}),
        ("dp2,pp2", "dp1,pp2", "abab", "ab", {"pipeline": {"schedule": "interleaved_1f1b"}}),
        ("dp2,tp2,sequence", "dp1,tp2,sequence", "aabb", "aa", {"optimizer": {"name": "muon"}}),
        ("dp2,cp2", "dp1,cp2", "aabb", "aa", {}),
        ("dp4,ep2", "dp2,ep2", "aabb", "aa", EXPERTS),
        ("dp4,zero3", "dp2,zero3", "aabb", "aa", {"adapter": {"rank": 2, "targets": ["*.attention.qkv"]}}),
        ("dp4,zero1,offload", "dp2,zero1,offload", "aabb", "aa", {"optimizer": {"state_dtype": "8bit"}}),
    ],
    ids=str,
)  # fmt: skip
def test_layouts(
    text: str,
    fewer: str,
    nodes: str,
    left: str,
    sections: dict[str, Any],
    tmp_path: Path,
    pool: RankPool,
    memory: Path,
) -> None:
    """A node is lost after step 3; the nodes that are left take two steps, and all of them the others."""
    sections = {"model": LAYERS, **sections, "train": {"steps": 7, **FLOAT64}}
    killed = {**sections, "train": {**sections["train"], "callbacks": KILLS}}
    environment = {"KILLED_ONCE": str(tmp_path / "fired"), "KILLED_AFTER": "3 5"}
    config = mirrored(tmp_path, tmp_path / "runs", text, 99, **killed)
    launches = Nodes(pool, memory, nodes, environment)
    launches.train_until_killed(config)
    for node in set(nodes) - set(left):
        launches.lose(node)
    launches.nodes = list(left)
    launches.train_until_killed(mirrored(tmp_path, tmp_path / "runs", fewer, 99, **killed))
    launches.nodes = list(nodes)
    said = launches.train(config)
    assert f"resuming from {memory}/a/" in said and "changed: parallel.dp: " in said
    assert "step 4, " in said or "step 5, " in said, said
    assert len(set(layouts(config))) == 2
    same = mirrored(tmp_path, tmp_path / "same", text, 0, **sections)
    assert_same_losses(config, same, pool)


def wait_for(agents: Agents, text: str, number: int = 1) -> None:
    """Block until the first agent has printed a text so many times."""
    deadline_s = time.monotonic() + LIMIT_S
    while agents.said().count(text) < number and agents.processes[0].poll() is None:
        assert time.monotonic() < deadline_s, agents.said()
        time.sleep(0.05)


def endless(tmp_path: Path, text: str = "dp3,zero2", **sections: Any) -> RunConfig:
    """Return a run that does not end by itself, and grows again soon."""
    slow = {"builder": "tests.end_to_end.builders:slow", "options": {**GPT2, "pause_s": 0.01}}
    keys: dict[str, Any] = {
        "model": slow,
        "batch": {"global_batch": 6},
        "optimizer": {"schedule": "constant"},  # whatever the number of steps
        "train": {"steps": 100_000, **FLOAT64},
        "launch": {"grow_after_s": 1.0},
    }
    for name, section in sections.items():
        keys[name] = {**keys.get(name, {}), **section}
    return mirrored(tmp_path, tmp_path / "runs", text, **keys)


def stop(agents: Agents, config: RunConfig) -> RunConfig:
    """Take three more steps, then end the run by a signal; return the configuration of as many steps."""
    wait_for_lines(metrics(config), num_lines(metrics(config)) + 3, agents.processes[0])
    agents.processes[0].send_signal(signal.SIGTERM)
    codes = agents.wait()
    assert codes[0] == 85, agents.said()
    return config.replace(train={"steps": num_lines(metrics(config))})


@pytest.mark.long
def test_lost_and_grown_and_lost_again(tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """The same node comes back under its number and name, and is lost once more. Growing is no failure."""
    config = endless(tmp_path)
    agents = Agents(shell, config, 3, 1)
    recorded = run_directory(config.run) / "recoveries.jsonl"
    for number in (1, 3):
        wait_for_lines(metrics(config), num_lines(metrics(config)) + 3, agents.processes[0])
        agents.kill(1)
        agents.processes[1].wait()
        if number == 1:
            agents.processes[1] = agents.start(1)  # at once: its loss may not have been noticed
        wait_for_lines(recorded, number + (number == 1), agents.processes[0])
    config = stop(agents, config)
    fewer, more = "dp 3 -> 2, chunks 2 -> 3", "dp 2 -> 3, chunks 3 -> 2"
    assert changes(config) == [fewer, more, fewer]
    assert [record["planned"] for record in recoveries(config)] == [False, True, False]
    said = agents.said()
    assert "node n1 can take ranks; all ranks start anew with dp 2 -> 3, chunks 3 -> 2" in said
    assert "recovery 2 of 9" in said and "recovery 3 of 9" not in said
    again = num_lines(run_directory(config.run) / "metrics-again.jsonl")
    assert again <= 3, "whose mirrors were not complete yet"
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)


@pytest.mark.long
def test_a_node_is_lost_in_a_recovery(tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """Two neighbours, one after the other: the second before the first step of the smaller layout. Its shards
    are on the first node.
    """
    config = endless(tmp_path)
    agents = Agents(shell, config, 3, 1)
    wait_for_lines(metrics(config), 3, agents.processes[0])
    agents.kill(1)
    wait_for(agents, "all ranks start anew with dp 3 -> 2")
    agents.kill(2)
    wait_for(agents, "recovered: ")
    config = stop(agents, config)
    assert "all ranks start anew with dp 2 -> 1, chunks 3 -> 6, recovery 2 of 9" in agents.said()
    assert changes(config) == ["dp 3 -> 1, chunks 2 -> 6"]
    # 1's shards were on 1 and 2 alone
    assert "shard pp0-dp1-tp0" in agents.said() and "is on none of the nodes n0" in agents.said()
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)


@pytest.mark.long
def test_shard_and_mirror_are_gone(tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """Two neighbours of four nodes at once: from the newest checkpoint, and a line names the shard."""
    keys = {"batch": {"global_batch": 8}, "checkpoint": {"every": 2}}
    config = endless(tmp_path, "dp4,zero3", **keys)
    agents = Agents(shell, config, 4, 1)
    wait_for_lines(metrics(config), 5, agents.processes[0])
    agents.kill(1)
    agents.kill(2)
    wait_for(agents, "recovered: ")
    config = stop(agents, config)
    said = agents.said()
    assert "the mirror in memory is left out: of step " in said
    assert "/checkpoints/step-" in said and "dp 4 -> 2, chunks 2 -> 4" in said
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_node_is_lost_during_a_save(
    asynchronous: bool, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Every step is saved: the kill is beside one. A checkpoint of the smaller layout is the run's last."""
    model = trapped(rank=1, at_call=8, killed="agent", once=str(tmp_path / "fired"))
    saves = {"every": 1, "asynchronous": asynchronous, "keep_last": 2}
    config = endless(tmp_path, model=model, checkpoint=saves, train={"steps": 8})
    agents = Agents(shell, config, 3, 1)
    assert agents.wait() == [0, -9, 0], agents.said()
    assert changes(config) == ["dp 3 -> 2, chunks 2 -> 3"]
    same = unbroken(config, tmp_path / "same")
    assert_same_losses(config, same, pool)
    assert len(list((run_directory(config.run) / "checkpoints").glob("step-*"))) == 2


@pytest.mark.long
def test_the_whole_job_again(tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """With min_dp = dp it ends at the first loss, as without fewer replicas; the next job resumes from its
    checkpoint with fewer nodes, and the one after that with the configured layout.
    """
    config = endless(tmp_path, launch={"min_dp": 3}, checkpoint={"every": 2})
    agents = Agents(shell, config, 3, 1)
    wait_for_lines(metrics(config), 5, agents.processes[0])
    agents.kill(2)
    assert agents.wait() == [1, 1, -9], agents.said()
    assert (
        "2 nodes of 1 rank hold at most dp 2 x pp 1 x tp 1, and launch.min_dp = 3" in agents.said()
    )
    config = endless(tmp_path, checkpoint={"every": 2})
    agents = Agents(shell, config, 3, 1)
    wait_for_lines(metrics(config), num_lines(metrics(config)) + 3, agents.processes[0])
    agents.kill(2)
    wait_for(agents, "recovered: ")
    stop(agents, config)
    agents = Agents(shell, config, 3, 1)
    wait_for(agents, "changed: parallel.dp: ")
    config = stop(agents, config)
    assert "changed: parallel.dp: 2 -> 3" in agents.said()
    assert layouts(config)[-1] == "pp1 dp3 tp1" and "pp1 dp2 tp1" in layouts(config)
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)


@pytest.mark.long
def test_a_node_that_was_cut_off_does_not_go_on(
    tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Its processes stand still, as good as a network in two halves, and go on when the run has left them
    behind: only the half with the first node takes steps, and the other ends by itself.
    """
    config = endless(tmp_path)
    agents = Agents(shell, config, 3, 1)
    wait_for_lines(metrics(config), 3, agents.processes[0])
    stopped = [*agents.ranks(2), agents.processes[2].pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait_for(agents, "recovered: ")
    assert "node n2 lost: no sign of life for 60 s" in agents.said()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert agents.processes[2].wait(LIMIT_S) == COORDINATOR_LOST
    assert "The ranks of this node are ended" in agents.said(2)
    config = stop(agents, config)
    assert_same_losses(config, unbroken(config, tmp_path / "same"), pool)
