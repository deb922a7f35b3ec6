"""Tensor parallelism by hand, in one process: slices by the plan,
partial results summed or put side by side.

What the framework does with collectives is here a sum over a list; it proves that the fused layouts
can be cut.
"""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn

from meshwright_models import decoder, gpt2, llama


def gpt2_8_heads() -> nn.Sequential:
    return gpt2.build(
        vocab_size=96,
        hidden_size=32,
        num_layers=2,
        num_heads=8,
        max_sequence_length=16,
        dropout=0.0,
    )


def llama_4_groups() -> nn.Sequential:
    return llama.build(96, 32, 2, num_heads=8, num_kv_heads=4, ffn_size=40, max_sequence_length=16)


def llama_many_heads() -> nn.Sequential:
    return llama.build(
        96, 48, 2, num_heads=8, num_kv_heads=8, ffn_size=56, max_sequence_length=16, tied=True
    )


def nemotron_4_groups() -> nn.Sequential:
    return decoder.build(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_size": 40,
        },
        **{
            "max_sequence_length": 16,
            "norm": "layer_norm",
            "mlp": "squared_relu",
            "rotary_share": 0.5,
        },
        **{"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    )


BUILDERS = [gpt2_8_heads, llama_4_groups, llama_many_heads, nemotron_4_groups]


def kind_of(model: nn.Sequential, name: str) -> str:
    kinds = [kind for pattern, kind in model.sharding_plan.items() if fnmatchcase(name, pattern)]
    assert len(kinds) <= 1, f"{name} matches more than one pattern"
    return kinds[0] if kinds else "replicate"


def part_of(model: nn.Sequential, tp_rank: int, tp: int) -> nn.Sequential:
    """Return a copy that holds only what tp rank ``tp_rank`` holds.
    The bias of a row module is left to rank 0.
    """
    part = copy.deepcopy(model)
    for name, module in part.named_modules():
        kind = kind_of(model, name)
        if kind in ("column", "vocab", "row"):
            dim = 1 if kind == "row" else 0
            module.weight = nn.Parameter(module.weight.detach().chunk(tp, dim)[tp_rank].clone())
            if getattr(module, "bias", None) is not None:
                if kind == "row":
                    module.bias = nn.Parameter(module.bias.detach() * (tp_rank == 0))
                else:
                    module.bias = nn.Parameter(module.bias.detach().chunk(tp)[tp_rank].clone())
    return part


def split_forward(parts: list[nn.Sequential], ids: Tensor) -> Tensor:
    """(B, S) -> (B, S, V): each residual branch is a sum over the parts,
    the logits stand side by side.
    """
    rows = parts[0].embedding.tokens.num_embeddings // len(parts)
    x = torch.zeros(())
    for tp_rank, part in enumerate(parts):
        local = ids - tp_rank * rows
        mine = (local >= 0) & (local < rows)
        x = x + part.embedding.tokens(local.where(mine, 0)) * mine[..., None]
    if parts[0].embedding.positions is not None:
        x = x + parts[0].embedding.positions(torch.arange(ids.shape[1]))
    for name, whole in parts[0].named_children():
        if name.startswith("block"):
            blocks = [part.get_submodule(name) for part in parts]
            h = whole.attention_norm(x)
            x = x + sum(block.attention(h) for block in blocks)
            h = whole.mlp_norm(x)
            x = x + sum(block.mlp(h) for block in blocks)
    x = parts[0].norm(x)
    return torch.cat([part.head(x) for part in parts], dim=-1)


def made_in_float64(build) -> nn.Sequential:
    torch.manual_seed(0)
    model = build().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model


@torch.no_grad()
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("build", BUILDERS)
def test_the_parts_add_up_to_the_whole(build, tp: int) -> None:
    model = made_in_float64(build)
    ids = torch.randint(96, (2, 9))
    expected = model(ids)
    found = split_forward([part_of(model, tp_rank, tp) for tp_rank in range(tp)], ids)
    assert (found - expected).norm() / expected.norm() < 1e-12


@pytest.mark.parametrize("build", BUILDERS)
def test_gradients_of_the_parts_are_slices_of_the_whole(build) -> None:
    model = made_in_float64(build)
    ids = torch.randint(96, (2, 9))
    model(ids).pow(2).mean().backward()
    parts = [part_of(model, tp_rank, 2) for tp_rank in range(2)]
    split_forward(parts, ids).pow(2).mean().backward()
    for pattern, kind in model.sharding_plan.items():
        if kind in ("column", "row"):
            name = pattern.replace("*", "1") + ".weight"
            found = torch.cat(
                [part.get_parameter(name).grad for part in parts], dim=1 if kind == "row" else 0
            )
            expected = model.get_parameter(name).grad
            assert (found - expected).norm() / expected.norm() < 1e-10, name


class Scale(nn.Module):
    """Stands for a dropout mask: one factor per head, heads in dim 1."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == len(self.factors)
        return x * self.factors[:, None, None]


@torch.no_grad()
@pytest.mark.parametrize("build", BUILDERS)
def test_a_mask_over_heads_is_cut_as_the_heads_are(build) -> None:
    """The plan's ``heads``: rank r's slice of the whole mask, contiguous along dim 1."""
    model = made_in_float64(build)
    x = torch.randn(2, 9, model.embedding.tokens.embedding_dim, dtype=torch.float64)
    factors = torch.rand(8, dtype=torch.float64)
    parts = [part_of(model, tp_rank, 2) for tp_rank in range(2)]
    for a_model, mask in zip([model, *parts], [factors, factors[:4], factors[4:]], strict=True):
        a_model.block0.attention.drops = True
        a_model.block0.attention.dropout = Scale(mask)
        assert kind_of(model, "block0.attention.dropout") == "heads"
    expected = model.block0.attention(x)
    found = sum(part.block0.attention(x) for part in parts)
    assert (found - expected).norm() / expected.norm() < 1e-12


@pytest.mark.parametrize("build", BUILDERS)
def test_every_split_module_exists_and_says_what_divides_it(build) -> None:
    model = build()
    names = [name for name, _ in model.named_modules()]
    for pattern in [*model.sharding_plan, *model.divisible]:
        assert any(fnmatchcase(name, pattern) for name in names), f"{pattern} matches nothing"
    split = {pattern for pattern, kind in model.sharding_plan.items() if kind in ("column", "row")}
    assert split == set(model.divisible)
    for pattern, units in model.divisible.items():
        module = model.get_submodule(pattern.replace("*", "0"))
        length = module.weight.shape[1 if model.sharding_plan[pattern] == "row" else 0]
        assert length % units == 0, (pattern, length, units)


@torch.no_grad()
def test_more_ranks_than_groups_is_what_divisible_is_for() -> None:
    """tp = 8 on 4 key-value groups cuts through a group: the rows are no attention any more."""
    model = made_in_float64(llama_4_groups)
    assert model.divisible["block*.attention.qkv"] == 4
    with pytest.raises(Exception, match=r"[Ss]hape|divisible|rearrange"):
        split_forward(
            [part_of(model, tp_rank, 8) for tp_rank in range(8)], torch.randint(96, (2, 9))
        )


def test_ffn_that_the_groups_do_not_divide_says_so() -> None:
    model = llama.build(96, 32, 1, num_heads=8, num_kv_heads=4, ffn_size=42, max_sequence_length=16)
    assert (model.divisible["block*.mlp.gate_up"], model.divisible["block*.mlp.down"]) == (2, 42)
