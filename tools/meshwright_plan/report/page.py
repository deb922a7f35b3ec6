"""HTML report of one run or of several side by side, in one self-contained file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from meshwright.config import resolve, to_toml
from meshwright.config.keys import flatten
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.schedule.analysis import Costs, timeline_of
from meshwright.schedule.drawing import text
from meshwright.schedule.load import draw_schedule, num_forwards
from meshwright.terminal.format import format_gib
from meshwright_plan.page.chart import tone
from meshwright_plan.page.placement import placement_cards
from meshwright_plan.page.render import render, svg_of
from meshwright_plan.picture.axis import unit_of_seconds
from meshwright_plan.picture.figure import figure
from meshwright_plan.picture.panel import Panel, Unit
from meshwright_plan.report.account import PARTS, account, beside_simulation, mean_account
from meshwright_plan.report.curves import axes_of, charts_of, comparison_charts
from meshwright_plan.report.experts import heat_maps
from meshwright_plan.report.figures import compared_figures, key_figures, layout_of, totals
from meshwright_plan.report.notices import notices
from meshwright_plan.report.run import Attempt, RunContents, clock

TEMPLATE = Path(__file__).parent / "templates" / "report.html.j2"
MAX_DRAWN = 2000
"""Maximum number of actions in a picture. With more, the boxes would be hair-thin:
the schedule is shown as text.
"""
MAX_SIMULATED = 2**17
"""Maximum number of forwards of a schedule that is simulated for the page."""
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
    ranks: Sequence[tuple[str, ...]]
    """(rank, its coordinates on the axes, text)."""


def page(runs: Sequence[RunContents]) -> str:
    """Return the HTML report of these runs."""
    names = names_of(runs)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
    return render(
        TEMPLATE,
        title=f"meshwright: {listed}",
        at=clock(time.time()),
        axes=json.dumps([axes_of(run) for run in runs], allow_nan=False),
        runs=[
            view(run, name, index)
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ],
        together=comparison_charts(runs, names) if runs[1:] else [],
        compared=compared_figures(runs) if runs[1:] else [],
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
        "tone": tone(index),
        "directory": str(run.directory),
        "state": run.state,
        "layout": layout_of(run),
        "model": model_of(run),
        "done": done_share(run),
        "has_steps": bool(run.records),
        "facts": list(key_figures(run)),
        "notices": [each._replace(rows=shortened(each.rows)) for each in notices(run)],
        "charts": charts_of(run, index),
        "experts": heat_maps(run.directory),
        "cards": placement_cards(run.grid, run.nodes) if run.grid is not None else "",
        "placement": run.placement,
        "schedule": schedule_of(run, f"run{index}-"),
        "memory": memory_of(run),
        "time": time_rows(run),
        "traced_on": run.traced_on,
        "parts": PARTS,
        "totals": list(totals(run)),
        "attempts": shortened([row if has_jobs else row[:-1] for row in attempts]),
        "has_jobs": has_jobs,
        "checkpoints": shortened([saved.cells(clock) for saved in run.checkpoints]),
        "changed": [] if run.resolved is None else to_toml(run.resolved).split("\n\n"),
        "config": json.dumps(run.config, indent=1, ensure_ascii=False),
    }


def model_of(run: RunContents) -> str:
    """Return the model's builder, with the number of parameters if there is a checkpoint."""
    size = f", {run.checkpoints[-1].parameters:,} parameters" if run.checkpoints else ""
    return f"{run.config.get('model', {}).get('builder', '?')}{size}"


