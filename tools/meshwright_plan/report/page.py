"""HTML report of one run or of several side by side, in one self-contained file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from meshwright.config import RunConfig, resolve, to_toml
from meshwright.config.keys import flatten
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.run.recoveries import PHASES, LoggedRecovery
from meshwright.schedule.analysis import Costs, timeline_of
from meshwright.schedule.drawing import text
from meshwright.schedule.load import draw_schedule, num_forwards
from meshwright.terminal.format import format_duration, format_gib
from meshwright_plan.page.placement import placement_cards
from meshwright_plan.page.render import render, svg_of
from meshwright_plan.picture.axis import unit_of_seconds
from meshwright_plan.picture.figure import figure
from meshwright_plan.picture.panel import Panel, Unit
from meshwright_plan.report.account import PARTS, account, beside_simulation, mean_account
from meshwright_plan.report.curves import (
    axes_of,
    comparison_charts,
    final_figures,
    layout_of,
    of_run,
)
from meshwright_plan.report.experts import heat_maps
from meshwright_plan.report.run import Attempt, RunContents, clock

TEMPLATE = Path(__file__).parent / "templates" / "report.html.j2"
MAX_DRAWN = 2000
"""Maximum number of actions in a picture. With more, the boxes would be hair-thin:
the schedule is shown as text.
"""
MAX_SIMULATED = 2**17
"""Maximum number of forwards of a schedule that is simulated for the page."""
MAX_STRAGGLERS = 8
MAX_ROWS = 60
"""Maximum number of rows of the tables of attempts and checkpoints;
rows in the middle are left out.
"""


class SchedulePicture(NamedTuple):
    """A schedule, as a picture or, if that would be too large, as text."""

    title: str
    picture: Markup
    text: str
    caption: str


class TimeRow(NamedTuple):
    """Time of one rank: (name, share of the step, text) of each part."""

    rank: str
    parts: tuple[tuple[str, float, str], ...]


class Memory(NamedTuple):
    """Peak memory of a run by pipeline rank and by rank."""

    caption: str
    stages: tuple[tuple[str, float, str], ...]
    """(pipeline rank, its largest peak as a share of the largest of all, text)."""
    axes: tuple[str, ...]
    ranks: list[tuple[str, ...]]
    """(rank, its coordinates on the axes, text)."""


def page(runs: Sequence[RunContents]) -> str:
    """Return the HTML report of these runs."""
    names, figures = names_of(runs), [final_figures(run) for run in runs]
    return render(
        TEMPLATE,
        title=f"meshwright: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if names[4:] else ""),
        at=clock(time.time()),
        axes=json.dumps([axes_of(run) for run in runs]),
        runs=[
            view(run, name, index)
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ],
        names=names,
        together=comparison_charts(runs, names) if runs[1:] else [],
        final=[(name, *(each[name] for each in figures)) for name in figures[0]],
        differences=differences(runs) if runs[1:] else [],
    )


def names_of(runs: Sequence[RunContents]) -> list[str]:
    """Return a name for each run: its directory's name,
    or the full path if two runs share a name.
    """
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.directory)
        for run, name in zip(runs, names, strict=True)
    ]


def view(run: RunContents, name: str, index: int) -> dict[str, Any]:
    """Return the template's values for one run; ``index``: its place on the page."""
    before = (*run.attempts[:1], *run.attempts)
    attempts = [
        attempt_row(attempt, last.layout)
        for attempt, last in zip(run.attempts, before, strict=False)
    ]
    has_jobs = any("slurm_job" in attempt.start for attempt in run.attempts)
    return {
        "name": name,
        "directory": str(run.directory),
        "state": run.state,
        "is_live": run.is_live,
        "facts": list(facts(run)),
        "remarks": run.remarks,
        "charts": of_run(run, index),
        "experts": heat_maps(run.directory),
        "cards": placement_cards(run.grid, run.nodes) if run.grid is not None else "",
        "placement": run.placement,
        "schedule": schedule_of(run),
        "memory": memory_of(run),
        "time": time_rows(run),
        "traced_on": run.traced_on,
        "parts": PARTS,
        "whole": list(time_totals(run)),
        "stragglers": stragglers(run),
        "attempts": shortened([row if has_jobs else row[:-1] for row in attempts]),
        "has_jobs": has_jobs,
        "recoveries": shortened([recovery_row(each) for each in run.recoveries]),
        "phases": PHASES,
        "checkpoints": shortened([saved.cells(clock) for saved in run.checkpoints]),
        "hang": run.hang,
        "config": config_text(run),
    }


