"""Layouts of two ranks on one shared GPU, beside one rank alone: gloo,
with messages through host memory.

    python benchmarks/gpu_shared.py --job tp2 --out FILE        also pp2, dp2, one; the losses of three steps
    python benchmarks/gpu_shared.py --tiny --device cpu ...     the same layouts on toy sizes

It compares losses, not time: gloo carries every byte through host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu_contenders import build_on_device, config_of, job_of, parse

from meshwright.mesh import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.step import take_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
}
MODEL, GLOBAL_BATCH, STEPS = "llama-1b", 4, 3
NUM_LAYERS = 4
"""Layers of the model; few, since tensor parallelism sends 200 MiB per layer
and micro-batch through host memory.
"""


def run_rank(options: argparse.Namespace) -> None:
    """Take the steps of one rank; rank 0 writes the losses."""
    parallel = LAYOUTS[options.job]
    job = job_of(MODEL, GLOBAL_BATCH // parallel.get("dp", 1), options.tiny)
    if not options.tiny:
        job = job._replace(options=job.options | {"num_layers": NUM_LAYERS})
    config = config_of(job, options.device, **parallel)
    mesh = open_mesh(Grid.of(config.parallel.degrees), options.device, share_devices=True)
    parts = build_on_device(config, mesh, job)
    losses = [take_step(parts).loss for _ in range(STEPS)]
    if mesh.rank == 0:
        options.out.write_text(
            json.dumps({"name": f"{options.job} on one device", "losses": losses}) + "\n"
        )
    close_mesh(mesh)


def start_ranks(argv: Sequence[str], size: int) -> int:
    """Start the ranks as processes of their own; return the worst exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *argv],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def main(argv: Sequence[str]) -> int:
    """Run a layout; return the exit code."""
    options = parse(__doc__, LAYOUTS, argv)
    if "RANK" not in os.environ and options.job != "one":
        return start_ranks(argv, 2)
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
