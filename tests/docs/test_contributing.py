"""The examples of CONTRIBUTING.md run as they stand."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.parts import Observer, Parts, StepEvent
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import check
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright.tracking.record import StepRecord
from tests.support.layouts import samples

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
NAMES: dict[str, Any] = {
    **{"Observer": Observer, "Parts": Parts, "StepEvent": StepEvent, "StepRecord": StepRecord},
    **{"Action": Action, "Kind": Kind, "Schedule": Schedule, "NamedTuple": NamedTuple, "Sequence": Sequence},
    **{"torch": torch, "Tensor": Tensor, "nn": nn, "Any": Any},
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
    reasons: list[str] = []
    parts: Any = SimpleNamespace(request_stop=reasons.append)
    observer = example("StopWhenGood")(2.0)
    for loss, stops in ((None, False), (2.5, False), (1.5, True)):
        event: Any = SimpleNamespace(validation_loss=loss)
        observer.after_step(parts, event)
        assert bool(reasons) is stops


def test_a_sink_prints(capsys: Any) -> None:
    sink = example("PrintSink")(None, None)
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


def test_an_optimizer_is_element_wise_momentum() -> None:
    ours, theirs = nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.arange(6.0))
    pairs = (
        (ours, example("Momentum")([ours], lr=0.1)),
        (theirs, torch.optim.SGD([theirs], lr=0.1, momentum=0.9)),
    )
    for step in range(3):
        for parameter, optimizer in pairs:
            parameter.grad = torch.full((6,), float(step + 1))
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_model_runs_and_its_plan_names_its_layers() -> None:
    model = example("build_mlp")()
    assert model(torch.zeros(2, 8)).shape == (2, 8)
    names = [name for name, _ in model.named_children()]
    assert [fnmatch.filter(names, pattern) for pattern in model.sharding_plan] == [["up0", "up1"], ["down0", "down1"]]
