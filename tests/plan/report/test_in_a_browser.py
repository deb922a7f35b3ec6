"""The pages as people see them: in a real browser, on a desk, on a phone, in the dark,
without a network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.mesh.grid import Grid
from meshwright_plan.report.page import page
from meshwright_plan.report.run import ReportedState, read_run
from tests.plan.report.builders import make_mixture_run, make_run
from tests.support.chromium import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"
)

DESK, PHONE = 1280, 390


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a run that was restarted and traced, of one without a step, and of all of them,
    everything unfolded.
    """
    folder = tmp_path_factory.mktemp("pages")
    starts = ((0, Grid(pp=2, dp=2, tp=2)), (40, Grid(pp=4, dp=2)))
    wide = {"model": {"options": {"a_long_name": "x" * 200}}}
    demo = read_run(
        make_run(folder / "demo", 200, starts=starts, saved=(40, 200), train={"steps": 200}, **wide)
    )
    zero = read_run(
        make_run(
            folder / "a-run-whose-name-is-rather-long-and-has-no-blank-anywhere", 0, traced=False
        )
    )
    other = read_run(
        make_run(
            folder / "other", 300, seed=1, train={"steps": 300}, optimizer={"learning_rate": 1e-3}
        )
    )
    mixture = read_run(make_mixture_run(folder / "mixture"))
    found = {}
    contents = {
        "demo": [demo],
        "zero": [zero],
        "mixture": [mixture],
        "all": [demo, zero, other, mixture],
    }
    for name, runs in contents.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(runs).replace("<details", "<details open"))
    return found


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["demo", "zero", "mixture", "all"])
def test_it_fits_and_asks_nobody(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.opened(pages[name], width, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("Math.max(...[...document.querySelectorAll('.chart, p, h1, h2')].map("
                         "e => e.getBoundingClientRect().right))") <= width  # fmt: skip
    asked = [
        each["params"]["request"]["url"]
        for each in browser.events
        if each["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [pages[name].as_uri()]
    bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert not [each for each in browser.events if each["method"] in bad]
    light = browser.value(BRIGHTNESS.format(of="document.body", what="color"))
    paper = browser.value(BRIGHTNESS.format(of="document.body", what="backgroundColor"))
    assert (paper < 40 and light > 200) if dark else (paper > 240 and light < 60)
    if name != "zero":
        lines = browser.value(
            "[...document.querySelectorAll('.area .line')].map(e => getComputedStyle(e).stroke)"
        )
        assert lines and "none" not in lines
        assert browser.value("Math.min(...[...document.querySelectorAll('.ys span, .xs span')].map("
                             "e => parseFloat(getComputedStyle(e).fontSize)))") >= 10  # fmt: skip


BRIGHTNESS = (
    "getComputedStyle({of}).{what}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3"
)


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_words_are_not_broken_by_letters(browser: Browser, tmp_path: Path, width: int) -> None:
    """Beside a run of a very long name the figures' own names stay readable:
    no column is a letter wide.
    """
    runs = [
        read_run(make_run(tmp_path / name, 3))
        for name in ("one", "a-name-without-a-blank-" * 6, "three")
    ]
    (tmp_path / "page.html").write_text(page(runs))
    browser.opened(tmp_path / "page.html", width)
    cells = "[...document.querySelectorAll('.plain tbody th')].filter(e => e.offsetWidth)"
    assert browser.value(f"Math.min(...{cells}.map(e => e.offsetWidth))") >= 90
    assert browser.value(f"Math.max(...{cells}.map(e => e.offsetHeight))") <= 150
    assert browser.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "in_a_row"), [(DESK, 4), (PHONE, 1)])
def test_maps_of_experts_fill_their_columns(
    browser: Browser, pages: dict[str, Path], width: int, in_a_row: int
) -> None:
    """Side by side where there is room, each with the labels of its rows and columns around it."""
    browser.opened(pages["mixture"], width)
    boxes = browser.value("[...document.querySelectorAll('.map canvas')].map(e => e.getBoundingClientRect()).map("
                          "b => [b.left, b.top, b.right, b.bottom])")  # fmt: skip
    assert len(boxes) == 4 and len({left for left, *_ in boxes}) == in_a_row
    assert all(
        0 <= left < right <= width and right - left > 0.8 * width / in_a_row - 70
        for left, _, right, _ in boxes
    )
    labels = browser.value(
        "[...document.querySelector('.map').querySelectorAll('span')].map(e => e.textContent)"
    )
    assert labels == ["0", "39", "1", "step", "60"]
    rows = browser.value(
        "[...document.querySelectorAll('.map .rows')].map(e => e.getBoundingClientRect().height)"
    )
    heights = [bottom - top for _, top, _, bottom in boxes]
    assert rows == pytest.approx(heights, abs=1.5), (
        "the labels of the rows stand at the first and the last"
    )


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


TICKS = "[...document.querySelector('.chart .{}').children].map(e => e.textContent)"
NAMES = "charts[0].points.map(([name]) => name)"


def choose(browser: Browser, **changed: object) -> None:
    """Change the tools at the top of the page as a person would."""
    for name, value in changed.items():
        kind = "checked" if isinstance(value, bool) else "value"
        browser.value(f"tools.elements.{name}.{kind} = {json.dumps(value)}")
    browser.value("tools.oninput()")


def test_other_axes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.opened(pages["demo"], DESK)
    run = read_run(pages["demo"].parent / "demo")
    before = browser.value("document.querySelector('.charts').innerHTML")
    choose(browser, x="tokens")
    assert browser.value("charts[0].view.x1") == pytest.approx(run.records[-1].tokens, rel=1e-6)
    choose(browser, x="time", logX=True)
    assert browser.value("10 ** charts[0].view.x1") == pytest.approx(
        sum(r.step_s for r in run.records), rel=1e-6
    )
    assert browser.value("10 ** charts[0].view.x0") == pytest.approx(
        run.records[0].step_s, rel=1e-6
    )
    choose(browser, x="step", logX=False, logY=True)
    view = browser.value("charts[0].view")
    low = min(min(record.loss, record.validation_loss or record.loss) for record in run.records)
    high = max(record.loss for record in run.records)
    assert view["y0"] < math.log10(low) < math.log10(high) < view["y1"] and view["logY"]
    assert browser.value("document.querySelector('.scale').textContent") == "logarithmic"
    choose(browser, logY=False)
    assert browser.value("document.querySelector('.charts').innerHTML") == before, (
        "as it was rendered"
    )


def test_smoothing_is_a_moving_average_over_the_raw_curve(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.opened(pages["demo"], DESK)
    losses = [record.loss for record in read_run(pages["demo"].parent / "demo").records]
    choose(browser, smooth="33")  # a weight of 0.9
    assert browser.value(NAMES) == ["training", "training, smoothed", "validation"]
    mean, weight, expected = 0.0, 0.0, []
    for loss in losses:
        mean, weight = 0.9 * mean + 0.1 * loss, 0.9 * weight + 0.1
        expected.append(mean / weight)
    points = browser.value("charts[0].points[1][1]")
    view = browser.value("charts[0].view")
    assert len(points) == len(losses)
    drawn = [view["y0"] + (1 - y / 10_000) * (view["y1"] - view["y0"]) for _, y in points]
    assert drawn == pytest.approx(expected, abs=(view["y1"] - view["y0"]) / 9_000)
    assert browser.value(
        "document.querySelectorAll('.chart')[0].querySelector('.line.pale') !== null"
    )


def test_a_drag_zooms_all_charts_and_a_double_click_shows_all(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.opened(pages["demo"], DESK)
    box = browser.value("(b => ({x: b.left, y: b.top + 30, w: b.width}))"
                        "(document.querySelector('.area').getBoundingClientRect())")  # fmt: skip
    left, right = box["x"] + 0.25 * box["w"], box["x"] + 0.5 * box["w"]
    mouse = {"button": "left", "clickCount": 1, "y": box["y"]}
    browser.ask("Input.dispatchMouseEvent", type="mousePressed", x=left, **mouse)
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=right, buttons=1, **mouse)
    browser.ask("Input.dispatchMouseEvent", type="mouseReleased", x=right, **mouse)
    for index in (0, 1):
        view = browser.value(f"charts[{index}].view")
        assert (view["x0"], view["x1"]) == pytest.approx((1 + 0.25 * 199, 1 + 0.5 * 199), abs=1)
    losses = [record.loss for record in read_run(pages["demo"].parent / "demo").records[52:98]]
    view = browser.value("charts[0].view")
    assert view["y0"] < min(losses) and max(losses) < view["y1"] < max(losses) + 1.5
    ticks = [float(text) for text in browser.value(TICKS.format("xs"))]
    assert ticks and min(ticks) >= 50 and max(ticks) <= 101
    browser.value("charts[0].area.ondblclick()")
    assert browser.value("charts[0].view.x1") == 200 and browser.value(
        "tools.querySelector('.whole').disabled"
    )


def test_the_tools_work_with_several_runs_and_hostile_names(
    browser: Browser, tmp_path: Path
) -> None:
    name = "<img src=x onerror=alert(1)>' \"&"
    make_run(tmp_path / "one", 160).rename(tmp_path / name)
    runs = [read_run(tmp_path / name), read_run(make_run(tmp_path / "two", 160))]
    (tmp_path / "page.html").write_text(page(runs))
    browser.opened(tmp_path / "page.html", DESK)
    choose(browser, x="time", smooth="50", logX=True, logY=True)
    names = browser.value(NAMES)
    assert names == [name, f"{name}, smoothed", "two", "two, smoothed"]
    assert browser.value("document.querySelectorAll('img').length") == 0
    bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
    assert not [each for each in browser.events if each["method"] in bad]


def test_the_schedule_in_the_dark_stands_on_dark_paper(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """Its boxes keep their colours; what stands beside them turns light."""
    for dark in (False, True):
        browser.opened(pages["demo"], DESK, dark=dark)
        text = browser.value(
            BRIGHTNESS.format(of="document.querySelector('.shaded svg text')", what="fill")
        )
        paper = browser.value(
            BRIGHTNESS.format(of="document.querySelector('.shaded')", what="backgroundColor")
        )
        assert (paper < 40 and text > 200) if dark else (paper > 240 and text < 60)
        assert browser.value("[...document.querySelectorAll('.shaded path')].some("
                             "e => getComputedStyle(e).fill === 'rgb(240, 152, 60)')")  # fmt: skip
        assert browser.value("getComputedStyle(document.querySelector('.shaded')).filter") == "none"


PHONE_TO_WALL = (360, 380, 700, 1000, 1280, 1600, 1920, 2560)


@pytest.mark.parametrize("width", PHONE_TO_WALL)
def test_charts_use_the_width(browser: Browser, pages: dict[str, Path], width: int) -> None:
    for name in ("demo", "all"):
        browser.opened(pages[name], width)
        assert browser.value("document.documentElement.scrollWidth") <= width
        right = browser.value("Math.max(...[...document.querySelectorAll('.chart')].map("
                              "e => e.getBoundingClientRect().right))")  # fmt: skip
        used = min(width, 1920)
        assert right >= (width + used) / 2 - 0.06 * used


TILES = """(() => {
    const facts = document.querySelector('.facts'), rows = {};
    for (const tile of facts.children) {
        const top = Math.round(tile.getBoundingClientRect().top);
        rows[top] = (rows[top] ?? 0) + 1;
    }
    return Object.values(rows);
})()"""


@pytest.mark.parametrize("width", PHONE_TO_WALL)
def test_no_tile_is_alone_in_its_row(browser: Browser, pages: dict[str, Path], width: int) -> None:
    browser.opened(pages["demo"], width)
    count = browser.value("document.querySelector('.facts').children.length")
    assert count > 6
    for left in range(count, 3, -1):
        rows = browser.value(TILES)
        assert sum(rows) == left and rows[-1] > 1, rows
        assert len(rows) == 1 or width > 600 or max(rows) == 2
        browser.value("document.querySelector('.facts').lastElementChild.remove()")


@pytest.mark.parametrize("width", PHONE_TO_WALL)
def test_the_numbers_of_a_schedule_can_be_read(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    """10 pixels at least; where the boxes are too small for that,
    the pointer tells rank and action.
    """
    browser.opened(pages["demo"], width)
    sizes = browser.value("[...document.querySelectorAll('.shaded svg text')].map("
                          "e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)")  # fmt: skip
    assert len(sizes) > 20 and min(sizes) >= 10
    titles = browser.value(
        "[...document.querySelectorAll('.shaded svg g > title')].map(e => e.textContent)"
    )
    assert "rank0 0F0" in titles and len(titles) == len(set(titles)) * 2, (
        "a measured and a simulated one of each"
    )


def test_the_x_axis_has_the_chosen_name(browser: Browser, pages: dict[str, Path]) -> None:
    browser.opened(pages["demo"], DESK)
    for chosen, name in (("tokens", "tokens"), ("time", "training time"), ("step", "step")):
        choose(browser, x=chosen)
        assert browser.value(
            "[...new Set([...document.querySelectorAll('.x-name')].map(e => e.textContent))]"
        ) == [name]


def test_a_spike_has_a_logarithmic_scale_and_a_lone_step_is_a_dot(
    browser: Browser, tmp_path: Path
) -> None:
    def change(step: int) -> dict[str, object]:
        spike = {"grad_norm": 500.0} if step == 30 else {}
        return spike | ({"loss": math.nan} if step in (10, 12) else {})

    (tmp_path / "page.html").write_text(
        page([read_run(make_run(tmp_path / "a", 40, change=change))])
    )
    browser.opened(tmp_path / "page.html", DESK)
    scales = browser.value(
        "[...document.querySelectorAll('.chart')].filter(e => e.querySelector('.scale').textContent)"
        ".map(e => [e.querySelector('.name').textContent, e.querySelector('.scale').textContent])"
    )
    assert scales == [["Gradient norm", "logarithmic"]]
    labels = browser.value(
        "[...charts.find(each => each.data.log).ys.children].map(e => e.textContent)"
    )
    assert [float(text) for text in labels] == [1, 10, 100]
    ticks = browser.value(TICKS.format("xs"))
    assert len(set(ticks)) == len(ticks) > 2 and all(float(text) % 1 == 0 for text in ticks)
    assert browser.value("document.querySelector('.chart .dots.c0') !== null"), "step 11"
    lowest = browser.value(
        "charts.map(chart => chart.data.zero && !chart.view.logY ? chart.view.y0 : 0)"
    )
    assert set(lowest) == {0}


@pytest.mark.parametrize("steps", [(9 * 10**18,), (9 * 10**18, 9 * 10**18 + 1024), (1,)])
def test_a_huge_step_is_drawn_and_zooms_end(
    steps: tuple[int, ...], browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", len(steps))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    moved = [line | {"step": step} for line, step in zip(lines, steps, strict=True)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in moved))
    (tmp_path / "page.html").write_text(page([read_run(run)]))
    browser.opened(tmp_path / "page.html", DESK)
    browser.value("for (let i = 0; i < 100; i++) tools.querySelector('.later').onclick()")
    low, high = browser.value("[charts[0].view.x0, charts[0].view.x1]")
    assert high - low > 1e-9 * high
    assert browser.value("charts.every(each => each.xs.children.length <= 50)")


LINES = "[...charts[0].svg.querySelectorAll('.line')].map(e => getComputedStyle(e).stroke)"


def test_the_legend_switches_runs(browser: Browser, tmp_path: Path) -> None:
    """Six runs: a click takes a run out of the charts, whose axes fit the others, and dims its
    column; a second one brings it back. Its colour is the same in legend, curves, table and its own
    section.
    """
    runs = [
        read_run(make_run(tmp_path / f"run{i}", 20 + 20 * i, seed=i, traced=False))
        for i in range(6)
    ]
    (tmp_path / "page.html").write_text(page(runs).replace("<details", "<details open"))
    browser.opened(tmp_path / "page.html", DESK)
    colours = browser.value(LINES)
    assert len(set(colours)) == 6 and browser.value(NAMES) == [f"run{i}" for i in range(6)]
    assert colours == browser.value(
        "[...document.querySelectorAll('.runs button')].map("
        "e => getComputedStyle(e, '::before').borderTopColor)"
    )
    assert colours == browser.value(
        "[...document.querySelectorAll('.compare')[0].querySelectorAll('thead [data-column]')].map("
        "e => getComputedStyle(e).borderTopColor)"
    )
    assert colours == browser.value(
        "[...document.querySelectorAll('.run .large .line')].filter("
        "e => !e.matches('.ink')).map(e => getComputedStyle(e).stroke)"
    )
    button = "document.querySelectorAll('.runs button')[5]"
    assert browser.value("charts[0].view.x1") == 120
    browser.value(f"{button}.click()")
    assert browser.value(NAMES) == [f"run{i}" for i in range(5)]
    assert browser.value("charts[0].view.x1") == 100
    assert browser.value(f"{button}.getAttribute('aria-pressed')") == "false"
    assert browser.value("document.querySelectorAll('td.off').length") > 5
    assert browser.value("charts.at(-1).points.length") > 0, "its own section stays"
    browser.value(f"{button}.click()")
    assert browser.value(LINES) == colours and not browser.value(
        "document.querySelectorAll('.off').length"
    )
    browser.value(f"{button}.onpointerenter()")
    assert browser.value(
        "[...charts[0].svg.querySelectorAll('.line')].map(e => getComputedStyle(e).opacity)"
    ) == ["0.12"] * 5 + ["1"]


def test_a_chart_can_be_read_with_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.opened(pages["demo"], DESK)
    browser.value("charts[0].area.focus()")
    assert browser.value("document.activeElement === charts[0].area")
    outline = browser.value(
        "charts[0].area.matches(':focus-visible') && getComputedStyle(charts[0].area).outlineWidth"
    )
    said = []
    for key in ("End", "ArrowLeft", "Home", "ArrowRight", "ArrowRight"):
        browser.ask("Input.dispatchKeyEvent", type="keyDown", key=key)
        said.append(browser.value("charts[0].now.textContent").partition(":")[0])
    assert said == ["step 200", "step 199", "step 1", "step 2", "step 3"] and outline == "2px"
    assert browser.value("charts[0].now.getAttribute('role')") == "status"
    browser.value("charts[0].area.blur()")
    assert browser.value("charts[0].now.textContent") == ""


def test_a_heat_map_tells_what_is_under_the_pointer(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """The load of a cell as the file has it, which is also the strength of its colour."""
    browser.opened(pages["mixture"], DESK)
    folder = pages["mixture"].parent / "mixture"
    line = json.loads((folder / "expert-load.jsonl").read_text().splitlines()[9])
    counts = line["counts"]["block0.mlp.router"]
    pairs = [max(counts[at : at + 2]) for at in range(0, 40, 2)]
    expected = pairs[3] / (sum(counts) / 40)
    browser.value("document.querySelector('canvas').scrollIntoView({block: 'center'})")
    at = browser.value("(b => ({x: b.left + b.width * 9.5 / 60, y: b.top + b.height * 3.5 / 20}))"
                       "(document.querySelector('canvas').getBoundingClientRect())")  # fmt: skip
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
    said = browser.value("document.querySelector('.map .spot').textContent")
    assert said == f"step 10, busiest of experts 6-7: {expected:.2f} x the mean"
    alpha = browser.value(
        "document.querySelector('canvas').getContext('2d').getImageData(9, 3, 1, 1).data[3]"
    )
    assert alpha == pytest.approx(255 * min(1.0, expected / 2), abs=3)


def test_motion_and_print(browser: Browser, tmp_path: Path) -> None:
    """A live run's sign beats, unless the reader wants no motion; a print has no tools, light paper
    and everything unfolded.
    """
    directory = make_run(tmp_path / "demo", 20)
    run = replace(read_run(directory), state=ReportedState("running", "since today"))
    (tmp_path / "page.html").write_text(page([run]))
    for motion, name in (("no-preference", "beat"), ("reduce", "none")):
        browser.opened(tmp_path / "page.html", DESK)
        feature = {"name": "prefers-reduced-motion", "value": motion}
        browser.ask("Emulation.setEmulatedMedia", features=[feature])
        assert browser.value(
            "getComputedStyle(document.querySelector('.running i')).animationName"
        ) == name  # fmt: skip
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.ask("Emulation.setEmulatedMedia", media="print", features=[dark])
    browser.value("onbeforeprint()")
    assert browser.value(BRIGHTNESS.format(of="document.body", what="backgroundColor")) > 240
    assert browser.value("getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert browser.value("document.querySelectorAll('details:not([open])').length") == 0
    browser.ask("Emulation.setEmulatedMedia", media="")


def test_tables_are_blocks_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    """Starts and checkpoints need no sideways scrolling there: each cell has its column's name."""
    browser.opened(pages["demo"], PHONE)
    boxes = (
        "[...document.querySelectorAll('.wide')].filter(e => e.querySelector('.left:not(.few)'))"
    )
    assert browser.value(f"{boxes}.length") >= 2
    assert browser.value(f"{boxes}.every(e => e.scrollWidth <= e.clientWidth)")
    names = browser.value(
        "[...document.querySelectorAll('[aria-label=Starts] tbody tr:last-child > *')].map("
        "e => getComputedStyle(e, '::before').content)"
    )
    assert names[:3] == ['"start "', '"at "', '"layout "']
