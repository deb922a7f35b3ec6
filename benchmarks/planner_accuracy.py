"""Errors of the planner's step times and memory against published runs, source by source.

    python benchmarks/planner_accuracy.py                       the table, with the constants that are stored
    python benchmarks/planner_accuracy.py --only korthikanti    rows whose names begin so, each of them listed
    python benchmarks/planner_accuracy.py --runs FILE           other runs, in the columns of published_runs.csv
    python benchmarks/planner_accuracy.py --fit                 fits the constants anew: of each source on all others
    python benchmarks/planner_accuracy.py --never-fitted        the sources that are in no fit
    python benchmarks/planner_accuracy.py --classes             error_bars.ERRORS of `plan`, of all sources

The constants (:class:`meshwright_plan.planner.rates.RateFractions`) are one set for all devices,
models and frameworks. Each source is predicted with the constants that fit all *other* sources
best: no row influences its own prediction. Sources that leave out what matters (micro-batch,
device, recompute) are listed apart and excluded from every fit. The sources of ``NEVER_FITTED`` are
in no fit, and are shown on request alone: at the end of a change.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from families import lead_table, rank, table
from published import DATA, Bench, Case, case, memory_bytes, memory_is_comparable, read, step_s
from pydantic import ValidationError
from report import conclude, environment
from rich.console import Console
from rich.table import Table

from meshwright.errors import UserError
from meshwright_plan.planner.error_bars import KindError, RunKind, generation_of
from meshwright_plan.planner.hardware import Hardware, read_hardware
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.rates import RateFractions

CONSTANTS = Path(__file__).parent / "published_constants.json"
FITTED = {
    "product": (0.7, 1.0),
    "short_k": (30.0, 1500.0),
    "tiling": (0.05, 1.5),
    "memory": (0.5, 0.95),
    "attention": (0.7, 1.3),
    "attention_backward": (0.5, 1.0),
    "last_wave": (0.05, 2.0),
    "node_link": (0.4, 0.95),
    "cluster_link": (0.3, 0.95),
    "operation_s": (1e-6, 2e-5),
    "hidden": (0.4, 1.0),
    "waits": (1e-4, 0.05),
}
"""Constant -> physical range. The fit starts at ``START`` and is pulled to it,
as if each were known to 30 %.
"""
START = RateFractions(
    product=0.92, short_k=250.0, tiling=0.5, memory=0.8, attention=1.0, attention_backward=0.8, last_wave=0.5,
    node_link=0.75, cluster_link=0.75, operation_s=4e-6, hidden=0.8, waits=0.005,
)  # fmt: skip
PULL = 0.3
NEVER_FITTED = ("fms", "mlm", "pythia")
"""Sources excluded from every fit: torch FSDP compiled, Transformer Engine on Hopper,
GPT-NeoX in eager torch.
"""
BARS = {
    "korthikanti22": (0.0365, 0.0887, None),
    "simumax": (0.0526, 0.114, 0.02),
}
"""Source -> largest mean and maximum error of time, largest mean error of memory. All others:
``BAR`` on the mean.
"""
BAR = 0.10
MIN_RUNS = 5
"""Fewest runs that state all that matters for an error of their kind without the others."""


class Drawn(NamedTuple):
    """Published row with its layout model and hardware, ready to be timed."""

    case: Case
    layout: LayoutModel
    hardware: Hardware


class Scored(NamedTuple):
    """Published row with its prediction."""

    id: str
    source: str
    whole: bool
    step_s: float | None
    predicted_s: float
    memory_gib: float | None
    predicted_gib: float
    room_gib: float
    """GiB of a device that are usable for tensors."""
    ran: bool
    """Flag: the run is published as completed, not as out of memory."""
    shares: dict[str, float]
    """Share of each part in the predicted step."""
    cp: int = 1
    ep: int = 1
    kind: RunKind = RunKind("", has_experts=False, is_float8=False)

    @property
    def error(self) -> float:
        """Relative error of the step time, signed."""
        assert self.step_s is not None
        return self.predicted_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the memory, signed."""
        assert self.memory_gib is not None
        return self.predicted_gib / self.memory_gib - 1

    @property
    def fits(self) -> bool:
        """True if the predicted memory fits into the device."""
        return self.predicted_gib <= self.room_gib


def draw(runs: Path, wanted: Callable[[str], bool]) -> tuple[list[Drawn], list[str]]:
    """Read the rows whose names are ``wanted``, and profile their models;
    return them and the rows left out.
    """
    bench, found = Bench(), []
    rows, left_out = read(runs)
    for row in rows:
        if not wanted(row.id):
            continue
        try:
            one = case(row)
            found.append(Drawn(one, bench.layout(one), read_hardware(one.hardware)))
        except (UserError, ValidationError) as error:
            left_out.append(f"{row.id}: {str(error).splitlines()[0]}")
    return found, left_out


