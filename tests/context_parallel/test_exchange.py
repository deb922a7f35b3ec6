"""The exchange of keys and values on real ranks: values, gradients and bytes against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.exchange import gather_keys
from meshwright.launch.pool import RankPool
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh

B, G, S, D = 2, 3, 8, 5


def drawn(seed: int) -> Tensor:
    return torch.randn(B, G, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exchange(rank: int, cp: int, order: str) -> None:
    mesh = open_mesh(Grid(cp=cp), "cpu")
    assert mesh.cp.ranks == mesh.dp.ranks == tuple(range(cp)) and mesh.cp.rank == rank
    cut = TokenCut(mesh.cp, order, torch.zeros(B, S))
    places = cut.places(torch.device("cpu"))[0]
    k, v = (drawn(seed)[:, :, places].requires_grad_() for seed in (1, 2))
    mesh.traffic.reset()
    all_k, all_v = gather_keys(k, v, cut)
    assert torch.equal(all_k, drawn(1)) and torch.equal(all_v, drawn(2))
    torch.autograd.backward([all_k, all_v], [drawn(10 + rank), drawn(20 + rank)])
    for part, first in ((k, 10), (v, 20)):
        expected = torch.stack([drawn(first + other) for other in range(cp)]).sum(0)[:, :, places]
        assert part.grad is not None
        torch.testing.assert_close(part.grad, expected, rtol=1e-14, atol=1e-14)
    one_way = 2 * B * S * G * D * 8 * (cp - 1) / cp
    assert dict.fromkeys((("cp", "all_gather"), ("cp", "reduce_scatter")), (1, one_way)) == dict(mesh.traffic.counts)
    close_mesh(mesh)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp", [2, 4])
def test_keys_of_all_ranks_in_the_order_of_the_sample(order: str, cp: int, pool: RankPool) -> None:
    pool.run(exchange, cp, order)


def groups(rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    mesh = open_mesh(Grid(pp=1, dp=2, tp=2, cp=2), "cpu")
    found = []
    for group in (mesh.dp, mesh.cp, mesh.tp):
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
