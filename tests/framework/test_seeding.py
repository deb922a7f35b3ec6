"""Randomness by name: dropout masks and seeds that know no rank, no order and no batch."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from meshwright.current import CurrentMicrobatch
from meshwright.seeding import SeededDropout, derive, restart_calls, seed_dropouts, seeded
from tests.support.errors import raises


def dropout(p: float = 0.25, name: str = "block0.dropout", seed: int = 7) -> SeededDropout:
    return SeededDropout(p, seed, name, CurrentMicrobatch())


def mask(module: SeededDropout, samples: list[int], *shape: int) -> Tensor:
    """(B, ...) True where kept, for these samples."""
    module.current.sample_indices = torch.tensor(samples)
    return module.mask(torch.Size((len(samples), *shape)), torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------
# statistics


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    """Within five standard deviations of 1 - p, on 200,000 elements."""
    kept = mask(dropout(p), list(range(20)), 100, 100)
    assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())


def chi_square(counts: Tensor, expected: float) -> float:
    return float(((counts.double() - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_no_sample_row_or_column_is_favoured(dim: int) -> None:
    """Kept elements per index of each dim: chi-square with 63 degrees of freedom, mean 63,
    deviation 11.
    """
    p = 0.3
    kept = mask(dropout(p), list(range(64)), 64, 64)
    others = [d for d in range(3) if d != dim]
    dropped = (~kept).sum(dim=others)
    assert 20 < chi_square(dropped, p * 64 * 64) / (1 - p) < 120


def test_neighbours_are_independent() -> None:
    """Of all pairs of neighbours along each dim (p/2 + ..): four equal classes at p = 0.5;
    3 degrees of freedom.
    """
    kept = mask(dropout(0.5), list(range(32)), 64, 64).long()
    for dim in range(3):
        length = kept.shape[dim]
        pair = 2 * kept.narrow(dim, 0, length - 1) + kept.narrow(dim, 1, length - 1)
        counts = torch.bincount(pair.flatten(), minlength=4)
        assert chi_square(counts, pair.numel() / 4) < 25


def differ_like_strangers(a: Tensor, b: Tensor) -> bool:
    """Two masks of p = 0.5 agree in half of their elements, within five standard deviations."""
    agree = float((a == b).double().mean())
    return abs(agree - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


def test_masks_differ_between_layers_samples_and_seeds() -> None:
    one = mask(dropout(0.5), [3], 50, 50)
    assert differ_like_strangers(one, mask(dropout(0.5, "block1.dropout"), [3], 50, 50))
    assert differ_like_strangers(one, mask(dropout(0.5, seed=8), [3], 50, 50))
    for sample in (4, 2, 3 + 2**20, 3 + 2**32):
        assert differ_like_strangers(one, mask(dropout(0.5), [sample], 50, 50)), sample


# -------------------------------------------------------------------------------------------------
# the same everywhere


def test_a_mask_does_not_know_its_batch() -> None:
    """A sample's mask is the same alone, in any company, in any place."""
    module = dropout()
    together = mask(module, [5, 17, 2, 1000], 6, 8)
    for place, sample in enumerate([5, 17, 2, 1000]):
        assert torch.equal(mask(module, [sample], 6, 8)[0], together[place])
    assert torch.equal(mask(module, [1000, 2, 17, 5], 6, 8), together.flip(0))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 5), (12, 3)])
def test_shards_are_slices_of_the_whole_mask(count: int, shape: tuple[int, ...]) -> None:
    """Heads of (B, H, S, S), or the sequence of (B, S, D), split over dim 1."""
    whole = mask(dropout(0.5), [3, 9], *shape)
    for index in range(count):
        module = dropout(0.5)
        module.shard = (1, index, count)
        part = mask(module, [3, 9], shape[0] // count, *shape[1:])
        assert torch.equal(part, whole.chunk(count, 1)[index])


def test_shards_of_another_dim() -> None:
    whole = mask(dropout(0.5), [3, 9], 5, 8)
    module = dropout(0.5)
    module.shard = (2, 1, 2)
    assert torch.equal(mask(module, [3, 9], 5, 4), whole[:, :, 4:])


def test_a_repeated_forward_draws_the_same_mask() -> None:
    """Also after others have drawn, and after torch's own generator has moved on:
    recomputation relies on it.
    """
    module = dropout(0.5)
    module.current.sample_indices = torch.tensor([1, 2])
    x = torch.ones(2, 5, 7)
    first = module(x)
    torch.rand(3)
    mask(dropout(0.5, "other"), [9], 4)
    module.current.sample_indices = torch.tensor([1, 2])
    restart_calls([module])
    assert torch.equal(module(x), first)


def test_a_golden_mask() -> None:
    """These very bits, on every machine and torch:
    whoever changes the draw changes everybody's resumed run.
    """
    module = SeededDropout(0.5, 1234, "block0.after_mlp", CurrentMicrobatch())
    bits = mask(module, [0, 41], 2, 8).flatten().tolist()
    assert "".join("x" if kept else "." for kept in bits) == GOLDEN_MASK


# -------------------------------------------------------------------------------------------------------
# as nn.Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    """Kept elements are scaled by 1 / (1 - p), the others are zero; so is their gradient."""
    module = dropout(0.25)
    kept = mask(module, [0, 1], 4, 16)
    x = torch.linspace(1, 2, 128).view(2, 4, 16).to(dtype).requires_grad_()
    y = module(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.detach(), (x.detach() * kept) / 0.75)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept.to(dtype) / 0.75)


