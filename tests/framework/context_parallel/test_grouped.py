"""Attention whose keys are gathered by groups of heads: bit-equal for any number of groups,
messages under it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.context_parallel import plan
from meshwright.context_parallel.cut import TokenCut, along_samples
from meshwright.context_parallel.grouped import num_groups
from meshwright.current import CurrentMicrobatch
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.placement.rewrite import ModuleSite
from meshwright_launch.pool import RankPool
from meshwright_models import some_queries
from meshwright_models.attention import AttentionCore

B, H, G, S, D = 2, 8, 4, 24, 4
STARTS = [[0, 5, 6, 12], [0, 1, 20]]


def drawn(seed: int, heads: int, dtype: torch.dtype) -> Tensor:
    whole = torch.randn(
        B, heads, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return whole.to(dtype)


def starts() -> Tensor:
    found = torch.zeros(B, S, dtype=torch.bool)
    for sample, at in enumerate(STARTS):
        found[sample, at] = True
    return found


def core_on(cut: TokenCut, groups: int | None, window: int | None) -> AttentionCore:
    core = AttentionCore(window)
    plan._hook(plan.CORE, cut, groups, ModuleSite("core", core, (), ("core",)))
    return core


def cut_over(group: Group, order: str) -> TokenCut:
    current = CurrentMicrobatch()
    cut = TokenCut(group, order, torch.zeros(B, S), current)
    current.tokens = cut.tokens_of({"starts": starts()}, torch.device("cpu"))
    return cut


def attend(
    rank: int, cp: int, order: str, window: int | None, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    """Return bytes of the output and of each gradient, by number of groups;
    the last are those of one process.
    """
    some_queries.MASK_ELEMENTS["cpu"] = 2 * S  # several blocks
    mesh = open_mesh(Grid(cp=cp), "cpu")
    cut = cut_over(mesh.cp, order)
    places = cut.positions(torch.device("cpu")).expand(B, -1)
    whole = [drawn(seed, heads, dtype).requires_grad_() for seed, heads in enumerate((H, G, G))]
    expected = AttentionCore(window)(*whole, None, starts())
    expected.backward(drawn(3, H, dtype))
    found = []
    for groups in (1, 2, 4):
        parts = [along_samples(each.detach(), 2, places).requires_grad_() for each in whole]
        mesh.traffic.reset()
        out = core_on(cut, groups, window)(*parts, None, starts())
        forward = dict(mesh.traffic.counts)
        out.backward(along_samples(drawn(3, H, dtype), 2, places))
        found.append(
            (out.detach(), *(each.grad for each in parts), forward, dict(mesh.traffic.counts))
        )
    rows = along_samples(expected.detach(), 2, places)
    grads = [along_samples(each.grad, 2, places) for each in whole if each.grad is not None]
    close_mesh(mesh)
    return [*found, (rows, *grads)]


@pytest.mark.parametrize(
    ("cp", "order", "window", "dtype"),
    [
        (2, "zigzag", None, torch.float64),
        (4, "documents", 3, torch.float64),
        (4, "contiguous", 7, torch.float32),
        (2, "documents", None, torch.bfloat16),
    ],
)
def test_the_number_of_groups_changes_no_number(
    cp: int, order: str, window: int | None, dtype: torch.dtype, pool: RankPool
) -> None:
    bar = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    size = 2 * B * S * G * D * dtype.itemsize * (cp - 1) / cp
    for *by_groups, expected in pool.run(attend, cp, order, window, dtype):
        for groups, (*tensors, forward, both) in zip((1, 2, 4), by_groups, strict=True):
            for tensor, first, plain in zip(tensors, by_groups[0], expected, strict=False):
                assert torch.equal(tensor, first)
                torch.testing.assert_close(tensor, plain, rtol=bar, atol=bar)
            gathers = groups if groups == 1 else 2 * groups
            assert forward == {("cp", "all_gather"): (groups, size)}
            assert both == {
                ("cp", "all_gather"): (gathers, size * gathers / groups),
                ("cp", "reduce_scatter"): (groups, size),
            }


def test_groups_that_are_chosen() -> None:
    """The keys of a group have at most as many elements as this rank's queries."""
    assert [num_groups(cp, 8, 8) for cp in (2, 3, 4, 8, 16)] == [2, 4, 4, 8, 8]
    assert [num_groups(cp, 32, 8) for cp in (2, 4, 8, 16, 32, 64)] == [1, 1, 2, 4, 8, 8]
    assert [num_groups(8, 8, 1), num_groups(2, 6, 6), num_groups(4, 6, 6)] == [1, 2, 6]
    assert [num_groups(2, 8, 8, wanted) for wanted in (1, 4, 3)] == [1, 4, 0]


class Order(nn.Module):
    """A core that notes what it does between messages."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log, self.core = log, AttentionCore()

    def forward(self, *args: Any, places: Tensor, **kwargs: Any) -> Tensor:
        self.log.append("attend")
        out: Tensor = self.core(*args, places=places, **kwargs)
        return out

    def query_blocks(self, *args: Any, **kwargs: Any) -> list[slice]:
        return [slice(0, args[0].shape[-2])]


def overlap(rank: int, world_size: int) -> list[str]:
    mesh, log = open_mesh(Grid(cp=world_size), "cpu"), []
    for name in ("all_gather", "reduce_scatter"):
        post = getattr(mesh.cp, name)

        def logged(*args: Any, post: Any = post, name: str = name) -> CollectiveHandle:
            log.append(name)
            handle: CollectiveHandle = post(*args)
            wait = handle.wait

            def waited() -> None:
                log.append(f"wait {name}")
                wait()

            handle.wait = waited  # type: ignore[method-assign]
            return handle

        setattr(mesh.cp, name, logged)
    cut, core = cut_over(mesh.cp, "zigzag"), Order(log)
    plan._hook(plan.CORE, cut, 2, ModuleSite("core", core, (), ("core",)))
    parts = [torch.randn(B, heads, S // world_size, D, requires_grad=True) for heads in (4, 2, 2)]
    core(*parts, None, starts()).sum().backward()
    close_mesh(mesh)
    return log


def test_messages_of_a_group_are_under_the_attention_of_another(pool: RankPool) -> None:
    forward = ["all_gather", "wait all_gather", "all_gather", "attend", "wait all_gather", "attend"]
    backward = ["all_gather", "wait all_gather", "all_gather", "attend", "reduce_scatter"]
    backward += [
        "wait all_gather",
        "attend",
        "wait reduce_scatter",
        "reduce_scatter",
        "wait reduce_scatter",
    ]
    assert pool.run(overlap, 2) == [forward + backward] * 2
