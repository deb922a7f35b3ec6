"""Balance of the experts' load in plain torch: losses against transformers and by hand, the bias,
counts.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright_models.equal_scores import OF_EXPERTS
from meshwright_models.expert_balance import Balance, count_tokens, loss_sum
from meshwright_models.moe_options import moe_of
from meshwright_models.router import Router, Routing, unchanged

B, S, D, E, K = 3, 5, 6, 4, 2


def router(balance: Balance | None, scores: str = "softmax", *, has_bias: bool = False) -> Router:
    torch.manual_seed(0)
    return Router(D, Routing(E, K, scores, has_bias=has_bias), balance).double()


def samples() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, S, D, dtype=torch.float64)


def test_the_batch_loss_is_that_of_transformers() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    plain = router(None)
    logits = plain.logits(samples())
    ids, _ = plain.choose(plain.scores(logits))
    ours = loss_sum(Balance(batch_loss=0.02), logits, plain.scores(logits), ids, unchanged) / (
        B * S
    )
    theirs = 0.02 * mixtral.load_balancing_loss_func((logits.reshape(-1, E),), E, K)
    # theirs counts in float32
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0.0)


def by_hand(plain: Router, x: Tensor, alpha: float) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3, token by token, times the number of tokens."""
    total = x.new_zeros(())
    for sample in x:
        scores = plain.scores(plain.logits(sample))
        chosen = [set(plain.choose(token)[0].tolist()) for token in scores]
        for e in range(E):
            f = E / (K * S) * sum(e in each for each in chosen)
            p = sum(token[e] / token.sum() for token in scores) / S
            total = total + S * alpha * f * p
    return total


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_sequence_loss_and_its_gradient_by_hand(scores: str) -> None:
    balanced = router(Balance(sequence_loss=0.1, z_loss=0.01), scores)
    balanced.gradient_scale = 0.25
    x = samples()
    _, weights = balanced(x)
    weights.sum().backward()
    plain = router(None, scores)
    _, weights = plain(x)
    z = plain.logits(x).exp().sum(-1).log().square().sum()
    (weights.sum() + 0.25 * (by_hand(plain, x, 0.1) + 0.01 * z)).backward()
    torch.testing.assert_close(balanced.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-14)


def test_samples_are_balanced_each_by_itself_and_a_batch_as_a_whole() -> None:
    x, plain = samples(), router(None)
    for balance, is_equal in (
        (Balance(sequence_loss=1.0, z_loss=1.0), True),
        (Balance(batch_loss=1.0), False),
    ):
        sums = []
        for parts in (x.split(1), x.split(B)):
            logits = [plain.logits(part) for part in parts]
            found = [
                loss_sum(
                    balance,
                    each,
                    plain.scores(each),
                    plain.choose(plain.scores(each))[0],
                    unchanged,
                )
                for each in logits
            ]
            sums.append(float(sum(found).detach()))
        assert (abs(sums[0] - sums[1]) < 1e-12) == is_equal
    assert (
        router(Balance(batch_loss=1.0)).couples_samples
        and not router(Balance(sequence_loss=1.0)).couples_samples
    )


def test_the_bias_follows_the_counts_of_training_alone() -> None:
    balanced = router(Balance(bias_rate=0.5, counts=True), has_bias=True)
    x = samples()
    balanced.eval()(x)
    assert balanced.counts.sum() == 0
    ids, _ = balanced.train()(x)
    counts = torch.tensor([int((ids == e).sum()) for e in range(E)])
    assert torch.equal(balanced.counts, counts) and counts.sum() == B * S * K
    assert torch.equal(count_tokens(ids, E).sum(0), counts)
    balanced.end_step()
    assert torch.equal(
        balanced.bias, 0.5 * (counts.double().mean() - counts).sign().to(balanced.bias.dtype)
    )
    assert balanced.counts.sum() == 0


def test_the_bias_of_a_frozen_router_stays() -> None:
    """Under adapters, or in a frozen group: its scores are those that the base was trained with."""
    balanced = router(Balance(bias_rate=0.5, counts=True), has_bias=True)
    balanced.weight.requires_grad_(False)
    before = balanced.bias.clone()
    balanced.train()(samples())
    assert balanced.counts.sum() == B * S * K
    balanced.end_step()
    assert torch.equal(balanced.bias, before) and balanced.counts.sum() == 0


def test_the_nearest_tie_of_a_choice() -> None:
    plain = router(None)
    x = samples()
    ordered = plain.scores(plain.logits(x)).sort(-1, descending=True).values
    nearest = float((ordered[..., K - 1] - ordered[..., K]).detach().min())
    assert 0 < nearest - OF_EXPERTS[torch.float64] <= float(plain.choice_gap(x)) < nearest
    with torch.no_grad():
        plain.weight[2] = plain.weight[1]
    ties = plain.scores(plain.logits(x)).sort(-1, descending=True).values[..., K - 1 : K + 1]
    assert (ties[..., 0] - ties[..., 1]).min() <= 1e-15, "two experts are equal"
    assert 1e-12 < plain.choice_gap(x) <= OF_EXPERTS[torch.float64], (
        "they count as equal, and rounding is far less"
    )
    assert math.isinf(Router(D, Routing(E, E)).choice_gap(x.float()))
    grouped = Router(D, Routing(E, 1, num_groups=2, group_score="max")).double()
    assert float(grouped.choice_gap(x)) > 0


def test_options() -> None:
    def balancing(**options: object) -> Balance | None:
        chosen = moe_of({"num_experts": 4, "top_k": 2, **options})
        assert chosen is not None
        chosen.check(8, 2)
        return chosen.balancing()

    assert balancing() is None and balancing(count_tokens=True) == Balance(counts=True)
    assert balancing(balance="bias") == Balance(bias_rate=0.001)
    assert balancing(router_z_loss=0.1, batch_loss=0.2) == Balance(batch_loss=0.2, z_loss=0.1)
    with pytest.raises(ValueError, match=r"sequence_loss=-1\.0 must not be negative"):
        balancing(sequence_loss=-1.0)


def test_a_loss_needs_no_gradient_of_a_frozen_router() -> None:
    frozen = router(Balance(z_loss=1.0)).requires_grad_(False)
    _, weights = frozen(samples())
    assert not weights.requires_grad


def test_a_recomputed_forward_adds_its_loss_once() -> None:
    gradients = []
    for recompute in (False, True):
        balanced = router(Balance(sequence_loss=1.0))
        x = samples().requires_grad_()
        _, weights = checkpoint(balanced, x, use_reentrant=False) if recompute else balanced(x)
        weights.square().sum().backward()
        gradients.append((balanced.weight.grad, x.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.0, atol=0.0)
