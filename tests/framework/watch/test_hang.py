"""A run that hangs: the rank that all wait for is named, with what it does; stacks are on disk;
nothing is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.errors import HangError
from meshwright.run.directory import STATUS, run_directory
from meshwright.watch.hang.status import Status, read_status
from meshwright.watch.hang.watchdog import GROUP_TIMEOUT_MARGIN_S
from tests.end_to_end.driving import GPT2, layout, lines, run_config
from tests.end_to_end.shell import LIMIT_S, Shell, written
from tests.framework.watch.hanging import ALONE, BEGAN

LIMIT = 5.0
WAITS = r"waits to receive {} of micro-batch \d from rank {} \(pp\d dp\d tp\d\), which has "
IN = (
    r"waits in the [a-z-]+( (of|into) \([\d, ]+\))? of the {} ranks \(number \d+\) for rank {} "
    r"\(pp. dp. tp.\), which has "
)
COMPUTES = r"been computing F of micro-batch \d for \d+\.?\d* s"
READS = r"been reading samples for \d+\.?\d* s"
SILENT = (
    r"sent no heartbeat for \d+\.?\d* s: its process \d+ on \S+ is stopped, or the machine is gone"
)

torture = pytest.mark.torture(row="hangs: rank, peer and action are named")


def hanging(
    directory: Path, how: str, text: str, rank: int, at_call: int, **sections: dict[str, Any]
) -> RunConfig:
    """Return a run in which one rank hangs, in its second step or so. ``none``: none does."""
    reads = {"rank": rank, "at_call": at_call} if how == "reading" else {}
    model: dict[str, Any] = {"builder": "meshwright_models.gpt2:build", "options": GPT2}
    if how not in ("reading", "none"):
        model = {
            "builder": "tests.framework.watch.hanging:hangs",
            "options": {**GPT2, "how": how, "rank": rank, "at_call": at_call},
        }
    keys: dict[str, Any] = {"train": {"steps": 1000}, "launch": {"timeout_s": LIMIT}} | sections
    config = run_config(directory, directory, model=model, parallel=layout(text), **keys)
    tree = config.model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        {**tree, "data": {"builder": "tests.framework.watch.hanging:samples", "options": reads}}
    )


def reported_after_s(shell: Shell, config: RunConfig) -> float:
    """Seconds from when it began to hang to the report."""
    report = run_directory(config.run) / "hang" / "report.txt"
    return report.stat().st_mtime - (shell.directory / BEGAN).stat().st_mtime


def ended(shell: Shell, config: RunConfig, *words: str) -> str:
    """What a run that hangs has said, once it has ended as it should."""
    began = shell.directory / BEGAN
    done = shell.run(
        *(words or ("-m", "meshwright_launch")), "train", written(config, shell.directory)
    )
    shell.wait_until_none_is_left()
    assert began.exists(), done.stderr
    assert done.returncode == (1 if words else HangError.exit_code), done.stderr
    assert "Traceback" not in done.stderr or words
    assert done.stderr.count("the run hangs: nothing has moved on rank") == 1, done.stderr
    passed_s = reported_after_s(shell, config)
    assert LIMIT <= passed_s < GROUP_TIMEOUT_MARGIN_S / 2, (
        "the watchdog and not the process groups' limit, also on a busy machine"
    )
    return done.stderr


RANK_0, RANK_1 = r"rank 0 .*", r"rank 1 .*"
OF_WORLD = r"\(\d,\) of the world ranks \(number \d+\)"
HANGS = [
    ("reading", "dp2", 1, RANK_0 + IN.format("(dp|world)", 1) + READS),
    ("reading", "pp2", 0, RANK_1 + WAITS.format("F", 0) + READS),
    ("reading", "tp2", 1, RANK_0 + IN.format("tp", 1) + READS),
    ("loop", "pp2", 0, RANK_1 + WAITS.format("F", 0) + COMPUTES),
    ("loop", "tp2", 1, RANK_0 + IN.format("tp", 1) + COMPUTES),
    ("loop", "dp2,pp2", 3, r"rank \d .* 3 .*which has " + COMPUTES),
    ("stop", "dp2", 0, RANK_1 + IN.format("(dp|world)", 0) + SILENT),
    ("stop", "pp2", 1, RANK_0 + WAITS.format("B", 1) + SILENT),
    ("stop", "tp2", 0, RANK_1 + IN.format("tp", 0) + SILENT),
    ("collective more", "pp2,tp2", 1, RANK_0 + IN.format("tp", 1) + COMPUTES),
    ("collective more", "pp2", 0, RANK_1 + WAITS.format("F", 0) + COMPUTES),
    (
        *("collective less", "dp2", 1),
        rf"deadlock: {RANK_0}waits in the all-reduce of {OF_WORLD} for {RANK_1}; {RANK_1}waits in"
        r" the all-gather into \(\d+,\) of the dp ranks \(number \d+\) for rank 0",
    ),
    (
        *("collective other", "dp2", 1),
        rf"{RANK_0}is in the all-reduce of {OF_WORLD}, and {RANK_1}in the barr",
    ),
    (
        *("message less", "pp2", 0),
        rf"deadlock: {RANK_0}waits to receive B of micro-batch \d from {RANK_1}; {RANK_1}waits to"
        r" receive F of micro-batch \d from rank 0",
    ),
]


@torture
@pytest.mark.parametrize(("how", "text", "rank", "said"), HANGS)
def test_who_hangs_is_named(
    how: str,
    text: str,
    rank: int,
    said: str,
    tmp_path: Path,
    shell: Shell,
    record_property: Callable[[str, float], None],
) -> None:
    config = hanging(tmp_path, how, text, rank, 9)
    first, head, *table = ended(shell, config).splitlines()
    assert first.startswith("meshwright: error: the run hangs: nothing has moved on rank ")
    record_property("within_s", reported_after_s(shell, config))
    assert re.search(said, first), first
    num_ranks = 4 if "," in text else 2
    assert head.split() == ["rank", "at", "step", "for", "activity"]
    assert [line.split()[0] for line in table[:num_ranks]] == [
        str(each) for each in range(num_ranks)
    ]
    place = run_directory(config.run) / "hang"
    reason = first.removeprefix("meshwright: error: ").removesuffix(" [MW-WATCH-005]")
    assert reason in (place / "report.txt").read_text()
    for each in range(num_ranks):
        path = place / f"rank-{each}.txt"
        if how == "stop" and each == rank:
            assert not path.exists()
            continue
        stacks = path.read_text()
        assert "executor.py" in stacks, "the main thread's among them"
        if each == rank and how in ("reading", "loop", "collective more"):
            assert "hanging.py" in stacks
    if not (how == "stop" and rank == 0):
        status = read_status(run_directory(config.run) / STATUS)
        assert status.ended is not None and status.ended.how == "failed"
        assert status.ended.message.startswith("the run hangs: ")


@torture
def test_a_run_of_one_process(tmp_path: Path, shell: Shell) -> None:
    shell.environment[ALONE] = "1"
    config = hanging(tmp_path, "reading", "", 0, 20)
    said = ended(shell, config)
    assert re.search(r"rank 0 \(pp0 dp0 tp0\) has " + READS, said)
    assert "hanging.py" in (run_directory(config.run) / "hang" / "rank-0.txt").read_text()


@torture
def test_under_torchrun_it_is_said_once(tmp_path: Path, shell: Shell) -> None:
    words = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "meshwright_launch",
    )
    said = ended(shell, hanging(tmp_path, "loop", "pp2", 0, 9), *words)
    assert re.search(
        r"error: rank \d: the run hangs: .* rank 1 .*" + WAITS.format("F", 0) + COMPUTES, said
    )


def wait_for(config: RunConfig, process: subprocess.Popen[str], step: int) -> Status:
    """Return the first status with so many steps taken."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline_s and process.poll() is None
        if (run_directory(config.run) / "status.json").exists():
            status = read_status(run_directory(config.run) / STATUS)
            if status.step >= step and len(status.ranks) == 2:
                return status
        time.sleep(0.05)


