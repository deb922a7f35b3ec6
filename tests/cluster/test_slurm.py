"""Runs on a real Slurm: the numbers of one machine, and whatever happens to a job,
those of a run left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshwright.config import RunConfig, load
from meshwright.data.prepare.stdlib import prepare_stdlib
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.cluster.hosts import until
from tests.cluster.slurm import Slurm
from tests.end_to_end.driving import (
    changed,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    size,
    tensors,
    train_rank,
)
from tests.end_to_end.shell import written

pytestmark = pytest.mark.slurm(
    row="jobs on a real Slurm, and the seconds until a step beyond the fault"
)
ROOT = Path(__file__).parents[2]
STEPS = 160
LIMIT_S = 300.0
OURS = re.compile(r"-m meshwright_launch train|slurmstepd: \[")
OURS_ALONE = re.compile(r"^\S*python\S* -m meshwright_launch train|multiprocessing.forkserver")


def submitted(cluster: Slurm, file: str, *words: str) -> str:
    """`meshwright slurm --submit`, on the login node; the number of the job."""
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "slurm",
        file,
        "--nodes=2",
        "--devices-per-node=2",
        "--submit",
        *words,
    ]
    done = cluster.command(*command, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = re.search(r"job (\d+);", done.stdout)
    assert found, done.stdout
    return found[1]


def steps_of(config: RunConfig) -> int:
    """Return the last step that has been told."""
    metrics = run_directory(config.run) / "metrics.jsonl"
    return (
        int(lines(config)[-1]["step"])
        if metrics.exists() and metrics.read_text().count("\n")
        else 0
    )


def num_starts(config: RunConfig) -> int:
    """How often the run has begun to train."""
    return (run_directory(config.run) / "starts.jsonl").read_text().count("\n")


def told(config: RunConfig) -> str:
    """Return all logs of the job."""
    logs = sorted((run_directory(config.run) / "slurm").glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@pytest.fixture
def idle(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster with all nodes up and nothing on them;
    afterwards no process of ours may be left on any node.
    """
    yield cluster
    cluster.command("scancel", "--user=root")
    names = cluster.hosts.names
    until(
        lambda: cluster.states() == dict.fromkeys(names, "idle"),
        f"idle nodes, {cluster.states()}",
        LIMIT_S,
        0.2,
    )

    def left() -> list[str]:
        return [
            line for name in names for line in cluster.hosts.commands(name) if OURS.search(line)
        ]

    until(lambda: not left(), "no process of ours on any node", 30.0, 0.1)


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    """The same run on one machine, left alone."""
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("plain"),
        parallel=layout("pp2,tp2"),
        train={"steps": STEPS},
        optimizer={"schedule": "constant"},
        batch={"micro_batch_size": 2},
        checkpoint={"every": 0},
    )
    pool.run(train_rank, size(config), config, timeout_s=LIMIT_S)
    return config


@pytest.mark.parametrize("words", [(), ("--torchrun",)], ids=["srun", "torchrun"])
def test_the_numbers_of_one_machine(
    words: tuple[str, ...], idle: Slurm, plain: RunConfig, tmp_path: Path
) -> None:
    """pp across nodes, tp inside: the host names say so."""
    config = changed(plain, run={"directory": str(tmp_path)}, train={"steps": 20})
    job = submitted(idle, written(config, tmp_path), *words)
    assert idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT"]) == "COMPLETED", told(config)
    first = {step: loss for step, loss in exact_losses(plain).items() if step <= 20}
    assert exact_losses(config) == first
    placed = (run_directory(config.run) / "placement.txt").read_text()
    assert "h1: ranks 0-1" in placed and "h2: ranks 2-3" in placed, (
        "the ranks of a tp group are neighbours"
    )
    assert "2 groups of 2 neighbours, a row above; each inside one node" in placed
    assert "pp 2 x dp 1 x tp 2 = 4 ranks on 2 nodes of 2" in told(config)


def send_usr2(cluster: Slurm, job: str) -> None:
    """As Slurm does before the time limit."""
    assert cluster.command("scancel", "--signal=USR2", job).returncode == 0


