"""Attention of some queries to all keys: the rows of the whole attention, by plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from meshwright.context_parallel.cut import TokenCut, along_samples
from meshwright.context_parallel.order import ORDERS
from meshwright.mesh.comm import Group
from meshwright.seeding import Draw, SeededDropout
from meshwright_models import some_queries
from meshwright_models.attention import AttentionCore

B, H, G, S, D = 2, 4, 2, 12, 3
STARTS = {
    "one document": [0],
    "on the cuts": [0, 3, 6, 9],
    "off the cuts": [0, 1, 5, 8],
    "of one token": list(range(S)),
}


def cut_of(rank: int, cp: int, order: str, length: int = S) -> TokenCut:
    return TokenCut(Group("cp", tuple(range(cp)), rank), order, torch.zeros(1, length))


def plain(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None) -> Tensor:
    """Each query by itself, in a loop over keys that it may see."""
    found = torch.zeros_like(q)
    for b in range(B):
        document = [int(starts[b, : place + 1].sum()) for place in range(S)]
        for head in range(H):
            keys, values = k[b, head // (H // G)], v[b, head // (H // G)]
            for query in range(S):
                seen = [
                    key
                    for key in range(query + 1)
                    if document[key] == document[query] and (window is None or key > query - window)
                ]
                weights = (keys[seen] @ q[b, head, query] / math.sqrt(D)).softmax(0)
                found[b, head, query] = weights @ values[seen]
    return found


@pytest.mark.parametrize("documents", STARTS)
@pytest.mark.parametrize(("window", "many"), [(None, 16), (2, 1), (5, 16)])
def test_some_queries_get_the_rows_of_the_whole_attention(
    documents: str, window: int | None, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(some_queries, "QUERY_BLOCK", 2)
    monkeypatch.setattr(some_queries, "MANY_RUNS", many)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(B, heads, S, D, dtype=torch.float64, generator=generator) for heads in (H, G, G))
    starts = torch.zeros(B, S, dtype=torch.bool)
    starts[0, STARTS[documents]] = True
    starts[1, [0, 7]] = True  # another sample of the micro-batch has other documents
    core, expected = AttentionCore(window), plain(q, k, v, starts, window)
    for cp in (2, 4):
        for order in ORDERS:
            for rank in range(cp):
                cut = cut_of(rank, cp, order)
                tokens = cut.tokens_of({"starts": starts}, q.device)
                places = cut.positions(q.device) if tokens is None else tokens.positions
                mine, rows = (along_samples(whole, 2, places.expand(B, -1)) for whole in (q, expected))
                for dropout in (None, nn.Identity()):  # the fused kernel, and the path with dropout
                    found = core(mine, k, v, dropout, starts, places=places)
                    torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-14)
                first = some_queries.first_seen(places, starts, window)
                found = some_queries.attend(mine, k, v, places, first, None, reads=False)
                torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_drops_the_elements_of_its_tokens(tp: int) -> None:
    """Of hidden activations (B, S, D), which sequence parallelism may cut again, and of probabilities (B, H, S, S)."""
    draw = Draw(torch.tensor([5, 9]))
    whole = SeededDropout(0.5, 1, "drop", draw).mask(torch.Size((2, S, D)), torch.device("cpu"))
    scores = SeededDropout(0.5, 1, "drop", draw).mask(torch.Size((2, H, S, S)), torch.device("cpu"))
    for order in ("contiguous", "zigzag"):
        for rank in range(3):
            cut = cut_of(rank, 3, order)
            places = cut.positions(torch.device("cpu"))[0]
            for tp_rank in range(tp):
                dropout = SeededDropout(0.5, 1, "drop", draw)
                dropout.cut, dropout.shard = (1, cut), (1, tp_rank, tp)
                share = S // 3 // tp
                mine = dropout.mask(torch.Size((2, share, D)), torch.device("cpu"))
                assert torch.equal(mine, whole[:, places[tp_rank * share : (tp_rank + 1) * share]])
                dropout = SeededDropout(0.5, 1, "drop", draw)
                dropout.cut, dropout.shard = (2, cut), (1, tp_rank, tp)
                mine = dropout.mask(torch.Size((2, H // tp, S // 3, S)), torch.device("cpu"))
                heads = slice(tp_rank * H // tp, (tp_rank + 1) * H // tp)
                assert torch.equal(mine, scores[:, heads][:, :, places])
