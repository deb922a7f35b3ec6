"""What expert parallelism refuses, before any process exists."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import resolve
from meshwright.mesh import Grid, check_placement, draw_placement, nodes_of
from meshwright.mesh.comm import Group
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of
from tests.support.errors import raises

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_layers": 1,
    "max_sequence_length": 8,
    "num_heads": 4,
}
EXPERTS, WIDTH = 4, 8
SIZES |= {"num_kv_heads": 2, "ffn_size": 24}


def llama(moe: dict[str, Any] | None, **parallel: Any) -> Any:
    options = SIZES | ({} if moe is None else {"moe": moe})
    batch = {"micro_batch_size": 1, "chunks": 1}
    return config_of("meshwright_models.llama:build", options, 8, parallel=parallel, batch=batch)


def test_a_rank_has_its_experts_alone() -> None:
    config = resolve(llama({"num_experts": 6, "top_k": 2}, dp=3, ep=3), 3)
    infos = draw_blueprint(config, ep=Group("ep", (0, 1, 2), 1)).infos
    info = infos["block0.mlp.experts.down"]
    assert (
        info.slice is not None
        and info.slice.ranges == ((2, 4),)
        and info.sliced_over == "ep"
        and not info.is_partial
    )
    assert info.global_shape == (6, 16, 24) and info.local_shape == (2, 16, 24)
    assert infos["block0.mlp.router.weight"].slice is None


@pytest.mark.parametrize(
    ("moe", "parallel", "values"),
    [
        (
            {"num_experts": 6, "top_k": 2},
            {"dp": 4, "ep": 4},
            ("6 experts", "parallel.ep = 4", "1, 2, 3, 6"),
        ),
        (None, {"dp": 2, "ep": 2}, ("parallel.ep = 2",)),
    ],
)
def test_models_that_cannot_be_shared(
    moe: dict[str, Any] | None, parallel: dict[str, Any], values: tuple[object, ...]
) -> None:
    config = resolve(llama(moe, **parallel), parallel["dp"])
    with raises(("MW-EP-001", "MW-EP-002"), *values):
        draw_blueprint(config)


class OwnExperts(nn.Module):
    """Experts of a user: y = scale[e] W[e] x; the scales are a buffer or a frozen parameter."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        scale = torch.arange(1.0, EXPERTS + 1, device="cpu")
        if held == "buffer":
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(torch.empty(EXPERTS), requires_grad=held != "frozen")
        if held == "counted":
            self.step_sums = ("counts",)
            self.register_buffer("counts", torch.zeros(EXPERTS, dtype=torch.int64, device="cpu"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -0.5, 0.5)
        if isinstance(self.scale, nn.Parameter):
            with torch.no_grad():
                self.scale.copy_(torch.arange(1.0, EXPERTS + 1, device=self.scale.device))

    def end_step(self) -> None:
        self.counts.zero_()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if hasattr(self, "counts") and self.training:
            self.counts += nn.functional.one_hot(ids.reshape(-1), EXPERTS).sum(0)
        y = torch.einsum("...d,edf->...ef", x, self.weight) * self.scale[:, None].to(x.dtype)
        chosen = y.gather(-2, ids.unsqueeze(-1).expand(*ids.shape, WIDTH))
        return (chosen * weights.unsqueeze(-1)).sum(-2)


class OwnBlock(nn.Module):
    """Residual block with a router of the two highest scores."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = OwnExperts(held)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


def build_own(held: str) -> nn.Sequential:
    layers = {
        "embedding": nn.Embedding(61, WIDTH),
        "block": OwnBlock(held),
        "head": nn.Linear(WIDTH, 61),
    }
    model = nn.Sequential(OrderedDict(layers))
    model.sharding_plan = {"block.router": "router", "block.experts": "experts"}
    return model


def own(held: str, **parallel: Any) -> Any:
    batch = {"micro_batch_size": 1, "chunks": 1}
    builder = "tests.framework.expert_parallel.test_plan:build_own"
    return config_of(builder, {"held": held}, 8, parallel=parallel, batch=batch)


@pytest.mark.parametrize(
    ("held", "code", "values"),
    [
        ("buffer", "MW-EP-011", ("block.experts.scale", "dim 0 = 4", "parallel.ep = 2")),
        ("counted", "MW-PIPELINE-043", ("block.experts", "step_sums", "parallel.ep = 2")),
    ],
)
def test_buffers_with_a_row_for_each_expert_are_refused(
    held: str, code: str, values: tuple[object, ...]
) -> None:
    """Ids on a rank count its own experts: it would read, or count,
    the rows of the first rank's.
    """
    draw_blueprint(resolve(own(held, dp=2), 2))
    with raises(code, *values):
        draw_blueprint(resolve(own(held, dp=2, ep=2), 2))


def test_a_frozen_parameter_in_their_place_is_cut(pool: RankPool) -> None:
    """The way out that the message names has the numbers of one process."""
    assert_agrees(own("frozen"), "dp2,ep2", pool, References(), global_batch=4, steps=2)


def test_ep_divides_the_ranks_of_a_stage() -> None:
    config = llama({"num_experts": 6, "top_k": 2}, dp=4, pp=2, ep=3)
    with raises("MW-CONFIG-077", "ep = 3", "dp 4 x tp 1 = 4", "1, 2, 4"):
        resolve(config, 8)


def test_a_group_stays_inside_a_node_unless_it_may_leave_it() -> None:
    grid = Grid(dp=8, ep=8)
    with raises("MW-MESH-018", "0..7", "node0, node1"):
        check_placement(grid, nodes_of(2, 4))
    check_placement(grid, nodes_of(2, 4), ep_across_nodes=True)
    drawn = " ".join(draw_placement(grid, nodes_of(2, 4)).split())
    assert (
        "expert parallel 1 group of 8 neighbours, 1 replica of each expert; across up to 2 nodes"
        in drawn
    )