def requeue(cluster: Slurm, job: str) -> None:
    """As an operator does."""
    assert cluster.command("scontrol", "requeue", job).returncode == 0


def preempt(cluster: Slurm, job: str) -> None:
    """By a job of a higher partition that wants all nodes."""
    other = cluster.submit(
        "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"
    )
    cluster.wait(other, ["COMPLETED"])


def restart_the_controller(cluster: Slurm, job: str) -> None:
    """slurmctld goes, and comes again: the job is not to notice."""
    cluster.stop_controller()
    time.sleep(2)
    cluster.start_controller()


def kill_a_rank(cluster: Slurm, job: str) -> None:
    """The last one's process, on its node."""
    node = nodes_of(cluster, job)[-1]
    found = [
        pid
        for pid in cluster.hosts.pids(node)
        if b"launch\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(found[-1], signal.SIGKILL)


def nodes_of(cluster: Slurm, job: str) -> list[str]:
    """Return names of a job's nodes."""
    return cluster.command(
        "scontrol", "show", "hostnames", cluster.job(job)["NodeList"]
    ).stdout.split()


def crash(cluster: Slurm, job: str) -> None:
    """Power off, and after the job has left it the node comes back."""
    node = nodes_of(cluster, job)[-1]
    cluster.hosts.crash(node)
    until(lambda: cluster.state(job) != "RUNNING", "the job has left the dead node", LIMIT_S, 0.1)
    cluster.hosts.heal(node)
    cluster.hosts.boot(node)
    cluster.start_node(node)


def cut(cluster: Slurm, job: str) -> None:
    """The cable of a node is out until the job has left it."""
    node = nodes_of(cluster, job)[-1]
    cluster.hosts.cut(node)
    until(lambda: cluster.state(job) != "RUNNING", "the job has left the lost node", LIMIT_S, 0.1)
    cluster.hosts.heal(node)


def test_a_slow_node_is_named_and_left_out(idle: Slurm, plain: RunConfig, tmp_path: Path) -> None:
    """The doctor's figures are those that were set, within 10 %,
    and the job runs where the link is sound.
    """
    config = changed(plain, run={"directory": str(tmp_path)}, train={"steps": 4})
    try:
        for name in idle.hosts.names:
            idle.hosts.limit(name, "1gbit" if name != "h2" else "100mbit")
        words = [
            "--doctor",
            "--nodes=3",
            "--parallel.pp=3",
            "--parallel.tp=1",
            "--devices-per-node=1",
        ]
        job = submitted(idle, written(config, tmp_path), *words)
        assert idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT"], LIMIT_S) == "COMPLETED", told(
            config
        )
    finally:
        for name in idle.hosts.names:
            idle.hosts.limit(name, None)
    assert nodes_of(idle, job) == ["h1", "h3", "h4"]
    said = told(config)
    slow, usual = re.search(
        r"the link of h2 is slow: ([\d.]+) Gbit/s, others reach ([\d.]+) Gbit/s", said
    ).groups()  # type: ignore[union-attr]
    assert float(slow) == pytest.approx(0.1, rel=0.1) and float(usual) == pytest.approx(
        1.0, rel=0.1
    )
    figures = tomllib.loads((run_directory(config.run) / "links.toml").read_text())
    assert 8 * figures["across_nodes"]["bytes_per_s"] == pytest.approx(1e9, rel=0.1)