def is_never_fitted(name: str) -> bool:
    """Return True for a row of a source that is in no fit."""
    return name.split("-")[0] in NEVER_FITTED


def paper(drawn: Drawn) -> str:
    """Return the paper or project of a row; a fit leaves out all its rows together."""
    return drawn.case.row.id.split("-")[0]


class Fit:
    """Least-squares fit of log step times.
    Each source has the weight of the root of its number of rows.
    """

    def __init__(self, rows: Sequence[Drawn]) -> None:
        usable = [row for row in rows if row.case.whole and row.case.row.step_s is not None]
        self.rows = [row for row in usable if not is_never_fitted(row.case.row.id)]
        self.papers = [paper(row) for row in self.rows]
        self.start = np.log([getattr(START, name) for name in FITTED])
        self.bounds = np.log(np.array(list(FITTED.values())))
        simulated = [self.seconds(row, START, simulated=True) for row in self.rows]
        formula = [self.seconds(row, START) for row in self.rows]
        self.corrections = [s / f for s, f in zip(simulated, formula, strict=True)]

    @staticmethod
    def seconds(row: Drawn, fractions: RateFractions, *, simulated: bool = False) -> float:
        """Return the seconds of a row's step."""
        return step_s(row.case, row.layout, row.hardware, fractions, simulated=simulated).total

    def errors(self, point: Any) -> Any:
        """Return the error of each row's log step time, (rows,)."""
        fractions = constants(point)
        return np.array(
            [
                math.log(self.seconds(row, fractions) * correction / (row.case.row.step_s or 1.0))
                for row, correction in zip(self.rows, self.corrections, strict=True)
            ]
        )

    def slopes(self, point: Any, errors: Any) -> Any:
        """Return the derivatives of the errors by each constant's logarithm, (rows, constants)."""
        columns = []
        for index in range(len(point)):
            step = -0.02 if point[index] + 0.02 > self.bounds[index, 1] else 0.02
            moved = point.copy()
            moved[index] += step
            columns.append((self.errors(moved) - errors) / step)
        return np.stack(columns, axis=1)

    def step(self, point: Any, errors: Any, slopes: Any, without: str) -> Any:
        """Take one Gauss-Newton step; outliers count less (Huber, from 15 %),
        constants are pulled to the start.
        """
        kept = np.array([paper != without for paper in self.papers])
        numbers = {name: self.papers.count(name) for name in set(self.papers)}
        weights = np.array([1 / math.sqrt(numbers[name]) for name in self.papers]) * kept
        weights = weights * np.minimum(1.0, 0.15 / np.maximum(np.abs(errors), 1e-9))
        free = np.ones(len(point), dtype=bool)
        for _ in range(len(point)):  # constants that would leave their bounds stay on them
            a = slopes[:, free]
            left = a.T @ (weights[:, None] * a) + np.eye(int(free.sum())) * 0.01 / PULL**2
            pulled = errors - slopes[:, ~free] @ np.zeros(int((~free).sum()))
            right = -a.T @ (weights * pulled) - (point - self.start)[free] * 0.01 / PULL**2
            moved = point.copy()
            moved[free] += np.clip(np.linalg.solve(left, right), -0.5, 0.5)
            out = (moved < self.bounds[:, 0] - 1e-12) | (moved > self.bounds[:, 1] + 1e-12)
            stuck = (
                out
                & ((point <= self.bounds[:, 0] + 1e-9) | (point >= self.bounds[:, 1] - 1e-9))
                & free
            )
            moved = np.clip(moved, self.bounds[:, 0], self.bounds[:, 1])
            if not stuck.any():
                return moved
            free &= ~stuck
        return point

    def all(self, rounds: int = 5) -> dict[str, RateFractions]:
        """Fit on all rows (under the name ""),
        and without the rows of each paper (under its name).
        """
        point = self.start.copy()
        for _ in range(rounds):
            errors = self.errors(point)
            slopes = self.slopes(point, errors)
            point = self.step(point, errors, slopes, "")
        errors = self.errors(point)
        slopes = self.slopes(point, errors)
        found = {"": constants(point)}
        for name in sorted(set(self.papers)):
            without = point
            for _ in range(2):
                near = errors + slopes @ (without - point)
                without = self.step(without, near, slopes, name)
            found[name] = constants(without)
        return found