def facts(run: RunContents) -> Iterator[tuple[str, str]]:
    """Yield the key figures at the top of the page, as (name, text)."""
    figures, model = final_figures(run), run.config.get("model", {})
    size = f", {run.checkpoints[-1].parameters:,} parameters" if run.checkpoints else ""
    yield "model", f"{model.get('builder', '?')}{size}"
    yield "layout", layout_of(run)
    yield "step", figures["steps"] if run.records else f"none yet of {run.steps or '?'}"
    if run.records:
        yield "training loss", figures["training loss, mean of the last 10 steps"]
        yield "validation loss", figures["validation loss, last"]
        yield "tokens", figures["tokens"]
        if run.present:
            speed = (
                f"{figures['tokens/s, median']} tokens/s, {figures['seconds a step, median']} s a"
                " step"
            )
            yield "throughput", speed
        for name, key in (("MFU, full attention", "mfu"), ("MFU, causal half", "mfu_causal")):
            if shares := sorted(
                share for record in run.present if (share := getattr(record, key)) is not None
            ):
                yield name, f"{shares[len(shares) // 2]:.1%}, median"
        if run.present:
            yield "memory", f"{figures['memory at the peak']}, at the peak"
        yield "time in steps", figures["time in steps"]
    yield "starts", f"{len(run.attempts)}"
    if run.recoveries:
        yield "recoveries in place", f"{len(run.recoveries)}"
    yield "checkpoints", f"{len(run.checkpoints)}"


def recovery_row(recovery: LoggedRecovery) -> tuple[str, ...]:
    """Return the cells of a recovery in place: what was repaired, where, and the seconds of each
    phase.
    """
    seconds = (recovery.seconds.get(phase) for phase in PHASES)
    return (
        recovery.at,
        recovery.what,
        ", ".join(recovery.nodes) or "-",
        "-" if recovery.replaced is None else str(recovery.replaced),
        "-" if recovery.step is None else f"{recovery.step:,}",
        *("-" if each is None else f"{each:.3g}" for each in seconds),
    )