def test_a_dead_link_is_named_before_anything_hangs(
    idle: Slurm, plain: RunConfig, tmp_path: Path
) -> None:
    """h2 and h3 both reach the node of rank 0."""
    config = changed(plain, run={"directory": str(tmp_path)}, parallel=layout("pp3"))
    idle.hosts.part("h2", "h3")
    try:
        done = idle.command(
            *("srun", "--kill-on-bad-exit=1", "-w", "h1,h2,h3", "-N3", "--ntasks-per-node=1"),
            *(sys.executable, "-m", "meshwright_launch", "doctor", written(config, tmp_path)),
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            timeout=LIMIT_S,
        )
    finally:
        idle.hosts.join("h2", "h3")
    assert "1 thing is wrong: the link between h2 and h3 is dead: no connection" in done.stderr, (
        done.stderr
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr


WIDE = {"max_sequence_length": 256, "num_layers": 4, "dropout": 0.0}
"""Activations of 262 KB for eight samples, and little to compute for them."""


def wide(plain: RunConfig, runs: Path, **sections: Any) -> RunConfig:
    """Return a model whose messages are large enough for a link to matter."""
    return changed(
        plain,
        run={"directory": str(runs)},
        model={"options": plain.model.options | WIDE},
        data={"sequence_length": 256},
        batch={"micro_batch_size": 8, "global_batch": 64},
        **sections,
    )


def test_a_run_says_who_makes_the_others_wait(
    idle: Slurm, plain: RunConfig, tmp_path: Path
) -> None:
    """The same link, without the doctor: the run itself names it."""
    config = wide(
        plain,
        tmp_path,
        parallel=layout("pp4"),
        train={"steps": 12},
        tracking={"stragglers_every": 6},
    )
    try:
        for name in idle.hosts.names:
            idle.hosts.limit(name, "500mbit" if name != "h2" else "20mbit")
        job = submitted(idle, written(config, tmp_path), "--nodes=4", "--devices-per-node=1")
        assert idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT"], LIMIT_S) == "COMPLETED", told(
            config
        )
    finally:
        for name in idle.hosts.names:
            idle.hosts.limit(name, None)
    assert "the link of h2 makes the others wait" in told(config), told(config)
    named = {
        line["step"]: line["perf/straggler"] for line in lines(config) if "perf/straggler" in line
    }
    assert named == {6: "the link of h2", 12: "the link of h2"}


def test_the_demo_on_four_nodes(idle: Slurm, tmp_path: Path) -> None:
    """dp 2 x pp 2 x tp 2 from configs/demo.toml: the losses of one machine, bit for bit."""
    text = tmp_path / "text"
    prepare_stdlib(text, 4096, 0.05, replace=False, say=lambda line: None)
    demo = load(ROOT / "configs" / "demo.toml")
    config = changed(
        demo,
        run={"directory": str(tmp_path / "slurm")},
        data={"train": str(text / "train"), "validation": str(text / "validation")}
        | {"tokenizer": str(text / "tokenizer.json")},
        train={"steps": 20, "validate_every": 10, "validate_steps": 2},
        checkpoint={"every": 10},
        tracking={"wandb": "off"},
    )
    here = changed(config, run={"directory": str(tmp_path / "here")})
    words = [sys.executable, "-m", "meshwright_launch", "train", written(here, tmp_path)]
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)
    job = submitted(idle, written(config, tmp_path), "--nodes=4")
    assert idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT"], LIMIT_S) == "COMPLETED", told(config)
    assert exact_losses(config) == exact_losses(here)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(here.run)))


