"""`watch.mirror`: a dead rank is replaced in place, no step is taken twice, and the losses are those of a
run without a failure, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.run.directory import run_directory
from meshwright.tracking.jsonl import num_repeated
from meshwright_launch import leftovers, mirror_place
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    tensors,
    train,
    with_own_samples,
)
from tests.end_to_end.shell import LIMIT_S, Shell, written

pytestmark = pytest.mark.slow
PHASES = ["left_s", "groups_s", "built_s", "restored_s", "stepped_s"]


def mirrored(
    corpus: Path, runs: Path, text: str, max_restarts: int = 9, **sections: Any
) -> RunConfig:
    """Return a run on its own samples that is mirrored in memory."""
    keys: dict[str, Any] = {
        "train": {"steps": 5},
        "watch": {"mirror": max_restarts > 0},
        "launch": {"max_restarts": max_restarts},
    }
    for name, section in sections.items():
        keys[name] = {**keys.get(name, {}), **section}
    return with_own_samples(run_config(corpus, runs, parallel=layout(text), **keys))


def trapped(**trap: Any) -> dict[str, Any]:
    """Return the section of a model whose layers fail, on one rank at one call."""
    return {"builder": "tests.end_to_end.builders:trapped", "options": {**GPT2, **trap}}


def recoveries(config: RunConfig) -> list[dict[str, Any]]:
    """Return the records of a run's recoveries."""
    text = (run_directory(config.run) / "recoveries.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def starts_of(config: RunConfig, rank: int) -> int:
    """Return how many processes a rank has had."""
    log = run_directory(config.run) / f"logs/rank-{rank}.log"
    return len(re.findall(r"^=== started ", log.read_text(), re.MULTILINE))


def test_a_killed_rank_is_replaced_and_the_others_stay(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Rank 1 is killed in step 4. There is no checkpoint before the end. tp does not divide the
    vocabulary.
    """
    trap = {"rank": 1, "at_call": 14, "killed": True, "once": str(tmp_path / "fired")}
    model = trapped(**trap, vocab_size=301)
    config = mirrored(corpus, tmp_path / "runs", "dp2,tp2", model=model)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 0, done.stderr
    replaced, recovered = done.stderr.splitlines()
    assert replaced.startswith("meshwright: rank 1 was ended by SIGKILL: if nobody sent it, ")
    assert replaced.endswith("; replaced in place, recovery 1 of 9")
    assert recovered.startswith("meshwright: recovered: left ")
    assert [starts_of(config, rank) for rank in (1, 2)] == [2, 1]
    (record,) = recoveries(config)
    assert record["what"].startswith("rank 1 was ended by SIGKILL")
    times = [record[phase] for phase in PHASES]
    assert times == sorted(times)

    same = mirrored(corpus, tmp_path / "same", "dp2,tp2", 0, model=model)  # the trap has fired
    train(pool, same)
    assert len(lines(config)) == 5 and exact_losses(config) == exact_losses(same)
    assert num_repeated(run_directory(config.run)) <= 1, "its mirror was not complete yet"
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))


@pytest.mark.long
def test_what_always_fails_is_given_up(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """In its first step, whoever takes it: three recoveries, then a restart as without a mirror."""
    model = trapped(rank=1, at_call=3)
    config = mirrored(corpus, tmp_path, "dp2", model=model)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 93, done.stderr
    log = (run_directory(config.run) / "logs/failures.log").read_text()
    assert log.count("Traceback") == 7, "of three recoveries and four launches"
    assert "recovery 3 of 9" in done.stderr and "recovery 4 of 9" not in done.stderr
    assert "given up after 4 failures: 3 restarts in a row" in done.stderr
    assert "ArithmeticError: the layer of a user has failed" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("moment", ["AfterTraining", "BeforeTheMirror", "AtExit"])
def test_a_death_between_steps(
    moment: str, asynchronous: bool, corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """A step that is saved and not mirrored is not taken again: its checkpoint is the newer one."""
    shell.environment["KILLED_ONCE"] = str(tmp_path / "fired")
    keys: dict[str, Any] = {"checkpoint": {"every": 3, "asynchronous": asynchronous}}
    callbacks = {"train": {"callbacks": (f"tests.end_to_end.killing:{moment}",)}}
    config = mirrored(corpus, tmp_path / "runs", "dp2", **keys, **callbacks)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fired").exists() and "rank 1 was ended by SIGKILL" in done.stderr
    same = mirrored(corpus, tmp_path / "same", "dp2", 0, **keys)
    train(pool, same)
    assert exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))


@pytest.mark.long
def test_an_error_at_the_end_is_shown(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """All steps are taken and saved: the next start finds the run complete."""
    callbacks = {"callbacks": ("tests.end_to_end.killing:FailsAtTheEnd",)}
    config = mirrored(corpus, tmp_path, "dp2", 99, train=callbacks)
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ArithmeticError: the secret cause") >= 1
    assert done.stderr.count("recovery ") == 1, done.stderr


@pytest.mark.long
def test_a_signal_ends_a_mirrored_run(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """Also after a recovery: the process that replaces another has a handler too."""
    model = trapped(rank=1, at_call=10, killed=True, once=str(tmp_path / "fired"))
    config = mirrored(corpus, tmp_path, "dp2", model=model, train={"steps": 100_000})
    command = ["-m", "meshwright_launch", "train", written(config, tmp_path)]
    with shell.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = iter(process.stderr)
        assert any("recovered" in line for line in said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 85, list(said)
        assert "it is saved" in "".join(said)


@pytest.mark.torture(row="recoveries in place")
@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("dp4,zero0", {}),
        ("dp4,zero1,shard2", {}),
        ("dp4,zero3", {}),
        ("dp2,pp2,zero2", {"train": {"dtype": "bfloat16"}}),
        ("dp2,tp2,sequence", {"optimizer": {"name": "muon"}}),
        ("dp2,cp2", {}),
        ("dp4,zero1,offload", {"optimizer": {"state_dtype": "8bit"}}),
        ("dp2,pp2", {"adapter": {"rank": 2, "targets": ["*.attention.qkv"]}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("together", [1, 2, 4])
def test_kills_at_random_moments(
    text: str,
    sections: dict[str, Any],
    together: int,
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    shell: Shell,
    request: pytest.FixtureRequest,
) -> None:
    """Ranks are killed alone, two at a time, or all; some of them during a recovery."""
    draw = random.Random(f"{request.config.getoption('--seed')} {text} {together}")
    sections = {**sections, "train": {"steps": 25, **sections.get("train", {})}}
    config = mirrored(corpus, tmp_path / "runs", text, 99, **sections)
    command = ["-m", "meshwright_launch", "train", written(config, tmp_path)]
    with (
        (tmp_path / "said").open("w") as said,
        shell.start(command, stdout=said, stderr=said) as run,
    ):
        for _ in range(4):
            _kill(run, config, together, draw)
        assert run.wait(LIMIT_S) == 0, (tmp_path / "said").read_text()[-4000:]
    same = mirrored(corpus, tmp_path / "same", text, 0, **sections)
    train(pool, same)
    assert len(lines(config)) == 25 and exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))
    assert recoveries(config), "no rank was killed"
    assert any("train/recoveries" in line for line in lines(config)), "no record names one"


def _kill(
    run: subprocess.Popen[str], config: RunConfig, together: int, draw: random.Random
) -> None:
    """Kill some ranks after a few more steps, or, without one, a moment later: in a recovery."""
    metrics = run_directory(config.run) / "metrics.jsonl"
    wanted = _num_lines(metrics) + draw.choice([0, 1, 3])
    while _num_lines(metrics) < max(wanted, 1) and run.poll() is None:
        time.sleep(0.01)
    time.sleep(draw.random())
    ranks = [pid for server in _children(run.pid) for pid in _children(server)]
    for pid in draw.sample(ranks, min(together, len(ranks))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def test_without_a_file_system_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, before a rank starts."""
    for module in (leftovers, mirror_place):
        monkeypatch.setattr(module, "MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match="MW-LAUNCH-115") as error:
        mirror_place.MirrorPlace().open()
    assert str(tmp_path / "none") in str(error.value)