def memory_of(run: RunContents) -> Memory | None:
    """Return the peak memory of all ranks, and the lowest and highest peak of each pipeline rank.

    The range is per pipeline rank because pipeline ranks hold different stages.
    """
    if run.peaks is None:
        return None
    peaks, grid = run.peaks.peaks, Grid.of(run.peaks.grid)
    most, places = max(peaks, default=0) or 1, [grid.coordinates(rank) for rank in range(grid.size)]
    located, stages = list(zip(peaks, places, strict=True)), []
    for pp_rank in range(grid.pp):
        own = peaks[pp_rank * grid.size // grid.pp : (pp_rank + 1) * grid.size // grid.pp]
        low, high = format_gib(min(own)), format_gib(max(own))
        stages.append((f"pp{pp_rank}", max(own) / most, high if low == high else f"{low} – {high}"))
    of = attrgetter(*(f"{axis}_rank" for axis in grid.axes))
    rows = [
        (str(rank), *map(str, of(at)), format_gib(peak)) for rank, (peak, at) in enumerate(located)
    ]
    kind = (
        "allocated by torch"
        if run.peaks.device == "cuda"
        else "the whole process, libraries included"
    )
    caption = f"The peak of each rank, {kind}, as of step {run.peaks.step:,}."
    return Memory(caption, tuple(stages), grid.axes, shortened(rows))


def schedule_of(run: RunContents) -> SchedulePicture | None:
    """Draw the schedule; return None if there is nothing to draw.

    If a step was traced: measured above simulated. Otherwise: simulated, in ticks.
    """
    if run.trace is not None:
        trace, step = run.trace.trace, beside_simulation(run.trace)
        measured, simulated = step.bubble_percents
        caption = (
            f"Step {trace.step} as it was, above the same schedule simulated with the measured"
            f" medians of each kind and stage. Bubble of total time: measured {measured:.1f} %,"
            f" simulated {simulated:.1f} %."
        )
        if run.traced_on:
            caption += f" The layout was {run.traced_on} then."
        if trace.clock_error_s:
            caption += (
                f" Times of different hosts may be off by {1e3 * trace.clock_error_s:.2f} ms."
            )
        return draw_panels("measured and simulated", step, caption)
    # code that the run names is not imported
    config = run.resolved
    if config is None or ":" in config.pipeline.schedule:
        return None
    if num_forwards(config.pipeline, config.parallel.pp, config.batch.chunks) > MAX_SIMULATED:
        return None
    try:
        config = resolve(config)
        schedule = draw_schedule(config.pipeline, config.parallel.pp, config.batch.chunks)
    except UserError:
        return None
    if schedule.pp == 1:
        return None
    caption = (
        "No step was traced (tracking.trace_step), so this is the plan, with a backward as long as"
        " two forwards."
    )
    return draw_panels(
        "simulated, in ticks", [Panel(timeline_of(schedule, Costs()))], caption, Unit.TICKS
    )


def draw_panels(
    title: str, panels: Sequence[Panel], caption: str, unit: Unit = Unit.SECONDS
) -> SchedulePicture:
    """Draw panels as a picture, or as text if they have too many actions
    or matplotlib is missing.
    """
    if sum(len(panel.timeline.spans) for panel in panels) <= MAX_DRAWN:
        try:
            return SchedulePicture(
                title, Markup(svg_of(figure(panels, unit), f"the schedule, {title}")), "", caption
            )
        except UserError as error:
            caption = f"{caption} {error.message}."
    return SchedulePicture(
        title, Markup(""), "\n\n".join(text(panel.timeline) for panel in panels), caption
    )


def time_rows(run: RunContents) -> list[TimeRow]:
    """Split the traced step's time into parts,
    for each pipeline rank of the first replica and their mean.
    """
    if run.trace is None:
        return []
    accounts = account(run.trace.timeline, run.trace.readings)
    size, unit = unit_of_seconds(accounts[0].total)
    rows = {str(each.rank): each for each in accounts} | (
        {"mean": mean_account(accounts)} if accounts[1:] else {}
    )
    return [
        TimeRow(
            name,
            tuple(
                (part, max(0.0, value) / each.total, f"{value / size:.3g} {unit}")
                for part, value in zip(PARTS, each[1:], strict=True)
            ),
        )
        for name, each in rows.items()
    ]


def time_totals(run: RunContents) -> Iterator[tuple[str, str]]:
    """Yield totals over all steps as (name, text), as far as metrics.jsonl has them."""
    kept_s = sum(record.step_s for record in run.records)
    if not kept_s:
        return
    lost = [record for attempt in run.attempts for record in attempt.repeated]
    yield "steps that count", f"{len(run.records):,}, {format_duration(kept_s)}"
    if lost:
        lost_s = sum(record.step_s for record in lost)
        share = lost_s / (kept_s + lost_s)
        yield (
            "steps repeated after a restart",
            f"{len(lost):,}, {format_duration(lost_s)}: {share:.1%} of the time",
        )
    skipped = sum(record.skipped for record in run.records)
    if skipped:
        yield "steps skipped for NaN/Inf", f"{skipped:,}"
    data_s = sum(record.data_s for record in run.records)
    yield "waiting for data", f"{format_duration(data_s)}, {data_s / kept_s:.1%} of it"
    bubbles = [
        (r.bubble_share * r.step_s, r.step_s) for r in run.records if r.bubble_share is not None
    ]
    if bubbles:
        yield (
            "pipeline bubble",
            (
                f"{sum(idle for idle, _ in bubbles) / sum(all_s for _, all_s in bubbles):.1%} of"
                " forward and backward"
            ),
        )
    saves = [record.save_s for record in run.records if record.save_s is not None]
    if saves:
        yield (
            "writing checkpoints, behind the steps",
            f"{len(saves)} seen, {max(saves):.3g} s the longest",
        )


def stragglers(run: RunContents) -> list[tuple[str, str, str]]:
    """List the stragglers, worst first: (rank, number of steps, largest share of a step)."""
    found: dict[str, list[float]] = {}
    for record in run.records:
        if record.straggler:
            found.setdefault(record.straggler, []).append(record.straggler_share or 0.0)
    rows = sorted(found.items(), key=lambda each: -sum(each[1]))[:MAX_STRAGGLERS]
    return [(who, f"{len(shares):,}", f"{max(shares):.0%}") for who, shares in rows]


def attempt_row(attempt: Attempt, before: str) -> tuple[str, ...]:
    """Return a table row: number, time, layout, host, first step, steps kept, steps lost,
    Slurm job.

    ``before``: the layout of the previous start.
    """
    start, kept, lost = attempt.start, attempt.kept, attempt.repeated
    nodes = start.get("nodes")
    where = f"{start.get('host', '?')}" + (
        f" and {nodes - 1} more" if isinstance(nodes, int) and nodes > 1 else ""
    )
    return (
        str(attempt.number + 1),
        str(start.get("at", "?"))[:19],
        attempt.layout + (" (changed)" if attempt.layout != before else ""),
        where,
        f"{attempt.from_step:,}",
        f"{kept[0].step:,} – {kept[-1].step:,}" if kept else "none",
        f"{lost[0].step:,} – {lost[-1].step:,}" if lost else "",
        str(start.get("slurm_job", "")),
    )


def shortened(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out the rows in the middle if there are more than ``MAX_ROWS``."""
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    return [*rows[:half], ("…", *[""] * (len(rows[0]) - 1)), *rows[-half:]]


def config_text(run: RunContents) -> str:
    """Return the resolved configuration as a file for `meshwright train`;
    as JSON if this version cannot parse it.
    """
    config: RunConfig | None = run.resolved
    return to_toml(config) if config is not None else json.dumps(run.config, indent=2)


def differences(runs: Sequence[RunContents]) -> list[tuple[str, ...]]:
    """List configuration keys whose values differ between runs,
    except the run's name and directory.
    """
    configs = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for each in configs for key in each))
    rows = []
    for key in keys:
        values = [
            json.dumps(each[key], ensure_ascii=False) if key in each else "–" for each in configs
        ]
        if len(set(values)) > 1 and key not in ("run.name", "run.directory"):
            rows.append((key, *values))
    return rows
