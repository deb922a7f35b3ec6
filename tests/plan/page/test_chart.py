"""Curves of a page: nothing that stands out is lost, and labels can be read."""

from __future__ import annotations

import math
import re
import struct
from base64 import b64decode

import pytest

from meshwright_plan.page.chart import MAX_LABELS, SIDE, Curve, Mark, Quantity, axis, chart, short
from meshwright_plan.page.points import MAX_POINTS, MAX_ROWS, Column, column, columns, thin


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4321], points[4322], points[8000] = (4321.0, 99.0), (4322.0, -99.0), (8000.0, math.nan)
    kept = thin(points)
    assert len(kept) <= 1.1 * MAX_POINTS and kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[4321], points[4322], points[-1]} <= set(kept)
    assert any(x == 8000 and math.isnan(y) for x, y in kept)
    assert thin(points[:600]) == points[:600]


def test_a_curve_that_is_never_finite_is_no_chart() -> None:
    assert chart(Quantity("Loss"), [Curve("training", [(1, math.nan), (2, math.nan)])]) == ""
    assert chart(Quantity("Loss"), [Curve("training", [])]) == ""


@pytest.mark.parametrize(
    "values",
    [
        [4.0, 9.0],
        [0.3, 0.3],
        [0.0, 0.0],
        [1e-5, 3e-4],
        [3.05e-4, 3.06e-4],
        [-3, 1234567],
        [1e9, 4.2e9],
        [5.0000001, 5.0000002],
        [1, 1e12],
    ],
)
def test_an_axis_holds_its_values_and_its_labels_differ(values: list[float]) -> None:
    found = axis(values)
    assert found.low < found.high and all(0 <= found.share(value) <= 1 for value in values)
    labels = [found.label(tick) for tick in found.ticks]
    assert 1 <= len(labels) <= MAX_LABELS + 2 and len(set(labels)) == len(labels), labels
    assert all(found.low <= tick <= found.high for tick in found.ticks)


def test_an_axis_from_zero_begins_there() -> None:
    assert axis([3, 5], from_zero=True).low == 0 and axis([7, 7], from_zero=True).low == 0


@pytest.mark.parametrize(
    ("value", "apart", "largest", "said"),
    [
        (0.0, 0.1, 0, "0"),
        (0.25, 0.25, 1, "0.25"),
        (2.5, 2.5, 10, "2.5"),
        (1200, 0, 0, "1,200"),
        (2000, 2000, 10_000, "2k"),
        (2500, 2500, 10_000, "2.5k"),
        (3.5e6, 0, 0, "3.5M"),
        (20e6, 20e6, 80e6, "20M"),
        (3e-4, 0, 0, "0.0003"),
        (1.3e-5, 0, 0, "1.3e-05"),
        (3.051e-4, 1e-7, 3.06e-4, "0.0003051"),
    ],
)
def test_numbers_are_short(value: float, apart: float, largest: float, said: str) -> None:
    assert short(value, apart, largest) == said


def test_a_scale_is_logarithmic_only_where_one_value_would_hide_the_others() -> None:
    calm = [(float(x), 1 + x / 100) for x in range(100)]
    assert "logarithmic" not in chart(Quantity("Norm", may_be_log=True), [Curve("norm", calm)])
    spike = [*calm, (100.0, 500.0)]
    assert "logarithmic" in chart(Quantity("Norm", may_be_log=True), [Curve("norm", spike)])
    assert "logarithmic" not in chart(Quantity("Norm"), [Curve("norm", spike)])
    assert "logarithmic" not in chart(Quantity("Norm", may_be_log=True), [Curve("norm", [(-1.0, 0.0), *spike])])
    labels = re.findall(r'top:[\d.e-]+%">([^<]+)<', chart(Quantity("Norm", may_be_log=True), [Curve("norm", spike)]))
    assert labels == ["1", "10", "100"]


