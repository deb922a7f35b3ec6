"""Time from a death to the second new step: a rank replaced in place, a node by a spare one, and a restart.

    python benchmarks/recovery.py [--kills 5] [--out FILE]

All train the demo on 8 ranks of this machine, in turns:

    in place     watch.mirror = true; a random rank is ended by SIGKILL
    spare node   the same on two emulated nodes and a spare one; the second node's agent is killed, and its ranks
    restart      watch.mirror = false; a checkpoint every 10 steps; a random rank is killed

A new step is one that the run had not recorded before. Needs the demo's corpus (`make demo`, or
`meshwright data stdlib`, see README.md). Exit code 1: a loss differs from that of a run without a
death.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import environment
from rich.console import Console
from rich.table import Table

SIDES = {
    "in place": ["--watch.mirror=true"],
    "spare node": ["--watch.mirror=true"],
    "restart": ["--checkpoint.every=10"],
}
STEPS = 60


def start(
    folder: Path, name: str, keys: list[str], variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a run of the demo, or with ``variables`` the agent of one of its nodes."""
    words = [
        "train",
        "configs/demo.toml",
        f"--run.name={name}",
        f"--run.directory={folder}",
        f"--train.steps={STEPS}",
        "--train.validate_every=0",
        "--tracking.wandb=off",
        *keys,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright_launch", *words],
        env=os.environ | (variables or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def records(path: Path) -> dict[int, str]:
    """Return the loss of each recorded step."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {each["step"]: each["train/loss_hex"] for each in found}


def wait_for(path: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    """Block until a run has recorded a step."""
    while max(records(path), default=0) < step:
        if run.poll() is not None:
            raise SystemExit(f"the run has ended with {run.returncode} before step {step}")
        time.sleep(0.02)


def start_nodes(folder: Path, name: str, keys: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the agents of two nodes with four ranks each, and of a spare one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "MESHWRIGHT_NNODES": "3",
        "MESHWRIGHT_NPROC_PER_NODE": "4",
        "MESHWRIGHT_SPARES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    own = [{"MESHWRIGHT_NODE_RANK": str(node), "MESHWRIGHT_NODE": f"n{node}"} for node in range(3)]
    return [start(folder, name, keys, variables | each) for each in own]


def killed(folder: Path, name: str, side: str, draw: random.Random) -> tuple[float, dict[int, str]]:
    """Run the demo, kill a rank or a node, and return the seconds to the second new step and all losses."""
    metrics = folder / name / "metrics.jsonl"
    keys = [*SIDES[side], "--launch.max_restarts=5"]
    agents = start_nodes(folder, name, keys) if side == "spare node" else []
    run = agents[0] if agents else start(folder, name, keys)
    wait_for(metrics, draw.randint(12, 19), run)
    time.sleep(draw.random() / 2)
    ranks = [pid for server in children(run.pid) for pid in children(server)]
    last = max(records(metrics))
    os.kill(agents[1].pid if agents else draw.choice(ranks), signal.SIGKILL)
    start_s = time.monotonic()
    wait_for(metrics, last + 2, run)  # the next one may have been under way
    seconds = time.monotonic() - start_s
    assert run.wait() == 0
    for agent in agents:
        agent.wait()
    return seconds, records(metrics)


def main() -> int:
    """Run, print and write; return 1 if a loss differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="kills of each side (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    draw = random.Random(arguments.seed)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    different = 0
    phases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        assert start(folder, "whole", []).wait() == 0
        whole = records(folder / "whole/metrics.jsonl")
        for number in range(arguments.kills):
            for side in SIDES:
                name = f"{side.replace(' ', '-')}-{number}"
                taken_s, losses = killed(folder, name, side, draw)
                seconds[side].append(taken_s)
                different += losses != whole
            for side in ("in-place", "spare-node"):
                found = folder / f"{side}-{number}/recoveries.jsonl"
                phases += [json.loads(line) for line in found.read_text().splitlines()]
    console = Console(width=100)
    table = Table("", "seconds from the kill to the second new step", "least", "most")
    for side, each in seconds.items():
        table.add_row(
            side, f"{statistics.median(each):.1f}", f"{min(each):.1f}", f"{max(each):.1f}"
        )
    console.print(table)
    console.print(
        f"{different} of {len(SIDES) * arguments.kills} runs with other losses", highlight=False
    )
    if arguments.out is not None:
        command = shlex.join(["python", "benchmarks/recovery.py", *sys.argv[1:]])
        report = {"environment": environment(command), "seconds": seconds, "recoveries": phases}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
