"""Steps of several ranks in a child process with the stub CUDA device. Imports no torch.

this process    compile_library -> python -m tests.support.cuda -> one CudaStep per rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.config import RunConfig
from tests.support.sources import ROOT


class CudaStep(NamedTuple):
    """Findings of one rank's step."""

    num_operations: int
    num_collectives: int
    """Collectives and messages."""
    num_from_autograd: int
    """Collectives and messages posted from autograd's thread for the device, during backward."""
    off_device: list[str]
    """Collectives and messages with a tensor in host memory, which NCCL refuses."""
    races: dict[str, int]
    """Description of two unordered accesses of a tensor on two streams -> number of occurrences."""
    waits: dict[str, int]
    """Place in the code -> number of host-device synchronisations there,
    before the optimizer step is launched.
    """
    waits_after: dict[str, int]
    """The same from the launch of the optimizer step on."""

    @property
    def problems(self) -> list[str]:
        """Operations that NCCL would refuse, and races."""
        return [*self.off_device, *self.races]


def run_child(
    module: str, *arguments: str | Path, lines: Iterable[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` with this process's path, and the lines as its stdin."""
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        input="".join(f"{line}\n" for line in lines),
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def run_process(library: Path, jobs: Sequence[tuple[RunConfig, int]]) -> list[CudaStep]:
    """Take one step of each (resolved configuration, rank) in one process;
    takes some seconds per rank.

    Raises:
        RuntimeError: a rank fails; has the process's stderr.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-cuda-") as directory:
        results = Path(directory) / "steps.jsonl"
        results.touch()
        lines = [f"{rank} {config.model_dump_json()}" for config, rank in jobs]
        done = run_child("tests.support.cuda", library, results, lines=lines)
        steps = [CudaStep(**json.loads(line)) for line in results.read_text().splitlines()]
    if done.returncode or len(steps) != len(jobs):
        rank = jobs[min(len(steps), len(jobs) - 1)][1]
        raise RuntimeError(
            f"the step of rank {rank} fails on fake CUDA tensors: {done.stderr or done.returncode}"
        )
    return steps
