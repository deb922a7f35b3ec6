"""A picture in a page is the picture of the file, in fewer bytes."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from meshwright.schedule.analysis import timeline_of
from meshwright.schedule.build import build
from meshwright_plan.page.render import svg_of
from meshwright_plan.picture.figure import figure
from meshwright_plan.picture.panel import Panel


def test_a_schedule_keeps_its_boxes_and_loses_half_its_bytes() -> None:
    drawn = figure([Panel(timeline_of(build("1f1b", 4, 16)))])
    target = io.StringIO()
    drawn.savefig(target, format="svg")
    text = svg_of(drawn, 'a "schedule"')
    root = ElementTree.fromstring(text.replace("xlink:href", "href"))
    assert root.get("aria-label") == 'a "schedule"' and len(text) < len(target.getvalue()) / 2
    rules = dict(re.findall(r"\.(s\w{8})\{([^}]*)\}", text))
    boxes = [
        each for each in root.iter() if "fill: #f0983c" in rules.get(each.get("class", ""), "")
    ]
    assert len(boxes) == 4 * 16 + 1, "each B, and that of the legend"


def test_letters_are_left_alone() -> None:
    drawn = Figure(figsize=(2, 2))
    drawn.text(0.123456, 0.5, '0.123456 of style="x"')
    text = svg_of(drawn, "a number")
    assert "0.123456 of style=" in text and "17.77" in text and "17.777" not in text
