"""``nn.SyncBatchNorm`` over replicas: statistics, gradients and running statistics of torch's own
module on the samples of all replicas together, and modules that are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.model.build import build_model
from meshwright.model.sync_batch_norm import (
    join_replicas,
    synchronised,
    use_replica_statistics,
)
from meshwright_launch.pool import RankPool
from tests.support.errors import raises

RANKS, CHANNELS, STEPS = 3, 5, 2
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((), {}),
    "sequences": ((4,), {"eps": 0.1, "momentum": 0.3}),
    "images": ((3, 2), {"affine": False}),
    "volumes": ((2, 1, 3), {"momentum": None}),
    "without running statistics": ((3,), {"track_running_stats": False}),
}
"""Name -> dims of a sample after its channels, and options of the module."""
SIZES = (1, 4, 2)
"""Samples on each rank."""


def norm_of(**options: Any) -> nn.Module:
    """Return a layer around the module, in float64, with weights that are not one and zero."""
    torch.manual_seed(1)
    layer = nn.Sequential(nn.SyncBatchNorm(CHANNELS, **options)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def samples_of(dims: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
    """Return inputs of all ranks, far from zero, and factors of their outputs in the loss."""
    torch.manual_seed(2 + step)
    shape = (sum(SIZES), CHANNELS, *dims)
    return 100.0 + torch.randn(shape).double(), torch.randn(shape).double()


def numbers_of(layer: nn.Module, x: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of one batch, and the buffers after it."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * factors).sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    found |= {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {**{name: each for name, each in found.items() if each is not None}, **buffers}


def of_rank(rank: int, world_size: int) -> dict[str, list[dict[str, Tensor]]]:
    """Return the numbers of one rank for all cases: those of each batch, then in eval mode."""
    mesh = open_mesh(Grid(dp=world_size), "cpu")
    group = mesh.second_group(mesh.replicas, "dp_statistics")
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    found = {}
    for name, (dims, options) in CASES.items():
        layer = norm_of(**options)
        assert not list(use_replica_statistics("test", layer))
        join_replicas(layer, group)
        batches = [[each[rows] for each in samples_of(dims, step)] for step in range(STEPS)]
        found[name] = [numbers_of(layer, *batch) for batch in batches]
        layer.eval()
        found[name].append({"y": layer(batches[0][0]).detach()})
    return found


def test_ranks_together_are_one_process(pool: RankPool) -> None:
    ranks = pool.run(of_rank, RANKS)
    for name, (dims, options) in CASES.items():
        plain = norm_of(**options)
        for step in range(STEPS):
            expected = numbers_of(plain, *samples_of(dims, step))
            found = [rank[name][step] for rank in ranks]
            for key, value in expected.items():
                if key in ("y", "dx"):
                    together = torch.cat([each[key] for each in found])
                elif key.startswith("d"):  # sums, as of all gradients
                    together = torch.stack([each[key] for each in found]).sum(0)
                else:
                    together = found[0][key]
                    assert all(torch.equal(each[key], together) for each in found), (name, key)
                torch.testing.assert_close(
                    together, value, rtol=1e-11, atol=1e-11, msg=f"{name}: {key} of step {step}"
                )
        if options.get("track_running_stats", True):
            expected_y = plain.eval()(samples_of(dims, 0)[0])
            found_y = torch.cat([rank[name][STEPS]["y"] for rank in ranks])
            torch.testing.assert_close(found_y, expected_y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_far_from_zero_keep_their_variance(dtype: torch.dtype) -> None:
    """A sum of squares would lose all of it in 32 bits."""
    layer = nn.Sequential(nn.SyncBatchNorm(1, track_running_stats=False)).to(dtype)
    assert not list(use_replica_statistics("test", layer))
    x = (4096.0 + 32.0 * torch.arange(8.0)).view(8, 1)
    expected = nn.functional.batch_norm(x.double(), None, None, training=True)
    found = layer(x.to(dtype))
    assert found.dtype is dtype
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)


class Tight(nn.SyncBatchNorm):
    """Module with other defaults."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__(channels, eps=1e-3)


class Doubled(Tight):
    """Module with a forward of its own, too."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def of_kind(kind: str) -> nn.Sequential:
    """Build a model with one module of a kind."""
    kinds = {"tight": Tight, "doubled": Doubled}
    norm = kinds[kind]() if kind in kinds else nn.SyncBatchNorm(CHANNELS)
    if kind == "grouped":
        norm.process_group = object()
    return nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.Sequential(norm), nn.Linear(CHANNELS, 4))


BUILDER = "tests.framework.model.test_sync_batch_norm:of_kind"


@pytest.mark.parametrize(
    ("kind", "code"), [("grouped", "MW-MODEL-064"), ("doubled", "MW-MODEL-065")]
)
def test_modules_that_exchange_otherwise_are_refused(kind: str, code: str) -> None:
    with raises(code, BUILDER, "1.0", "process_group" if kind == "grouped" else "Doubled"):
        build_model(BUILDER, {"kind": kind}, 0)


def test_the_module_stays_what_it_was() -> None:
    model = build_model(BUILDER, {"kind": "tight"}, 0).layers
    norm = model.get_submodule("1.0")
    assert isinstance(norm, Tight) and type(norm).__name__ == "Tight" and norm.eps == 1e-3
    assert [name for name, _ in synchronised(model)] == ["1.0"]
    assert type(copy.deepcopy(norm)) is type(norm)
    norm.eval()
    assert not list(synchronised(model))


@pytest.mark.parametrize("shape", [(5,), (3, 0)])
def test_inputs_without_channels_are_refused(shape: tuple[int, ...]) -> None:
    norm = build_model(BUILDER, {"kind": "tight"}, 0).layers.get_submodule("1.0")
    with pytest.raises(ValueError, match="expected \\(samples, channels"):
        norm(torch.zeros(shape))
