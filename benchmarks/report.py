"""Ratios, tables and a JSON file from the ranks' measurements. Never absolute times alone:
the machine is not quiet.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import RankObserved, Ranks, RankTimes
from rich.console import Console
from rich.table import Table
from task import TOKENS_PER_STEP
from wire import labels

from meshwright.mesh import Grid

RESULTS = Path(__file__).parent / "results"
SAME_LOSS = 2e-6
"""Relative difference of the first losses above which two contenders do not do the same work."""
SAME_NORM = 1e-4
"""Relative difference of the gradient norms, likewise: float32 sums of squares,
in different orders.
"""


class Pair(NamedTuple):
    """Pair of contenders: this framework's, and the one that it is compared with."""

    ours: str
    theirs: str
    bar: float | None = None
    """Largest ratio of CPU seconds, ours / theirs, that passes."""


class Spread(NamedTuple):
    """Median and range of ratios; each ratio is of two blocks next to each other in time."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3f}  [{self.least:.3f} .. {self.most:.3f}]"


class Repeat(NamedTuple):
    """One block of one contender, over all ranks, per step."""

    wall_s: float
    cpu_s: float
    main_thread_s: float
    others_cpu_s: float
    """CPU seconds that other processes of this machine used meanwhile."""
    loopback_bytes: float
    """Bytes that the kernel counted on loopback, from the ranks and from other processes."""


def spread(ratios: Sequence[float]) -> Spread:
    """Return the median, least and most of the ratios."""
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def repeats_of(ranks: Sequence[RankTimes], name: str) -> list[Repeat]:
    """Combine the ranks' blocks: wall time of the slowest rank, CPU seconds of all ranks."""
    found = []
    for blocks in zip(*(rank.blocks for rank in ranks), strict=True):
        mine = [block[name] for block in blocks]
        cpu_s = sum(block.cpu_s for block in mine)
        others = max(0.0, max(block.machine_cpu_s for block in mine) - cpu_s)
        seen = max(block.loopback_bytes for block in mine)
        main_thread_s = sum(block.main_thread_s for block in mine)
        found.append(
            Repeat(max(block.wall_s for block in mine), cpu_s, main_thread_s, others, seen)
        )
    return found


def ratio_row(ranks: Sequence[RankTimes], pair: Pair) -> dict[str, Any]:
    """Return the ratios of one pair."""
    both = list(zip(repeats_of(ranks, pair.ours), repeats_of(ranks, pair.theirs), strict=True))
    cpu = spread([ours.cpu_s / theirs.cpu_s for ours, theirs in both])
    return {
        "ours": pair.ours,
        "theirs": pair.theirs,
        "throughput_ratio": spread([theirs.wall_s / ours.wall_s for ours, theirs in both]),
        "cpu_ratio": cpu,
        "bar": pair.bar,
        "bar_met": None if pair.bar is None else cpu.median <= pair.bar,
    }


def contender_row(
    ranks: Sequence[RankTimes], observed: Sequence[RankObserved], name: str
) -> dict[str, Any]:
    """Return one contender's own numbers: losses, norms and bytes,
    and its times as a scale for the ratios.
    """
    repeats = repeats_of(ranks, name)
    shown = [rank.shown[name] for rank in ranks if rank.shown[name]]
    return {
        "losses": [
            statistics.fmean(step.loss for step in steps) for steps in zip(*shown, strict=True)
        ],
        "grad_norms": [steps[0].grad_norm for steps in zip(*shown, strict=True)],
        "tokens_per_s": TOKENS_PER_STEP / statistics.median(repeat.wall_s for repeat in repeats),
        "cpu_s_per_step": statistics.median(repeat.cpu_s for repeat in repeats),
        "peak_live_bytes_of_a_rank": max(rank.peak_bytes for rank in observed),
        "wire_bytes_of_all_ranks": sum(sum(rank.wire_bytes.values()) for rank in observed),
        "loopback_bytes": min(repeat.loopback_bytes for repeat in repeats),
        "repeats": repeats,
    }


def wire_rows(
    observed: Sequence[RankObserved], expected: Sequence[Mapping[Ranks, float]], grid: Grid
) -> list[dict[str, Any]]:
    """Return bytes by axis, summed over ranks: by formula, mesh counters and observer. ``equal``:
    on every rank.
    """
    rows: dict[str, dict[str, Any]] = {}
    for rank, (seen, formula) in enumerate(zip(observed, expected, strict=True)):
        axes_of = labels(grid, rank)
        for ranks in sorted(formula.keys() | seen.wire_bytes.keys() | seen.counted_bytes.keys()):
            axes = axes_of.get(ranks, f"ranks {ranks}")
            row = rows.setdefault(
                axes, {"axes": axes, "formula": 0.0, "counted": 0.0, "observed": 0.0, "equal": True}
            )
            numbers = [
                source.get(ranks, 0.0) for source in (formula, seen.counted_bytes, seen.wire_bytes)
            ]
            for key, number in zip(("formula", "counted", "observed"), numbers, strict=True):
                row[key] += number
            row["equal"] = row["equal"] and max(numbers) - min(numbers) < 1.0
    return list(rows.values())


