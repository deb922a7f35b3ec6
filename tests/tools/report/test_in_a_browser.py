"""The pages as people see them: in a real browser, on a desk, on a phone, in the dark, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.mesh.grid import Grid
from meshwright.tools.report.page import page
from meshwright.tools.report.run import read_run
from tests.support.chromium import CHROMIUM, Browser
from tests.tools.report.builders import make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

DESK, PHONE = 1280, 390


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a run that was restarted and traced, of one without a step, and of all of them, everything unfolded."""
    folder = tmp_path_factory.mktemp("pages")
    starts = ((0, Grid(2, 2, 2)), (40, Grid(4, 2, 1)))
    wide = {"model": {"options": {"a_long_name": "x" * 200}}}
    demo = read_run(make_run(folder / "demo", 200, starts=starts, saved=(40, 200), train={"steps": 200}, **wide))
    zero = read_run(make_run(folder / "a-run-whose-name-is-rather-long-and-has-no-blank-anywhere", 0, traced=False))
    other = read_run(make_run(folder / "other", 300, seed=1, train={"steps": 300}, optimizer={"learning_rate": 1e-3}))
    found = {}
    for name, runs in {"demo": [demo], "zero": [zero], "all": [demo, zero, other]}.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(runs).replace("<details", "<details open"))
    return found


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["demo", "zero", "all"])
def test_it_fits_and_asks_nobody(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.opened(pages[name], width, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("Math.max(...[...document.querySelectorAll('.chart, p, h1, h2')].map("
                         "e => e.getBoundingClientRect().right))") <= width  # fmt: skip
    asked = [
        each["params"]["request"]["url"] for each in browser.events if each["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [pages[name].as_uri()]
    bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert not [each for each in browser.events if each["method"] in bad]
    light = browser.value(BRIGHTNESS.format(of="document.body", what="color"))
    paper = browser.value(BRIGHTNESS.format(of="document.body", what="backgroundColor"))
    assert (paper < 40 and light > 200) if dark else (paper > 240 and light < 60)
    if name != "zero":
        lines = browser.value("[...document.querySelectorAll('.area .line')].map(e => getComputedStyle(e).stroke)")
        assert lines and "none" not in lines
        assert browser.value("Math.min(...[...document.querySelectorAll('.ys span, .xs span')].map("
                             "e => parseFloat(getComputedStyle(e).fontSize)))") >= 10  # fmt: skip


BRIGHTNESS = "getComputedStyle({of}).{what}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3"


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_words_are_not_broken_by_letters(browser: Browser, tmp_path: Path, width: int) -> None:
    """Beside a run of a very long name the figures' own names stay readable: no column is a letter wide."""
    runs = [read_run(make_run(tmp_path / name, 3)) for name in ("one", "a-name-without-a-blank-" * 6, "three")]
    (tmp_path / "page.html").write_text(page(runs))
    browser.opened(tmp_path / "page.html", width)
    cells = "[...document.querySelectorAll('.plain tr td:first-child')].filter(e => e.offsetWidth)"
    assert browser.value(f"Math.min(...{cells}.map(e => e.offsetWidth))") >= 90
    assert browser.value(f"Math.max(...{cells}.map(e => e.offsetHeight))") <= 150
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_what_is_under_the_pointer_is_told(browser: Browser, pages: dict[str, Path]) -> None:
    """Step 100 of 200, in the middle: the loss that the run has written down of it."""
    browser.opened(pages["demo"], DESK)
    at = browser.value("(b => ({x: b.left + b.width * 99 / 199, y: b.top + 20}))"
                       "(document.querySelector('.area').getBoundingClientRect())")  # fmt: skip
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=at["x"], y=at["y"])
    said = browser.value("document.querySelector('.chart .now').textContent")
    run = read_run(pages["demo"].parent / "demo")
    words = dict(part.rsplit(" ", 1) for part in said.partition(": ")[2].split(", "))
    assert said.startswith("step 100: ") and {"training", "validation"} <= words.keys(), said
    assert float(words["training"]) == pytest.approx(run.records[99].loss, abs=0.01)
    assert float(words["validation"]) == pytest.approx(run.records[99].validation_loss, abs=0.01)
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.value("document.querySelector('.chart .now').textContent") == ""
