"""Cost of watching a run: steps with all guards against steps with none,
asynchronous saves against blocking ones.

    python benchmarks/guards.py [--repeats 12] [--steps 5] [--saves 5] [--out FILE]

Guards: the activity notes of each rank, the watchdog with its heartbeats, and the comparison of
replicas. The check that loss and gradients are finite is not measured: it reads numbers that a step
sums anyway.

Together: the same training with all guards and with none, in turns of some steps, A B, B A, ... on
two ranks, one a core. A ratio compares adjacent turns. Replicas are compared once in each turn,
twenty times as often as ``watch.drift_every`` has it.

Each alone, as a share of a step: the notes are counted and one is timed. The watchdog's CPU time is
the extra time that an idle process spends with it. A comparison is timed and divided by
``watch.drift_every``.

A save: the time that `Saver.start` blocks the loop if the checkpoint is written asynchronously,
over the time if the loop waits for the disk. The same parts save both ways, in turns.

Exit code 1: the guards, each alone, add up to more than 2 % of a step; or together they cost more
than 2 % of its CPU time in the median; or they change a number; or an asynchronous save blocks for
more than 10 % of a blocking one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

from contenders import Ours, Shown
from measure import race
from report import conclude, environment, repeats_of, spread
from rich.console import Console
from rich.table import Table
from task import Samples, run_config

from meshwright.build import build
from meshwright.mesh import Grid
from meshwright.mesh.activity import Activity
from meshwright.mesh.mesh import open_mesh
from meshwright.run.directory import STATUS
from meshwright.run.saving import Saver
from meshwright.step import take_step
from meshwright.system.atomic import write_atomic
from meshwright.system.process import end_process
from meshwright.watch.drift import check_drift
from meshwright.watch.hang.watchdog import Watchdog
from meshwright_launch.pool import RankPool

BAR, SAVE_BAR = 1.02, 0.10
ALONE_S = 20.0
"""Time for which an idle process is measured, with and without a watchdog."""
LAYOUTS = {"dp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2": (1, 1, 2)}
GUARDS = ("notes", "watchdog", "comparison")
SAVED = {"hidden_size": 512, "num_layers": 8}
"""Options of the model that is saved, large enough that a save takes long."""


class Bare(Ours):
    """Contender without guards: activity notes are no-ops."""

    def __init__(self, *degrees: int) -> None:
        super().__init__(*degrees)
        activity: Any = self.mesh.activity
        activity.begin = activity.waits = lambda what: None
        activity.posts = lambda key: 0


class Guarded(Ours):
    """Contender with all guards, as in a run."""

    def __init__(self, directory: str, *degrees: int) -> None:
        super().__init__(*degrees)
        self.directory = directory
        self.watchdog: Watchdog | None = None

    def step(self) -> Shown:
        """Take a step; start the watchdog before the first step of a block."""
        if self.watchdog is None:
            self.watchdog = watchdog_of(self, self.directory)
            self.watchdog.__enter__()
        return super().step()

    def settle(self) -> None:
        """Compare replicas and stop the watchdog at the end of a block."""
        super().settle()
        check_drift(self.parts)
        if self.watchdog is not None:
            self.watchdog.__exit__(None, None, None)
            self.watchdog = None


def watchdog_of(ours: Ours, directory: str) -> Watchdog:
    """Return a watchdog with the defaults of a run."""
    limit_s = ours.parts.config.launch.timeout_s
    replace_status = partial(write_atomic, Path(directory) / STATUS, is_durable=False)
    return Watchdog(
        ours.mesh,
        Path(directory),
        limit_s,
        10**6,
        lambda: ours.parts.state.step,
        end_process,
        replace_status,
    )


def each_alone(
    rank: int, world_size: int, directory: str, degrees: tuple[int, int, int]
) -> dict[str, float]:
    """Return the seconds of a ``step``, and of each guard per step."""
    ours = Ours(*degrees)
    activity: Any = ours.mesh.activity
    times_s = []
    for _ in range(6):
        ours.mesh.world.barrier()
        start_s = time.perf_counter()
        ours.step()
        times_s.append(time.perf_counter() - start_s)
    notes_s = 0.0
    number: Counter[str] = Counter()
    for name, given in (("begin", "it"), ("waits", None), ("posts", "dp")):
        note, other = getattr(activity, name), getattr(Activity(), name)
        setattr(
            activity,
            name,
            lambda *what, name=name, note=note: (number.update([name]), note(*what))[1],
        )
        number.clear()
        ours.step()
        delattr(activity, name)
        notes_s += number[name] * timeit(partial(other, given), number=10_000) / 10_000
    compared_s = []
    for _ in range(6):
        ours.mesh.world.barrier()
        start_s = time.perf_counter()
        check_drift(ours.parts)
        compared_s.append(time.perf_counter() - start_s)
    step_s = statistics.median(times_s[1:])
    shares = []
    # gloo's threads wake up all the time
    for watched in (contextlib.nullcontext(), watchdog_of(ours, directory)):
        cpu_s = time.process_time()
        with watched:
            time.sleep(ALONE_S)
        shares.append((time.process_time() - cpu_s) / ALONE_S)
    share = max(0.0, shares[1] - shares[0])
    return {
        "step": step_s,
        "notes": notes_s,
        "watchdog": share * step_s,
        "comparison": statistics.median(compared_s[1:]) / ours.parts.config.watch.drift_every,
    }


def saves(
    rank: int, world_size: int, directory: str, num_saves: int
) -> list[tuple[float, float, float]]:
    """Return three times of each save, in s: blocked if asynchronous, until it was written,
    blocked if blocking.
    """
    config = run_config(1, world_size, 1)
    options = config.model.options | SAVED
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"options": options})}
    )
    parts = build(config, open_mesh(Grid(pp=world_size), "cpu"), (Samples(), {}))
    saver = Saver(parts, Path(directory), lambda text: None)
    found = []
    for _ in range(num_saves + 1):  # the first warms up
        times = []
        for behind in (True, False):
            take_step(parts)
            parts.mesh.world.barrier()
            start_s = time.perf_counter()
            saver.start()
            if behind:
                times.append(time.perf_counter() - start_s)
            saver.finish()
            times.append(time.perf_counter() - start_s)
        found.append((times[0], times[1], times[2]))
    return found[1:]


def compare(pool: RankPool, name: str, repeats: int, steps: int, directory: str) -> dict[str, Any]:
    """Measure one layout with and without guards."""
    degrees = LAYOUTS[name]
    builders = {"guarded": partial(Guarded, directory, *degrees), "bare": partial(Bare, *degrees)}
    ranks = pool.run(race, 2, builders, repeats, steps, timeout_s=3600)
    guarded, bare = repeats_of(ranks, "guarded"), repeats_of(ranks, "bare")
    pairs = list(zip(guarded, bare, strict=True))
    return {
        "layout": name,
        "cpu_ratio": spread([ours.cpu_s / theirs.cpu_s for ours, theirs in pairs]),
        "python_ratio": spread(
            [ours.main_thread_s / theirs.main_thread_s for ours, theirs in pairs]
        ),
        "wall_ratio": spread([ours.wall_s / theirs.wall_s for ours, theirs in pairs]),
        "step_s": statistics.median(each.wall_s for each in bare),
        "same_numbers": all(rank.shown["guarded"] == rank.shown["bare"] for rank in ranks),
        "alone_s": pool.run(each_alone, 2, directory, degrees, timeout_s=3600)[0],
    }


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    console, problems = Console(), []
    with RankPool(2) as pool, tempfile.TemporaryDirectory() as directory:
        layouts = [
            compare(pool, name, options.repeats, options.steps, directory) for name in LAYOUTS
        ]
        ranks = pool.run(saves, 2, directory, options.saves, timeout_s=3600)
    table = Table(
        "layout",
        "CPU, guarded / bare",
        "Python's thread",
        "wall",
        "step",
        title="all guards on, or none",
    )
    for row in layouts:
        table.add_row(
            row["layout"],
            *(str(row[f"{what}_ratio"]) for what in ("cpu", "python", "wall")),
            f"{1e3 * row['step_s']:.0f} ms",
        )
        if row["cpu_ratio"].median > BAR:
            problems.append(
                f"{row['layout']}: guards cost {row['cpu_ratio'].median - 1:.1%} of a step's CPU"
                " time"
            )
        if not row["same_numbers"]:
            problems.append(f"{row['layout']}: the two compute other numbers")
    console.print(table)
    table = Table("layout", *GUARDS, "sum", title="each alone, of a step (rank 0)")
    for row in layouts:
        alone = row["alone_s"]
        shares = [alone[guard] / alone["step"] for guard in GUARDS]
        table.add_row(row["layout"], *(f"{share:.3%}" for share in shares), f"{sum(shares):.3%}")
        if sum(shares) > BAR - 1:
            problems.append(
                f"{row['layout']}: each alone, guards add up to {sum(shares):.1%} of a step"
            )
    console.print(table)
    slowest = [
        tuple(max(times) for times in zip(*each, strict=True)) for each in zip(*ranks, strict=True)
    ]
    held = spread([behind / blocking for behind, _, blocking in slowest])
    behind_s, there_s, blocking_s = (
        statistics.median(times) for times in zip(*slowest, strict=True)
    )
    console.print(
        f"\na save: the loop is held up {behind_s:.3f} s when it is written behind ({there_s:.2f} s"
        f" until there), and {blocking_s:.2f} s when it blocks; ratio {held}",
        highlight=False,
    )
    if held.median > SAVE_BAR:
        problems.append(f"a save behind holds the loop up for {held.median:.0%} of a blocking one")
    report = {
        **environment(f"python benchmarks/guards.py {shlex.join(sys.argv[1:])}".rstrip()),
        "guards": layouts,
        "saves": {
            "held_up_ratio": held,
            "behind_s": behind_s,
            "until_there_s": there_s,
            "blocking_s": blocking_s,
        },
        "problems": problems,
    }
    return conclude("guards", options.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