@pytest.mark.parametrize(("rate", "slower"), [("1gbit", 0.0), ("100mbit", 1.5)])
def test_tensor_parallel_groups_belong_in_a_node(
    rate: str,
    slower: float,
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """The same four ranks, tp inside nodes and pp across them, and the other way round: what the
    same steps take. With 1 Gbit/s two cores compute for so long that it does not matter yet, and
    nothing is asserted of it.
    """
    config = wide(plain, tmp_path, train={"steps": 8, "validate_every": 0})
    crossed = changed(config, run={"name": "crossed"}, parallel={"tp_across_nodes": True})
    words = (
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        "-w",
        "h1,h2",
        sys.executable,
        "-m",
        "meshwright_launch",
        "train",
    )
    taken_s = []
    try:
        for name in idle.hosts.names:
            idle.hosts.limit(name, rate)
        for each, order in ((config, "block"), (crossed, "cyclic")):
            done = idle.command(
                *words,
                written(each, tmp_path),
                env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_DISTRIBUTION": order},
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, done.stderr
            taken_s.append(statistics.median(line["perf/step_s"] for line in lines(each)[2:]))
    finally:
        for name in idle.hosts.names:
            idle.hosts.limit(name, None)
    assert exact_losses(crossed) == exact_losses(config)
    inside_s, across_s = taken_s
    record_property("noted", f"tp inside nodes {inside_s:.2f} s, across {across_s:.2f} s at {rate}")
    assert across_s > slower * inside_s


FAULTS: dict[str, tuple[Callable[[Slurm, str], None], int]] = {
    "scancel --signal=USR2": (send_usr2, 1),
    "scontrol requeue": (requeue, 1),
    "preemption": (preempt, 1),
    "a rank killed": (kill_a_rank, 1),
    "a node crashes": (crash, 1),
    "a link is cut": (cut, 1),
    "slurmctld restarts": (restart_the_controller, 0),
}
"""What happens, and how often the job starts again because of it."""


SURVIVED: list[Any] = [
    *(pytest.param(fault, (), id=fault) for fault in FAULTS),
    pytest.param("scancel --signal=USR2", ("--torchrun",), id="scancel --signal=USR2, torchrun"),
]


@pytest.mark.parametrize(("fault", "words"), SURVIVED)
def test_the_job_survives(
    fault: str,
    words: tuple[str, ...],
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    config = changed(
        plain, run={"directory": str(tmp_path)}, checkpoint={"every": 10, "keep_last": 2}
    )
    job = submitted(idle, written(config, tmp_path), *words)
    until(lambda: steps_of(config) >= 25, "25 steps", LIMIT_S, 0.1)
    strike, restarts = FAULTS[fault]
    begin_s, before = time.monotonic(), steps_of(config)
    strike(idle, job)
    until(lambda: num_starts(config) == 1 + restarts, f"{restarts} further starts", LIMIT_S, 0.1)
    until(lambda: steps_of(config) > before, f"a step after {before}", LIMIT_S, 0.1)
    recovered_s = time.monotonic() - begin_s
    assert (
        idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"], LIMIT_S) == "COMPLETED"
    ), told(config)
    assert int(idle.job(job)["Restarts"]) == restarts
    assert exact_losses(config) == exact_losses(plain)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(plain.run)))
    if strike is send_usr2:
        assert (
            json.loads((run_directory(config.run) / "starts.jsonl").read_text().splitlines()[1])[
                "step"
            ]
            > before
        )
    record_property("noted", f"{' '.join((fault, *words))} {recovered_s:.0f}")


MIRRORED = ("--spares=1", "--watch.mirror=true", "--launch.max_restarts=9")


def test_a_spare_node_takes_over(
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """The second of two nodes is powered off: the job goes on, without a requeue."""
    config = changed(plain, run={"directory": str(tmp_path)})
    job = submitted(idle, written(config, tmp_path), *MIRRORED)
    until(lambda: steps_of(config) >= 25, "25 steps", LIMIT_S, 0.1)
    nodes = nodes_of(idle, job)
    assert len(nodes) == 3
    begin_s, before = time.monotonic(), steps_of(config)
    idle.hosts.crash(nodes[1])
    try:
        until(lambda: steps_of(config) > before + 1, "a second new step", LIMIT_S, 0.05)
        recovered_s = time.monotonic() - begin_s
        assert idle.wait(job, ["COMPLETED", "FAILED", "PENDING"], LIMIT_S) == "COMPLETED", told(
            config
        )
    finally:
        bring_back(idle, nodes[1])
    assert idle.job(job)["Restarts"] == "0"
    (record,) = map(
        json.loads, (run_directory(config.run) / "recoveries.jsonl").read_text().splitlines()
    )
    assert (record["nodes"], record["replaced"]) == ([nodes[1]], 2)
    assert f"replaced in place on {nodes[2]}" in told(config)
    assert exact_losses(config) == exact_losses(plain)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(plain.run)))
    record_property("noted", f"a node crashes, a spare takes over {recovered_s:.0f}")


