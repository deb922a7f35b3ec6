"""`watch.mirror` on several nodes: an agent on each, emulated on this machine. A dead rank is replaced on
its node, a dead node by a spare one; the losses are those of a run without a failure, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.agent import COORDINATOR_LOST
from meshwright_launch.pool import RankPool
from tests.end_to_end.agents import Agents, kill, num_lines, wait_for_lines
from tests.end_to_end.driving import differing, exact_losses, lines, tensors, train
from tests.end_to_end.shell import LIMIT_S, Shell
from tests.end_to_end.test_recovery import mirrored, recoveries, starts_of, trapped

pytestmark = pytest.mark.slow


def same_as_alone(config: RunConfig, runs: Path, pool: RankPool, again: bool = False) -> None:
    """Compare a run with one without a failure, on one machine and without a mirror. ``again``: steps
    may have been taken twice.
    """
    num_repeated = num_lines(run_directory(config.run) / "metrics-again.jsonl")
    assert again or num_repeated <= len(recoveries(config)), "whose mirror was not complete yet"
    tree = config.model_dump()
    tree["run"]["directory"] = str(runs)
    tree["watch"]["mirror"], tree["launch"]["max_restarts"] = False, 0
    same = RunConfig.model_validate(tree)
    train(pool, same)  # a trap has fired
    assert exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))


def metrics(config: RunConfig) -> Path:
    """Return the file with a line for each step."""
    return run_directory(config.run) / "metrics.jsonl"


def test_a_spare_node_takes_over(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """The agent of the second node is killed in the middle of a step, and its ranks die with it. There
    is no checkpoint before the end.
    """
    model = trapped(rank=3, at_call=14, killed="agent", once=str(tmp_path / "fired"))
    config = mirrored(corpus, tmp_path / "runs", "dp2,pp2", model=model)
    agents = Agents(shell, config, 3, 2, spares=1)
    assert agents.wait() == [0, -9, 0], agents.said()
    assert "node n1 lost: it has closed its connection; with it ranks 2, 3" in agents.said()
    assert "; replaced in place on n2, recovery 1 of 9" in agents.said()
    assert [starts_of(config, rank) for rank in (1, 2, 3)] == [1, 2, 2]
    (record,) = recoveries(config)
    assert record["nodes"] == ["n1"] and record["replaced"] == 2
    assert 1 < record["step"] <= 4 and 0 <= record["detected_s"] < 10
    same_as_alone(config, tmp_path / "same", pool)


@pytest.mark.long
def test_all_nodes_end_with_the_first(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """No process is left behind, of spare nodes too: `shell` checks that."""
    config = mirrored(corpus, tmp_path / "runs", "dp2", train={"steps": 100_000})
    agents = Agents(shell, config, 3, 1, spares=1)
    wait_for_lines(metrics(config), 2, agents.processes[0])
    agents.kill(0)
    assert agents.wait() == [-9, COORDINATOR_LOST, COORDINATOR_LOST]
    shell.wait_until_none_is_left()
    assert "the agent of the first node is gone: it has closed its connection" in agents.said(1)


@pytest.mark.long
def test_a_killed_rank_is_replaced_on_its_node(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """The spare node stays spare."""
    model = trapped(rank=2, at_call=14, killed=True, once=str(tmp_path / "fired"))
    config = mirrored(corpus, tmp_path / "runs", "dp2,pp2", model=model)
    agents = Agents(shell, config, 3, 2, spares=1)
    assert agents.wait() == [0, 0, 0], agents.said()
    assert "; replaced in place, recovery 1 of 9" in agents.said()
    (record,) = recoveries(config)
    assert (record["nodes"], record["replaced"]) == (["n1"], 1)
    same_as_alone(config, tmp_path / "same", pool)


@pytest.mark.long
def test_two_nodes_at_once(corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell) -> None:
    """Two spares take over; later one of them dies too, and there is no other."""
    config = mirrored(
        corpus,
        tmp_path / "runs",
        "dp3",
        batch={"global_batch": 9},
        train={"steps": 40},
        launch={"min_dp": 3},  # no fewer replicas
    )
    agents = Agents(shell, config, 5, 1, spares=2)
    wait_for_lines(metrics(config), 3, agents.processes[0])
    agents.kill(1)
    agents.kill(2)
    recorded = run_directory(config.run) / "recoveries.jsonl"
    wait_for_lines(recorded, 1, agents.processes[0])
    agents.kill(3)
    assert agents.wait() == [1, -9, -9, -9, 1], agents.said()
    assert "n3 lost, and no spare node is left: the run ends" in agents.said()
    assert sum(record["replaced"] for record in recoveries(config)) >= 2
    agents = Agents(shell, config, 3, 1)  # the same command, as a requeued job
    assert agents.wait() == [0, 0, 0], agents.said()
    same_as_alone(config, tmp_path / "same", pool, again=True)


@pytest.mark.long
def test_a_node_comes_back_as_a_spare(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Its agent is started again while the run goes on, and takes over when another node dies."""
    config = mirrored(corpus, tmp_path / "runs", "dp2", train={"steps": 400})
    agents = Agents(shell, config, 3, 1, spares=1)
    recorded = run_directory(config.run) / "recoveries.jsonl"
    wait_for_lines(metrics(config), 3, agents.processes[0])
    agents.kill(1)
    wait_for_lines(recorded, 1, agents.processes[0])
    agents.processes[1].wait()
    agents.processes[1] = agents.start(1)
    time.sleep(8)
    agents.kill(2)
    assert agents.wait() == [0, 0, -9], agents.said()
    assert "replaced in place on n1, recovery 2 of 9" in agents.said()
    same_as_alone(config, tmp_path / "same", pool)


