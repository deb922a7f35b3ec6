"""Rows go to the ranks of their experts and come back: values, gradients and bytes against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.expert_parallel.dispatch import find_route
from meshwright.expert_parallel.exchange import combine, dispatch
from meshwright.mesh import expert_group, expert_replicas
from meshwright.mesh.fake import fake_mesh
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright_launch.pool import RankPool

N, K, E, D = 6, 2, 8, 5
CHOICES = ("drawn", "one", "few")


def drawn(rank: int, choice: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Tokens of a rank and their experts; all to the last expert, or only to the experts of one rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(N + rank, D, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in x])
    return x, {"drawn": ids, "one": torch.full_like(ids, E - 1), "few": ids % (E // 4)}[choice]


def exchange(rank: int, ep: int, choice: str, dtype: torch.dtype) -> None:
    mesh = open_mesh(Grid(dp=ep, ep=ep), "cpu")
    assert mesh.ep.ranks == tuple(range(ep)) and mesh.expert_replicas.size == 1
    everyone = [drawn(other, choice, dtype) for other in range(ep)]
    x, ids = everyone[rank]
    x.requires_grad_()
    mesh.traffic.reset()
    route = find_route(ids, E, mesh.ep)
    rows = dispatch(x, route)
    here = range(rank * E // ep, (rank + 1) * E // ep)
    expected = [
        (int(expert) - here.start, tokens[t])
        for tokens, chosen in everyone
        for expert in here
        for t in range(len(tokens))
        for _ in range(int((chosen[t] == expert).sum()))
    ]
    assert route.local_ids.tolist() == [expert for expert, _ in expected]
    for row, (_, token) in zip(rows, expected, strict=True):
        assert torch.equal(row, token)
    scale = torch.arange(1, E + 1, dtype=dtype)
    y = combine(rows * scale[route.local_ids + here.start, None], route)
    assert torch.equal(y.view(len(x), K, D), x[:, None] * scale[ids][..., None])
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, scale[ids].sum(1, keepdim=True).expand_as(x).to(dtype))
    calls, wire_bytes = mesh.traffic.counts["ep", "all_to_all"]
    received = len(expected)  # forward and backward of both: sent twice, received twice
    assert calls == 5
    row_bytes = D * x.element_size() * (ep - 1) / ep
    assert wire_bytes == pytest.approx(E * 8 * (ep - 1) / ep + 2 * (len(x) * K + received) * row_bytes)
    close_mesh(mesh)


@pytest.mark.parametrize(("ep", "choice"), [(2, "drawn"), (4, "one"), (4, "few")])
def test_rows_go_to_their_experts_and_back(ep: int, choice: str, pool: RankPool) -> None:
    pool.run(exchange, ep, choice, torch.float64)


def test_rows_of_16_bits(pool: RankPool) -> None:
    pool.run(exchange, 2, "drawn", torch.bfloat16)


def test_groups_of_the_grid() -> None:
    grid = Grid(pp=2, dp=2, tp=2, cp=2, ep=4)
    assert str(grid) == "pp 2 x dp 2 x cp 2 x tp 2, ep 4" and grid.size == 16
    assert expert_group(grid, 6) == (4, 5, 6, 7) and expert_group(grid, 9) == (8, 9, 10, 11)
    assert expert_replicas(grid, 6) == (2, 6) and expert_replicas(grid, 9) == (9, 13)
    groups = {expert_group(grid, rank) for rank in range(grid.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))


def test_a_fake_group_shares_rows_out_evenly() -> None:
    with fake_mesh(Grid(dp=4, ep=4), 1) as mesh:
        assert mesh.ep.ranks == (0, 1, 2, 3) and mesh.expert_replicas.ranks == (1,)
        assert mesh.ep.host_counts(torch.zeros(2, 4), 10) == [[3, 3, 2, 2]] * 2
