"""The Chrome trace: the structure that viewers need, and what is in it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from meshwright.schedule.action import COMPUTE, SENDS, Kind
from meshwright.schedule.analysis import Costs, Reading, timeline_of
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.degrees import INTERLEAVES
from meshwright_plan.picture.panel import Panel, Unit
from meshwright_plan.picture.perfetto import chrome_trace
from tests.plan.picture.test_figure import INTERLEAVED

COSTS = Costs(comm=0.25, reduce=1, step=1)


def events_of(*panels: Panel, unit: Unit = Unit.TICKS) -> dict[str, list[dict[str, Any]]]:
    """The events by phase, after the check that each holds what its phase needs."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(chrome_trace(panels, unit))["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        found[event["ph"]].append(event)
    assert found.keys() <= {"M", "X", "s", "f"}
    named = {(event["pid"], event["tid"]) for event in found["M"] if event["name"] == "thread_name"}
    for event in found["X"]:
        assert event["ts"] >= 0 and event["dur"] > 0 and (event["pid"], event["tid"]) in named
    starts, ends = ({event["id"]: event for event in found[phase]} for phase in "sf")
    assert len(found["s"]) == len(starts) and starts.keys() == ends.keys()
    for id_, start in starts.items():
        end = ends[id_]
        assert start["ts"] <= end["ts"] and end["bp"] == "e" and start["cat"] == end["cat"]
        assert slice_at(found["X"], start)["cat"] in {str(kind) for kind in SENDS}
        assert slice_at(found["X"], end)["cat"] in {str(kind) for kind in COMPUTE}
    return found


def slice_at(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    """The slice that an arrow is bound to: the last to begin of those that hold its time."""
    holding = [
        each
        for each in slices
        if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
        and each["ts"] <= event["ts"] < each["ts"] + each["dur"]
    ]
    return max(holding, key=lambda each: each["ts"])


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_each_computation_has_a_slice_and_each_message_an_arrow(name: str) -> None:
    schedule = build(name, 3, 4, INTERLEAVES.get(name, [1])[0])
    timeline = timeline_of(schedule, COSTS)
    found = events_of(Panel(timeline))
    computed = [event for event in found["X"] if event["cat"] in {str(kind) for kind in COMPUTE}]
    expected = {
        (str(s.action), s.start * 1000, (s.end - s.start) * 1000)
        for s in timeline.spans
        if is_computed(s)
    }
    assert {(event["name"], event["ts"], event["dur"]) for event in computed} == expected
    borders = [
        stage
        for stage in range(1, schedule.num_stages)
        if schedule.rank_of(stage) != schedule.rank_of(stage - 1)
    ]
    assert len(found["s"]) == 2 * 4 * len(borders)
    threads = [event["args"]["name"] for event in found["M"] if event["name"] == "thread_name"]
    assert threads == [f"rank {rank}{track}" for rank in range(3) for track in ("", " sends")]


def is_computed(span: Any) -> bool:
    return span.action.kind in COMPUTE


def test_an_arrow_ends_at_the_computation_that_used_the_message() -> None:
    found = events_of(Panel(timeline_of(INTERLEAVED, COSTS)))
    pairs = set()
    for start, end in zip(found["s"], found["f"], strict=True):
        assert start["id"] == end["id"]
        pairs.add((slice_at(found["X"], start)["name"], slice_at(found["X"], end)["name"]))
    assert {
        ("0SEND_F0", "1F0"),
        ("1SEND_F1", "2F1"),
        ("3SEND_B0", "2I0"),
        ("1SEND_B1", "0I1"),
    } <= pairs
    assert len(pairs) == 12


def test_a_process_for_each_panel_and_seconds_as_microseconds() -> None:
    timeline = timeline_of(build("1f1b", 2, 1), Costs(f=0.001, b=0.002, comm=0.0001))
    panels = (Panel(timeline, "measured", (Reading(0, 0.0, 0.0002),)), Panel(timeline, "simulated"))
    found = events_of(*panels, unit=Unit.SECONDS)
    names = {
        event["pid"]: event["args"]["name"]
        for event in found["M"]
        if event["name"] == "process_name"
    }
    assert names == {1: "measured", 2: "simulated"}
    forwards = [event for event in found["X"] if event["name"] == "0F0"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in forwards] == [
        (1, 0, 1000),
        (2, 0, 1000),
    ]
    assert [event["dur"] for event in found["X"] if event["cat"] == "data"] == [pytest.approx(200)]
    assert forwards[0]["args"] == {"stage": 0, "microbatch": 0}
    waits = {event["name"] for event in found["X"] if event["cat"] == str(Kind.RECV_B)}
    assert waits == {"wait for 0RECV_B0"}