def problems_of(comparison: Mapping[str, Any]) -> list[str]:
    """Return the reasons for which a comparison is invalid or misses its bar."""
    found = []
    contenders = comparison["contenders"]
    reference_name, reference = next(iter(contenders.items()))
    for name, row in contenders.items():
        off = max(abs(a / b - 1) for a, b in zip(row["losses"], reference["losses"], strict=True))
        if off > SAME_LOSS:
            found.append(
                f"{name} computes another loss than {reference_name}: {row['losses']},"
                f" {reference['losses']}"
            )
        off = max(
            abs(a / b - 1) for a, b in zip(row["grad_norms"], reference["grad_norms"], strict=True)
        )
        if off > SAME_NORM:
            both = f"{row['grad_norms']}, {reference['grad_norms']}"
            found.append(f"{name} has another gradient norm than {reference_name}: {both}")
    for name, rows in comparison["wire"].items():
        found += [
            f"{name}: bytes on the wire along {row['axes']} differ: {row}"
            for row in rows
            if not row["equal"]
        ]
    for row in comparison["ratios"]:
        if row["bar_met"] is False:
            found.append(
                f"{row['ours']} / {row['theirs']}: CPU {row['cpu_ratio']} is above the bar of"
                f" {row['bar']}"
            )
    return found


def environment(command: str) -> dict[str, Any]:
    """Return the date, command, versions and machine of a measurement."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = {name.strip(): text for name, _, text in (line.partition(":") for line in lines)}
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": " ".join(
            found.get(key, "").strip() for key in ("model name", "cpu family", "model")
        ),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def show(comparison: Mapping[str, Any], console: Console) -> None:
    """Print one comparison as tables. ``lo``: bytes that the kernel counted on loopback,
    the least of all repeats.
    """
    console.print(f"\n[bold]{comparison['title']}[/bold]", highlight=False)
    table = Table(
        "", "loss 1", "loss 2", "loss 3", "norm 1", "peak MB", "wire MB", "lo MB", "tok/s", "CPU s"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in comparison["contenders"].items():
        table.add_row(
            name,
            *(f"{loss:.6f}" for loss in row["losses"]),
            f"{row['grad_norms'][0]:.5f}",
            f"{row['peak_live_bytes_of_a_rank'] / 1e6:.1f}",
            f"{row['wire_bytes_of_all_ranks'] / 1e6:.1f}",
            f"{row['loopback_bytes'] / 1e6:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['cpu_s_per_step']:.2f}",
        )
    console.print(table)
    table = Table(
        "ratio, median [least .. most]",
        "throughput (higher: better)",
        "CPU s (lower: better)",
        "bar",
    )
    for row in comparison["ratios"]:
        bar = (
            ""
            if row["bar"] is None
            else f"<= {row['bar']:.2f} {'met' if row['bar_met'] else 'MISSED'}"
        )
        table.add_row(
            f"{row['ours']} / {row['theirs']}",
            str(row["throughput_ratio"]),
            str(row["cpu_ratio"]),
            bar,
        )
    console.print(table)
    table = Table(
        "bytes on the wire, all ranks, one step",
        "along",
        "by formula",
        "counted by us",
        "seen below",
        "",
    )
    for name, rows in comparison["wire"].items():
        for row in rows:
            numbers = (f"{row[key]:,.0f}" for key in ("formula", "counted", "observed"))
            table.add_row(name, row["axes"], *numbers, "equal" if row["equal"] else "DIFFERENT")
    if table.row_count:
        console.print(table)
    console.print(
        f"meanwhile other processes used {comparison['others_cores']:.2f} cores (median over"
        " blocks)",
        highlight=False,
    )


def conclude(name: str, out: Path | None, report: Mapping[str, Any], console: Console) -> int:
    """Write the report to ``out``, or to the results under today's date; print its problems;
    return the exit code.
    """
    path = out or RESULTS / f"{date.today().isoformat()}-{name}.json"
    write(path, report)
    console.print(f"\nwritten to {path}", highlight=False)
    for problem in report["problems"]:
        console.print(f"[red]{problem}[/red]", highlight=False)
    return 1 if report["problems"] else 0


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON; NamedTuples become objects."""

    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {key: plain(each) for key, each in value._asdict().items()}
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(report), indent=1) + "\n")
