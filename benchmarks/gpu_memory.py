"""Peak memory of a training step on one GPU,
beside the prediction of ``meshwright dryrun`` made beforehand.

    python benchmarks/gpu_memory.py --job llama-1b --out FILE     one model of the race, in a process of its own
    python benchmarks/gpu_memory.py --tiny --device cpu ...       the same code on toy sizes

On CUDA the peak is torch's (allocated; reserved beside it) in the third step. On CPU it is that of
live storages, as in memory_accuracy.py.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from gpu_contenders import SHAPES, Ours, config_of, job_of, parse
from memory_accuracy import measure as measure_on_cpu

from meshwright_plan.dryrun.fake_step import profile_rank


def predicted_bytes(name: str, device: str, tiny: bool) -> int:
    """Return the peak that a dry run predicts for the only rank of a job of one micro-batch."""
    return profile_rank(config_of(job_of(name, 1, tiny), device), 0).peak_bytes


def measured(name: str, device: str, tiny: bool) -> dict[str, int]:
    """Return the peak bytes of the third step."""
    job = job_of(name, 1, tiny)
    if device == "cpu":
        return {"allocated": measure_on_cpu(0, 1, config_of(job, device).model_dump_json())}
    ours = Ours(job, torch.device(device, 0))
    for _ in range(2):
        ours.step(1)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours.step(1)
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def row(name: str, predicted: int, found: dict[str, int]) -> dict[str, Any]:
    """Return measurement and prediction in GiB,
    and the error of the prediction in percent of what was allocated.
    """
    gib = {f"{kind}_gib": round(number / 2**30, 6) for kind, number in found.items()}
    off = round(100 * (predicted / found["allocated"] - 1), 3)
    return {
        "name": f"{name}: measured",
        "predicted_gib": round(predicted / 2**30, 6),
        **gib,
        "error_percent": off,
    }


def main(argv: Sequence[str]) -> int:
    """Measure one job; return the exit code."""
    options = parse(__doc__, SHAPES, argv)
    options.out.write_text(json.dumps(measured(options.job, options.device, options.tiny)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
