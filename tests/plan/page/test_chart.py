"""Curves of a page as data for its script; what the script draws is tests/plan/report/test_in_a_browser.py."""

from __future__ import annotations

import json
import math
import struct
from base64 import b64decode
from typing import Any

import pytest

from meshwright_plan.page.chart import INK, MAX_LABELLED, Curve, Mark, Quantity, chart, tone
from meshwright_plan.page.points import MAX_ROWS, Column, column, columns


def data(*args: Any, **options: Any) -> dict[str, Any]:
    """What the script gets of a chart."""
    drawn = chart(*args, **options)
    assert drawn is not None
    return json.loads(drawn.data)  # type: ignore[no-any-return]


def test_a_curve_that_is_never_finite_is_no_chart() -> None:
    assert chart(Quantity("Loss"), [Curve("training", [(1, math.nan), (2, math.nan)])]) is None
    assert chart(Quantity("Loss"), [Curve("training", [])]) is None


def test_a_scale_is_logarithmic_only_where_one_value_would_hide_the_others() -> None:
    norm = Quantity("Norm", may_be_log=True)
    calm = [(float(x), 1 + x / 100) for x in range(100)]
    spike = [*calm, (100.0, 500.0)]
    assert data(norm, [Curve("norm", spike)])["log"] is True
    assert data(norm, [Curve("norm", calm)])["log"] is False
    assert data(Quantity("Norm"), [Curve("norm", spike)])["log"] is False
    assert data(norm, [Curve("norm", [(-1.0, 0.0), *spike])])["log"] is False


def test_marks_outside_are_left_out_and_told_once() -> None:
    marks = [
        Mark(5, "restart"),
        Mark(7, "restart"),
        Mark(99, "restart"),
        Mark(6, "NaN/Inf", "bad"),
    ]
    drawn = chart(Quantity("Loss"), [Curve("training", [(0, 1), (10, 2)])], marks=marks)
    assert drawn is not None
    assert json.loads(drawn.data)["marks"] == [[5, "mark"], [6, "mark bad"], [7, "mark"]]
    assert drawn.legend == (
        ("c0", "training"),
        ("mark", "restart"),
        ("mark bad", "NaN/Inf"),
    )


def test_marks_beyond_the_last_finite_value_are_there() -> None:
    """Steps that were not taken have no loss."""
    curve = Curve("training", [(1, 8.0), (2, math.nan), (3, math.nan)])
    marks = [Mark(step, "NaN/Inf", "bad") for step in (2, 3, 4)]
    assert [x for x, _ in data(Quantity("Loss"), [curve], marks=marks)["marks"]] == [2, 3]


def test_a_hidden_curve_is_only_in_the_data() -> None:
    curves = [Curve("raw", [(0, 99.0), (1, 0)], look="hidden"), Curve("x", [(0, 1), (1, 2)])]
    drawn = chart(Quantity("Loss", may_be_log=True), curves, levels=[(1.5, "level")])
    assert drawn is not None and [name for _, name in drawn.legend] == ["x", "level"]
    assert [each["name"] for each in json.loads(drawn.data)["curves"]] == ["raw", "x"]
    assert json.loads(drawn.data)["log"] is False, "it has no say in the scale"


def test_a_label_has_the_last_values_of_the_curves() -> None:
    curves = [
        Curve("training", [(1, 9), (20, 8.25), (21, math.nan)]),
        Curve("raw", [(1, 9)], look="pale"),
        Curve("repeated", [(2, 7)], look="lost"),
        Curve("validation", [(5, 8.5)], INK),
    ]
    drawn = chart(Quantity("Loss", "nats"), curves)
    assert drawn is not None
    assert drawn.label == "Loss (nats): training 8.25 at step 20, validation 8.5 at step 5"
    many = chart(Quantity("Norm"), [Curve(f"run{i}", [(1, i)], i) for i in range(15)])
    assert many is not None and many.label.count(" at step 1") == MAX_LABELLED
    assert many.label.endswith("and 3 more curves")


def test_runs_after_the_sixth_are_dashed() -> None:
    tones = [tone(colour) for colour in (0, 5, 6, 13)]
    assert tones == ["c0", "c5", "c0 d1", "c1 d2"] and tone(INK) == "ink"


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
    assert found["width"] == 4 and found["x"] == [
        0.0,
        4.0,
        MAX_ROWS,
    ], "an even spacing is three numbers"
    assert unpacked(found["low"])[:2] == [0, 0] and unpacked(found["high"])[:2] == [3, 3]
    assert unpacked(found["y"])[:2] == pytest.approx([1.5, 4 / 3]), (
        "the second row of 0, 1, NaN and 3"
    )
    assert math.isnan(unpacked(column([1e300, 0.0, 7.0]))[0])
