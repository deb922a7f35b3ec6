"""Charts of one run, and of several runs on shared axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from meshwright.terminal.format import GIB
from meshwright.tracking.record import StepRecord
from meshwright_plan.page.chart import INK, Chart, Curve, Mark, Quantity, chart
from meshwright_plan.page.points import MAX_ROWS, Column, Point, column
from meshwright_plan.report.loss_curve import (
    SMOOTHED_FROM,
    loss_unit,
    running_mean,
    smoothing_reach,
)
from meshwright_plan.report.run import RunContents

MAX_BAD = 200
"""Maximum number of marks of non-finite steps in one chart."""
MAX_EXTRA_CHARTS = 24
"""Maximum number of charts for metrics of callbacks, model and GPUs."""


class RecordedQuantity(NamedTuple):
    """Quantity recorded at each step."""

    quantity: Quantity
    of: Callable[[StepRecord], float | None]


LOSS = RecordedQuantity(Quantity("Loss"), lambda record: record.loss)
VALIDATION = RecordedQuantity(Quantity("Validation loss"), lambda record: record.validation_loss)
NORM = RecordedQuantity(
    Quantity("Gradient norm", "L2, before clipping", from_zero=True, may_be_log=True),
    lambda record: record.grad_norm,
)
RATE = RecordedQuantity(
    Quantity("Learning rate", from_zero=True), lambda record: record.learning_rate
)
SCALE = RecordedQuantity(
    Quantity("Loss scale", from_zero=True, may_be_log=True), lambda record: record.loss_scale
)
THROUGHPUT = RecordedQuantity(
    Quantity("Throughput", "tokens/s", from_zero=True), lambda record: record.tokens_per_s
)
STEP_TIME = RecordedQuantity(
    Quantity("Step time", "s", from_zero=True, may_be_log=True), lambda record: record.step_s
)
MFU = RecordedQuantity(
    Quantity("MFU", "%, full attention counted", from_zero=True),
    lambda record: _percent(record.mfu),
)
BUBBLE = RecordedQuantity(
    Quantity("Pipeline bubble", "% of forward and backward", from_zero=True),
    lambda record: _percent(record.bubble_share),
)
MEMORY = RecordedQuantity(
    Quantity("Peak memory", "GiB, rank 0", from_zero=True),
    lambda record: record.memory_bytes / GIB,
)
SPEED = (THROUGHPUT, STEP_TIME, MFU, BUBBLE, MEMORY)
OPTIMIZER = (NORM, RATE, SCALE)

SKEW = RecordedQuantity(
    Quantity("Load of the busiest expert", "x the mean, in the worst layer; 1: balanced"),
    lambda record: record.extra.get("experts/skew"),
)
OF_EXPERTS = {
    "experts/skew": SKEW.quantity,
    "experts/entropy": Quantity(
        "Entropy of the load", "mean over layers; 1: balanced, 0: one expert has all"
    ),
    "experts/idle_share": Quantity(
        "Idle experts", "share of the experts of all layers", from_zero=True
    ),
    "experts/token_entropy": Quantity(
        "Entropy of a token's scores", "1: all experts alike, 0: one has all"
    ),
    "experts/dropped_share": Quantity(
        "Dropped choices", "share of the choices of all layers", from_zero=True
    ),
}
"""Charts of a mixture of experts, by the name of the metric (``tracking/expert_load.py``)."""


class Charts(NamedTuple):
    """Charts of a run, by section of its page."""

    loss: list[Chart]
    speed: list[Chart]
    optimizer: list[Chart]
    others: list[Chart]


def charts_of(run: RunContents, index: int = 0) -> Charts:
    """Build the charts of a run. ``index``: its place on the page, and its colour."""
    marks = list(marks_of(run))
    levels = (
        []
        if run.unigram_entropy is None
        else [(run.unigram_entropy, f"unigram baseline {run.unigram_entropy:.3f}")]
    )
    loss = LOSS.quantity._replace(unit=loss_unit(run.records))

    def section(recorded: Sequence[RecordedQuantity]) -> list[Chart]:
        drawn = []
        for each in recorded:
            name = each.quantity.title.lower()
            curves = [Curve(name, points(run.records, each)), *repeated_curves(run, each)]
            drawn.append(chart(each.quantity, _of(index, curves), marks=marks, legend=False))
        return [each for each in drawn if each]

    others = [
        chart(OF_EXPERTS.get(title, Quantity(title)), _of(index, curves), marks=marks)
        for title, curves in extra_charts(run).items()
    ]
    return Charts(
        [
            each
            for each in [chart(loss, _of(index, loss_curves(run)), marks=marks, levels=levels)]
            if each
        ],
        section(SPEED),
        section(OPTIMIZER),
        [each for each in others if each],
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _of(index: int, curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves as those of the run at this place, in its colour."""
    return [
        curve._replace(run=index, colour=curve.colour if curve.colour < 0 else curve.colour + index)
        for curve in curves
    ]


