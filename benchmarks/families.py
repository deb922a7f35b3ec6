"""Ranking of layouts: families of published runs that differ in their layout alone.

A family has one source, model, sequence length, device, number of devices and precision. Its runs
are ranked by seconds per sample, because some of them differ in the global batch too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from published import Row
from rich.table import Table

LEAST_ROWS = 3
LEADS = (0.02, 0.04, 0.1, 0.2)
"""Bounds of predicted leads, as shares of the slower time."""
NOISE_SHARE = 0.01
"""Pairs whose published times differ by less are no evidence of an order."""


class Run(NamedTuple):
    """Published and predicted seconds per sample of one run."""

    id: str
    published: float
    predicted: float


class Ranking(NamedTuple):
    """Agreement of the predicted with the published order of a family."""

    family: str
    rows: int
    spearman: float
    pairs: int
    """Pairs that differ by more than noise."""
    ordered: int
    """Pairs of these in the right order."""
    ratio_error: float
    """Mean absolute error of the ratio of two runs, over all pairs."""
    regret: float
    """Published time of the run that is predicted to be the fastest, over that of the fastest,
    minus one.
    """
    place: int
    """Place of the fastest published run in the predicted order, from one."""
    leads: tuple[tuple[float, bool], ...]
    """Predicted lead of the faster run of each pair that differs by more than noise, and True:
    it was the faster.
    """


def name_of(row: Row) -> str:
    """Return the family of a row."""
    of = (row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab, row.seq, row.gpu)
    size = row.tp * row.pp * row.dp * row.cp
    source = row.source if row.source.startswith("zb") else row.id.split("-")[0]
    return " ".join(map(str, (source, *of, size, row.precision)))


def rank(rows: Sequence[tuple[Row, float]]) -> list[Ranking]:
    """Rank the families among (row, predicted seconds of a step); small families are left out."""
    families: dict[str, list[Run]] = defaultdict(list)
    labels: dict[str, str] = {}
    for row, predicted in rows:
        if row.step_s is not None:
            name, samples = name_of(row), row.global_batch
            families[name].append(Run(row.id, row.step_s / samples, predicted / samples))
            labels[name] = (
                f"{row.source} {row.layers} x {row.hidden}, {row.tp * row.pp * row.dp * row.cp}"
                " devices"
            )
            labels[name] += (
                f", {row.heads} heads, {row.precision}" if row.source == "bigscience" else ""
            )
    return [
        _ranking(labels[name], runs) for name, runs in families.items() if len(runs) >= LEAST_ROWS
    ]


def _ranking(name: str, runs: Sequence[Run]) -> Ranking:
    pairs = list(combinations(runs, 2))
    apart = [(a, b) for a, b in pairs if abs(a.published / b.published - 1) > NOISE_SHARE]
    ordered = sum((a.published < b.published) == (a.predicted < b.predicted) for a, b in apart)
    errors = [
        abs(math.log(a.predicted / b.predicted) - math.log(a.published / b.published))
        for a, b in pairs
    ]
    best, chosen = (
        min(runs, key=lambda run: run.published),
        min(runs, key=lambda run: run.predicted),
    )
    place = 1 + sum(run.predicted < best.predicted for run in runs)
    regret, error = chosen.published / best.published - 1, sum(errors) / len(errors)
    leads = tuple(
        (
            1 - min(a.predicted, b.predicted) / max(a.predicted, b.predicted),
            (a.published < b.published) == (a.predicted < b.predicted),
        )
        for a, b in apart
    )
    return Ranking(
        name, len(runs), spearman(runs), len(apart), ordered, error, regret, place, leads
    )


def spearman(runs: Sequence[Run]) -> float:
    """Return the rank correlation of published and predicted times; ties have their mean rank."""
    a, b = _ranks([run.published for run in runs]), _ranks([run.predicted for run in runs])
    mean = (len(runs) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < each for other in values) + (sum(other == each for other in values) + 1) / 2
        for each in values
    ]


def table(rankings: Sequence[Ranking]) -> Table:
    """Return one line per family, and their totals."""
    shown = Table(
        "family",
        "rows",
        "Spearman",
        "pairs in order",
        "error of a ratio",
        "regret",
        "place of the best",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for each in sorted(rankings, key=lambda each: -each.rows):
        pairs = f"{each.ordered} of {each.pairs}"
        figures = (
            f"{each.spearman:.2f}",
            pairs,
            f"{each.ratio_error:.1%}",
            f"{each.regret:.1%}",
            str(each.place),
        )
        shown.add_row(each.family, str(each.rows), *figures)
    if rankings:
        total: Callable[[str], float] = lambda name: sum(getattr(each, name) for each in rankings)  # noqa: E731
        count, pairs = len(rankings), f"{total('ordered'):.0f} of {total('pairs'):.0f}"
        means = [total(name) / count for name in ("spearman", "ratio_error", "regret")]
        within = sum(each.place <= LEAST_ROWS for each in rankings)
        figures = (
            f"{means[0]:.2f}",
            pairs,
            f"{means[1]:.1%}",
            f"{means[2]:.1%}",
            f"{within} of {count} within 3",
        )
        shown.add_row("all, families alike", f"{total('rows'):.0f}", *figures)
    return shown


def lead_table(rankings: Sequence[Ranking]) -> Table:
    """Return how often the run with a predicted lead was the faster one, by the lead."""
    shown, bounds = Table("predicted lead"), (0.0, *LEADS, 1.0)
    counts, shares = [], []
    for low, high in pairwise(bounds):
        name = (
            f"below {high:.0%}"
            if not low
            else f"above {low:.0%}"
            if high == 1
            else f"{low:.0%} to {high:.0%}"
        )
        shown.add_column(name, justify="right")
        right = [
            is_right for each in rankings for lead, is_right in each.leads if low <= lead < high
        ]
        counts.append(str(len(right)))
        shares.append(f"{sum(right) / len(right):.0%}" if right else "")
    shown.add_row("pairs", *counts)
    shown.add_row("faster one predicted", *shares)
    return shown
