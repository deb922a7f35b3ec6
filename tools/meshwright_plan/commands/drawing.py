"""Command ``meshwright draw``: the schedule of a configuration, or the traced step of a run.
No torch.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from meshwright.config import load, resolve
from meshwright.errors import ConfigError
from meshwright.run.trust import check_file
from meshwright.schedule.action import Schedule
from meshwright.schedule.analysis import Costs, timeline_of
from meshwright.schedule.drawing import text
from meshwright.schedule.load import draw_schedule
from meshwright.system.atomic import check_inside, write_out, writing
from meshwright.terminal.output import put
from meshwright_plan.picture.axis import unit_of_seconds
from meshwright_plan.picture.panel import Panel, Unit
from meshwright_plan.report.account import account, beside_simulation, table
from meshwright_plan.report.trace_file import newest, read

WIDTH = 100


class Format(StrEnum):
    """Output format of a drawing."""

    TEXT = "text"
    SVG = "svg"
    PNG = "png"
    TRACE = "trace"


SUFFIXES = {
    Format.TEXT: ".txt",
    Format.SVG: ".svg",
    Format.PNG: ".png",
    Format.TRACE: ".trace.json",
}
NONZERO_COSTS = ("f", "b", "i", "w")
"""Costs of computations, which must be above 0."""


def draw(options: argparse.Namespace, overrides: list[str]) -> int:
    """Draw the schedule of a configuration, or the traced step of a run.

    Raises:
        UserError: an option is invalid or has no effect here, or the configuration or trace is
            invalid.
    """
    formats = parse_formats(options.format) if options.format is not None else list(Format)
    path, costs = Path(options.drawn), options.costs
    if path.is_dir() or path.suffix == ".json":
        unused = [*overrides, *([f"--costs {costs}"] if costs is not None else [])]
        if unused:
            raise ConfigError(
                "MW-LAUNCH-016",
                f"{path} is a run, whose times are measured: {' '.join(unused)} has no effect",
            )
        draw_trace(newest(path) if path.is_dir() else path, options.out, formats, path)
        return 0
    default_out = Path() if options.format is not None else None
    config = load(options.drawn, overrides)
    if ":" in config.pipeline.schedule:  # the only function that is called here
        check_file(options.drawn, overrides, trust_code=options.trust_code)
    ticks = parse_costs(costs or "")
    config = resolve(config)
    schedule = draw_schedule(config.pipeline, config.parallel.pp, config.batch.chunks)
    draw_simulated(schedule, ticks, options.out or default_out, formats)
    return 0


def draw_trace(path: Path, out: Path | None, formats: Sequence[Format], named: Path) -> None:
    """Print a measured step, its simulation and the time of each rank;
    write both timelines as one picture.

    ``named``: the run, or the file ``path`` itself, that the command names; without ``out`` nothing
        is written outside.
    """
    traced = read(path)
    accounts, panels = account(traced.timeline, traced.readings), beside_simulation(traced)
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    measured, simulated = panels.bubble_percents
    size, unit = unit_of_seconds(accounts[0].total)
    sections = [
        *(text(panel.timeline, width) for panel in panels),
        table(accounts, size, unit),
        (
            f"bubble of total time: measured {measured:.1f} %, simulated {simulated:.1f} %, "
            f"{measured - simulated:+.1f} points"
        ),
    ]
    if traced.trace.clock_error_s:
        sections.append(
            f"times of different hosts may be off by {1e3 * traced.trace.clock_error_s:.2f} ms"
        )
    drawn = "\n\n".join(sections)
    put(f"{drawn}\n")
    for format in formats if out is None else ():
        check_inside(
            path.with_name(path.stem + SUFFIXES[format]), named if named.is_dir() else path.parent
        )
    write(out or path.parent, path.stem, formats, drawn, panels, Unit.SECONDS)


def draw_simulated(
    schedule: Schedule, costs: Costs, out: Path | None, formats: Sequence[Format]
) -> None:
    """Print a schedule, its bubble and its activations; write the requested files."""
    timeline = timeline_of(schedule, costs)
    grid = text(timeline, shutil.get_terminal_size((WIDTH, 0)).columns)
    kinds = {
        str(action.kind).lower()
        for rank in range(schedule.pp)
        for _, action in schedule.actions(rank)
    }
    used = [
        f"{name} {cost:g}" for name, cost in costs._asdict().items() if name in kinds | {"comm"}
    ]
    put(f"{grid}\n\nin ticks: {', '.join(used)} (change them with --costs)")
    if out is not None:
        stem = re.sub(r"[^\w.]+", "-", timeline.name.replace("=", "")).strip(".-")
        write(out, stem, formats, grid, [Panel(timeline)], Unit.TICKS)


def write(
    out: Path, stem: str, formats: Sequence[Format], drawn: str, panels: Sequence[Panel], unit: Unit
) -> None:
    """Write ``out/stem`` in each format, and print the paths.

    Raises:
        ConfigError: a file cannot be written there.
    """
    from meshwright_plan.picture.figure import figure, save
    from meshwright_plan.picture.perfetto import chrome_trace

    is_pictured = bool({Format.SVG, Format.PNG} & set(formats))
    picture = figure(panels, unit) if is_pictured else None
    for format in formats:
        path = out / (stem + SUFFIXES[format])
        if format is Format.TEXT:
            write_out(path, drawn + "\n")
        elif format is Format.TRACE:
            write_out(path, chrome_trace(panels, unit))
        elif picture is not None:
            with writing(path) as file:
                save(picture, file)
        put(path)


MAX_COST = 1e100
"""Upper limit of the cost of a computation or a message: sums of them stay finite."""


def parse_costs(words: str) -> Costs:
    """Parse ``f=1,b=2,comm=0.1``; costs that are not named keep the defaults of :class:`Costs`.

    Raises:
        ConfigError: an unknown name, not a number, a negative number, or a computation that takes
            no time.
    """
    known = Costs._field_defaults
    found: dict[str, float] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.strip().partition("=")
        try:
            cost = float(value)
        except ValueError:
            cost = -1.0
        least = "above 0" if name in NONZERO_COSTS else "from 0 up"
        if name not in known or not 0 <= cost < MAX_COST or (name in NONZERO_COSTS and cost == 0):
            advice = (
                f"{name} needs a number {least}"
                if name in known
                else f"choose from {', '.join(known)}"
            )
            raise ConfigError(
                "MW-LAUNCH-017",
                f"--costs {words}: {word.strip()!r} is not a cost: {advice}, as in"
                " f=1,b=2,comm=0.1",
            )
        found[name] = cost
    return Costs(**found)


def parse_formats(words: str) -> list[Format]:
    """Parse ``svg,trace`` into formats.

    Raises:
        ConfigError: an unknown format; lists the known ones.
    """
    wanted = [word.strip() for word in words.split(",")]
    unknown = [word for word in wanted if word not in list(Format)]
    if unknown:
        raise ConfigError(
            "MW-LAUNCH-018",
            f"--format {words}: {unknown[0]!r} is not a format: choose from {', '.join(Format)}",
        )
    return list(dict.fromkeys(Format(word) for word in wanted))
