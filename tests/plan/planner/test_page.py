"""The page of a plan as a browser shows it: nothing from elsewhere, nothing cut,
readable in the dark.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright_plan.planner.hardware import Link
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.page import page
from meshwright_plan.planner.plan import Plan
from meshwright_plan.planner.search import search
from tests.plan.planner.small import cache, hardware
from tests.support.chromium import CHROMIUM, Browser

RGB = tuple[float, float, float]
READABLE = 4.5
"""Contrast of text, by WCAG 2.1, level AA."""
VIEWS = [(1280, False), (390, False), (1280, True), (390, True)]

TEXTS = """(() => {
    const found = [], shown = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (shown.nextNode()) {
        const element = shown.currentNode.parentElement, text = shown.currentNode.data.trim();
        if (!text || !element.getClientRects().length) continue;
        const drawn = !!element.closest("svg"), picture = element.closest(".picture");
        let under = element, paper = "rgba(0, 0, 0, 0)";
        while (under && paper === "rgba(0, 0, 0, 0)") {
            paper = getComputedStyle(under).backgroundColor;
            under = under.parentElement;
        }
        const ink = getComputedStyle(element)[drawn ? "fill" : "color"];
        found.push([ink, paper, picture ? getComputedStyle(picture).filter : "none", drawn, text]);
    }
    return JSON.stringify(found);
})()"""
"""[[colour of a text, colour below it, filter over both, whether it is in a picture, the text],
...]
"""

LOOSE_ENDS = """(() => {
    const named = [...document.querySelectorAll("svg *")].flatMap(each => [...each.attributes].flatMap(attribute =>
        attribute.name.endsWith("href") ? [attribute.value.slice(1)]
            : [...attribute.value.matchAll(/url\\(#([^)]+)\\)/g)].map(found => found[1])
    ));
    return JSON.stringify([named.length, named.filter(name => !document.getElementById(name))]);
})()"""
"""[references from one part of a picture to another, those that lead nowhere]"""


@pytest.fixture(scope="module")
def planned() -> tuple[ModelCache, Plan]:
    """Two nodes whose link is slow: a pipeline, so that a schedule is drawn."""
    bench = cache(samples=4)
    between = Link(bytes_per_s=1e7, latency_s=1e-6)
    return bench, search(
        bench, hardware(devices_per_node=1, cluster_link=between, memory_bytes=2**22), 2
    )


@pytest.fixture(scope="module")
def file(planned: tuple[ModelCache, Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    assert planned[1].best[0].choice.pp == 2
    file.write_text(page(*planned), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def evaluated(browser: Browser, expression: str) -> Any:
    """What an expression says as JSON."""
    return json.loads(browser.value(expression))


def of_event(browser: Browser, *methods: str) -> list[dict[str, Any]]:
    """What has come by."""
    return [event["params"] for event in browser.events if event.get("method") in methods]


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_it_asks_for_nothing_and_complains_of_nothing(
    browser: Browser, file: Path, width: int, dark: bool
) -> None:
    browser.opened(file, width, dark=dark)
    browser.value("document.title")  # what was said until now has come by
    asked = [event["request"]["url"] for event in of_event(browser, "Network.requestWillBeSent")]
    assert asked == [file.as_uri()]
    said = of_event(
        browser, "Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"
    )
    assert said == []


@pytest.mark.parametrize(("width", "dark"), VIEWS[:2])
def test_all_pictures_are_there_and_nothing_sticks_out(
    browser: Browser, file: Path, width: int, dark: bool
) -> None:
    browser.opened(file, width, dark=dark)
    sizes = evaluated(
        browser,
        "JSON.stringify([...document.querySelectorAll('svg, img')].map(each =>"
        " [each.getBoundingClientRect().width, each.getBoundingClientRect().height,"
        " each.getAttribute('aria-label')]))",
    )
    assert [size[2] for size in sizes] == [
        "time of a step against memory",
        "memory of each rank, by category",
        "the schedule, simulated",
    ]
    assert all(size[0] > 300 and size[1] > 100 for size in sizes)
    references, nowhere = evaluated(browser, LOOSE_ENDS)
    assert references > 50 and nowhere == []
    assert browser.value("document.documentElement.scrollWidth") <= width
    reached = browser.value("window.scrollTo(10000, 0), window.scrollX")
    assert reached == 0


def channels(colour: str) -> RGB:
    """``rgb(1, 2, 3)`` -> 0..1 each."""
    red, green, blue = (float(number) / 255 for number in re.findall(r"[\d.]+", colour)[:3])
    return red, green, blue


def through(colour: RGB, filters: str) -> RGB:
    """By the matrices of the Filter Effects specification, one after the other."""
    for name, value in re.findall(r"(\S+?)\(([\d.]+)", filters):
        amount = float(value)
        if name == "invert":
            colour = tuple(c * (1 - amount) + (1 - c) * amount for c in colour)  # type: ignore[assignment]
        elif name == "brightness":
            colour = tuple(c * amount for c in colour)  # type: ignore[assignment]
        else:
            assert (name, amount) == ("hue-rotate", 180)
            red, green, blue = colour
            grey = 2 * (0.213 * red + 0.715 * green + 0.072 * blue)
            colour = grey - red, grey - green, grey - blue
    return tuple(min(1.0, max(0.0, c)) for c in colour)  # type: ignore[return-value]


def luminance(colour: RGB) -> float:
    """Relative, 0..1."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("width", "dark"), VIEWS[::2])
def test_it_can_be_read_by_day_and_in_the_dark(
    browser: Browser, file: Path, width: int, dark: bool
) -> None:
    browser.opened(file, width, dark=dark)
    paper = luminance(channels(browser.value("getComputedStyle(document.body).backgroundColor")))
    assert paper < 0.02 if dark else paper > 0.9
    texts = evaluated(browser, TEXTS)
    assert len(texts) > 100 and any(drawn for *_, drawn, _ in texts)
    for ink, below, filters, drawn, text in texts:
        if drawn and luminance(channels(ink)) > 0.5:
            continue  # a number on a dark box, not on paper
        a, b = (luminance(through(channels(colour), filters)) for colour in (ink, below))
        assert b < 0.05 if dark else b > 0.8, text
        contrast = (max(a, b) + 0.05) / (min(a, b) + 0.05)
        assert contrast >= READABLE, (text, ink, below, filters, contrast)


def test_a_page_needs_nothing_else(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("<svg role=") == 3
    for word in ("<script", 'src="', "<link", "@import", "url(http"):
        assert word not in text


def test_a_name_is_no_markup(planned: tuple[ModelCache, Plan]) -> None:
    bench, plan = planned
    run = plan.base.run.model_copy(update={"name": "<b>&amp;"})
    text = page(bench, dataclasses.replace(plan, base=plan.base.model_copy(update={"run": run})))
    assert "<title>&lt;b&gt;&amp;amp; on 2 x box</title>" in text and "<b>&amp;" not in text
