"""Masks of dropout on a rank that holds some of the tokens."""

from __future__ import annotations

import pytest
import torch

from meshwright.context_parallel.cut import TokenCut
from meshwright.current import CurrentMicrobatch
from meshwright.mesh.comm import Group
from meshwright.seeding import SeededDropout

B, H, G, S, D = 2, 4, 2, 12, 3


def cut_of(rank: int, cp: int, order: str, length: int = S) -> TokenCut:
    return TokenCut(Group("cp", tuple(range(cp)), rank), order, torch.zeros(1, length))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_drops_the_elements_of_its_tokens(tp: int) -> None:
    """Of hidden activations (B, S, D), which sequence parallelism may cut again,
    and of probabilities (B, H, S, S).
    """
    current = CurrentMicrobatch(torch.tensor([5, 9]))
    whole = SeededDropout(0.5, 1, "drop", current).mask(torch.Size((2, S, D)), torch.device("cpu"))
    scores = SeededDropout(0.5, 1, "drop", current).mask(
        torch.Size((2, H, S, S)), torch.device("cpu")
    )
    for order in ("contiguous", "zigzag"):
        for rank in range(3):
            cut = cut_of(rank, 3, order)
            places = cut.positions(torch.device("cpu"))[0]
            for tp_rank in range(tp):
                dropout = SeededDropout(0.5, 1, "drop", current)
                dropout.cut, dropout.shard = (1, cut), (1, tp_rank, tp)
                share = S // 3 // tp
                mine = dropout.mask(torch.Size((2, share, D)), torch.device("cpu"))
                assert torch.equal(mine, whole[:, places[tp_rank * share : (tp_rank + 1) * share]])
                dropout = SeededDropout(0.5, 1, "drop", current)
                dropout.cut, dropout.shard = (2, cut), (1, tp_rank, tp)
                mine = dropout.mask(torch.Size((2, H // tp, S // 3, S)), torch.device("cpu"))
                heads = slice(tp_rank * H // tp, (tp_rank + 1) * H // tp)
                assert torch.equal(mine, scores[:, heads][:, :, places])
