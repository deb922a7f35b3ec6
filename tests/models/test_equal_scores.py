"""Equal experts and equal tokens: the place decides between them,
whatever rounding does to their scores.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright_models.equal_scores import OF_EXPERTS, OF_TOKENS, choice_gap, highest
from meshwright_models.expert_balance import Balance
from meshwright_models.expert_capacity import capacity_gap, within_capacity
from meshwright_models.router import Router, Routing

B, S, D, E, K = 3, 24, 16, 6, 2
NOISE = {torch.float64: 1e-15, torch.float32: 1e-6}


def router(dtype: torch.dtype = torch.float64, **options) -> Router:
    torch.manual_seed(0)
    balance = Balance(bias_rate=0.25, counts=True)
    return Router(D, Routing(E, **{"top_k": K, **options}), balance).to(dtype)


def with_equal_tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return samples (B, S, D) in which a third of the tokens, and the last ones, have one state."""
    torch.manual_seed(1)
    x = torch.randn(B, S, D, dtype=dtype)
    x[:, ::3] = x[:, -4:] = x[:, :1].clone()
    return x


def noisy(x: Tensor, seed: int, size: float) -> Tensor:
    """Return x with other last bits, as another layout's products have them."""
    return x * (
        1
        + size * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    )


def by_loop(ids: Tensor, scores: Tensor, capacity: int, tolerance: float) -> Tensor:
    """Apply the rule choice by choice: above the ties, then the ties by place, up to the
    capacity.
    """
    is_kept = torch.zeros_like(ids, dtype=torch.bool)
    for sample in range(ids.shape[0]):
        for expert in range(E):
            chosen = [
                (float(scores[sample, s, k]), s, k)
                for s, k in (ids[sample] == expert).nonzero().tolist()
            ]
            ordered = sorted((score for score, _, _ in chosen), reverse=True)
            threshold = ordered[min(capacity, len(ordered)) - 1] if ordered else 0.0
            above = [each for each in chosen if each[0] > threshold * (1 + tolerance)]
            ties = [each for each in chosen if abs(each[0] - threshold) <= threshold * tolerance]
            for _, s, k in [*above, *sorted(ties, key=lambda each: each[1:])][:capacity]:
                is_kept[sample, s, k] = True
    return is_kept


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("capacity_factor", [0.3, 0.6, 1.0])
def test_the_last_bits_of_equal_tokens_drop_no_other_tokens(
    dtype: torch.dtype, scores: str, capacity_factor: float
) -> None:
    limited = router(dtype, scores=scores, capacity_factor=capacity_factor).train()
    x = with_equal_tokens(dtype)
    expected, _ = limited(x)
    assert (expected == E).any()
    for seed in range(20):
        ids, _ = limited(noisy(x, seed, NOISE[dtype]))
        assert torch.equal(ids, expected)


def test_of_equal_tokens_the_earlier_ones_are_kept() -> None:
    limited = router(capacity_factor=0.5).train()
    x = with_equal_tokens()[:, :1].expand(B, S, D)
    ids, weights = limited(noisy(x, 0, 1e-15))
    capacity = int(0.5 * K * S / E)
    assert (
        (ids[:, :capacity] < E).all()
        and (ids[:, capacity:] == E).all()
        and (weights[:, capacity:] == 0).all()
    )


def test_tokens_that_differ_by_more_than_the_tolerance_are_kept_by_score() -> None:
    tolerance, step = OF_TOKENS[torch.float64], 4 * OF_TOKENS[torch.float64]
    scores = (0.5 + step * torch.arange(S, dtype=torch.float64)).view(1, S, 1)
    is_kept = within_capacity(torch.zeros(1, S, 1, dtype=torch.int64), scores, E, 5, tolerance)
    assert is_kept.flatten().tolist() == [False] * (S - 5) + [True] * 5


@pytest.mark.parametrize("seed", range(12))
def test_the_rule_is_that_of_a_loop(seed: int) -> None:
    torch.manual_seed(seed)
    scores = (torch.randint(1, 6, (B, S, E)) / 8).double()
    scores = noisy(
        scores if seed % 2 else scores + 0.1 * torch.rand(B, S, E, dtype=torch.float64), seed, 1e-14
    )
    ids = scores.argsort(-1, descending=True)[..., :K]
    of_ids, tolerance = scores.gather(-1, ids), OF_TOKENS[torch.float64]
    capacity = 1 + seed % 9
    found = within_capacity(ids, of_ids, E, capacity, tolerance)
    assert torch.equal(found, by_loop(ids, of_ids, capacity, tolerance))
    gap = float(capacity_gap(ids, of_ids, E, capacity, tolerance))
    for other in range(5):  # a smaller change of all scores changes nothing, the threshold included
        moved = of_ids + gap / 4.1 * (2 * torch.rand(of_ids.shape, dtype=torch.float64) - 1)
        assert torch.equal(within_capacity(ids, moved, E, capacity, tolerance), found), other


