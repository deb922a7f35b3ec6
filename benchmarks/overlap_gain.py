"""Three plans of docs/plan.md, and the step time each would gain if more messages overlapped
with matrix products.

    python benchmarks/overlap_gain.py [--only 8B]

none       this framework: tensor-parallel messages of forward and of rows block
tp         all tensor-parallel messages overlap products (userbuffers of Transformer Engine)
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from meshwright.config import load
from meshwright_plan.commands.plans import FREE_BATCH, execution_options, remove_layout
from meshwright_plan.planner.cost import step_time
from meshwright_plan.planner.explanation import parts
from meshwright_plan.planner.hardware import read_hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.nearest import search_with_offload
from meshwright_plan.planner.rates import PerformanceModel


class Case(NamedTuple):
    """Model on a cluster."""

    name: str
    config: str
    cluster: str
    nodes: int
    global_batch: int
    overrides: tuple[str, ...] = ()


LLAMA2_13B = (
    "--model.options.vocab_size=32000",
    "--model.options.hidden_size=5120",
    "--model.options.num_layers=40",
    "--model.options.num_heads=40",
    "--model.options.num_kv_heads=40",
    "--model.options.ffn_size=13824",
    "--model.options.max_sequence_length=4096",
    "--data.sequence_length=4096",
)
CASES = (
    Case("8B, 4 x 8 H100", "configs/llama3-8b.toml", "h100", 4, 512),
    Case("70B, 16 x 8 H100", "configs/llama3-70b.toml", "h100", 16, 512),
    Case(
        "13B, 8 x 8 A100 of 40 GB, 50 Gbit/s each",
        "configs/llama3-8b.toml",
        "a100-40gb-p4d",
        8,
        1024,
        LLAMA2_13B,
    ),
)


def main() -> int:
    """Plan each case and print its parts, and the gain of overlap for its first layouts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names begin so")
    options = parser.parse_args()
    console = Console(width=160)
    for case in (each for each in CASES if each.name.startswith(options.only)):
        hardware = read_hardware(case.cluster)
        config = load(
            case.config, [*case.overrides, *FREE_BATCH, f"--batch.global_batch={case.global_batch}"]
        )
        config = remove_layout(config, case.nodes * hardware.devices_per_node, case.global_batch)
        cache = ModelCache(config, execution_options(config.train, hardware))
        plan = search_with_offload(cache, hardware, case.nodes, 10, settles=True)
        own = PerformanceModel.of(hardware)
        overlapped = own._replace(traits=own.traits._replace(overlaps_tp=True))
        table = Table(
            "layout",
            "step s",
            "computation",
            "tp messages",
            "gradients",
            "bubble",
            "with tp overlap",
            "gain",
        )
        for each in plan.best[:5]:
            found, beside = parts(each), step_time(each.layout, overlapped).total
            shown = (
                "computation",
                "tensor-parallel messages",
                "gradient reduction and weight all-gathers",
            )
            shares = [
                f"{found[name] / each.time.total:.1%}"
                for name in (*shown, "bubble and messages between stages")
            ]
            gain = f"{1 - beside / each.time.total:.1%}"
            table.add_row(
                str(each.choice), f"{each.time.total:.3f}", *shares, f"{beside:.3f}", gain
            )
        console.print(case.name)
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
