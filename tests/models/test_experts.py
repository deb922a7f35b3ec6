"""Routers and experts in one process: choice, weights, ties, gradients, slices of experts,
precision.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import llama
from meshwright_models.experts import Experts, MoE
from meshwright_models.router import Router, Routing

D = 12


def router_of(**options) -> Router:
    torch.manual_seed(0)
    router = Router(D, Routing(8, **{"top_k": 3, **options})).double()
    nn.init.normal_(router.weight)
    return router


def experts_of(num_experts: int = 8) -> Experts:
    torch.manual_seed(1)
    return Experts(num_experts, D, 10, activation=F.silu).double()


def tokens(count: int = 7) -> Tensor:
    return torch.randn(2, count, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def one_by_one(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the definition: a loop over tokens and their experts."""
    found = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            for expert, weight in zip(ids[b, s].tolist(), weights[b, s], strict=True):
                gate, up = (experts.gate_up[expert] @ x[b, s]).chunk(2)
                found[b, s] = found[b, s] + weight * (experts.down[expert] @ (F.silu(gate) * up))
    return found


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_the_output_is_the_weighted_sum_over_a_tokens_experts(top_k: int) -> None:
    router, experts, x = router_of(top_k=top_k), experts_of(), tokens().requires_grad_()
    leaves = [x, *router.parameters(), *experts.parameters()]
    ids, weights = router(x)
    found = MoE(router, experts)(x)
    expected = one_by_one(experts, x, ids, weights)
    assert (found - expected).norm() < 1e-12 * expected.norm()
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (found, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-11 * other.norm() + 1e-13


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    experts, x = experts_of(), tokens()
    ids = torch.full((*x.shape[:-1], 1), 5)
    experts(x, ids).sum().backward()
    assert experts.gate_up.grad is not None and experts.down.grad is not None
    for gradient in (experts.gate_up.grad, experts.down.grad):
        assert gradient.flatten(1).norm(dim=1).nonzero().flatten().tolist() == [5]


def test_a_slice_of_the_experts_is_a_module_of_experts() -> None:
    whole, x = experts_of(), tokens().flatten(0, 1)
    ids = torch.arange(x.shape[0]).remainder(4)[:, None]
    part = copy.deepcopy(whole)
    part.gate_up, part.down = nn.Parameter(whole.gate_up[4:]), nn.Parameter(whole.down[4:])
    assert torch.equal(
        part(x, ids, None), whole(x, ids + 4, torch.ones(ids.shape, dtype=torch.float64))
    )


def test_of_equal_scores_the_lowest_id_is_chosen() -> None:
    router = router_of()
    nn.init.zeros_(router.weight)
    assert router(tokens())[0].unique(dim=1).tolist() == [[[0, 1, 2]]] * 2


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = router_of(scores="sigmoid", has_bias=True, scaling=2.5, normalise=False)
    plain_ids, x = router(tokens())[0], tokens()
    router.bias = torch.tensor([-9.0] * 5 + [9.0] * 3)
    ids, weights = router(x)
    assert not torch.equal(ids, plain_ids) and ids.unique().tolist() == [5, 6, 7]
    assert torch.equal(weights, router.logits(x).sigmoid().gather(-1, ids) * 2.5)


def test_groups_limit_the_choice_also_where_all_scores_are_negative() -> None:
    """A mask of 0.0 in place of -inf would choose experts of groups that are not chosen."""
    router = router_of(scores="sigmoid", has_bias=True, num_groups=4, groups_per_token=2, top_k=4)
    router.bias = torch.full((8,), -5.0)
    x = tokens()
    ids, _ = router(x)
    scores = router.logits(x).sigmoid().unflatten(-1, (4, 2)).sum(-1)
    best = scores.topk(2, dim=-1).indices
    for found, groups in zip(
        (ids // 2).flatten(0, 1).tolist(), best.flatten(0, 1).tolist(), strict=True
    ):
        assert sorted(found) == sorted([*groups, *groups])


def test_scores_of_a_bfloat16_model_are_float32_and_its_bias_is_not_cast() -> None:
    moe = {"num_experts": 8, "top_k": 2, "router": "sigmoid", "balance": "bias"}
    model = llama.build(31, 16, 1, 2, 2, 24, 16, moe=moe).bfloat16()
    router, x = model.block0.mlp.router, torch.randn(1, 5, 16, dtype=torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and router.bias.dtype == torch.float32
    _, weights = router(x)
    assert weights.dtype == torch.float32
    expected = F.linear(x.float(), router.weight.float()).sigmoid().topk(2).values
    assert torch.equal(weights, expected / (expected.sum(-1, keepdim=True) + 1e-20))
    assert model.block0.mlp(x).dtype == torch.bfloat16


def test_a_grouped_product_computes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(4, 16, 24, activation=F.silu).bfloat16()
    x, ids = torch.randn(9, 16, dtype=torch.bfloat16), torch.tensor([[3, 0]] * 5 + [[2, 3]] * 4)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(Experts, "can_group", lambda self, rows, grouped=grouped: grouped)
        experts.zero_grad()
        y = experts(x, ids, torch.full(ids.shape, 0.5))
        (y.float() * torch.arange(16)).sum().backward()
        results.append([y, experts.gate_up.grad, experts.down.grad])
    for loop, grouped_one in zip(*results, strict=True):
        assert loop.norm() > 0 and (loop - grouped_one).float().norm() < 1e-2 * loop.float().norm()


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"num_experts": 4}, ["top_k must be given"]),
        ({"num_experts": 4, "top_k": 5}, ["top_k=5", "num_experts=4"]),
        ({"num_experts": 4, "top_k": 0, "capacity_factor": 1.25}, ["top_k=0 must be positive"]),
        (
            {"num_experts": 4, "top_k": 2, "num_expert": 3},
            ["no option num_expert", "did you mean num_experts"],
        ),
        ({"num_experts": 4, "top_k": 2, "router": "relu"}, ["router='relu'", "softmax, sigmoid"]),
        (
            {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8},
            ["expert_ffn_size=8", "ffn_size=24"],
        ),
        ({"num_experts": 6, "top_k": 2, "num_groups": 4}, ["num_groups=4", "num_experts=6"]),
        ({"num_experts": 8, "top_k": 3, "num_groups": 4}, ["1 groups of 2 experts", "top_k=3"]),
        ({"num_experts": 4, "top_k": 2, "first_dense": 1}, ["first_dense", "num_layers=1"]),
        ({"num_experts": 4, "top_k": 2, "shared_gate": True}, ["shared_ffn_size"]),
        (
            {"num_experts": "4", "top_k": 2.0},
            ["num_experts='4' must be a whole number; top_k=2.0 must be"],
        ),
        ({"num_experts": 4, "top_k": True}, ["top_k=True must be a whole number"]),
        (
            {"num_experts": 4, "top_k": 2, "expert_ffn_size": "8"},
            ["expert_ffn_size='8' must be a whole number"],
        ),
        (
            {"num_experts": 4, "top_k": 2, "batch_loss": math.nan},
            ["batch_loss=nan must be a finite number"],
        ),
        (
            {"num_experts": 4, "top_k": 2, "normalise": "false"},
            ["normalise='false' must be true or false"],
        ),
        (
            {"num_experts": 4, "top_k": 2, "router": ["softmax"]},
            ["router=['softmax'] must be a text"],
        ),
        ({"num_experts": 4, "top_k": 2, "bias_rate": 0.1}, ["bias_rate=0.1", 'balance="bias"']),
        (4, ["moe=4 must be a table", "num_experts"]),
    ],
)
def test_options_without_a_meaning_are_refused_with_their_values(
    moe: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError, match="moe") as caught:
        llama.build(31, 16, 1, 2, 2, 24, 16, moe=moe)
    assert all(word in str(caught.value) for word in words), caught.value


def test_sizes_of_a_latent_attention_are_whole_numbers() -> None:
    sizes = {"kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
    for mla, words in (
        (sizes | {"kv_rank": "8"}, "mla: kv_rank='8' must be a whole number"),
        (sizes | {"q_rank": 4.0}, "mla: q_rank=4.0 must be a whole number"),
        (True, "mla=True must be a table"),
    ):
        with pytest.raises(ValueError, match=words):
            llama.build(31, 16, 1, 2, 2, 24, 16, mla=mla)
