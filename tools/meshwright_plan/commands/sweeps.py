"""Command ``meshwright plan`` with ``--sweep-nodes`` or ``--sweep-batch``:
the best layout of each combination.
"""

from __future__ import annotations

import argparse

from meshwright.errors import ConfigError
from meshwright.terminal.output import put
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.sweep import sweep, sweep_table

MAX_POINTS = 64


def run_sweep(options: argparse.Namespace, cache: ModelCache, hardware: Hardware) -> int:
    """Print the best layout of each number of nodes and global batch.

    Raises:
        ConfigError: more points than are searched in a few minutes, or options of a single search.
    """
    of_one_search = {"--why": options.why, "--best": options.best, "--out": options.out}
    if alone := [name for name, value in of_one_search.items() if value is not None]:
        raise ConfigError(
            "MW-LAUNCH-091",
            f"{' and '.join(alone)}: a sweep prints the best layout of each size alone: leave "
            f"{'it' if len(alone) == 1 else 'them'} out, or the sweep",
        )
    nodes = options.sweep_nodes or [options.nodes]
    batches = options.sweep_batch or [cache.config.batch.global_batch]
    if len(nodes) * len(batches) > MAX_POINTS:
        raise ConfigError(
            "MW-LAUNCH-081",
            f"--sweep-nodes and --sweep-batch: {len(nodes)} x {len(batches)} searches, and"
            f" {MAX_POINTS} at most: name fewer numbers",
        )
    points = sweep(cache, hardware, nodes, batches)
    put("\n".join(sweep_table(points, options.device_hour, cache.error_bar(hardware).share)))
    return 0 if any(each.layout is not None for each in points) else 2
