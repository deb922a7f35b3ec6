"""Cost of the mirror in memory (``watch.mirror``): its share of a step, and its bytes beside the price.

    python benchmarks/mirror.py [--nodes 2] [--rounds 5] [--out FILE]

Each model trains on dp 2 x pp 2 x tp 2 with ZeRO-1, on one node or on emulated ones, which keep copies of
each other's mirrors. "alone": seconds of copy and exchange when nothing runs beside them; "waits": seconds in
which the main thread of the slowest rank waits for them in a step, when they run beside it. Bytes must be
those of run/mirror_size.py, beside the headers of the files.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import environment
from rich.console import Console
from rich.table import Table
from task import Samples, run_config

from meshwright.build import build
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import NOT_MIRRORED, StepEvent
from meshwright.run.mirror import Mirror
from meshwright.run.mirror_size import MirrorSize, mirror_size
from meshwright.step import take_step
from meshwright.system.host import NODE
from meshwright_launch.leftovers import MEMORY
from meshwright_launch.pool import RankPool

RANKS = 8
TIMEOUT_S = 1800.0
STEPS = 4
MODELS = {"1.3 M": (128, 4, 4096), "27 M": (512, 8, 4096)}
"""Hidden size, number of layers and vocabulary, by number of parameters."""


class Times(NamedTuple):
    """Seconds of each round on one rank, and the price of the mirror."""

    step_s: list[float]
    waits_s: list[float]
    alone_s: list[float]
    sent_bytes: float
    parameters: int
    price: MirrorSize


def measure(
    rank: int, world_size: int, options: dict[str, object], folder: Path, nodes: int, rounds: int
) -> Times:
    """Take rounds of some steps with a mirror beside them, and one with nothing beside it."""
    config = run_config(2, 2, 2)
    model = config.model.model_copy(update={"options": options})
    os.environ[NODE] = f"node{rank * nodes // world_size}"
    mesh = open_mesh(Grid(dp=2, pp=2, tp=2), "cpu")
    parts = build(config.model_copy(update={"model": model}), mesh, (Samples(), {}))
    directory = folder / os.environ.pop(NODE)
    directory.mkdir(exist_ok=True)
    mirror = Mirror(parts, directory, 0)

    waited = [0.0]

    def timed(function: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        function()
        waited[0] += time.perf_counter() - start_s

    def join_timed() -> bool:
        timed(mirror.join)
        return False

    parts.flags[NOT_MIRRORED] = join_timed

    def take_steps(number: int) -> tuple[float, float]:
        """Return the seconds of a step, and those in which the main thread waits in it."""
        parts.mesh.world.barrier()
        start_s, waited[0] = time.perf_counter(), 0.0
        for _ in range(number):
            event = StepEvent(take_step(parts), 0.0, False, False, False, False)
            timed(partial(mirror.after_step, parts, event))
        seconds = (time.perf_counter() - start_s) / number, waited[0] / number
        mirror.join()
        return seconds

    def mirror_alone() -> float:
        """Return the seconds of a mirror with nothing beside it, of the slowest rank."""
        event = StepEvent(take_step(parts), 0.0, False, False, False, False)
        parts.mesh.world.barrier()
        start_s = time.perf_counter()
        mirror.after_step(parts, event)
        mirror.join()
        parts.mesh.world.barrier()
        return time.perf_counter() - start_s

    take_steps(3)  # the first two lay out the files
    sent = 0.0 if mirror.exchange is None else mirror.exchange.sent_bytes
    alone_s = [mirror_alone()]
    sent = 0.0 if mirror.exchange is None else mirror.exchange.sent_bytes - sent
    step_s, waits_s = [], []
    for _ in range(rounds):
        taken_s, waiting_s = take_steps(STEPS)
        step_s.append(taken_s)
        waits_s.append(waiting_s)
        alone_s.append(mirror_alone())
    price = mirror_size(parts.blueprint, mesh.nodes)
    return Times(step_s, waits_s, alone_s, sent, parts.blueprint.num_parameters, price)


def main() -> int:
    """Run, print and write; return 1 if the bytes are not those of the price."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each model (default 5)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    table = Table("parameters", "step s", "alone s", "waits s", "share", "held", "sent", "more")
    console = Console(width=120)
    found: list[dict[str, Any]] = []
    is_exact = True
    with RankPool(RANKS) as pool:
        for name, (hidden_size, num_layers, vocab_size) in MODELS.items():
            options: dict[str, object] = {
                "vocab_size": vocab_size,
                "hidden_size": hidden_size,
                "num_layers": num_layers,
                "num_heads": 8,
                "max_sequence_length": 256,
                "dropout": 0.0,
                "tied": True,
            }
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                place = Path(folder)
                how = (options, place, arguments.nodes, arguments.rounds)
                ranks: list[Times] = pool.run(measure, RANKS, *how, timeout_s=TIMEOUT_S)
                files = list(place.glob("*/*/*.safetensors"))
                written = sum(path.stat().st_size for path in files)
                headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
            row = row_of(ranks, written, headers)
            is_exact = is_exact and row["is_exact"]
            found.append(row)
            table.add_row(
                name,
                f"{row['step_s']:.3f}",
                f"{row['alone_s']:.4f}",
                f"{row['waits_s']:.4f}",
                f"{row['waits_s'] / row['step_s']:.1%}",
                f"{written:,}",
                f"{row['sent_bytes']:,.0f}",
                f"{headers:,}",
            )
    console.print(table)
    if arguments.out is not None:
        command = shlex.join(["python", "benchmarks/mirror.py", *sys.argv[1:]])
        report = {"environment": environment(command), "models": found}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if is_exact else 1


def row_of(ranks: Sequence[Times], written: int, headers: int) -> dict[str, Any]:
    """Return the figures of one model. ``written``: bytes of all files, ``headers`` among them."""
    first = ranks[0]
    slowest = [max(of_round) for of_round in zip(*(each.waits_s for each in ranks), strict=True)]
    price = round(sum(first.price.held.values()))
    return {
        "parameters": first.parameters,
        "step_s": statistics.median(first.step_s),
        "alone_s": statistics.median(first.alone_s),
        "waits_s": statistics.median(slowest),
        "held_bytes": written,
        "header_bytes": headers,
        "price_held_bytes": price,
        "sent_bytes": sum(each.sent_bytes for each in ranks),
        "price_sent_bytes": sum(first.price.sent),
        "is_exact": written - headers == price,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
