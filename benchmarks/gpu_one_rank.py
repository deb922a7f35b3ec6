"""One real rank of a large layout on one GPU: its own code and tensors,
over process groups without peers.

    python benchmarks/gpu_one_rank.py --job tp8 --out FILE        also pp8, dp64, cp8 (131,072 tokens)
    python benchmarks/gpu_one_rank.py --tiny --device cpu ...     the same code on toy sizes and layouts

Collectives and messages return at once (torch's "fake" backend): the time is that of this rank's
computation without communication and bubbles, and the memory is this rank's. Received tensors hold
whatever their memory held, so no value of the step is read: losses mean nothing. The peak is
compared with the dry run of the same rank, made beforehand.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from gpu_contenders import build_on_device, config_of, job_of, parse
from gpu_step import LEARNING_RATE, Job, timed
from observe import Observer

from meshwright.config import RunConfig
from meshwright.data_parallel.ties import sum_ties
from meshwright.mesh.device import prepare_allocator
from meshwright.mesh.fake import fake_mesh
from meshwright.parts import Parts, StepFeed
from meshwright.step import all_reduce_sums
from meshwright_plan.dryrun.fake_step import grid_of, profile_rank

MODEL = "llama-8b-8-blocks"


class Layout(NamedTuple):
    """A layout, the rank that runs, and the length of a sample in multiples of the model's."""

    parallel: dict[str, Any]
    chunks: int
    rank: int
    lengths: int = 1

    def job(self, tiny: bool) -> Job:
        """Return the model with this layout's samples."""
        job = job_of(MODEL, self.chunks, tiny)
        length = self.lengths * job.sequence_length
        return job._replace(
            options=job.options | {"max_sequence_length": length}, sequence_length=length
        )


LAYOUTS = {
    "tp8": Layout({"tp": 8, "sequence": True}, 4, 0),
    "pp8": Layout({"pp": 8}, 8, 3),
    "dp64": Layout({"dp": 64}, 1, 5),
    "cp8": Layout({"cp": 8}, 1, 3, lengths=16),
}
TINY = {
    "tp8": Layout({"tp": 2, "sequence": True}, 2, 0),
    "pp8": Layout({"pp": 2}, 2, 1),
    "dp64": Layout({"dp": 4}, 1, 3),
    "cp8": Layout({"cp": 4}, 1, 1, lengths=2),
}


def step(parts: Parts) -> float:
    """Take a step in which no branch depends on a value; return 0, because there is no loss."""
    for replica in parts.replicas.values():
        replica.begin_step()
    with parts.executor.until_step(StepFeed(parts, parts.source, 0)) as row:
        sum_ties(bucket for replica in parts.replicas.values() for bucket in replica.buckets)
        all_reduce_sums(parts, row)
        parts.optimizer.step(LEARNING_RATE, 1.0)
    parts.last = row
    for replica in parts.replicas.values():
        replica.wait_for_weights()
    return 0.0


def measure(config: RunConfig, layout: Layout, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return the seconds and the peak bytes of a step of one rank."""
    prepare_allocator()
    watched = Observer() if device.type == "cpu" else nullcontext()
    with (
        watched as observer,
        fake_mesh(grid_of(config.parallel), layout.rank, device=str(device)) as mesh,
    ):
        parts = build_on_device(config, mesh, layout.job(tiny))
        for stage in parts.executor.stages.values():
            stage.calls.skip_first_checks()
        for _ in range(2):
            step(parts)
        gc.collect()
        if observer is not None:
            observer.restart()
            step(parts)
            found: dict[str, Any] = {"allocated": observer.peak_bytes}
        else:
            torch.cuda.reset_peak_memory_stats(device)
            step(parts)
            torch.cuda.synchronize(device)
            found = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        times = [timed(lambda: step(parts), 2, device) for _ in range(1 if tiny else 4)]
    return found | {"step_s": statistics.median(times)}


def main(argv: Sequence[str]) -> int:
    """Measure one rank; return the exit code."""
    options = parse(__doc__, LAYOUTS, argv)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    layout = (TINY if options.tiny else LAYOUTS)[options.job]
    config = config_of(layout.job(options.tiny), options.device, **layout.parallel)
    predicted = profile_rank(config, layout.rank).peak_bytes
    found = measure(config, layout, device, options.tiny)
    row = {
        "name": f"{MODEL}, {layout.parallel}, rank {layout.rank}",
        "chunks": layout.chunks,
        "step_ms": round(found["step_s"] * 1e3, 3),
        "predicted_gib": round(predicted / 2**30, 6),
        **{
            f"{kind}_gib": round(found[kind] / 2**30, 6)
            for kind in ("allocated", "reserved")
            if kind in found
        },
        "error_percent": round(100 * (predicted / found["allocated"] - 1), 3),
    }
    options.out.write_text(json.dumps(row, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