@torture
def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path, shell: Shell) -> None:
    """For longer than the limit: that is nobody's hang."""
    config = hanging(tmp_path, "none", "dp2", 0, 0, train={"steps": 400}, launch={"timeout_s": 6.0})
    with shell.start(
        ["-m", "meshwright_launch", "train", written(config, tmp_path)], stderr=subprocess.PIPE
    ) as process:
        pids = [each.beat.pid for each in wait_for(config, process, 2).ranks]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(9)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert lines(config)[-1]["step"] == 400 and not (run_directory(config.run) / "hang").exists()


@torture
def test_status_of_a_live_a_killed_and_an_ended_run(tmp_path: Path, shell: Shell) -> None:
    config = hanging(
        tmp_path, "none", "pp2", 0, 0, train={"steps": 100000}, launch={"timeout_s": 20.0}
    )
    file, run = written(config, tmp_path), str(run_directory(config.run))
    with shell.start(
        ["-m", "meshwright_launch", "train", file], stdout=subprocess.DEVNULL
    ) as process:
        pid = wait_for(config, process, 2).pid
        live = shell.run("-m", "meshwright_launch", "status", run)
        process.kill()
    assert live.returncode == 0, live.stderr
    summary, _, table = live.stdout.partition("\n\n")
    first, state, step, *straggler = summary.splitlines()
    head, *ranks = table.splitlines()
    assert not straggler or straggler[0].startswith("waits  "), (
        "on a busy machine one rank may be slower"
    )
    assert first == f"run    {run}" and state == "state  training", live.stdout
    assert re.fullmatch(
        r"step   \d+ of 100000, \S+ s each \(median of the last \d+\), [\d:]+ left, until about .*",
        step,
    )
    assert head.split() == ["rank", "at", "step", "for", "activity"]
    assert [line.split()[:4] for line in ranks] == [
        ["0", "pp0", "dp0", "tp0"],
        ["1", "pp1", "dp0", "tp0"],
    ]
    shell.wait_until_none_is_left()
    time.sleep(7)
    killed = shell.run("-m", "meshwright_launch", "status", run)
    assert re.search(
        rf"state  silent for \d+\.?\d* s, while training; process {pid} of rank 0 is gone from this"
        r" machine\n",
        killed.stdout,
    )
    done = shell.run(
        "-m", "meshwright_launch", "train", file, "--train.steps=2", "--run.name=short"
    )
    assert done.returncode == 0, done.stderr
    over = shell.run("-m", "meshwright_launch", "status", str(Path(run).parent / "short"))
    assert re.search(r"state  finished at [-\d]+ [\d:]+\nstep   2 of 2, \S+ s each", over.stdout), (
        over.stdout
    )


def test_status_of_no_run(tmp_path: Path, shell: Shell) -> None:
    done = shell.run("-m", "meshwright_launch", "status", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"meshwright: error: {tmp_path}/none is no directory: give that of a run, such as"
        " runs/demo [MW-WATCH-002]\n"
    )
