"""Charts of one run, and of several runs on shared axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from meshwright.terminal.format import GIB, format_duration
from meshwright.tracking.record import StepRecord
from meshwright_plan.page.chart import Chart, Curve, Mark, Quantity, chart
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
THROUGHPUT = RecordedQuantity(
    Quantity("Throughput", "tokens/s", from_zero=True), lambda record: record.tokens_per_s
)
RECORDED = (
    RecordedQuantity(
        Quantity("Learning rate", from_zero=True), lambda record: record.learning_rate
    ),
    NORM,
    THROUGHPUT,
    RecordedQuantity(
        Quantity("Time of a step", "s", from_zero=True, may_be_log=True),
        lambda record: record.step_s,
    ),
    RecordedQuantity(
        Quantity("Memory", "GiB at the peak, rank 0", from_zero=True),
        lambda record: record.memory_bytes / GIB,
    ),
    RecordedQuantity(
        Quantity(
            "Bubble",
            "share of forward and backward in which pipeline ranks were idle",
            from_zero=True,
        ),
        lambda record: record.bubble_share,
    ),
)

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


def steps_of(record: StepRecord) -> float:
    return record.step


def tokens_of(record: StepRecord) -> float:
    return record.tokens


def of_run(run: RunContents, index: int = 0) -> list[Chart]:
    """Build the charts of a run: loss first, then every other recorded quantity. ``index``:
    its place on the page.
    """
    marks = list(marks_of(run))
    levels = (
        []
        if run.unigram_entropy is None
        else [(run.unigram_entropy, f"unigrams {run.unigram_entropy:.3f}")]
    )
    charts = [
        chart(
            LOSS.quantity._replace(unit=loss_unit(run.records)),
            _of(index, loss_curves(run)),
            marks=marks,
            levels=levels,
        )
    ]
    for each in RECORDED:
        curves = [
            Curve(each.quantity.title.lower(), points(run.records, each)),
            *repeated_curves(run, each),
        ]
        charts.append(chart(each.quantity, _of(index, curves), marks=marks, legend=False))
    charts += [
        chart(OF_EXPERTS.get(title, Quantity(title)), _of(index, curves), marks=marks)
        for title, curves in extra_charts(run).items()
    ]
    return [drawn for drawn in charts if drawn]


def _of(index: int, curves: Sequence[Curve]) -> list[Curve]:
    return [curve._replace(run=index) for curve in curves]


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
                f"mean of {2 * smoothing_reach(training) + 1} steps", smoothed(training), 0, "mean"
            )
        )
    else:
        curves.append(Curve("training", training, 0))
    curves.append(Curve("validation", points(run.records, VALIDATION), 1, "dots"))
    return [*curves, *repeated_curves(run, LOSS)]


def repeated_curves(run: RunContents, recorded: RecordedQuantity) -> list[Curve]:
    """Build one curve for each start whose steps were lost and repeated by a later start."""
    repeated = [attempt.repeated for attempt in run.attempts if attempt.repeated]
    return [Curve("repeated", points(records, recorded), 0, "lost") for records in repeated]


def points(
    records: Sequence[StepRecord],
    recorded: RecordedQuantity,
    x: Callable[[StepRecord], float] = steps_of,
) -> list[Point]:
    """Return a point for each record that has the quantity. Values that are not finite become NaN,
    a gap.
    """
    values = ((x(record), recorded.of(record)) for record in records)
    return [(at, y if math.isfinite(y) else math.nan) for at, y in values if y is not None]


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """Return the running mean of a curve."""
    means = running_mean([y for _, y in curve], smoothing_reach(curve))
    return [(x, mean) for (x, _), mean in zip(curve, means, strict=True)]


def marks_of(run: RunContents) -> list[Mark]:
    """Build marks for restarts, and for steps that were skipped or whose loss is not finite."""
    recovered = {each.step - 1 for each in run.recoveries if each.step}
    marks = [
        Mark(attempt.from_step, "a recovery" if attempt.from_step in recovered else "a start")
        for attempt in run.attempts[1:]
    ]
    bad = [
        record.step for record in run.records if record.skipped or not math.isfinite(record.loss)
    ]
    return marks + [Mark(step, "not finite", bad=True) for step in bad[:MAX_BAD]]


def comparison_charts(runs: Sequence[RunContents], names: Sequence[str]) -> list[Chart]:
    """Build charts that compare runs: losses by step and tokens; norms,
    throughput and load of experts by step.
    """
    charts = []
    for recorded, x, x_name in (
        (LOSS, steps_of, "step"),
        (LOSS, tokens_of, "tokens"),
        (VALIDATION, steps_of, "step"),
        (VALIDATION, tokens_of, "tokens"),
        (NORM, steps_of, "step"),
        (THROUGHPUT, steps_of, "step"),
        (SKEW, steps_of, "step"),
    ):
        look = "dots" if recorded is VALIDATION else ""
        curves = []
        for index, (run, name) in enumerate(zip(runs, names, strict=True)):
            curve = points(run.records, recorded, x)
            is_long = recorded is LOSS and len(curve) >= SMOOTHED_FROM
            curves += [Curve(name, curve, index, "hidden", index)] * is_long
            curves.append(
                Curve(
                    name,
                    *((smoothed(curve), index, "mean") if is_long else (curve, index, look)),
                    index,
                )
            )
        is_smooth = recorded is LOSS and any(len(run.records) >= SMOOTHED_FROM for run in runs)
        title, unit, *scale = recorded.quantity
        if recorded in (LOSS, VALIDATION):
            unit = ", ".join({loss_unit(run.records): None for run in runs if run.records})
        shown = Quantity(
            f"{title} by {x_name}", unit + (", running mean" if is_smooth else ""), *scale
        )
        charts.append(chart(shown, curves, x_name=x_name))
    return [drawn for drawn in charts if drawn]


FIGURES = (
    "tokens",
    "training loss, mean of the last 10 steps",
    "validation loss, last",
    "validation loss, best",
    "tokens/s, median",
    "seconds a step, median",
    "memory at the peak",
    "bubble, median",
    "time in steps",
)
"""Figures of a run that has taken a step."""


def final_figures(run: RunContents) -> dict[str, str]:
    """Return the figures by which runs are compared, name -> text;
    dashes if the run has taken no step.

    What depends on the layout (speed, memory, bubble) is of the steps on the present one, which
    stands beside it.
    """
    records, present = run.records, run.present
    setup = {"starts": str(len(run.attempts)), "layout": layout_of(run)}
    if not records:
        return {"steps": "0", **dict.fromkeys(FIGURES, "–"), **setup}
    validated = [
        (record.validation_loss, record.step)
        for record in records
        if record.validation_loss is not None
    ]
    best = min((each for each in validated if math.isfinite(each[0])), default=None)
    last = [record.loss for record in records[-10:]]
    bubbles = [record.bubble_share for record in present if record.bubble_share is not None]
    values = (
        f"{records[-1].tokens:,}",
        f"{sum(last) / len(last):.4f}",
        f"{validated[-1][0]:.4f} at step {validated[-1][1]:,}" if validated else "–",
        f"{best[0]:.4f} at step {best[1]:,}" if best else "–",
        _rate(median(record.tokens_per_s for record in present)) if present else "–",
        f"{median(record.step_s for record in present):.3g}" if present else "–",
        _memory(run),
        f"{median(bubbles):.1%}" if bubbles else "–",
        format_duration(sum(record.step_s for record in records)),
    )
    steps = f"{records[-1].step:,}" + (f" of {run.steps:,}" if run.steps else "")
    return {"steps": steps, **dict(zip(FIGURES, values, strict=True)), **setup}


def _memory(run: RunContents) -> str:
    """Format the largest known peak memory of all ranks on the present layout, with its rank."""
    if not run.present:
        return "–"
    peaks = (
        max(record.memory_bytes for record in run.present),
        *(run.peaks.peaks[1:] if run.peaks else ()),
    )
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    return f"{peaks[rank] / GIB:.3g} GiB, rank {rank}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def layout_of(run: RunContents) -> str:
    """Describe the configured layout: parallel degrees, schedule and ZeRO stage."""
    parallel, pipeline = run.config.get("parallel", {}), run.config.get("pipeline", {})
    degrees = " x ".join(
        f"{axis}{parallel[axis]}"
        for axis in ("pp", "dp", "tp", *["cp"] * (parallel.get("cp", 1) != 1))
        if axis in parallel
    )
    # its ranks are those of dp, cp and tp
    experts = f"ep{parallel['ep']}" if parallel.get("ep", 1) != 1 else ""
    zero = f"ZeRO-{parallel['zero']}" if parallel.get("zero") else ""
    schedule = str(pipeline.get("schedule_file") or pipeline.get("schedule", ""))
    return ", ".join(filter(None, [degrees, experts, schedule, zero])) or "?"
