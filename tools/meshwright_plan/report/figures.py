"""Key figures of a run: the strip at the top of its page, and the table that compares runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

from meshwright.terminal.format import format_count, format_duration, format_gib
from meshwright.tracking.record import StepRecord
from meshwright_plan.report.loss_curve import loss_unit
from meshwright_plan.report.run import RunContents, clock

MEAN_OVER = 10
"""Number of latest steps whose mean is the training loss."""
LAST_STEPS = 20
"""Number of latest steps whose median gives the time left, as in `meshwright status`."""
MAX_LEFT_S = 1e9
"""Upper limit of the time left for which a date is printed."""


class Figure(NamedTuple):
    """One figure of a run."""

    name: str
    text: str
    note: str = ""
    value: float | None = None
    """Number by which runs are compared; None: not compared."""
    best: Literal["low", "high"] = "low"


class Cell(NamedTuple):
    """Figure of one run in the table of several."""

    text: str
    note: str
    is_best: bool


def key_figures(run: RunContents) -> Iterator[Figure]:
    """Yield the figures of the strip; those that are not known are left out."""
    if not run.records:
        yield Figure("step", f"0 of {run.steps or '?'}", "no step taken yet")
        return
    found = {each.name: each for each in figures(run)}
    yield found["step"]._replace(note=_progress(run))
    yield found["training loss"]
    yield from _validation(run)
    for name in ("throughput", "MFU", "peak memory", "pipeline bubble"):
        if found[name].text != "–":
            yield found[name]
    yield found["tokens"]._replace(note=f"in {found['training time'].text} of steps")


def figures(run: RunContents, common_step: int = 0) -> list[Figure]:
    """Return all figures of a run that has taken a step.

    Speed, memory and bubble are of the steps on the present layout.

    Args:
        common_step: Last step that all compared runs have taken; 0: nothing is compared.
    """
    records, present = run.records, run.present
    last, total_s = records[-1], sum(record.step_s for record in records)
    best = _best_validation(records)
    steps = f"{last.step:,}" + (f" of {run.steps:,}" if run.steps else "")
    found = [
        Figure("step", steps),
        Figure("tokens", f"{last.tokens:,}"),
        _loss(records[-MEAN_OVER:], "training loss", loss_unit(records)),
    ]
    if common_step:
        until = [record for record in records if record.step <= common_step]
        found.append(_loss(until[-MEAN_OVER:], f"training loss at step {common_step:,}"))
    if best is not None:
        text = f"at step {best.step:,}"
        found.append(Figure("best validation loss", _number(best.loss), text, best.loss))
    else:
        found.append(Figure("best validation loss", "–"))
    rate = _median([record.tokens_per_s for record in present])
    step_s = _median([record.step_s for record in present])
    mfu = _median([record.mfu for record in present])
    causal = _median([record.mfu_causal for record in present])
    bubble = _median([record.bubble_share for record in present])
    note = "" if step_s is None else f"{step_s:.3g} s per step, median"
    speed = "–" if rate is None else f"{format_rate(rate)} tokens/s"
    half = "" if causal is None else f"{causal:.1%} with causal attention counted half"
    return [
        *found,
        Figure("throughput", speed, note, rate, "high"),
        Figure("MFU", _percent(mfu), half, mfu, "high"),
        _memory(run),
        Figure("pipeline bubble", _percent(bubble), "of forward and backward, median", bubble),
        Figure("training time", format_duration(total_s)),
        Figure("starts", f"{len(run.attempts)}"),
        Figure("layout", layout_of(run)),
    ]


def compared_figures(runs: Sequence[RunContents]) -> list[tuple[str, list[Cell]]]:
    """Return the rows of the table of several runs: a name, and a cell for each run.

    The best of each row is marked, unless all are equal. Losses have their difference to it.
    """
    lengths = [run.records[-1].step for run in runs if run.records]
    common = min(lengths, default=0) if len(set(lengths)) > 1 else 0
    columns = [
        {each.name: each for each in figures(run, common)} if run.records else {} for run in runs
    ]
    names = next((list(column) for column in columns if column), [])
    rows = []
    for name in names:
        row = [column.get(name, Figure(name, "–")) for column in columns]
        if any(each.text not in ("–", "") for each in row):
            rows.append((name, _cells(row)))
    return rows


def _cells(row: Sequence[Figure]) -> list[Cell]:
    values = [each.value for each in row if each.value is not None and math.isfinite(each.value)]
    prefer = max if any(each.best == "high" for each in row) else min
    best = prefer(values) if len(set(values)) > 1 else None
    cells = []
    for each in row:
        is_best = best is not None and each.value == best
        note = (
            "" if "median" in each.note or each.note.startswith(("mean of", "rank")) else each.note
        )
        if best is not None and "loss" in each.name and each.value is not None and not is_best:
            note = ", ".join(filter(None, [_number(each.value - best, "+"), note]))
        cells.append(Cell(each.text, note, is_best))
    return cells


def layout_of(run: RunContents) -> str:
    """Describe the layout in one line: degrees, schedule and ZeRO stage.

    The degrees are those of the last start; before one, those of the configuration.
    """
    parallel, pipeline = run.config.get("parallel", {}), run.config.get("pipeline", {})
    configured = " ".join(
        f"{axis}{parallel[axis]}"
        for axis in ("pp", "dp", "tp", *["cp"] * (parallel.get("cp", 1) != 1))
        if axis in parallel
    )
    degrees = configured if run.layout == "?" else run.layout
    # its ranks are those of dp, cp and tp
    experts = f"ep{parallel['ep']}" if parallel.get("ep", 1) != 1 else ""
    zero = f"ZeRO-{parallel['zero']}" if parallel.get("zero") else ""
    schedule = str(pipeline.get("schedule_file") or pipeline.get("schedule", ""))
    return ", ".join(filter(None, [degrees, experts, schedule, zero])) or "?"


def totals(run: RunContents) -> Iterator[tuple[str, str]]:
    """Yield sums over all steps as (name, text), as far as metrics.jsonl has them."""
    kept_s = sum(record.step_s for record in run.records)
    if not kept_s:
        return
    yield "steps", f"{len(run.records):,}, {format_duration(kept_s)}"
    data_s = sum(record.data_s for record in run.records)
    yield "wait for data", f"{format_duration(data_s)}, {data_s / kept_s:.1%} of the step time"
    checked = [record.validation_s for record in run.records if record.validation_s is not None]
    if checked:
        yield "validation", f"{format_duration(sum(checked))}, {len(checked):,} times"
    saves = [record.save_s for record in run.records if record.save_s is not None]
    if saves:
        yield (
            "asynchronous saves",
            f"{len(saves):,}, the longest {max(saves):.3g} s",
        )


def format_rate(tokens_per_s: float) -> str:
    """Format a throughput: whole tokens per second, or three digits of few."""
    return f"{tokens_per_s:,.0f}" if 100 <= tokens_per_s < 1e9 else format_count(tokens_per_s)


class _Validated(NamedTuple):
    loss: float
    step: int


def _best_validation(records: Sequence[StepRecord]) -> _Validated | None:
    losses = [
        _Validated(record.validation_loss, record.step)
        for record in records
        if record.validation_loss is not None and math.isfinite(record.validation_loss)
    ]
    return min(losses, default=None)


def _validation(run: RunContents) -> Iterator[Figure]:
    """Yield the last validation, if there is one."""
    last = next((each for each in reversed(run.records) if each.validation_loss is not None), None)
    if last is None or last.validation_loss is None:
        return
    best = _best_validation(run.records)
    note = f"at step {last.step:,}"
    if best is not None and best.step != last.step:
        note += f"; best {_number(best.loss)} at step {best.step:,}"
    if last.validation_perplexity is not None:
        note += f"; perplexity {last.validation_perplexity:.4g}"
    yield Figure("validation loss", _number(last.validation_loss), note, last.validation_loss)


def _progress(run: RunContents) -> str:
    """Return the share of the steps; of a live run also the time left."""
    step, steps = run.records[-1].step, run.steps
    if not steps or not 0 <= step < steps:
        return ""
    note = f"{step / steps:.0%}"
    left_s = (steps - step) * median(record.step_s for record in run.records[-LAST_STEPS:])
    if run.is_live and 0 < left_s < MAX_LEFT_S:
        note += f", {format_duration(left_s)} left, until about {clock(time.time() + left_s)}"
    return note


def _loss(records: Sequence[StepRecord], name: str, unit: str = "") -> Figure:
    if not records:
        return Figure(name, "–")
    value = sum(record.loss for record in records) / len(records)
    note = f"mean of the last {len(records)} steps" if len(records) > 1 else ""
    nats = unit if "nats" in unit else ""
    return Figure(name, _number(value), ", ".join(filter(None, [note, nats])), value)


def _memory(run: RunContents) -> Figure:
    """Return the largest known peak memory of all ranks on the present layout, with its rank."""
    if not run.present:
        return Figure("peak memory", "–")
    peaks = (
        max(record.memory_bytes for record in run.present),
        *(run.peaks.peaks[1:] if run.peaks else ()),
    )
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    note = f"rank {rank}, the highest" if len(peaks) > 1 else f"rank {rank}"
    is_of_all = run.peaks is not None or run.present[-1].num_devices == 1
    value = peaks[rank] if is_of_all else None  # rank 0 alone is no maximum to compare
    return Figure("peak memory", format_gib(peaks[rank]), note, value)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _number(loss: float, sign: str = "") -> str:
    """Format a loss: four decimals, or three digits of one that is no loss of a model."""
    return f"{loss:{sign}.4f}" if abs(loss) < 1e6 else f"{loss:{sign}.3g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