def done_share(run: RunContents) -> float:
    """Return the share of the configured steps that are taken, 0..1."""
    step = run.records[-1].step if run.records else 0
    return min(1.0, max(0.0, step / run.steps)) if run.steps and run.steps > 0 else 0.0


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
        stages.append((f"pp{pp_rank}", max(own) / most, high if low == high else f"{low}–{high}"))
    of = attrgetter(*(f"{axis}_rank" for axis in grid.axes))
    rows = [
        (str(rank), *map(str, of(at)), format_gib(peak)) for rank, (peak, at) in enumerate(located)
    ]
    kind = (
        "memory allocated by torch"
        if run.peaks.device == "cuda"
        else "resident memory of the process, libraries included"
    )
    caption = f"Highest rank of each pipeline rank: {kind}, up to step {run.peaks.step:,}."
    return Memory(caption, tuple(stages), grid.axes, shortened(rows))


def schedule_of(run: RunContents, prefix: str = "") -> SchedulePicture | None:
    """Draw the schedule; return None if there is nothing to draw. ``prefix``: of names in it.

    If a step was traced: measured above simulated. Otherwise: simulated, in ticks.
    """
    if run.trace is not None:
        trace, step = run.trace.trace, beside_simulation(run.trace)
        measured, simulated = step.bubble_percents
        caption = (
            f"Step {trace.step} as measured, above the same schedule simulated with the measured"
            f" median of each action and stage. Bubble of total time: measured {measured:.1f} %,"
            f" simulated {simulated:.1f} %."
        )
        if run.traced_on:
            caption += f" It was traced on {run.traced_on}."
        if trace.clock_error_s:
            caption += (
                f" Times of different hosts may be off by {1e3 * trace.clock_error_s:.2f} ms."
            )
        return draw_panels("measured and simulated", step, caption, prefix)
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
    caption = "No step was traced (tracking.trace_step): simulated with a backward as long as two forwards."
    return draw_panels(
        "simulated, in ticks",
        [Panel(timeline_of(schedule, Costs()))],
        caption,
        prefix,
        Unit.TICKS,
    )


def draw_panels(
    title: str, panels: Sequence[Panel], caption: str, prefix: str, unit: Unit = Unit.SECONDS
) -> SchedulePicture:
    """Draw panels as a picture, or as text if they have too many actions
    or matplotlib is missing.
    """
    if sum(len(panel.timeline.spans) for panel in panels) <= MAX_DRAWN:
        try:
            drawn = svg_of(figure(panels, unit), f"the schedule, {title}", prefix)
            return SchedulePicture(title, Markup(drawn), "", caption)
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


def attempt_row(attempt: Attempt, before: str) -> tuple[str, ...]:
    """Return a table row: number, time, layout, host, checkpoint's step, steps kept, steps
    repeated, Slurm job.

    ``before``: the layout of the previous start.
    """
    start, kept, lost = attempt.start, attempt.kept, attempt.repeated
    nodes = start.get("nodes")
    where = f"{start.get('host', '?')}" + (
        f" and {nodes - 1} more" if isinstance(nodes, int) and nodes > 1 else ""
    )
    return (
        str(attempt.number + 1),
        str(start.get("at", "?"))[:16],
        attempt.layout + (" (changed)" if attempt.layout != before else ""),
        where,
        f"{attempt.from_step:,}",
        f"{kept[0].step:,} – {kept[-1].step:,}" if kept else "none",
        f"{lost[0].step:,} – {lost[-1].step:,}" if lost else "",
        str(start.get("slurm_job", "")),
    )


def shortened(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Leave out the rows in the middle if there are more than ``MAX_ROWS``."""
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    return [*rows[:half], ("…", *[""] * (len(rows[0]) - 1)), *rows[-half:]]


def differences(runs: Sequence[RunContents]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """List the configuration keys whose values differ between runs, except the run's name and
    directory: a cell is (value, whether it differs from the first run's).
    """
    configs = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for each in configs for key in each))
    rows = []
    for key in keys:
        values = [short_value(each[key]) if key in each else "–" for each in configs]
        if len(set(values)) > 1 and key not in ("run.name", "run.directory"):
            rows.append((key, [(value, value != values[0]) for value in values]))
    return rows


def short_value(value: Any) -> str:
    """Format a value of a configuration as JSON; a number with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