def test_points_lie_where_their_values_are_and_names_are_escaped() -> None:
    drawn = chart(Quantity("a<b"), [Curve("x&y", [(0, 0), (5, math.nan), (10, 10), (20, 10), (30, math.nan), (40, 5)])])
    assert "a&lt;b" in drawn and 'data-name="x&amp;y"' in drawn and "<b>a" in drawn
    path = re.search(r'data-name="x&amp;y" d="([^"]+)"', drawn)
    assert path is not None
    low, high = (float(each) for each in re.search(r'data-y="(\S+) (\S+) ', drawn).groups())  # type: ignore[union-attr]
    top = [round(SIDE * (1 - (y - low) / (high - low))) for y in (0, 10, 5)]
    assert path[1] == f"M0 {top[0]}h0M2500 {top[1]}L5000 {top[1]}M10000 {top[2]}h0"


def test_a_curve_that_is_never_finite_again_is_drawn_to_its_end() -> None:
    """Steps that were not taken have no loss: the axis goes on to them, and their marks are there."""
    curve = Curve("training", [(1, 8.0), (2, math.nan), (3, math.nan), (4, math.nan)])
    drawn = chart(Quantity("Loss"), [curve], marks=[Mark(step, "not finite", bad=True) for step in (2, 3, 4)])
    assert 'data-x="1 4 step"' in drawn and drawn.count('class="mark bad" d=') == 3
    assert 'class="dots c0" d="M0 ' in drawn, "one step alone is a line of no length"


def test_steps_are_whole_numbers() -> None:
    for steps in (1, 2, 3, 7, 12, 60, 100_000):
        found = axis(range(1, steps + 1), margin=0.0, whole=True)
        assert all(tick == int(tick) for tick in found.ticks) and 1 <= len(found.ticks) <= MAX_LABELS + 2
    assert "0.9" not in re.sub("<path[^>]*>", "", chart(Quantity("Loss"), [Curve("training", [(1, 8.0)])]))


def test_what_is_zero_throughout_has_no_axis_below_it() -> None:
    assert axis([0.0], from_zero=True).low == 0


def test_marks_outside_are_left_out_and_told_once() -> None:
    marks = [Mark(5, "a start"), Mark(7, "a start"), Mark(99, "a start"), Mark(6, "not finite", bad=True)]
    drawn = chart(Quantity("Loss"), [Curve("training", [(0, 1), (10, 2)])], marks=marks)
    assert drawn.count('class="mark" d=') == 2 and drawn.count('class="mark bad" d=') == 1
    assert drawn.count(">a start<") == 1


def unpacked(packed: Column) -> list[float]:
    """What the page's script reads of a column."""
    assert isinstance(packed, str)
    raw = b64decode(packed)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def test_columns_hold_every_point_or_the_mean_and_extremes_of_neighbours() -> None:
    few = [(1.0, 5.0), (2.0, math.nan), (4.0, 3.5)]
    found = columns(few)
    assert found["width"] == 1 and unpacked(found["x"]) == [1, 2, 4] and "low" not in found
    assert [str(y) for y in unpacked(found["y"])] == ["5.0", "nan", "3.5"]
    many = [(float(x), float(x % 4) + (x > 15)) for x in range(4 * MAX_ROWS)]
    many[6] = (6.0, math.nan)
    found = columns(many)
    assert found["width"] == 4 and found["x"] == [0.0, 4.0, MAX_ROWS], "an even spacing is three numbers"
    assert unpacked(found["low"])[:2] == [0, 0] and unpacked(found["high"])[:2] == [3, 3]
    assert unpacked(found["y"])[:2] == pytest.approx([1.5, 4 / 3]), "the second row of 0, 1, NaN and 3"
    assert math.isnan(unpacked(column([1e300, 0.0, 7.0]))[0])


def test_a_hidden_curve_is_only_in_the_data() -> None:
    drawn = chart(Quantity("Loss"), [Curve("raw", [(0, 99.0), (1, 0)], look="hidden"), Curve("x", [(0, 1), (1, 2)])])
    assert 'data-name="raw"' not in drawn and "&#34;raw&#34;" in drawn and ">raw<" not in drawn
    high = re.search(r'data-y="\S+ (\S+) ', drawn)
    assert high is not None and float(high[1]) < 3
