"""One contender of the race on one GPU, in a process of its own: time, both counts of MFU, memory,
kernels, idle time.

    python benchmarks/gpu_race.py --job llama-1b --contender ours-compiled --out FILE [--steps 10]
    python benchmarks/gpu_race.py --tiny --device cpu ...    the same code on toy sizes: its numbers mean nothing

FILE has a row per number of micro-batches, written when it is measured: contenders are in
gpu_contenders.py. After the timed steps one more step runs under torch's profiler: the 20 kernels
that take longest, and the share of the step in which no kernel ran, because the host had queued
none.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import CHUNKS, CONTENDERS, SHAPES, Contender, Ours, flops_of, job_of, make
from gpu_step import Job, timed
from torch.autograd import DeviceType

WARM_UP_STEPS = 2
BLOCKS = 3
KERNELS = 20


def profile(contender: Contender, chunks: int, device: torch.device) -> dict[str, Any]:
    """Return the longest kernels of a step in ms, and the share of the step, 0..1,
    without any kernel (on CUDA).
    """
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU] + ([activity.CUDA] if device.type == "cuda" else [])
    with torch.profiler.profile(activities=wanted) as found:
        contender.step(chunks)
        if device.type == "cuda":
            torch.cuda.synchronize()
    if device.type != "cuda":
        spent = {event.key: event.self_cpu_time_total for event in found.key_averages()}
        return {"kernels_ms": longest(spent), "idle_share": None}
    spans, by_name = [], dict[str, float]()
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
    return {"kernels_ms": longest(by_name), "idle_share": round(idle_share(spans), 4)}


def longest(spent_us: dict[str, float]) -> dict[str, float]:
    """Return the names that take longest, with their ms."""
    names = sorted(spent_us, key=lambda name: -spent_us[name])[:KERNELS]
    return {name[:120]: round(spent_us[name] / 1e3, 3) for name in names}


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return the share, 0..1, of the time from the first start to the last end that no (start, end)
    covers.
    """
    if not spans:
        return 0.0
    ordered = sorted(spans)
    first, covered_to, idle = ordered[0][0], ordered[0][0], 0.0
    for start, end in ordered:
        idle += max(0.0, start - covered_to)
        covered_to = max(covered_to, end)
    return idle / (covered_to - first) if covered_to > first else 0.0


def measure(contender: Contender, job: Job, steps: int, device: torch.device) -> dict[str, Any]:
    """Return a contender's row: the first loss, the median of blocks of timed steps, memory,
    and the profile.
    """
    chunks, cuda = job.chunks, device.type == "cuda"
    first_loss = contender.step(chunks)
    for _ in range(WARM_UP_STEPS - 1):
        contender.step(chunks)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    block_s = [
        timed(lambda: contender.step(chunks), max(1, steps // BLOCKS), device)
        for _ in range(BLOCKS)
    ]
    step_s = statistics.median(block_s)
    row: dict[str, Any] = {
        "step_ms": round(step_s * 1e3, 3),
        "step_ms_of_blocks": [round(each * 1e3, 3) for each in block_s],
        **flops_of(job).rates(step_s, device),
        "first_loss": first_loss,
    }
    if cuda:
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    return row | profile(contender, chunks, device)


def main(argv: Sequence[str]) -> int:
    """Measure one contender; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", choices=list(SHAPES), required=True)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes: exercises the code, measures nothing"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    contender: Contender | None = None
    for chunks in CHUNKS:
        job = job_of(options.job, chunks, options.tiny)
        if contender is None or isinstance(contender, Ours):
            contender = None  # its memory is free before the next is built
            gc.collect()
            contender = make(options.contender, job, device, options.tiny)
        name = f"{options.job} x {chunks}: {options.contender}"
        row = measure(contender, job, options.steps, device)
        if rows:  # loops go on with trained weights
            del row["first_loss"]
        rows.append({"name": name, **row})
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
