"""Parts of tokens that tp ranks have alike: sent once, and joined again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.expert_parallel.parts import join_parts, take_part
from meshwright.mesh import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright_launch.pool import RankPool


def there_and_back(rank: int, world_size: int, num_tokens: int) -> tuple[Tensor, ...]:
    """Return the part of a rank, the joined squares of all tokens, and their gradient."""
    mesh = open_mesh(Grid(pp=1, dp=1, cp=1, tp=world_size), "cpu")
    x = torch.arange(num_tokens * 2, dtype=torch.float64).view(num_tokens, 2).requires_grad_()
    part = take_part(x, mesh.tp)
    ids = take_part(torch.zeros(num_tokens, 1, dtype=torch.int64), mesh.tp, 7)
    whole = join_parts(part.square(), mesh.tp, num_tokens)
    (whole * torch.arange(1, num_tokens + 1)[:, None]).sum().backward()  # type: ignore[no-untyped-call]
    close_mesh(mesh)
    assert x.grad is not None
    return part.detach(), ids, whole.detach(), x.grad


@pytest.mark.parametrize("num_tokens", [1, 4, 5])
def test_each_token_is_sent_once_and_comes_back(num_tokens: int, pool: RankPool) -> None:
    x = torch.arange(num_tokens * 2, dtype=torch.float64).view(num_tokens, 2)
    found = pool.run(there_and_back, 2, num_tokens)
    parts, ids = (torch.cat([each[index] for each in found]) for index in (0, 1))
    assert torch.equal(parts[:num_tokens], x) and not parts[num_tokens:].any()
    assert ids.flatten().tolist() == [0] * num_tokens + [7] * (len(ids) - num_tokens)
    for _, _, whole, gradient in found:
        assert torch.equal(whole, x.square())
        assert torch.equal(gradient, 2 * x * torch.arange(1, num_tokens + 1)[:, None])
