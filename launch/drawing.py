"""What ``meshwright draw`` does: a configuration's schedule before it runs. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from framework.config import RunConfig, default_world_size, load, resolve
from framework.errors import ConfigError, ScheduleError
from framework.schedule.action import Schedule
from framework.schedule.build import build
from framework.schedule.check import check, report
from framework.schedule.draw import Panel, Unit, text, timeline_of
from framework.schedule.lower import lower
from framework.schedule.simulate import Costs

WIDTH = 100


class Format(StrEnum):
    """What can be written."""

    TEXT = "text"
    SVG = "svg"
    PNG = "png"
    TRACE = "trace"


SUFFIXES = {Format.TEXT: ".txt", Format.SVG: ".svg", Format.PNG: ".png", Format.TRACE: ".trace.json"}
MUST_LAST = ("f", "b", "i", "w")


def draw(drawn: str, overrides: Sequence[str], out: Path | None, formats: str | None, costs: str | None) -> None:
    """The command, with its words as they were given."""
    wanted = parse_formats(formats) if formats is not None else list(Format)
    if formats is not None and out is None:
        raise ConfigError(f"--format {formats} writes files: say where with --out DIR")
    draw_config(load(drawn, overrides), parse_costs(costs or ""), out, wanted)


def draw_config(config: RunConfig, costs: Costs, out: Path | None, formats: Sequence[Format]) -> None:
    """Print the schedule of a configuration, its bubble and its activations; write the files that are asked for."""
    schedule = schedule_of(resolve(config, default_world_size(config, 0)))
    timeline = timeline_of(schedule, costs)
    grid = text(timeline, shutil.get_terminal_size((WIDTH, 0)).columns)
    kinds = {str(action.kind).lower() for rank in range(schedule.pp) for _, action in schedule.actions(rank)}
    used = [f"{name} {cost:g}" for name, cost in costs._asdict().items() if name in kinds | {"comm"}]
    print(f"{grid}\n\nin ticks: {', '.join(used)} (change them with --costs)")
    if out is not None:
        stem = f"{schedule.name}-pp{schedule.pp}-chunks{schedule.chunks}"
        write(out, stem, formats, grid, [Panel(timeline)], Unit.TICKS)


def schedule_of(config: RunConfig) -> Schedule:
    """The lowered and checked schedule of a resolved configuration."""
    assert config.batch.chunks is not None
    schedule = lower(build(config.pipeline.schedule, config.parallel.pp, config.batch.chunks))
    problems = check(schedule)
    if problems:
        raise ScheduleError(report(schedule, problems))
    return schedule


def write(out: Path, stem: str, formats: Sequence[Format], drawn: str, panels: Sequence[Panel], unit: Unit) -> None:
    """Write ``out/stem`` in each format, and say where.

    Raises:
        ConfigError: the directory cannot be made or written to.
    """
    from framework.schedule.picture.figure import figure, save
    from framework.schedule.picture.perfetto import chrome_trace

    is_pictured = bool({Format.SVG, Format.PNG} & set(formats))
    picture = figure(panels, unit) if is_pictured else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        for format in formats:
            path = out / (stem + SUFFIXES[format])
            if format is Format.TEXT:
                path.write_text(drawn + "\n")
            elif format is Format.TRACE:
                path.write_text(chrome_trace(panels, unit))
            elif picture is not None:
                save(picture, path)
            print(path)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be written ({error.strerror}): choose another directory with --out"
        ) from error


def parse_costs(words: str) -> Costs:
    """``f=1,b=2,comm=0.1``: what is not named costs what :class:`Costs` says.

    Raises:
        ConfigError: an unknown name, no number, a negative one, or a computation that takes no time.
    """
    known = Costs._field_defaults
    found: dict[str, float] = {}
    for word in words.split(",") if words else ():
        name, _, value = word.strip().partition("=")
        try:
            cost = float(value)
        except ValueError:
            cost = -1.0
        least = "above 0" if name in MUST_LAST else "from 0 up"
        if name not in known or not 0 <= cost < float("inf") or (name in MUST_LAST and cost == 0):
            said = f"{name} needs a number {least}" if name in known else f"choose of {', '.join(known)}"
            raise ConfigError(f"--costs {words}: {word.strip()!r} is not understood: {said}, as in f=1,b=2,comm=0.1")
        found[name] = cost
    return Costs(**found)


def parse_formats(words: str) -> list[Format]:
    """``svg,trace`` -> the formats.

    Raises:
        ConfigError: names those that there are.
    """
    wanted = [word.strip() for word in words.split(",")]
    unknown = [word for word in wanted if word not in list(Format)]
    if unknown:
        raise ConfigError(f"--format {words}: {unknown[0]!r} is not known: choose of {', '.join(Format)}")
    return list(dict.fromkeys(Format(word) for word in wanted))
