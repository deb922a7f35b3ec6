"""T5 split over tp by its own plan gives the losses and gradients of the whole,
masks of dropout included.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.seeding import SeededDropout, seed_dropouts
from meshwright.tensor_parallel.check import check_plan
from meshwright.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from meshwright.tensor_parallel.layers import ColumnLinear, RowLinear, VocabEmbedding, VocabHead
from meshwright.tensor_parallel.plan import apply
from meshwright.tensor_parallel.whole_layers import ColumnEmbedding
from meshwright_launch.pool import RankPool
from meshwright_models import t5
from tests.framework.tensor_parallel.ranks_of_tp import close, fill, lonely_group, summed, tp_group
from tests.support.errors import has_code

B, SE, SD, V = 2, 12, 8, 31


def small(**options: Any) -> nn.Sequential:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 3,
        "ffn_size": 20,
    }
    return t5.build(V, **{**sizes, "num_buckets": 6, "max_distance": 5, **options})


def samples() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = {
        name: torch.randint(1, V, (B, length), generator=generator)
        for name, length in (("encoder_ids", SE), ("decoder_ids", SD))
    }
    ids["encoder_ids"][0, 7:] = 0
    labels = torch.randint(V, (B, SD), generator=generator)
    labels[1, 5:] = -100
    return ids, labels


def split_rank(rank: int, tp: int, sequence: bool, options: dict[str, Any]) -> None:
    group = tp_group(rank, tp)
    plain = fill(small(**options)).double()
    current = seed_dropouts(plain, 5)
    split = copy.deepcopy(plain)
    for module in split.modules():
        if isinstance(module, SeededDropout):
            module.current = current
    current.sample_indices = torch.arange(B) + 40
    infos = apply(split, plain.sharding_plan, plain.tied_weights, group, sequence, plain.divisible)

    ids, labels = samples()
    want = F.cross_entropy(plain(ids).flatten(0, 1), labels.flatten(), reduction="none").view(B, SD)
    want.sum().backward()
    got = vocab_parallel_cross_entropy(split(ids), labels, group, V)
    got.sum().backward()
    close(got.detach(), want.detach(), 1e-11)
    for name, whole in plain.named_parameters(remove_duplicate=False):
        info, local = infos[name], split.get_parameter(name)
        assert torch.equal(local.detach(), info.take(whole.detach())), name
        gradient = summed(local.grad) if info.is_partial else local.grad
        close(gradient, info.take(whole.grad), 1e-10, name)
    for names in plain.tied_weights:
        assert len({id(split.get_parameter(name)) for name in names}) == 1


@pytest.mark.parametrize(
    ("tp", "sequence", "options"),
    [
        (2, False, {}),
        (2, True, {"gated": True, "tied": False, "dropout": 0.0}),
        (4, False, {"gated": True}),
        (4, True, {}),
    ],
)
def test_split_over_tp_it_gives_the_losses_and_gradients_of_the_whole(
    pool: RankPool, tp: int, sequence: bool, options: dict[str, Any]
) -> None:
    pool.run(split_rank, tp, sequence, options)


@pytest.mark.parametrize("sequence", [False, True])
def test_where_everything_is_on_a_rank(sequence: bool) -> None:
    with torch.device("meta"):
        model = small()
    seed_dropouts(model, 0)
    infos = apply(
        model,
        model.sharding_plan,
        model.tied_weights,
        lonely_group(1, 2),
        sequence,
        model.divisible,
    )
    kinds = {
        "encoder_embedding.tokens": VocabEmbedding,
        "encoder1.attention.relative_bias": ColumnEmbedding,
        "encoder1.attention.qkv": ColumnLinear,
        "decoder0.attention.out": RowLinear,
        "decoder0.cross_attention.q": ColumnLinear,
        "decoder0.cross_attention.kv": ColumnLinear,
        "decoder0.cross_attention.out": RowLinear,
        "decoder1.mlp.up": ColumnLinear,
        "decoder1.mlp.down": RowLinear,
        "head": VocabHead,
    }
    assert {name: type(model.get_submodule(name)) for name in kinds} == kinds
    assert infos["decoder1.attention.relative_bias.weight"].local_shape == (6, 2)
    partial = {name for name, info in infos.items() if info.is_partial}
    assert partial == ({name for name in infos if "norm" in name} if sequence else set())
    value = {"encoder_ids": torch.zeros(B, SE), "decoder_ids": torch.zeros(B, SD)}
    value = {name: ids.long().to("meta") for name, ids in value.items()}
    shapes = []
    for layer in list(model)[:-2]:
        value = layer(value)
        shapes += [
            tuple(leaf.shape) for name, leaf in value.items() if name in ("encoder", "decoder")
        ]
    part = 2 if sequence else 1
    assert set(shapes) == {(B, SE // part, 16), (B, SD // part, 16)}, (
        "masks and ids stay whole, activations are cut"
    )


def test_a_tp_that_does_not_divide_the_heads_is_refused() -> None:
    model = small(num_heads=6)
    with pytest.raises(ModelError, check=has_code("MW-TP-002")) as caught:
        check_plan(model, model.sharding_plan, 4, False, model.divisible)
    said = str(caught.value)
    assert (
        "relative_bias (column" in said
        and "6 x 6" in said
        and "its 6 features cannot be split over" in said
    )
    assert "encoder0.attention.qkv" in said and "use a tp of 1, 2, 3, 6" in said
