"""Asked to end by a signal: all ranks save after the same step and leave;
the same command goes on bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.build import build
from meshwright.checkpoint import find
from meshwright.config import RunConfig, parse
from meshwright.errors import Preempted
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parts import STOP
from meshwright.run.directory import run_directory
from meshwright.step import take_step
from meshwright.system.process import SIGNALS, StopRequest
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import (
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    tensors,
    train,
    with_own_samples,
)
from tests.end_to_end.shell import LIMIT_S, ROOT, Shell, written
from tests.support.marks import long_row

EXIT_CODE = 85
CONSTANT: dict[str, dict[str, Any]] = {"optimizer": {"schedule": "constant"}}
"""The learning rate of a step does not depend on how many there will be."""


def test_a_signal_is_noted_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as asked:
        assert not asked.is_requested()
    assert [signal.getsignal(each) for each in SIGNALS] == before
    try:
        with StopRequest() as asked:
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGTERM)
            assert asked.is_requested() and asked.signal is signal.SIGUSR2, "the first"
        signal.raise_signal(signal.SIGTERM)  # on its way out the process is not ended by another
    finally:
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    seen = []

    def within() -> None:
        with StopRequest():
            seen.append([signal.getsignal(each) for each in SIGNALS])

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert seen == [before]


def asked_in_step(rank: int, world_size: int, config_json: str, whom: int, when: int) -> list[bool]:
    """Return what each step said, when one rank was asked before one of them."""
    config = parse(config_json)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp), "cpu")
    parts = build(config, mesh)
    said = []
    for step in (1, 2, 3):
        parts.flags[STOP] = lambda step=step: rank == whom and step == when
        said.append(STOP in take_step(parts).flags)
    close_mesh(mesh)
    return said


@pytest.mark.parametrize("whom", [long_row(0), 3])
def test_all_ranks_know_in_the_same_step(
    whom: int, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus, tmp_path, parallel={**layout("dp2,pp2"), "dp": 2}, batch={"chunks": 4}
    )
    assert (
        pool.run(asked_in_step, 4, config.model_dump_json(), whom, 2) == [[False, True, False]] * 4
    )


def asked_while_it_trains(rank: int, world_size: int, config: RunConfig) -> str:
    """Return the message with which a rank left; rank 1 was asked after its second step."""
    file = run_directory(config.run) / "metrics.jsonl"

    def ask() -> None:
        while not file.exists() or len(file.read_text().splitlines()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    if rank == 1:
        threading.Thread(target=ask, daemon=True).start()
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        work(config)
    except Preempted as stopped:
        return str(stopped)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return "never stopped"


def test_one_rank_is_asked_and_all_leave(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """The run that goes on is the run that was never stopped, dropout and all."""
    config = run_config(
        corpus, tmp_path / "asked", parallel=layout("dp2"), train={"steps": 400}, **CONSTANT
    )
    said = pool.run(asked_while_it_trains, 2, config)
    found = re.fullmatch(
        r"stopped by SIGUSR1 to rank 1 after step (\d+) of 400; it is saved, and .*", said[0]
    )
    assert found and said == [said[0]] * 2
    step = int(found[1])
    assert [checkpoint.step for checkpoint in find(run_directory(config.run))] == [step]
    assert lines(config)[-1]["step"] == step

    same = run_config(
        corpus, tmp_path / "same", parallel=layout("dp2"), train={"steps": step + 3}, **CONSTANT
    )
    train(pool, same)
    later = RunConfig.model_validate(config.model_dump() | {"train": same.train.model_dump()})
    train(pool, later)
    assert exact_losses(later) == exact_losses(same)
    assert not differing(tensors(run_directory(later.run)), tensors(run_directory(same.run)))


def process_of(config: RunConfig, rank: int) -> int:
    """Return a rank's process, as its log names it."""
    log = (run_directory(config.run) / "logs" / f"rank-{rank}.log").read_text()
    return int(re.findall(r"^=== started .* process (\d+) ===$", log, re.MULTILINE)[-1])


def stopped(
    shell: Shell,
    config: RunConfig,
    directory: Path,
    whom: str,
    how: list[signal.Signals],
    wait_s: float,
) -> None:
    """Train, send the signals a while after the second step, and look at what is left."""
    process = shell.start(
        ["-m", "meshwright_launch", "train", written(config, directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    metrics = run_directory(config.run) / "metrics.jsonl"
    deadline_s = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.01)
    time.sleep(wait_s)
    for each in how:
        pids = (
            [process.pid]
            if whom == "launcher"
            else [process_of(config, 1)]
            if whom == "rank"
            else shell.alive()
        )
        for pid in pids:
            try:
                os.kill(pid, each)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    _, said = process.communicate(timeout=LIMIT_S)
    step = lines(config)[-1]["step"]
    to_one = " to rank 1" if whom == "rank" else ""
    # of two that come at once Python takes the one of the lower number
    names = "|".join(each.name for each in how)
    (line,) = said.splitlines()
    assert re.fullmatch(
        f"meshwright: stopped by ({names}){to_one} after step {step} of 100000; it is saved, and"
        " the same command "
        r"resumes from there \[MW-RUN-014\]",
        line,
    )
    assert process.returncode == EXIT_CODE
    newest, *_ = find(run_directory(config.run))
    assert newest.step == step
    shell.wait_until_none_is_left()


def long_run(corpus: Path, directory: Path, text: str, every: int = 0) -> RunConfig:
    keys: dict[str, Any] = {"train": {"steps": 100000}, "checkpoint": {"every": every}}
    return with_own_samples(run_config(corpus, directory, parallel=layout(text), **keys))


@pytest.mark.torture
@pytest.mark.parametrize("text", ["dp2", ""])
def test_the_launcher_is_told(text: str, corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """A second and a third signal change nothing."""
    stopped(
        shell,
        long_run(corpus, tmp_path, text),
        tmp_path,
        "launcher",
        [signal.SIGTERM, signal.SIGINT, signal.SIGTERM],
        0.0,
    )


@pytest.mark.long
@pytest.mark.slow
def test_all_processes_are_told(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """Also Python's own, which know nothing of it: none of them dies, or says a word."""
    stopped(shell, long_run(corpus, tmp_path, "dp2"), tmp_path, "all", [signal.SIGUSR2], 0.0)


@pytest.mark.torture(
    row="each signal x each target x random moments: exit code 85 after the step, nothing left"
)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("whom", ["launcher", "rank", "all"])
def test_any_signal_to_anyone_at_any_moment(
    number: int, whom: str, corpus: Path, tmp_path: Path, shell: Shell, seed: int
) -> None:
    """Saving in every step, so that many signals come while it does."""
    draw = random.Random(f"{seed} {number} {whom}")
    signals = draw.choices(
        [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2], k=draw.choice([1, 2])
    )
    config = long_run(
        corpus, tmp_path, draw.choice(["dp2", "pp2", "tp2", "dp2,pp2"]), every=draw.choice([0, 1])
    )
    if whom == "all":
        signals = signals[:1]  # who came first differs from rank to rank
    stopped(shell, config, tmp_path, whom, signals, draw.uniform(0, 1.0))


SIGNAL_AT_EXIT = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGUSR2)"
"""A sitecustomize.py. Of all functions registered for the exit it runs last."""


@pytest.mark.long
def test_a_signal_after_the_end_changes_nothing(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """Slurm tells a rank of its time limit while the interpreter shuts down:
    a complete run exits with 0.
    """
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_EXIT)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shell.environment |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shell.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    config = run_config(corpus, tmp_path)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert shell.run("-c", "pass").returncode == -signal.SIGUSR2, "the signal is sent"
