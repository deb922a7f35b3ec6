"""The examples of CONTRIBUTING.md run as they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.parts import FLAGS, STOP, Observer, Parts, StepEvent
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import check
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright.tracking.record import StepRecord
from tests.support.layouts import samples

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
NAMES: dict[str, Any] = {
    **{"Observer": Observer, "Parts": Parts, "StepEvent": StepEvent, "STOP": STOP, "StepRecord": StepRecord},
    **{"Action": Action, "Kind": Kind, "Schedule": Schedule, "NamedTuple": NamedTuple, "Sequence": Sequence},
    **{"torch": torch, "Tensor": Tensor},
}


def example(name: str) -> Any:
    """Return what the example that defines ``name`` defines."""
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if re.search(rf"\b{name}\b", block)
    ]
    names = dict(NAMES)
    exec(code, names)
    return names[name]


def test_an_observer_stops_the_run() -> None:
    parts: Any = SimpleNamespace(flags=dict.fromkeys(FLAGS, lambda: False))
    observer = example("StopWhenGood")(2.0)
    for loss, stops in ((None, False), (2.5, False), (1.5, True)):
        event: Any = SimpleNamespace(validation_loss=loss)
        observer.after_step(parts, event)
        assert parts.flags[STOP]() is stops


def test_a_sink_prints(capsys: Any) -> None:
    sink = example("PrintSink")()
    record: Any = SimpleNamespace(step=3, loss=1.5)
    sink.open()
    sink.write(record)
    sink.close()
    assert capsys.readouterr().out == "3 1.5\n"


def test_a_schedule_is_the_one_that_is_there() -> None:
    assert example("gpipe")(4, 6) == build("gpipe", 4, 6, 1)
    assert check(lower(example("gpipe")(4, 6))) == []


def test_a_source_answers_to_indices() -> None:
    batch = samples(example("Squares")(), 12, 3)
    assert batch.inputs.tolist() == [[2.0], [3.0], [4.0]] and batch.labels.tolist() == [[4.0], [9.0], [16.0]]
    assert batch.sample_indices.tolist() == [12, 13, 14]
