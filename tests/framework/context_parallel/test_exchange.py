"""The exchange of keys and values on real ranks: values, gradients and bytes against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.context_parallel.cut import TokenCut, along_samples
from meshwright.context_parallel.exchange import gather_keys, heads_to_tokens, tokens_to_heads
from meshwright.mesh.comm import Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.seeding import Draw
from meshwright_launch.pool import RankPool

B, G, S, D = 2, 3, 8, 5


def drawn(seed: int, heads: int = G, width: int = D) -> Tensor:
    return torch.randn(B, heads, S, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut_over(group: Group, order: str) -> tuple[TokenCut, Tensor]:
    """The cut of samples with other documents each, and this rank's places (B, S/cp)."""
    draw = Draw()
    cut = TokenCut(group, order, torch.zeros(B, S), draw)
    starts = torch.zeros(B, S, dtype=torch.bool)
    starts[0, 3] = starts[1, 5] = starts[1, 6] = True
    draw.tokens = cut.tokens_of({"starts": starts}, torch.device("cpu"))
    return cut, cut.positions(torch.device("cpu")).expand(B, -1)


def exchange(rank: int, cp: int, order: str) -> None:
    mesh = open_mesh(Grid(cp=cp), "cpu")
    assert mesh.cp.ranks == mesh.replicas.ranks == tuple(range(cp)) and mesh.cp.rank == rank
    cut, places = cut_over(mesh.cp, order)
    assert (order == "documents") == bool((places[0] != places[1]).any())
    k, v = (along_samples(drawn(seed), 2, places).requires_grad_() for seed in (1, 2))
    mesh.traffic.reset()
    all_k, all_v = gather_keys(k, v, cut)
    assert torch.equal(all_k, drawn(1)) and torch.equal(all_v, drawn(2))
    torch.autograd.backward([all_k, all_v], [drawn(10 + rank), drawn(20 + rank)])
    for part, first in ((k, 10), (v, 20)):
        expected = along_samples(torch.stack([drawn(first + other) for other in range(cp)]).sum(0), 2, places)
        assert part.grad is not None
        torch.testing.assert_close(part.grad, expected, rtol=1e-14, atol=1e-14)
    one_way = 2 * B * S * G * D * 8 * (cp - 1) / cp
    assert dict.fromkeys((("cp", "all_gather"), ("cp", "reduce_scatter")), (1, one_way)) == dict(mesh.traffic.counts)
    close_mesh(mesh)


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
def test_keys_of_all_ranks_in_the_order_of_the_sample(order: str, cp: int, pool: RankPool) -> None:
    pool.run(exchange, cp, order)


def exchange_heads(rank: int, cp: int, order: str) -> None:
    """There and back: a rank's heads of all tokens, and the gradients by the definition."""
    mesh = open_mesh(Grid(cp=cp), "cpu")
    cut, places = cut_over(mesh.cp, order)
    whole = drawn(1, 2 * cp), drawn(2, cp), drawn(3, cp, D + 1)
    mine = [along_samples(each, 2, places).requires_grad_() for each in whole]
    mesh.traffic.reset()
    heads = tokens_to_heads(mine, cut)
    for found, each in zip(heads, whole, strict=True):
        assert torch.equal(found, each.chunk(cp, dim=1)[rank])
    back = heads_to_tokens(heads[0] * 2, cut)
    assert torch.equal(back, mine[0] * 2)
    gradient = along_samples(drawn(4, 2 * cp), 2, places)
    torch.autograd.backward([back, heads[1], heads[2]], [gradient, heads[1].detach(), heads[2].detach()])
    for each, expected in zip(mine, (gradient * 2, mine[1], mine[2]), strict=True):
        assert each.grad is not None and torch.equal(each.grad, expected)
    width = 2 * cp * D + cp * D + cp * (D + 1) + 2 * cp * D  # q, k and v there, the result back
    one_way = width * B * S // cp * 8 * (cp - 1) / cp
    assert dict(mesh.traffic.counts) == {("cp", "all_to_all"): (4, 2 * one_way)}
    close_mesh(mesh)


@pytest.mark.parametrize("order", ["zigzag", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
def test_heads_of_all_tokens_and_back(order: str, cp: int, pool: RankPool) -> None:
    pool.run(exchange_heads, cp, order)


def groups(rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    mesh = open_mesh(Grid(pp=1, dp=2, tp=2, cp=2), "cpu")
    found = []
    for group in (mesh.replicas, mesh.cp, mesh.tp):
        members = torch.zeros(group.size, dtype=torch.int64)
        group.all_gather(members, torch.tensor([rank])).wait()
        found.append(tuple(members.tolist()))
    close_mesh(mesh)
    return tuple(found)


def test_groups_reach_the_ranks_of_the_grid(pool: RankPool) -> None:

    found = pool.run(groups, 8)
    for rank in range(8):
        replicas = tuple(range(rank % 2, 8, 2))
        cp = tuple(sorted({rank, rank ^ 2}))
        assert found[rank] == (replicas, cp, (rank - rank % 2, rank - rank % 2 + 1))