def test_the_expected_value_is_the_input() -> None:
    """Within five standard deviations of the mean of 80,000 elements."""
    module = dropout(0.3)
    module.current.sample_indices = torch.arange(50)
    found = float(module(torch.ones(50, 40, 40, dtype=torch.float64)).mean())
    assert abs(found - 1.0) < 5 * math.sqrt(0.3 / 0.7 / 80_000)


def test_the_share_spreads_over_seeds_as_chance_does() -> None:
    """The share kept under 300 seeds, in standard deviations from 1 - p: mean 0, deviation 1."""
    shares = torch.stack(
        [mask(dropout(0.3, seed=seed), [0, 1], 20, 20).double().mean() for seed in range(300)]
    )
    z = (shares - 0.7) / math.sqrt(0.3 * 0.7 / 800)
    assert abs(float(z.mean())) < 5 / math.sqrt(300)
    assert 0.8 < float(z.std()) < 1.2


def test_evaluation_and_no_dropout_change_nothing() -> None:
    x = torch.ones(2, 3)
    assert dropout(0.5).eval()(x) is x
    assert dropout(0.0)(x) is x
    assert not dropout(1.0)(x).any()


def test_nobody_s_samples_are_a_mistake_of_ours() -> None:
    module = dropout(0.5)
    with pytest.raises(AssertionError):
        module(torch.ones(2, 3))


def test_every_dropout_of_a_model_gets_its_own_name() -> None:
    model = nn.Sequential(
        OrderedDict(first=nn.Dropout(0.1), block=nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2)))
    )
    current = seed_dropouts(model, 5)
    found = {name: m for name, m in model.named_modules() if isinstance(m, SeededDropout)}
    assert {name: (m.name, m.p) for name, m in found.items()} == {
        "first": ("first", 0.1),
        "block.1": ("block.1", 0.2),
    }
    assert all(m.current is current for m in found.values())
    assert len({int(m.key) for m in found.values()}) == 2


# ---------------------------------------------------------------------------------------------------------------
# seeds


def test_derive_is_the_same_everywhere() -> None:
    """Golden: another value would start every run anew."""
    assert derive(1234, "initialise", "embedding.tokens.weight") == GOLDEN_SEEDS[0]
    assert derive(0, "dropout", "block0.after_mlp") == GOLDEN_SEEDS[1]
    assert derive(1, "verify tokens", 41) == GOLDEN_SEEDS[2]


def test_derived_seeds_are_told_apart() -> None:
    """By each name, by where one ends and the next begins, and they fit into a generator."""
    seeds = [
        derive(s, *names)
        for s in (0, 1, 10)
        for names in ((), ("a",), ("a", "b"), ("ab",), ("a", 1), ("b", "a"))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeded_leaves_torch_s_generator_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with seeded(1, "a"):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    with seeded(1, "a"):
        assert torch.equal(torch.rand(4), inside)
    with seeded(1, "b"):
        assert not torch.equal(torch.rand(4), inside)


GOLDEN_SEEDS = (919651235255556329, 215670094662801338, 620952848131681351)
GOLDEN_MASK = "x...xx.........x.xxxxx.x.xxxx..."


def test_a_layer_that_computes_itself_again_is_refused() -> None:
    """Its second forward knows neither its samples nor how often the dropout was called in the
    first.
    """
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    current = seed_dropouts(layers, 3)
    current.sample_indices = torch.arange(2)
    found = torch.utils.checkpoint.checkpoint(
        layers, torch.ones(2, 4, requires_grad=True), use_reentrant=False
    )
    with raises("MW-RUN-031", "dropout 1"):
        found.sum().backward()
    current.is_recompute = True
    layers[1].num_calls = 0
    found = torch.utils.checkpoint.checkpoint(
        layers, torch.ones(2, 4, requires_grad=True), use_reentrant=False
    )
    layers[1].num_calls = 0
    found.sum().backward()


def test_a_dropout_on_rows_that_are_no_samples_says_so() -> None:
    """Tokens of all samples in one dim, as ``x.view(-1, D)`` makes them."""
    dropout = SeededDropout(
        0.5, 0, "block0.drop", CurrentMicrobatch(sample_indices=torch.arange(2))
    ).train()
    assert dropout(torch.ones(2, 3, 4)).shape == (2, 3, 4)
    for x in (torch.ones(6, 4), torch.ones(3, 2, 4), torch.ones(())):
        with raises("MW-MODEL-056") as error:
            dropout(x)
        assert "block0.drop" in error.value.message and "2 samples" in error.value.message
