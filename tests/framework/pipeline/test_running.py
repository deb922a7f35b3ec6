"""Buffers that forward changes: found on meta,
and refused where they would not be those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.model.buffers import cast_running, couples_samples, running_buffers
from meshwright.model.build import PlainModel
from meshwright.pipeline.plan import check_running
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import StageSpec
from meshwright.schedule.action import Schedule
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.degrees import INTERLEAVES
from meshwright.schedule.load import parse_schedule
from meshwright.schedule.lower import lower
from tests.support.errors import raises

INPUTS = torch.empty((4, 6), device="meta")


class OwnMean(nn.Module):
    """Subtracts a mean that it keeps: by writing in place, or by taking another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().mean(0)
        if self.in_place:
            self.mean.mul_(0.9).add_(seen, alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * seen
        return x - self.mean


class Constant(nn.Module):
    """A table that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Unseen(nn.Module):
    """torch writes these two and counts it nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True)


def around(layer: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("first", nn.Sequential(nn.Linear(6, 6), Constant()))
    model.add_module("kept", layer)
    return model


STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.BatchNorm1d(6), STATISTICS),
        (
            nn.Sequential(nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True)),
            STATISTICS,
        ),
        (nn.BatchNorm1d(6).eval(), []),
        (nn.BatchNorm1d(6, track_running_stats=False), []),
        (OwnMean(in_place=True), ["mean", "one"]),
        (OwnMean(in_place=False), ["mean", "one"]),
        (Constant(), []),
        (nn.Linear(6, 6), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_found_on_meta_with_their_neighbours(layer: nn.Module, expected: list[str]) -> None:
    inside = "kept.1." if isinstance(layer, nn.Sequential) else "kept."
    model = around(layer)
    assert running_buffers(model, INPUTS) == [inside + name for name in expected]
    assert all(not buffer.is_meta for buffer in model.buffers()), "the model itself was moved"


def test_samples_that_see_each_other() -> None:
    assert couples_samples(around(nn.BatchNorm1d(6, track_running_stats=False)), [])
    assert couples_samples(around(OwnMean(True)), ["kept.mean"])
    assert not couples_samples(around(nn.BatchNorm1d(6).eval()), [])
    assert not couples_samples(around(nn.GroupNorm(2, 6)), [])


def test_the_finer_of_two_precisions() -> None:
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model = around(nn.BatchNorm1d(6))
        cast_running(model, running_buffers(model, INPUTS), dtype)
        kept = model.get_submodule("kept")
        assert kept.running_mean.dtype is expected and kept.num_batches_tracked.dtype is torch.int64
        assert model.get_buffer("first.1.table").dtype is torch.float32


def refusal(schedule: Schedule | None = None, **other: Any) -> str:
    """What is said of a mean of its own, or of another layer, under such a run;
    "" when nothing is.
    """
    how: dict[str, Any] = {
        "dp": 1,
        "tp": 1,
        "plan": {},
        "sequence": False,
        "recomputed": [],
        "dtype": "float32",
    }
    how["layer"] = OwnMean(in_place=True)
    how |= other
    config = RunConfig()
    parallel = config.parallel.model_copy(
        update={name: how[name] for name in ("dp", "tp", "sequence")}
    )
    train = config.train.model_copy(update={"dtype": how["dtype"]})
    config = config.model_copy(update={"parallel": parallel, "train": train})
    model = PlainModel(around(how["layer"]), plan=how["plan"])
    running = running_buffers(model.layers, INPUTS)
    try:
        check_running(
            config.parallel,
            config.train.dtype,
            model,
            running,
            schedule or lower(build("1f1b", 2, 4)),
            how["recomputed"],
        )
    except ModelError as error:
        return str(error)
    return ""


def test_what_would_not_be_one_process() -> None:
    first = "layer kept (OwnMean) changes its buffer mean in forward, and "
    assert (
        refusal() == ""
        and refusal(tp=2, plan={"first.0": "column"}) == ""
        and refusal(recomputed=["first"]) == ""
    )
    assert refusal(dp=2).startswith(first + "with parallel.dp = 2 each replica would keep its own")
    assert "GroupNorm" in refusal(dp=2) and "track_running_stats=False" in refusal(dp=2)
    assert refusal(recomputed=["kept"]).startswith(
        first + "pipeline.recompute computes kept again in backward"
    )
    assert refusal(sequence=True).startswith(first + "under sequence parallelism")
    norm = nn.BatchNorm1d(6)
    assert "train.dtype" in refusal(layer=norm, dtype="bfloat16")
    assert refusal(layer=norm, dp=2, recomputed=["kept"]) == ""
    instances = nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True)
    )
    assert "each replica would keep its own" in refusal(layer=instances, dp=2)
    assert refusal(tp=2, plan={"kep*": "column"}).startswith(
        first + "kept of the same layer is split over"
    )


def test_a_schedule_that_takes_the_micro_batches_out_of_order() -> None:
    for name in BUILDERS:
        interleave = INTERLEAVES.get(name, range(1, 2))[0]
        assert refusal(lower(build(name, 2, 4, interleave))) == "", name
    swapped = parse_schedule(
        "# own pp=1 num_stages=1 chunks=2 placement=loop\n0F1 0F0 0B0 0B1 0REDUCE STEP\n"
    )
    assert "this schedule has stage 0 do 0F0 after micro-batch 1" in refusal(swapped)


@pytest.mark.parametrize(("running", "passes"), [([], False), (["kept.mean", "kept.var"], True)])
def test_what_meta_has_not_shown_is_caught_in_the_first_step(
    running: list[str], passes: bool
) -> None:
    model = around(Unseen())
    stage = Stage(StageSpec(0, None, None, running=running), model, lambda x, y: x.sum(-1))
    labels = torch.zeros(4, dtype=torch.int64)
    if passes:
        stage.forward(0, torch.randn(4, 6), labels, train=True)
        return
    with raises("MW-PIPELINE-019", "kept", "mean"):
        stage.forward(0, torch.randn(4, 6), labels, train=True)
