"""The page as a parser sees it: headings, labels, links, and what hostile files leave in it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.mesh.grid import Grid
from meshwright_plan.report.page import page
from meshwright_plan.report.run import read_run
from tests.plan.report.builders import make_mixture_run, make_run

VOID = {"meta", "input", "br", "wbr", "path", "use", "rect", "hr", "img", "link"}


class Page(HTMLParser):
    """Elements of a page, each as (tag, attributes, its ancestors' tags); and its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.headings: list[tuple[int, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.headings.append((int(tag[1]), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {f"h{level}" for level in range(1, 7)}:
            level, words = self.headings[-1]
            self.headings[-1] = (level, words + data)

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes, _ in self.elements if tag in tags]


def bad(step: int) -> dict[str, Any]:
    return {"loss": math.nan, "skipped": True} if step == 7 else {}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    grid = Grid(pp=2, dp=2, tp=2)
    demo = read_run(
        make_run(folder / "demo", 40, starts=((0, grid), (20, grid)), saved=(20,), change=bad)
    )
    mixture = read_run(make_mixture_run(folder / "mixture"))
    zero = read_run(make_run(folder / "zero", 0, traced=False))
    shown = {"demo": [demo], "mixture": [mixture], "zero": [zero], "all": [demo, mixture, zero]}
    return {name: page(runs) for name, runs in shown.items()}


NAMES = ["demo", "mixture", "zero", "all"]


@pytest.mark.parametrize("name", NAMES)
def test_headings_are_in_order(texts: dict[str, str], name: str) -> None:
    levels = [level for level, _ in Page(texts[name]).headings]
    assert levels[0] == 1 and levels.count(1) == 1 and len(levels) > 5
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels)), levels


def test_sections_come_in_the_order_of_a_readers_questions(texts: dict[str, str]) -> None:
    """Which run; the loss; what went wrong; speed; the rest; what was saved; the configuration."""
    found = [words for level, words in Page(texts["demo"]).headings if level <= 2]
    assert found == ["demo", "Loss", "Notices", "Speed and memory", "Optimizer",
                     "Checkpoints and starts", "Configuration"]  # fmt: skip
    together = [words for level, words in Page(texts["all"]).headings if level <= 2]
    assert together == ["3 runs side by side", "Loss", "Final figures",
                        "Configuration keys that differ", "More curves", "Each run"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_pictures_controls_and_regions_have_labels(texts: dict[str, str], name: str) -> None:
    found = Page(texts[name])
    pictures = [each for each in found.of("svg", "canvas") if each.get("role") == "img"]
    assert all(each.get("aria-label") for each in pictures)
    assert len(pictures) == len(found.of("svg", "canvas")), "none without a role"
    for tag, attributes, above in found.elements:
        if tag in ("input", "select"):
            assert "label" in above, attributes
        if attributes.get("role") in ("region", "group", "progressbar"):
            assert attributes.get("aria-label"), attributes
    ids = [each["id"] for _, each, _ in found.elements if "id" in each]
    assert len(ids) == len(set(ids)), "the hatching of a folded picture is not drawn"


def test_a_chart_tells_its_last_values(texts: dict[str, str]) -> None:
    (label,) = [
        each["aria-label"]
        for each in Page(texts["demo"]).of("svg")
        if (each.get("aria-label") or "").startswith("Loss (")
    ]
    assert label is not None and " at step 40, validation " in label and " at step 25" in label


@pytest.mark.parametrize("name", NAMES)
def test_nothing_points_out_of_the_page(texts: dict[str, str], name: str) -> None:
    found = Page(texts[name])
    assert found.of("meta")[1]["content"] == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    for tag, attributes, _ in found.elements:
        assert tag not in ("a", "link", "img", "iframe", "object", "embed", "base"), tag
        for key in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            assert (attributes.get(key) or "#").startswith("#"), (tag, attributes)
        assert not [key for key in attributes if key.startswith("on")], (tag, attributes)
    assert texts[name].count("<script") == 1


HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><a href=javascript:alert(1)>{{ 7 * 7 }}",
)


@pytest.mark.parametrize("words", HOSTILE)
def test_no_text_of_a_run_becomes_markup(tmp_path: Path, words: str) -> None:
    """Names, layouts, messages and values of every file of the run: the same elements with the same
    attributes as with harmless words.
    """

    def shape(text: str) -> Counter[tuple[str, tuple[str, ...]]]:
        return Counter((tag, tuple(sorted(each))) for tag, each, _ in Page(text).elements)

    found = []
    for name, said in (("harmless", "word"), ("hostile", words)):
        run = make_mixture_run(tmp_path / name, 12)
        for file in ("resolved.json", "starts.jsonl", "metrics.jsonl", "expert-load.jsonl"):
            rewrite(run / file, said)
        recovery = {"at": said, "what": said, "nodes": [said], "step": 6}
        (run / "recoveries.jsonl").write_text(json.dumps(recovery) + "\n")
        (run / "hang").mkdir()
        (run / "hang/report.txt").write_text(said)
        other = make_run(tmp_path / f"{name}-other", 12, seed=1)
        there = tmp_path / name / f"run {said.replace('/', '')}"
        there.mkdir()
        for path in [*other.iterdir()]:
            path.rename(there / path.name)
        rewrite(there / "resolved.json", said)
        contents = read_run(run)
        # a name that metrics.jsonl may not have
        records = [replace(each, extra={said: 1.0}) for each in contents.records]
        found.append(page([replace(contents, records=tuple(records)), read_run(there)]))
    assert words.replace("/", "") not in found[1] and words not in found[1]
    assert shape(found[0]) == shape(found[1])


def rewrite(path: Path, after: str) -> None:
    """Put words into the texts of a JSON file that a run's own code would have written."""
    text = path.read_text()
    lines = list(map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text]))
    for line in lines:
        if path.name == "resolved.json":
            line["model"]["options"] = {after: after}
            if path.parent.name.startswith("run "):  # no longer understood: shown as it is
                line["model"]["builder"] = line["pipeline"]["schedule"] = after
        elif path.name == "starts.jsonl":
            line |= {"layout": after, "host": after, "at": after, "slurm_job": after}
        elif path.name == "metrics.jsonl":
            line |= {"perf/straggler": after, "perf/straggler_share": 0.5}
        else:
            line["counts"] = {after: [1, 2, 3]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
