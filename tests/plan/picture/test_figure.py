"""The figure: what is in it is counted in its SVG, whose boxes carry names."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from meshwright.schedule.action import COMPUTE, Kind
from meshwright.schedule.analysis import Costs, Reading, Timeline, timeline_of
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.degrees import INTERLEAVES
from meshwright.schedule.load import parse_schedule
from meshwright_plan.picture.axis import time_axis, unit_of_seconds
from meshwright_plan.picture.figure import PNG_DPI, figure, save
from meshwright_plan.picture.legend import entries_of
from meshwright_plan.picture.palette import PAINTS, _channels, shade
from meshwright_plan.picture.panel import Panel, Unit

SVG = "{http://www.w3.org/2000/svg}"
COSTS = Costs(comm=0.25, reduce=1, step=1)

INTERLEAVED = parse_schedule(
    "# hand pp=2 num_stages=4 chunks=2 placement=loop\n"
    "0F0 0F1 2F0 2F1 2I0 2I1 0I0 2W0 0I1 2W1 0W0 0W1\n"
    "1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1\n"
)
"""Two stages a rank, and the backward in halves."""


class Drawn:
    """An SVG, read back."""

    def __init__(self, path: Path, *panels: Panel, unit: Unit = Unit.TICKS) -> None:
        save(figure(panels, unit), path)
        self.root = ElementTree.parse(path).getroot()
        self.words = [text.text for text in self.root.iter(f"{SVG}text")]

    def boxes(self) -> list[str]:
        """The names of the boxes, such as ``panel0-rank0-1F2``."""
        names = [group.get("id", "") for group in self.root.iter(f"{SVG}g")]
        return [name for name in names if name.startswith("panel")]

    def colours(self, ending: str) -> set[str]:
        """Of the boxes whose name ends so."""
        found = set()
        for group in self.root.iter(f"{SVG}g"):
            if group.get("id", "").startswith("panel") and group.get("id", "").endswith(ending):
                found |= set(
                    re.findall(r"fill: (#\w+)", ElementTree.tostring(group, encoding="unicode"))
                )
        return found


def lightness(colour: str) -> float:
    """Return the CIE L* of ``#rrggbb``, 0 (black) to 100 (white): its grey in print."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(colour))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 216 / 24389 else luminance * 24389 / 27


def expected_boxes(timeline: Timeline, panel: int = 0) -> list[str]:
    return [
        f"panel{panel}-rank{s.rank}-{s.action}" for s in timeline.spans if s.action.kind in PAINTS
    ]


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_box_for_each_computation_reduction_and_step(name: str, tmp_path: Path) -> None:
    timeline = timeline_of(build(name, 4, 4, INTERLEAVES.get(name, [1])[0]), COSTS)
    drawn = Drawn(tmp_path / "a.svg", Panel(timeline))
    assert sorted(drawn.boxes()) == sorted(expected_boxes(timeline))
    numbers = Counter(word for word in drawn.words if word in ("0", "1", "2", "3"))
    computed = Counter(str(s.action.microbatch) for s in timeline.spans if s.action.kind in COMPUTE)
    assert all(numbers[number] >= count for number, count in computed.items())
    title = next(word for word in drawn.words if word and word.startswith(timeline.name))
    assert "bubble" in title and "activations in flight" in title
    assert {"rank 0", "rank 3", "time (ticks)", "reduce", "optimizer step"} <= set(drawn.words)


def test_one_panel_below_the_other(tmp_path: Path) -> None:
    first = timeline_of(build("1f1b", 2, 2), COSTS)
    spans = tuple(s._replace(start=s.start / 1000, end=s.end / 1000) for s in first.spans)
    first = first._replace(spans=spans)
    panels = (Panel(first, "measured", (Reading(0, 0.0, 0.0005),)), Panel(first, "simulated"))
    drawn = Drawn(tmp_path / "a.svg", *panels, unit=Unit.SECONDS)
    assert sorted(drawn.boxes()) == sorted(expected_boxes(first) + expected_boxes(first, 1))
    assert {"measured", "simulated", "time (ms)", "samples read"} <= set(drawn.words)


def test_a_stage_is_a_shade(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path / "a.svg", Panel(timeline_of(INTERLEAVED, COSTS)))
    first, second = drawn.colours("rank0-0F0"), drawn.colours("rank0-2F0")
    assert first == drawn.colours("rank1-1F1") == {PAINTS[Kind.F].light}
    assert second == drawn.colours("rank1-3F1") == {PAINTS[Kind.F].dark}
    assert drawn.colours("rank0-0I0") != drawn.colours("rank0-2I0")
    words = [word for word in drawn.words if word and ", " in word and "gradient" in word]
    assert words == ["I, input gradient", "W, weight gradient"]