@pytest.mark.long
def test_a_signal_ends_all_nodes(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """As from Slurm, to all agents; and to a single one."""
    config = mirrored(corpus, tmp_path / "runs", "dp2", train={"steps": 100_000})
    for targets in ([0, 1, 2], [1]):
        before = num_lines(metrics(config))
        agents = Agents(shell, config, 3, 1, spares=1)
        wait_for_lines(metrics(config), before + 3, agents.processes[0])
        for node in targets:
            agents.processes[node].send_signal(signal.SIGTERM)
        codes = agents.wait()
        assert codes[:2] == [85, 85] and codes[2] in (85, 143), agents.said()
        assert "it is saved" in agents.said()
        assert not (run_directory(config.run) / "recoveries.jsonl").exists()


@pytest.mark.long
def test_agents_that_do_not_belong(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """One of another configuration is refused, and the run waits for the right one."""
    config = mirrored(corpus, tmp_path / "runs", "dp2")
    agents = Agents(shell, config, 1, 2)  # alone: as without nodes
    assert agents.wait() == [0], agents.said()
    config = mirrored(corpus, tmp_path / "other", "dp2")
    agents = Agents(shell, config, 2, 1)
    kill(agents.processes[1].pid)
    stranger = agents.start(1, "--run.seed=7")
    assert stranger.wait(LIMIT_S) == 2, agents.said(1)
    assert "is refused by that of n0: its configuration" in agents.said(1)
    agents.processes[0].send_signal(signal.SIGTERM)
    assert agents.processes[0].wait(LIMIT_S) == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_node_that_does_not_come(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """It is named, with the address that it cannot reach."""
    config = mirrored(corpus, tmp_path / "runs", "dp2", launch={"timeout_s": 5})
    agents = Agents(shell, config, 2, 1)
    kill(agents.processes[1].pid)
    assert agents.wait() == [1, -9]
    assert "[MW-LAUNCH-120]" in agents.said() and "not of node 1" in agents.said()


@pytest.mark.long
@pytest.mark.parametrize("killed", ["hang", "stop"])
def test_a_stuck_rank_is_replaced(
    killed: str, corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """The report of the hang names it; the others stay."""
    model = trapped(rank=1, at_call=14, killed=killed, once=str(tmp_path / "fired"))
    config = mirrored(corpus, tmp_path / "runs", "dp2,tp2", model=model, launch={"timeout_s": 5})
    agents = Agents(shell, config, 1, 4)
    assert agents.wait() == [0], agents.said()
    assert "the run hangs: nothing has moved on rank" in agents.said()
    assert "; replaced in place, recovery 1 of 9" in agents.said(), agents.said()
    assert [starts_of(config, rank) for rank in (1, 2, 3)] == [2, 1, 1]
    (record,) = recoveries(config)
    assert record["replaced"] == 1 and record["detected_s"] >= 5
    same_as_alone(config, tmp_path / "same", pool)


@pytest.mark.long
def test_a_signal_between_two_generations(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """It is kept while ranks are replaced: no step is lost, and the same command goes on."""
    model = trapped(rank=1, at_call=14, killed=True, once=str(tmp_path / "fired"))
    steps = {"train": {"steps": 400}, "checkpoint": {"every": 0}}
    config = mirrored(corpus, tmp_path / "runs", "dp2", model=model, **steps)
    agents = Agents(shell, config, 1, 2)
    deadline_s = time.monotonic() + LIMIT_S
    while "; replaced in place" not in agents.said() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    agents.processes[0].send_signal(signal.SIGTERM)
    assert agents.wait() == [85], agents.said()
    assert "it is saved" in agents.said()
    assert 2 <= num_lines(metrics(config)) < 400
    assert Agents(shell, config, 1, 2).wait() == [0]
    same_as_alone(config, tmp_path / "same", pool, again=True)


@pytest.mark.long
def test_a_rank_that_does_not_leave_its_step(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """It is killed with all others in the last permitted recovery, and the message names this reason."""
    config = mirrored(corpus, tmp_path / "runs", "dp3", 1, batch={"global_batch": 9})
    config = config.replace(train={"steps": 300})
    agents = Agents(shell, config, 1, 3)
    wait_for_lines(metrics(config), 3, agents.processes[0])
    stopped, killed = agents.ranks(0)[1:]
    os.kill(stopped, signal.SIGSTOP)
    kill(killed)
    assert agents.wait() == [0], agents.said()
    said = agents.said()
    assert said.count("was ended by SIGKILL") == 1, said
    assert "did not leave its step within 20 s of a failure; all ranks start anew" in said
    same_as_alone(config, tmp_path / "same", pool)


@pytest.mark.torture(row="recoveries in place, on several nodes")
@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("dp4,zero1", {}),
        ("dp4,zero3", {}),
        ("dp2,pp2,zero2", {"train": {"dtype": "bfloat16"}}),
        ("dp2,tp2,sequence", {"optimizer": {"name": "muon"}}),
        ("pp4", {}),
        ("dp4,ep2", {"model": "mixture"}),
    ],
    ids=str,
)
def test_kills_at_random_moments(
    text: str,
    sections: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    shell: Shell,
    request: pytest.FixtureRequest,
) -> None:
    """Ranks and whole nodes are killed, some of them during a recovery."""
    draw = random.Random(f"{request.config.getoption('--seed')} {text} nodes")
    sections = {**sections, "train": {"steps": 60, **sections.get("train", {})}}
    if sections.get("model") == "mixture":
        from tests.end_to_end.driving import MODELS

        sections["model"] = MODELS["mixture"]
    config = mirrored(corpus, tmp_path / "runs", text, 99, **sections)
    agents = Agents(shell, config, 4, 2, spares=2)
    nodes, seen = [1, 2, 3], 1
    for target in draw.sample(["node", "rank", "node", "rank"], 4):
        wait_for_lines(metrics(config), seen, agents.processes[0])
        time.sleep(draw.random())
        node = nodes[0]
        if target == "node":
            agents.kill(nodes.pop(0))
        else:
            for pid in draw.sample(ranks := agents.ranks(node), min(1, len(ranks))):
                kill(pid)
        seen = num_lines(metrics(config)) + draw.choice([0, 1, 3])
    codes = agents.wait()
    assert codes[0] == 0 and codes.count(-9) == 2, agents.said()
    assert len(lines(config)) == 60
    same_as_alone(config, tmp_path / "same", pool)
    assert recoveries(config), "nothing was killed"
