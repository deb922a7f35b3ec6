"""Forward of one layer of experts and backward of another in turns:
their messages travel while the other computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.expert_parallel.plan import apply
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parameters import ParameterInfo
from meshwright_launch.pool import RankPool
from meshwright_models.experts import Experts, MoE
from meshwright_models.router import Router, Routing


def two_layers(group: Group, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [MoE(Router(6, Routing(4, 2)), Experts(4, 6, 5, activation=F.silu)) for _ in range(2)]
    model = nn.Sequential(*layers).to(dtype)
    infos = {
        name: ParameterInfo(name, tuple(weight.shape)) for name, weight in model.named_parameters()
    }
    apply("test", model, {"*.experts": "experts"}, infos, group)
    return model


def take_turns(rank: int, ep: int) -> list[str]:
    mesh = open_mesh(Grid(dp=ep, ep=ep), "cpu")
    torch.manual_seed(rank)
    x = torch.randn(2, 1, 7, 6, dtype=torch.float64, requires_grad=True)
    one, both = two_layers(mesh.ep, torch.float64), two_layers(mesh.ep, torch.float64)
    found = [one[0](x[0]), one[1](x[1])]
    found[1].sum().backward()
    assert x.grad is not None
    of_x, x.grad = x.grad, None
    waiting, events = both[1](x[1]), list[str]()
    outputs: list[Tensor] = []
    exchange, wait = Group.all_to_all, CollectiveHandle.wait
    names = {0: "F", 1: "B"}

    def post(group: Group, out: Tensor, whole: Tensor, *sizes: Sequence[int]) -> Any:
        if whole.is_floating_point():
            events.append(f"{names[group.turns._turn]} posts")
        return exchange(group, out, whole, *sizes)

    def waits(handle: CollectiveHandle) -> None:
        if handle.keep and handle.keep[0].is_floating_point():
            events.append(f"{names[mesh.ep.turns._turn]} waits")
        wait(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_to_all", post)
        patch.setattr(CollectiveHandle, "wait", waits)
        mesh.ep.turns.run(
            lambda: outputs.append(both[0](x[0])), waiting.sum().backward, lambda: lambda: None
        )
    assert torch.equal(outputs[0], found[0]) and torch.equal(x.grad, of_x)  # type: ignore[arg-type]
    for mine, other in zip(both[1].parameters(), one[1].parameters(), strict=True):
        assert (
            mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
        )
    close_mesh(mesh)
    return copy.copy(events)


@pytest.mark.parametrize("ep", [2, 4])
def test_each_computes_while_rows_of_the_other_travel(ep: int, pool: RankPool) -> None:
    both = ["F posts", "B posts", "F waits", "F posts", "B waits", "B posts", "F waits", "B waits"]
    assert pool.run(take_turns, ep) == [both] * ep