def test_the_legend_has_as_many_shades_as_a_rank_has_stages() -> None:
    """In any one panel: the first holds stages 0 and 2 on rank 0, the second 0 alone."""
    panels = [timeline_of(INTERLEAVED).spans, timeline_of(build("1f1b", 2, 2)).spans]
    entries = {entry.name.partition(",")[0]: len(entry.colours) for entry in entries_of(panels)}
    assert entries["F"] == entries["I"] == 2 and entries["B"] == 1
    both = entries_of(
        [timeline_of(build(name, 2, 2, 2)).spans for name in ("zb_v", "interleaved_1f1b")]
    )
    # stages 0 and 3, 0 and 2
    assert {len(entry.colours) for entry in both if entry.name[1] == ","} == {2}


def test_a_long_run_keeps_both_ends(tmp_path: Path) -> None:
    timeline = timeline_of(build("1f1b", 4, 150), COSTS)
    boxes = set(Drawn(tmp_path / "a.svg", Panel(timeline)).boxes())
    assert {
        "panel0-rank0-0F0",
        "panel0-rank3-3B0",
        "panel0-rank0-0B149",
        "panel0-rank3-3F149",
    } <= boxes
    assert "panel0-rank0-0F75" not in boxes
    assert len(boxes) < 400


def test_the_axis_is_cut_once_and_loses_nothing_at_the_ends() -> None:
    timeline = timeline_of(build("1f1b", 4, 150), COSTS)
    spans = [span for span in timeline.spans if span.action.kind in PAINTS]
    axis = time_axis(spans)
    end = max(span.end for span in spans)
    assert axis.gap > 0 and axis.first_end < axis.second_start and axis.end == end
    assert axis.pieces(0, 1) == [(0, 1)]
    assert axis.pieces(end - 1, end) == [
        (pytest.approx(axis.length - 1), pytest.approx(axis.length))
    ]
    assert axis.pieces(axis.first_end + 1, axis.second_start - 1) == []
    (_, left), (right, _) = axis.pieces(0, end)
    assert right - left == pytest.approx(axis.gap)
    short = timeline_of(build("1f1b", 4, 8), COSTS)
    boxes = [span for span in short.spans if span.action.kind in PAINTS]
    stalled = [
        span._replace(start=span.start + 500, end=span.end + 500) if span.start > 8 else span
        for span in boxes
    ]
    assert time_axis(boxes).gap == time_axis(stalled).gap == 0


def test_many_ranks_keep_the_first_and_the_last(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path / "a.svg", Panel(timeline_of(build("1f1b", 70, 1))))
    ranks = [word for word in drawn.words if word and word.startswith("rank ")]
    assert (
        len(ranks) == 63 and (ranks[0], ranks[-1]) == ("rank 0", "rank 69") and "⋮" in drawn.words
    )


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 8)])
def test_the_png_is_as_large_as_the_figure(pp: int, chunks: int, tmp_path: Path) -> None:
    picture = figure([Panel(timeline_of(build("1f1b", pp, chunks), COSTS))])
    save(picture, tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 120_000
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == tuple(int(inches * PNG_DPI) for inches in picture.get_size_inches())
    assert 800 < width < 1600 and 200 < height < 600


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        save(figure([Panel(timeline_of(build("1f1b", 2, 2), COSTS))]), path)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_kinds_are_told_apart_in_grey() -> None:
    """Bands of lightness that do not touch, whatever the shade;
    the backward and its input half share one.
    """
    bands = {
        kind: (lightness(PAINTS[kind].dark), lightness(PAINTS[kind].light)) for kind in COMPUTE
    }
    assert bands[Kind.F][0] > max(bands[Kind.B][1], bands[Kind.I][1])
    assert min(bands[Kind.B][0], bands[Kind.I][0]) > bands[Kind.W][1] + 5
    for kind, (dark, light) in bands.items():
        letters = lightness(PAINTS[kind].letters)
        assert min(abs(letters - dark), abs(letters - light)) > 35
        assert [shade(kind, 0, 1), shade(kind, 0, 3), shade(kind, 2, 3)] == [
            PAINTS[kind].light,
            PAINTS[kind].light,
            PAINTS[kind].dark,
        ]
    assert lightness("#ffffff") == pytest.approx(100) and lightness("#000000") == 0


@pytest.mark.parametrize(
    ("length", "name"), [(20, "s"), (9, "ms"), (0.02, "ms"), (0.001, "µs"), (1e-9, "µs")]
)
def test_seconds_have_a_unit_that_reads_well(length: float, name: str) -> None:
    assert unit_of_seconds(length)[1] == name


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"),
    [("1f1b", 4, 8), ("1f1b", 32, 128), ("gpipe", 64, 100), ("dualpipe_v", 4, 16)],
)
def test_all_text_has_at_least_10_pixels_of_a_screen(
    tmp_path: Path, schedule: str, pp: int, chunks: int
) -> None:
    drawn = figure(
        [Panel(timeline_of(build(schedule, pp, chunks, INTERLEAVES.get(schedule, [1])[0]), COSTS))]
    )
    save(drawn, tmp_path / "drawn.svg")
    sizes = re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", (tmp_path / "drawn.svg").read_text())
    assert len(sizes) > pp and min(map(float, sizes)) * 96 / 72 >= 10, (
        "px of an SVG whose side is in points"
    )