def axes_of(run: RunContents) -> dict[str, Column]:
    """Return the columns step, tokens and time (s) of a run:
    the page converts steps to the other x axes with them.
    """
    seconds = accumulate(record.step_s for record in run.records)
    rows = [
        (record.step, record.tokens, so_far)
        for record, so_far in zip(run.records, seconds, strict=True)
    ]
    spacing = -(-len(rows) // MAX_ROWS) or 1
    kept = rows[::spacing] + (rows[-1:] if (len(rows) - 1) % spacing else [])
    return {
        name: column([row[at] for row in kept])
        for at, name in enumerate(("step", "tokens", "time"))
    }


def extra_charts(run: RunContents) -> dict[str, list[Curve]]:
    """Return the charts of callbacks, model and GPUs by title; mean,
    min and max of a quantity of GPUs share one.
    """
    charts: dict[str, list[Curve]] = {}
    for name in {name: None for record in run.records for name in record.extra}:
        curves = charts.setdefault(re.sub("^gpu/(min|max)_", "gpu/", name), [])
        curves.append(Curve(name, extra_points(run, name), colour=len(curves)))
    return dict(list(charts.items())[:MAX_EXTRA_CHARTS])


def extra_points(run: RunContents, name: str) -> list[Point]:
    """Return the values of an extra metric (of callbacks, model or GPUs) by step."""
    return points(
        run.records, RecordedQuantity(Quantity(name), lambda record: record.extra.get(name))
    )


def loss_curves(run: RunContents) -> list[Curve]:
    """Build the loss curves: training (with a running mean if there are many steps), validation,
    and repeated steps.
    """
    training = points(run.records, LOSS)
    curves = []
    if len(training) >= SMOOTHED_FROM:
        curves.append(Curve("training", training, 0, "pale"))
        curves.append(
            Curve(
                f"running mean, {2 * smoothing_reach(training) + 1} steps",
                smoothed(training),
                0,
                "mean",
            )
        )
    else:
        curves.append(Curve("training", training, 0))
    curves.append(Curve("validation", points(run.records, VALIDATION), INK, "dots"))
    return [*curves, *repeated_curves(run, LOSS)]


def repeated_curves(run: RunContents, recorded: RecordedQuantity) -> list[Curve]:
    """Build one curve for each start whose steps were lost and repeated by a later start."""
    repeated = [attempt.repeated for attempt in run.attempts if attempt.repeated]
    return [
        Curve("repeated after a restart", points(records, recorded), 0, "lost")
        for records in repeated
    ]


def points(records: Sequence[StepRecord], recorded: RecordedQuantity) -> list[Point]:
    """Return a point for each record that has the quantity. Values that are not finite become NaN,
    a gap.
    """
    values = ((record.step, recorded.of(record)) for record in records)
    return [(at, y if math.isfinite(y) else math.nan) for at, y in values if y is not None]


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """Return the running mean of a curve."""
    means = running_mean([y for _, y in curve], smoothing_reach(curve))
    return [(x, mean) for (x, _), mean in zip(curve, means, strict=True)]


def marks_of(run: RunContents) -> list[Mark]:
    """Build marks for restarts, and for steps that were skipped or whose loss is not finite."""
    marks = [
        Mark(attempt.from_step, "recovery" if is_recovery else "restart", "recovery" * is_recovery)
        for attempt in run.attempts[1:]
        for is_recovery in (attempt.from_step in run.recovered_steps,)
    ]
    bad = [
        record.step for record in run.records if record.skipped or not math.isfinite(record.loss)
    ]
    return marks + [Mark(step, "NaN/Inf", "bad") for step in bad[:MAX_BAD]]


def comparison_charts(runs: Sequence[RunContents], names: Sequence[str]) -> list[Chart]:
    """Build charts that compare runs, a curve for each; the page's legend is that of all."""
    is_long = any(len(run.records) >= SMOOTHED_FROM for run in runs)
    charts = []
    for recorded in (LOSS, VALIDATION, NORM, THROUGHPUT, STEP_TIME, SKEW):
        is_mean = is_long and recorded is LOSS
        look = "mean" if is_mean else "dots" if recorded is VALIDATION else ""
        curves = []
        for index, (run, name) in enumerate(zip(runs, names, strict=True)):
            curve = points(run.records, recorded)
            if is_mean:  # drawn instead of the mean while the page smooths
                curves.append(Curve(name, curve, index, "hidden", index))
            shown = smoothed(curve) if is_mean else curve
            curves.append(Curve(name, shown, index, look, index))
        quantity = recorded.quantity
        if recorded in (LOSS, VALIDATION):
            units = dict.fromkeys(loss_unit(run.records) for run in runs if run.records)
            unit = ", ".join([*units, *["running mean"] * is_mean])
            quantity = quantity._replace(unit=unit)
        charts.append(chart(quantity, curves, legend=False))
    return [drawn for drawn in charts if drawn]