def constants(point: Any) -> RateFractions:
    """Return the constants from their logarithms."""
    return START._replace(**dict(zip(FITTED, map(float, np.exp(point)), strict=True)))


def predict(row: Drawn, fractions: RateFractions) -> Scored:
    """Predict a row by simulation."""
    time_ = step_s(row.case, row.layout, row.hardware, fractions)
    parts = ("pipeline", "reduce", "gather", "optimizer")
    shares = {name: getattr(time_, name) / time_.total for name in parts}
    of = row.case.row
    return Scored(
        of.id,
        of.source,
        row.case.whole,
        of.step_s,
        time_.total,
        of.memory_gib if memory_is_comparable(of) else None,
        memory_bytes(row.case, row.layout) / 2**30,
        row.hardware.usable_bytes / 2**30,
        not of.out_of_memory,
        shares,
        of.cp,
        of.ep,
        kind_of(row),
    )


def kind_of(row: Drawn) -> RunKind:
    """Return the kind of run that a row is."""
    of = row.case.row
    return RunKind(
        generation_of(row.hardware.name),
        has_experts="moe" in of.options,
        is_float8="float8" in of.precision or "fp8" in of.precision,
    )


def errors_by_kind(scored: Sequence[Scored]) -> list[KindError]:
    """Return the mean error of each kind: of the rows that state all that matters, and of the others
    where there are fewer than MIN_RUNS of these.
    """
    groups: dict[RunKind, list[Scored]] = defaultdict(list)
    for one in scored:
        if one.step_s is not None:
            groups[one.kind].append(one)
    found = []
    for kind, rows in sorted(groups.items()):
        whole = [row for row in rows if row.whole]
        counted = whole if len(whole) >= MIN_RUNS else rows
        mean = sum(abs(row.error) for row in counted) / len(counted)
        found.append(KindError(kind, len(counted), round(mean, 3)))
    return found


def show_axis(scored: Sequence[Scored], console: Console, axis: str) -> list[dict[str, Any]]:
    """Print the errors of the rows with ``axis`` ("cp", "ep") by source;
    the table of all rows contains them too.
    """
    groups: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for one in scored:
        if getattr(one, axis) > 1 and one.step_s is not None:
            groups[not one.whole, one.source].append(one.error)
    table, lines = Table(f"rows with {axis} > 1", "rows", "mean", "max", "bias"), []
    for (guessed, source), errors in sorted(groups.items()):
        mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
        worst = max(map(abs, errors))
        lines.append(
            {
                "source": source,
                "guessed": guessed,
                "rows": len(errors),
                "mean": mean,
                "max": worst,
                "bias": bias,
            }
        )
        name = source + (" (guessed)" if guessed else "")
        table.add_row(name, str(len(errors)), f"{mean:.2%}", f"{worst:.2%}", f"{bias:+.2%}")
    if lines:
        console.print(table)
    return lines