def test_a_job_without_a_spare_node_goes_on(
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    pool: RankPool,
    record_property: Callable[[str, Any], None],
) -> None:
    """The second of two nodes is powered off: one replica takes the samples of both, without a requeue."""
    config = changed(
        plain,
        run={"directory": str(tmp_path)},
        parallel={"dp": 2, "pp": 1},
        train={"dtype": "float64"},
    )
    job = submitted(idle, written(config, tmp_path), "--spares=0", *MIRRORED[1:])
    until(lambda: steps_of(config) >= 25, "25 steps", LIMIT_S, 0.1)
    _, second = nodes_of(idle, job)
    begin_s, before = time.monotonic(), steps_of(config)
    idle.hosts.crash(second)
    try:
        until(lambda: steps_of(config) > before + 1, "a second new step", LIMIT_S, 0.05)
        recovered_s = time.monotonic() - begin_s
        assert idle.wait(job, ["COMPLETED", "FAILED", "PENDING"], LIMIT_S) == "COMPLETED", told(
            config
        )
    finally:
        bring_back(idle, second)
    assert idle.job(job)["Restarts"] == "0"
    (record,) = map(
        json.loads, (run_directory(config.run) / "recoveries.jsonl").read_text().splitlines()
    )
    assert record["change"].startswith("dp 2 -> 1, chunks ")
    same = changed(config, run={"directory": str(tmp_path / "same")})
    pool.run(train_rank, size(same), same, timeout_s=LIMIT_S)
    found, expected = (
        {step: float.fromhex(loss) for step, loss in exact_losses(each).items()}
        for each in (config, same)
    )
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    record_property("noted", f"a node crashes, fewer replicas go on {recovered_s:.0f}")


def test_the_first_node_takes_the_job_along(
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """Its agent coordinates the others, and the script of the job runs there: another node requeues
    the job, once Slurm has given the first one up.
    """
    config = changed(
        plain, run={"directory": str(tmp_path)}, checkpoint={"every": 10, "keep_last": 2}
    )
    job = submitted(idle, written(config, tmp_path), *MIRRORED)
    until(lambda: steps_of(config) >= 25, "25 steps", LIMIT_S, 0.1)
    first, *others = nodes_of(idle, job)
    begin_s = time.monotonic()
    idle.hosts.crash(first)
    try:
        until(
            lambda: (
                not any(
                    OURS_ALONE.search(line) for name in others for line in idle.hosts.commands(name)
                )
            ),
            "no rank and no agent on the other nodes",
            LIMIT_S,
            0.1,
        )
        ended_s = time.monotonic() - begin_s
        until(lambda: idle.job(job)["Restarts"] == "1", "a requeue", LIMIT_S, 0.1)
    finally:
        bring_back(idle, first)
    assert idle.wait(job, ["COMPLETED", "FAILED"], LIMIT_S) == "COMPLETED", told(config)
    assert exact_losses(config) == exact_losses(plain)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(plain.run)))
    record_property("noted", f"the first node crashes, all ranks have ended {ended_s:.0f}")


def bring_back(cluster: Slurm, node: str) -> None:
    """Start a node that was powered off."""
    cluster.hosts.heal(node)
    cluster.hosts.boot(node)
    cluster.start_node(node)


