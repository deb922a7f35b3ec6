"""Recorded metrics: sums on the device, in a run only;
names that could not be recorded are refused on meta.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.model.metrics import MAX_NAMES, Recorder, Recording, means
from tests.support.errors import raises


def test_outside_of_a_run_it_does_nothing() -> None:
    meshwright.record("any name at all", torch.ones(3))


def test_sums_and_counts() -> None:
    recorder = Recorder(("a", "b", "c"))
    with Recording(recorder):
        meshwright.record("b", torch.tensor(3.0, requires_grad=True), 2)
        meshwright.record("b", 4, torch.tensor([6]))
        with Recording(None):
            meshwright.record("b", 100.0)
        meshwright.record("c", float("nan"))
    sums = recorder.vector(torch.device("cpu"))
    assert sums.dtype == torch.float64 and not sums.requires_grad
    found = means(("a", "b", "c"), sums.tolist())
    assert list(found) == ["b", "c"] and found["b"] == 7 / 8


class RecordingLinear(nn.Linear):
    """Records under some names."""

    def __init__(self, names: list[str], shape: tuple[int, ...]) -> None:
        super().__init__(4, 4)
        self.names, self.shape = names, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            meshwright.record(name, x.new_zeros(self.shape))
        return super().forward(x)


def model(names: list[str], shape: list[int]) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), RecordingLinear(names, tuple(shape)), nn.Linear(4, 7))


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (["two words"], []),
        (["validation/loss"], []),
        (["x" * 65], []),
        ([f"m{number}" for number in range(MAX_NAMES + 1)], []),
        (["norm"], [3]),
    ],
)
def test_refused_before_the_first_step(names: list[str], shape: list[int]) -> None:
    with raises("MW-MODEL-032"):
        draw_blueprint(config_of(names, shape))


@pytest.mark.parametrize(
    "value", [None, "3", 1j, torch.ones((), dtype=torch.complex64), [1.0], torch.ones(2)]
)
@pytest.mark.parametrize("names", [None, ("norm",)], ids=["planned", "run"])
def test_a_value_that_is_no_real_number_is_refused_by_name(
    value: Any, names: tuple[str] | None
) -> None:
    for pair in ((value, 1), (1.0, value)):
        with Recording(Recorder(names)), raises("MW-MODEL-032", "'norm'"):
            meshwright.record("norm", *pair)
    with Recording(Recorder()), raises("MW-MODEL-032", "None"):
        meshwright.record(None, 1.0)  # type: ignore[arg-type]


def test_names_are_collected_on_meta() -> None:
    blueprint = draw_blueprint(config_of(["b", "a/x"], []))
    assert blueprint.metrics == ("a/x", "b")
    assert blueprint.digest() != draw_blueprint(config_of(["b"], [])).digest()


def config_of(names: list[str], shape: list[int]) -> RunConfig:
    return resolve(
        RunConfig.model_validate(
            {
                "model": {
                    "builder": f"{__name__}:model",
                    "options": {"names": names, "shape": shape},
                },
                "data": {"train": "random", "sequence_length": 4},
                "batch": {"micro_batch_size": 1, "chunks": 1},
                "train": {"steps": 1, "device": "cpu"},
            }
        ),
        1,
    )
