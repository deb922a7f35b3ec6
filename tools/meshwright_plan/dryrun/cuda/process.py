"""Steps of several ranks in a child process with the stub CUDA device, and their report. Imports no torch.

this process    compile_library -> python -m meshwright_plan.dryrun.cuda -> one CudaStep per rank -> describe
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.system.bounded import parse_json, read_text
from meshwright_plan.dryrun.cuda.library import compile_library


class CudaStep(NamedTuple):
    """Findings of one rank's step."""

    rank: int
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
    """Place in the code -> number of host-device synchronisations there, before the optimizer step is launched."""
    waits_after: dict[str, int]
    """The same from the launch of the optimizer step on."""

    @property
    def problems(self) -> list[str]:
        """Operations that NCCL would refuse, and races, as text."""
        refused = [f"{each} has a tensor in host memory, which NCCL refuses" for each in self.off_device]
        return [f"rank {self.rank}: {each}" for each in (*refused, *(f"race: {race}" for race in self.races))]


def take_cuda_steps(config: RunConfig, ranks: Sequence[int]) -> list[CudaStep]:
    """Take one step of each rank of a resolved configuration. Takes some seconds for the compiler, and some per rank.

    Raises:
        UserError: no compiler, or a rank fails; has the rank's error.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-cuda-") as directory:
        return run_process(compile_library(Path(directory)), [(config, rank) for rank in ranks])


UTF8_STREAMS = {"PYTHONIOENCODING": "utf-8:backslashreplace"}
"""Encoding of the child's streams, whatever the locale: configurations go in, a message comes out."""


def run_process(library: Path, jobs: Sequence[tuple[RunConfig, int]]) -> list[CudaStep]:
    """Take the step of each (configuration, rank) in one process with this library; see :func:`take_cuda_steps`."""
    with tempfile.TemporaryDirectory(prefix="meshwright-cuda-") as directory:
        results = Path(directory) / "steps.jsonl"
        results.touch()
        done = subprocess.run(
            [sys.executable, "-m", "meshwright_plan.dryrun.cuda", str(library), str(results)],
            input="".join(f"{rank} {config.model_dump_json()}\n" for config, rank in jobs),
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
            | UTF8_STREAMS,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        steps = [CudaStep(**parse_json(line)) for line in read_text(results).splitlines()]
    if done.returncode or len(steps) != len(jobs):
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        rank = jobs[min(len(steps), len(jobs) - 1)][1]
        raise UserError("MW-DRYRUN-003", f"--device cuda: the step of rank {rank} fails on fake CUDA tensors: {last}")
    return steps


def describe_cuda_steps(steps: Sequence[CudaStep]) -> str:
    """Return the report, as printed."""
    lines = ["CUDA path, on fake tensors of a CUDA device (no GPU was used):"]
    for step in steps:
        before = sum(step.waits.values())
        after = sum(step.waits_after.values())
        lines.append(
            f"  rank {step.rank}: {step.num_operations:,} operations, {step.num_collectives:,} collectives and "
            f"messages ({step.num_from_autograd:,} posted during backward by autograd's thread); the host waits for "
            f"the device {before} time{'s' * (before != 1)} before the optimizer's launch, {after} after it"
        )
        for where, count in sorted({**step.waits, **step.waits_after}.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"    {count:4} x {where}")
        lines += [f"    {problem}" for problem in step.problems]
    return "\n".join(lines)
