"""No command goes to the network unless the configuration names a remote."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright_launch.arguments import build_parser
from tests.end_to_end.network import GUARD, in_namespace, strangers
from tests.interop.configs import samples

ROOT = Path(__file__).parents[2]
SMALL = """
[run]
name = "small"
[model.options]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 4
max_sequence_length = 32
dropout = 0.0
[data]
train = "corpus/train"
validation = "corpus/validation"
tokenizer = "corpus/tokenizer.json"
sequence_length = 32
[batch]
micro_batch_size = 1
global_batch = 4
[parallel]
dp = 1
pp = 2
[train]
steps = 3
validate_steps = 1
[tracking]
wandb = "auto"
trace_step = 2
"""
FIRST = {
    "data files": "data files texts --out corpus --vocab-size 300",
    "data prepare": (
        "data prepare texts --tokenizer corpus/tokenizer.json --workers 1 --out prepared"
    ),
    "data show": "data show prepared",
    "data verify": "data verify prepared",
    "mesh": "mesh small.toml",
    "stages": "stages small.toml",
    "layouts": "layouts small.toml --ranks 2",
    "dryrun": "dryrun small.toml",
    "config import": "config import theirs.yaml --out imported.toml",
    "config show": "config show small.toml",
    "completion": "completion bash",
    "errors": "errors MW-DATA-001",
    "init": "init first.toml --text texts",
    "kubernetes": "kubernetes small.toml --nodes 1 --devices-per-node 2 --image ours",
}
"""What is quick."""
LATER = {
    "draw": "draw small.toml --out pictures",
    "plan": "plan small.toml --cluster h100 --nodes 1 --devices-per-node 2 --out planned",
    "train": "train small.toml",
    "plot": "plot runs/small",
    "status": "status runs/small",
    "sample": "sample runs/small --prompt the --tokens 3",
    "eval": "eval runs/small --batches 1",
    "report": "report runs/small",
    "convert": "convert runs/small --to hf taken",
    "checkpoint list": "checkpoint list runs/small",
    "checkpoint verify": "checkpoint verify runs/small",
    "checkpoint show": "checkpoint show runs/small",
    "checkpoint export": "checkpoint export runs/small --out exported/small",
    "verify": "verify small.toml --layouts pp2 --steps 1",
}
ELSEWHERE = {
    "doctor": "it measures links, between the ranks that a launcher has started",
    "calibrate": "it measures this machine for a minute, between ranks as `verify` starts them",
    "slurm": "it asks the cluster's own sinfo, where there is one",
    "data stdlib": "it is `data files` of other files",
}
"""Commands that are not called here, and why."""
DRIVER = """
import json, sys
if __name__ == "__main__":
    from meshwright_launch.cli import main
    for words in json.loads(sys.argv[1]):
        code = main(words)
        assert code == 0, (words, code)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with texts and configurations,
    and the driver that calls commands one after the other.
    """
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            f"rank {number} waits for the others in its stage\n" * 40
        )
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "theirs.yaml").write_text(samples.NANOTRON)
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """Without what would name a remote: keys and addresses."""
    names = ("WANDB", "HF_", "MASTER_", "RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    nowhere = {"HOME": "/nonexistent", "NETRC": "/nonexistent"}
    return {**kept, **nowhere, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def driver(commands: dict[str, str]) -> list[str]:
    return [sys.executable, "driver.py", json.dumps([line.split() for line in commands.values()])]


def leaves(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield all commands that do something, such as ``checkpoint list``."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog.partition(" ")[2]
    for action in below:
        for inner in action.choices.values():
            yield from leaves(inner)


def test_no_command_is_forgotten() -> None:
    """A new command belongs into one of the three tables."""
    assert set(leaves(build_parser())) == {*FIRST, *LATER, *ELSEWHERE}


@pytest.mark.long
def test_python_opens_no_connection(place: Path) -> None:
    """Python's own sockets, in each process that has Python, while the quick commands run."""
    done, seen = guarded(place, driver(FIRST))
    assert done.returncode == 0, done.stderr
    assert seen == ""


def test_the_guard_sees_what_tries(place: Path) -> None:
    for attempt in (
        "import socket; socket.create_connection(('203.0.113.7', 80), timeout=1)",
        "import urllib.request; urllib.request.urlopen('http://example.invalid', timeout=1)",
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('203.0.113.7', 53))",
    ):
        done, seen = guarded(place, [sys.executable, "-c", attempt])
        assert done.returncode != 0 and ("203.0.113.7" in seen or "example.invalid" in seen)


def test_a_remote_that_is_named_is_gone_to(place: Path) -> None:
    """wandb = "auto" with a key and a server: so the silence of the others is not the guard's."""
    program = (
        "import os; from meshwright.tracking.wandb import WandbMode, choose_mode as c;"
        " c(WandbMode.AUTO, os.environ)"
    )
    remote = {"WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://203.0.113.7:8080"}
    _, seen = guarded(place, [sys.executable, "-c", program], **remote)
    assert "203.0.113.7" in seen
    _, seen = guarded(
        place, [sys.executable, "-c", program], WANDB_BASE_URL=remote["WANDB_BASE_URL"]
    )
    assert seen == ""


def guarded(
    place: Path, words: list[str], **more: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a command with Python's sockets watched; returns also what was tried."""
    guard, seen = place / "guard", place / "seen"
    guard.mkdir(exist_ok=True)
    (guard / "sitecustomize.py").write_text(GUARD)
    seen.write_text("")
    watched = environment(NETWORK_SEEN=str(seen), PYTHONPATH=f"{guard}:{ROOT}", **more)
    done = subprocess.run(
        words, cwd=place, env=watched, capture_output=True, text=True, check=False
    )
    return done, seen.read_text()


@pytest.fixture
def needs_a_namespace() -> None:
    """Skip where a process cannot be watched from outside."""
    missing = [name for name in ("unshare", "strace") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here: what C++ does on sockets cannot be seen")
    tried = subprocess.run(
        ["unshare", "--net", "strace", "-f", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"not permitted here: {tried.stderr.strip().splitlines()[-1]}")


def watched(
    place: Path, words: list[str], **more: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a command on a loopback alone; returns also whom it tried to reach."""
    trace = place / "trace"
    done = subprocess.run(
        in_namespace(trace, words),
        cwd=place,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )
    return done, strangers(trace.read_text())


def test_the_kernel_sees_what_tries(place: Path, needs_a_namespace: None) -> None:
    for attempt, whom in (
        (
            "import socket; socket.create_connection(('203.0.113.7', 80), timeout=1)",
            "connect to 203.0.113.7, port 80",
        ),
        (
            "import urllib.request as u; u.urlopen('http://example.invalid', timeout=1)",
            "asks for the name example.invalid",
        ),
        (
            "import socket; socket.socket(type=2).sendto(b'x', ('203.0.113.7', 9))",
            "sendto to 203.0.113.7, port 9",
        ),
    ):
        _, found = watched(place, [sys.executable, "-c", attempt])
        assert any(whom in each for each in found), (attempt, found)


@pytest.mark.long
@pytest.mark.slow
def test_no_command_opens_a_connection(place: Path, needs_a_namespace: None) -> None:
    """All of them, with all that their libraries and children do."""
    done, found = watched(place, driver({**FIRST, **LATER}))
    assert done.returncode == 0, done.stderr
    assert "wandb writes offline (no key" in done.stderr
    assert found == []
