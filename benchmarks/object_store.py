"""Saving to and resuming from an object store, beside a local directory, in turns inside the same ranks.

    python benchmarks/object_store.py [--repeats 3] [--hidden 768] [--layers 2] [--out FILE]

The store is a local S3 server (moto), a Python process on the same cores: its own work is in what is
measured, and a bucket of a cloud has other times. Ratios of seconds, store / directory:

    save     until the checkpoint is published
    async    until the step may go on, on the slowest rank
    load     hash every file, then read

Bar: async at most 1.5, since no step may wait for a store. Exit code 1: it is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from report import environment, spread
from task import Samples, model_options, run_config

from meshwright.build import build
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.run.resume import resume
from meshwright.run.saving import Saver
from meshwright_launch.pool import RankPool

RANKS = 4
PLACES = {"directory": "", "store": "s3://bucket/prefix"}
OPERATIONS = ("save", "async", "load")
BAR = 1.5
"""Largest ratio of the time until the step may go on."""
Costs = dict[str, dict[str, list[float]]]
"""Place -> operation -> seconds of each repeat."""


def race(
    rank: int,
    world_size: int,
    options: dict[str, object],
    folder: Path,
    store: dict[str, str],
    repeats: int,
) -> tuple[Costs, int]:
    """Run every operation at both places in turns. Return the seconds, and the bytes of a
    checkpoint.
    """
    os.environ.update(store)
    config = run_config(RANKS, zero=3)
    model = config.model.model_copy(update={"options": options})
    config = config.model_copy(update={"model": model})
    parts = build(config, open_mesh(Grid(dp=RANKS), "cpu"), (Samples(), {}))
    parts.optimizer.step(1e-4, 1.0)
    configs, savers = {}, {}
    for place, url in PLACES.items():
        checkpoint = config.checkpoint.model_copy(update={"directory": url, "keep_last": 1000})
        configs[place] = parts.config = config.model_copy(update={"checkpoint": checkpoint})
        savers[place] = Saver(parts, folder / place, lambda text: None)
    costs: Costs = {place: {name: [] for name in OPERATIONS} for place in PLACES}
    for repeat in range(repeats + 1):  # the first one allocates
        for place in list(PLACES)[:: 1 if repeat % 2 == 0 else -1]:
            parts.config, saver = configs[place], savers[place]
            for name in OPERATIONS:
                if name != "load":
                    parts.state.step += 1
                    parts.state.samples_seen += config.batch.global_batch or 0
                dist.barrier()
                start_s = time.perf_counter()
                if name == "load":
                    resume(parts, folder / place, lambda text: None)
                else:
                    saver.start()
                if name == "save":
                    saver.finish()
                costs[place][name].append(time.perf_counter() - start_s)
                saver.finish()
    num_bytes = 3 * 4 * sum(each.numel() for each in parts.blueprint.model.layers.parameters())
    return {
        place: {name: each[1:] for name, each in found.items()} for place, found in costs.items()
    }, num_bytes


def main() -> int:
    """Run, print and write; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of both (default 3)")
    parser.add_argument("--hidden", type=int, default=768, help="hidden size (default 768)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.support.object_store import object_store

    sizes = {
        "vocab_size": 8192,
        "hidden_size": arguments.hidden,
        "num_layers": arguments.layers,
    }
    options = model_options(tied=True) | sizes
    with (
        tempfile.TemporaryDirectory() as folder,
        object_store() as server,
        RankPool(RANKS) as pool,
    ):
        store = {**server.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
        found = pool.run(
            race, RANKS, options, Path(folder), store, arguments.repeats, timeout_s=1800.0
        )
    num_bytes = found[0][1]
    costs: Costs = {
        place: {
            name: [max(each) for each in zip(*(of[place][name] for of, _ in found), strict=True)]
            for name in OPERATIONS
        }
        for place in PLACES
    }
    ratios = {
        name: spread(
            [b / a for a, b in zip(costs["directory"][name], costs["store"][name], strict=True)]
        )
        for name in OPERATIONS
    }
    result = {
        "environment": environment(shlex.join(["python", *sys.argv])),
        "ranks": RANKS,
        "bytes": num_bytes,
        "ratio": {name: each._asdict() for name, each in ratios.items()},
        "seconds": {
            place: {name: statistics.median(each) for name, each in of.items()}
            for place, of in costs.items()
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(f"{text}\n")
    return int(ratios["async"].median > BAR)


if __name__ == "__main__":
    sys.exit(main())