def test_a_sample_without_a_full_expert_has_no_gap() -> None:
    ids = torch.arange(E).view(1, E, 1)
    assert capacity_gap(ids, torch.full((1, E, 1), 0.5), E, 1, 0.1) == torch.inf
    assert within_capacity(ids, torch.full((1, E, 1), 0.5), E, 1, 0.1).all()


def doubled(chosen: Router) -> Router:
    """Return a router whose experts 1, 3 and 5 have the rows of 0, 2 and 4,
    as experts copied from a smaller mixture do.
    """
    with torch.no_grad():
        chosen.weight[1::2] = chosen.weight[::2]
    return chosen


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_k": 3}, {"top_k": 1, "scores": "sigmoid"}, {"top_k": 1, "has_bias": True}]
    + [
        {"top_k": 2, "num_groups": 3, "groups_per_token": 1, "group_score": score}
        for score in ("max", "top2")
    ],
)
def test_the_last_bits_of_equal_experts_choose_no_others(
    dtype: torch.dtype, options: dict[str, object]
) -> None:
    equal = doubled(router(dtype, **options))
    if equal.bias is not None:  # nearly cancels the scores: their rounding stays
        equal.bias.fill_(-0.2)
    scores = equal.scores(equal.logits(with_equal_tokens(dtype)))
    expected = equal.choose(scores)[0].sort().values
    for seed in range(20):
        ids, _ = equal.choose(noisy(scores, seed, NOISE[dtype] / 4))
        assert torch.equal(ids.sort().values, expected)


def test_equal_groups_are_those_of_the_lowest_number() -> None:
    grouped = router(num_groups=3, groups_per_token=1, group_score="max")
    with torch.no_grad():
        grouped.weight[2:4] = grouped.weight[:2]
        grouped.weight[4:] = grouped.weight[:2]
    scores = grouped.scores(grouped.logits(with_equal_tokens()))
    for seed in range(10):
        assert (grouped.choose(noisy(scores, seed, 1e-15))[0] < 2).all()


def test_experts_of_other_scores_are_chosen_by_score() -> None:
    for dtype, tolerance in OF_EXPERTS.items():
        scores = (0.5 + 2 * tolerance * torch.arange(E).double()).to(dtype)
        assert highest(scores, 2).tolist() == [E - 1, E - 2]
        assert highest(scores.flip(0), E).tolist() == list(range(E))


def test_scores_of_minus_infinity_tie_with_none() -> None:
    scores = torch.tensor([-torch.inf, 0.5, -torch.inf, 0.25])
    assert highest(scores, 2).tolist() == [1, 3] and highest(scores, 3).tolist() == [1, 3, 0]


@pytest.mark.parametrize("perturbed", [noisy, lambda scores, seed, size: scores])
def test_a_smaller_change_than_the_gap_chooses_no_others(perturbed: Callable[..., Tensor]) -> None:
    scores = perturbed(torch.randint(1, 9, (50, E)).double() / 8, 3, 1e-14)
    gap = float(choice_gap(scores, K))
    expected = highest(scores, K).sort().values
    for _ in range(20):
        moved = scores + gap / 4.1 * (2 * torch.rand(scores.shape, dtype=torch.float64) - 1)
        assert torch.equal(highest(moved, K).sort().values, expected)


@pytest.mark.parametrize("num_experts", [3, 7, 49])
def test_the_bias_of_an_expert_with_the_mean_load_stays(num_experts: int) -> None:
    """49 x (1 / 49) is not 1: a mean that is computed as a product leaves a sign."""
    balanced = Router(
        D, Routing(num_experts, 1, has_bias=True), Balance(bias_rate=0.25, counts=True)
    )
    balanced.counts.fill_(1)
    balanced.counts[0], balanced.counts[1] = 2, 0
    balanced.end_step()
    assert balanced.bias is not None
    assert balanced.bias.tolist() == [-0.25, 0.25, *[0.0] * (num_experts - 2)]