def test_the_job_survives_its_time_limit(
    idle: Slurm,
    plain: RunConfig,
    tmp_path: Path,
    pool: RankPool,
    record_property: Callable[[str, Any], None],
) -> None:
    """Three minutes for what takes longer: it is told in time,
    as early as its own steps and saves want it.
    """
    options = plain.model.options | {"pause_s": 0.2, "of": "head"}
    model = {"builder": "tests.end_to_end.builders:slow", "options": options}
    config = changed(
        plain,
        run={"directory": str(tmp_path)},
        model=model,
        train={"steps": 12},
        checkpoint={"every": 6, "keep_last": 2},
    )
    # nothing is measured before the first steps
    pool.run(train_rank, size(config), config, timeout_s=LIMIT_S)
    longer = changed(config, train={"steps": 120})
    job = submitted(idle, written(longer, tmp_path), "--time=3")
    script = (run_directory(config.run) / "slurm" / "job.sbatch").read_text()
    found = re.search(r"--signal=USR2@(\d+)", script)
    assert found and 62 <= int(found[1]) <= 90, script
    assert (
        idle.wait(job, ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"], 2 * LIMIT_S) == "COMPLETED"
    ), told(longer)
    restarts = int(idle.job(job)["Restarts"])
    assert restarts >= 1 and told(longer).count("ended on request, saved step-") == restarts, told(
        longer
    )
    first = {step: loss for step, loss in exact_losses(plain).items() if step <= 120}
    assert exact_losses(longer) == first
    starts = [
        json.loads(line)["step"]
        for line in (run_directory(config.run) / "starts.jsonl").read_text().splitlines()
    ]
    assert len(starts) == restarts + 2 and starts[0] == 0 and starts[1] == 12
    record_property("noted", f"a time limit {restarts} restarts")


AN_HOUR_AHEAD = """
import socket, time
if socket.gethostname() == "h2":
    now = time.time
    time.time = lambda: now() + 3600
"""


@contextlib.contextmanager
def as_it_is(cluster: Slurm, directory: Path) -> Iterator[None]:
    """Nothing is changed on any node."""
    yield


@contextlib.contextmanager
def a_clock_an_hour_ahead(cluster: Slurm, directory: Path) -> Iterator[None]:
    """On h2, for whatever python imports from the run's directory."""
    (directory / "sitecustomize.py").write_text(AN_HOUR_AHEAD)
    yield


@contextlib.contextmanager
def a_full_disk(cluster: Slurm, directory: Path) -> Iterator[None]:
    """Of 64 KiB, at /mnt/full of h1."""
    cluster.hosts.run("h1", "mkdir", "-p", "/mnt/full")
    assert (
        cluster.hosts.run(
            "h1", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt/full"
        ).returncode
        == 0
    )
    try:
        yield
    finally:
        cluster.hosts.run("h1", "umount", "/mnt/full")


class Bad(NamedTuple):
    """What cannot work: how srun starts it, what is said once for each node,
    and what is changed for it.
    """

    words: str
    said: str
    directory: str | None = None
    prepared: Callable[[Slurm, Path], contextlib.AbstractContextManager[None]] = as_it_is


TWO_EACH = "-w h1,h2 -N2 --ntasks-per-node=2"
BAD = {
    "fewer ranks than the mesh": Bad("-w h1 -N1 -n2", "= 4 ranks, but 2 were started"),
    "three ranks on a node and one on the other": Bad(
        "-w h1,h2 -N2 -n4 --distribution=plane=3", "straddles the nodes h1, h2"
    ),
    "no shared directory": Bad(
        TWO_EACH, "h2 does not see the run's directory", directory="/mnt/runs"
    ),
    "a clock an hour off": Bad(
        TWO_EACH, "the clocks of h1 and h2 are 3,", prepared=a_clock_an_hour_ahead
    ),
    "a full disk": Bad(
        "-w h1 -N1 -n4", "/mnt/full/run has 65,536 bytes free", "/mnt/full", a_full_disk
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_work_is_said_once_before_training(
    what: str, idle: Slurm, plain: RunConfig, tmp_path: Path
) -> None:
    bad = BAD[what]
    directory = bad.directory or str(tmp_path)
    config = changed(
        plain, run={"directory": directory}, train={"steps": 20}, checkpoint={"every": 5}
    )
    with bad.prepared(idle, tmp_path):
        done = idle.command(
            *("srun", "--kill-on-bad-exit=1", *bad.words.split()),
            *(sys.executable, "-m", "meshwright_launch", "train", written(config, tmp_path)),
            env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
            timeout=LIMIT_S,
        )
    nodes = 2 if "-N2" in bad.words else 1
    assert done.returncode == 2 and 1 <= done.stderr.count(bad.said) <= nodes, (
        done.stderr + done.stdout
    )
    assert "Traceback" not in done.stderr and "step " not in done.stdout.replace("steps", "")
    assert not (run_directory(config.run) / "metrics.jsonl").exists()
