"""Simulated step of DeepSeek-V3 by schedule: exposed all-to-alls of experts,
and those that paired actions hide.

    python benchmarks/overlap.py [--chunks 120]
    python benchmarks/overlap.py --picture docs/dualpipe.png     zb_v and dualpipe_v on 4 ranks instead

The layout of the paper (arXiv:2412.19437, section 3.1): 2,048 GPUs, 16 pipeline ranks, 64-way
expert parallelism over 8 nodes, ZeRO-1, no tensor parallelism; here on H100 with 400 Gbit/s a GPU,
in bfloat16, without recompute. Each row of a token travels on its own: the paper sends one copy to
a node and forwards it there, in 8 bits. Two minutes of a core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.config import load, resolve
from meshwright.schedule.analysis import Costs, name_of, simulate
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.picture.figure import figure, save
from meshwright_plan.picture.panel import Panel
from meshwright_plan.planner.choice import choice_of
from meshwright_plan.planner.explanation import parts
from meshwright_plan.planner.hardware import read_hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import evaluate

CONFIG = Path(__file__).parents[1] / "configs" / "deepseek-v3.toml"
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v")
COLUMNS = ("expert-parallel messages", "bubble and messages between stages")


OF_PICTURE = Costs(f=1.6, b=2.6, i=1.6, w=1, exchanges=4, exchange_f=0.6, exchange_b=0.6)
"""F of half a rank's layers computes for 1 and exchanges for 0.6."""


def draw(path: Path) -> None:
    """Draw a step of both schedules that place stages in a V."""
    built = (lower(build(name, 4, 10, 2)) for name in ("zb_v", "dualpipe_v"))
    save(
        figure([Panel(simulate(each, OF_PICTURE)._replace(name=name_of(each))) for each in built]),
        path,
    )


def main() -> None:
    """Print a row for each schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chunks", type=int, default=120, help="micro-batches of a step (default: the paper's 120)"
    )
    parser.add_argument("--picture", type=Path, help="file to draw")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw(arguments.picture)
        return
    hardware = read_hardware("h100")
    base = load(CONFIG).replace(
        batch={"global_batch": 128 * arguments.chunks},
        parallel={"ep": 64, "ep_across_nodes": True, "zero": 1},
        pipeline={"recompute": "none"},
    )
    print(
        "| schedule | step | exchanges that it waits for | hidden | bubble and messages between"
        " stages | MFU |"
    )
    print("|---|---|---|---|---|---|")
    for schedule in SCHEDULES:
        interleave = 1 if schedule == "1f1b" else 2
        config = resolve(
            base.replace(pipeline={"schedule": schedule, "interleave": interleave}), 2048
        )
        cache = ModelCache(config, execution_options(config.train, hardware))
        found = evaluate(cache, hardware, config, choice_of(config))
        waits, idle = (parts(found)[name] for name in COLUMNS)
        seconds = (
            f"{found.time.total:.1f} s | {waits:.1f} s | {found.time.hidden:.1f} s | {idle:.1f} s"
        )
        print(f"| `{schedule}` | {seconds} | {found.mfu:.1%} |", flush=True)


if __name__ == "__main__":
    main()