def show(scored: Sequence[Scored], console: Console, *, each: bool) -> list[dict[str, Any]]:
    """Print the tables; return the rows of the first."""
    groups: dict[tuple[bool, str], list[Scored]] = defaultdict(list)
    for one in scored:
        groups[not one.whole, one.source].append(one)
    table = Table(
        "source",
        "rows",
        "mean",
        "max",
        "bias",
        "bar",
        "memory: rows",
        "mean",
        "max",
        "ran: fit",
        "OOM: said",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    lines = []
    for (guessed, source), group in sorted(groups.items()):
        rows = [row for row in group if row.step_s is not None]
        ran, failed = [row for row in group if row.ran], [row for row in group if not row.ran]
        if not rows:
            continue
        errors = [row.error for row in rows]
        memory = [abs(row.memory_error) for row in rows if row.memory_gib is not None]
        mean, worst = sum(map(abs, errors)) / len(rows), max(map(abs, errors))
        most_mean, most, _ = BARS.get(source, (BAR, math.inf, None))
        met = mean < most_mean and worst < most
        line = {
            "source": source,
            "guessed": guessed,
            "rows": len(rows),
            "mean": mean,
            "max": worst,
            "bias": sum(errors) / len(rows),
            "met": met,
            "memory_rows": len(memory),
            "memory_mean": sum(memory) / len(memory) if memory else None,
            "memory_max": max(memory) if memory else None,
            "ran": len(ran),
            "ran_and_fit": sum(row.fits for row in ran),
            "out_of_memory": len(failed),
            "out_of_memory_and_said": sum(not row.fits for row in failed),
        }
        lines.append(line)
        table.add_row(
            source + (" (guessed)" if guessed else ""),
            str(len(rows)),
            f"{mean:.2%}",
            f"{worst:.2%}",
            f"{line['bias']:+.2%}",
            "" if guessed else "met" if met else "MISSED",
            str(len(memory) or ""),
            f"{line['memory_mean']:.2%}" if memory else "",
            f"{line['memory_max']:.2%}" if memory else "",
            f"{line['ran_and_fit']} of {len(ran)}",
            f"{line['out_of_memory_and_said']} of {len(failed)}" if failed else "",
        )
    console.print(table)
    for one in scored:
        if one.whole and one.ran is not one.fits:
            said = "fits" if one.fits else "does not fit"
            console.print(
                f"{one.id}: {one.predicted_gib:.1f} GiB of {one.room_gib:.1f} {said}, and it did"
                " not go so"
            )
    timed = [one for one in scored if one.step_s is not None]
    listed = timed if each else sorted(timed, key=lambda one: -abs(one.error))[:20]
    table = Table(
        "row" if each else "worst rows",
        "published s",
        "predicted s",
        "error",
        "of it",
        "GiB",
        "predicted",
    )
    for one in listed:
        parts = " ".join(
            f"{name} {share:.0%}" for name, share in one.shares.items() if share > 0.02
        )
        memory_gib = (
            ("", "")
            if one.memory_gib is None
            else (f"{one.memory_gib:.1f}", f"{one.predicted_gib:.1f}")
        )
        table.add_row(
            one.id,
            f"{one.step_s:.4g}",
            f"{one.predicted_s:.4g}",
            f"{one.error:+.1%}",
            parts,
            *memory_gib,
        )
    console.print(table)
    return lines


def stored() -> dict[str, RateFractions]:
    """Return the constants of the last fit."""
    raw: Mapping[str, Mapping[str, float]] = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    return {name: RateFractions(**values) for name, values in raw.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument(
        "--runs", type=Path, default=DATA, metavar="FILE", help="default: published_runs.csv"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, and store them")
    parser.add_argument(
        "--never-fitted", action="store_true", help=f"of the sources {', '.join(NEVER_FITTED)}"
    )
    parser.add_argument(
        "--classes", action="store_true", help="errors by kind of run, of all sources"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    console = Console(width=160)
    begin = time.monotonic()

    def is_wanted(name: str) -> bool:
        if options.runs != DATA or options.classes:
            return name.startswith(options.only)
        return is_never_fitted(name) == options.never_fitted and name.startswith(
            "" if options.fit else options.only
        )

    rows, left_out = draw(options.runs, is_wanted)
    console.print(
        f"{len(rows)} rows drawn in {time.monotonic() - begin:.0f} s, {len(left_out)} left out"
    )
    for line in left_out if options.runs != DATA else ():
        console.print(f"left out: {line}", markup=False, highlight=False)
    if not rows:
        return 2
    if options.fit:
        found = Fit(rows).all()
        text = {
            name: {key: float(f"{value:.4g}") for key, value in r._asdict().items()}
            for name, r in found.items()
        }
        CONSTANTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    sets = stored()
    rows = [row for row in rows if row.case.row.id.startswith(options.only)]
    scored = [predict(row, sets.get(paper(row), sets[""])) for row in rows]
    kinds = errors_by_kind(scored)
    if options.classes:
        for each in kinds:
            console.print(f"{each.kind!s:40} {each.num_runs:4} runs {each.share:6.1%}")
            generation, has_experts, is_float8 = each.kind
            kind = f'RunKind("{generation}", has_experts={has_experts}, is_float8={is_float8})'
            line = f"    KindError({kind}, {each.num_runs}, {each.share}),"
            console.print(line, soft_wrap=True, highlight=False)
        return 0
    lines = show(scored, console, each=bool(options.only))
    context, experts = (show_axis(scored, console, axis) for axis in ("cp", "ep"))
    rankings = rank(
        [(row.case.row, one.predicted_s) for row, one in zip(rows, scored, strict=True)]
    )
    if rankings:
        console.print(table(rankings))
        console.print(lead_table(rankings))
    missed = [line["source"] for line in lines if not line["met"] and not line["guessed"]]
    report = {
        "environment": environment(
            "python benchmarks/planner_accuracy.py " + " ".join(sys.argv[1:])
        ),
        "constants": {name: values._asdict() for name, values in sets.items()},
        "sources": lines,
        "context": context,
        "experts": experts,
        "families": [each._asdict() for each in rankings],
        "rows": [one._asdict() | {"error": one.error if one.step_s else None} for one in scored],
        "left_out": left_out,
        "problems": [f"{source}: misses its bar" for source in missed],
    }
    if options.out:
        return conclude("planner-accuracy", options.out, report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
