"""Which weights of a model are whole matrices, by its declaration: a list for each model,
and what is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import nn

from meshwright.config import RunConfig
from meshwright.model.build import configured_model
from meshwright.optimizer.matrix_plan import Matrix
from meshwright.optimizer.matrix_plan import matrices_of as matrices_in
from meshwright.parameters import ParameterInfo, Slice
from tests.support.errors import raises

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 4,
    "max_sequence_length": 8,
}


def config_of(builder: str, options: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"builder": builder, "options": options, **sections.pop("model", {})},
            "data": {"train": "random", "sequence_length": 8},
            "optimizer": {"name": "muon"},
            **sections,
        }
    )


def matrices_of(builder: str, **options: Any) -> dict[str, tuple[int, ...]]:
    return configured_model(config_of(f"meshwright_models.{builder}:build", options)).matrices


def test_gpt2() -> None:
    """q, k and v of each head in turn; embeddings, positions and the tied head are AdamW's."""
    assert matrices_of("gpt2", **SIZES) == {
        "block0.attention.qkv.weight": (4, 4, 4),
        "block0.attention.out.weight": (),
        "block0.mlp.up.weight": (),
        "block0.mlp.down.weight": (),
    }


def test_llama() -> None:
    """Two query heads, a key and a value for each group; gate and up in blocks."""
    assert matrices_of("llama", **SIZES, num_kv_heads=2, ffn_size=24, qk_norm=True) == {
        "block0.attention.qkv.weight": (8, 4, 4),
        "block0.attention.out.weight": (),
        "block0.mlp.gate_up.weight": (12, 12),
        "block0.mlp.down.weight": (),
    }


def test_experts_are_batches_of_matrices() -> None:
    """Gate and up of each expert are two; the router is AdamW's."""
    moe = {
        "num_experts": 4,
        "top_k": 2,
        "expert_ffn_size": 6,
        "shared_ffn_size": 8,
        "first_dense": 1,
    }
    sizes = SIZES | {"num_layers": 2}
    found = matrices_of("llama", **sizes, num_kv_heads=2, ffn_size=24, moe=moe)
    assert {name: rows for name, rows in found.items() if "block1.mlp" in name} == {
        "block1.mlp.experts.gate_up": (6, 6),
        "block1.mlp.experts.down": (),
        "block1.mlp.shared.gate_up.weight": (4, 4),
        "block1.mlp.shared.down.weight": (),
    }
    info = ParameterInfo("gate_up", (4, 12, 16), Slice(0, 2, 4, 2, over="ep"), matrix=(6, 6))
    assert [(each.place, each.part, each.shape) for each in matrices_in(info)] == [
        (index, part, (6, 16)) for index in (0, 1) for part in (0, 1)
    ]


def batched(matrices: Any = None) -> nn.Sequential:
    """Return a convolution, whose weight of three dims no sharding plan calls experts,
    before the layers of ``declared``.
    """
    model: Any = nn.Sequential(
        OrderedDict(conv=nn.Conv1d(4, 6, 3), **dict(declared().named_children()))
    )
    model.matrices = matrices
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("matrices", "expected"), [({"conv": "whole"}, ()), ({"conv": (1, 3)}, (1, 3)), ({}, None)]
)
def test_weights_of_three_dims_are_matrices_where_declared(
    matrices: Any, expected: tuple[int, ...] | None
) -> None:
    config = config_of("tests.framework.model.test_matrices:batched", {"matrices": matrices})
    assert configured_model(config).matrices.get("conv.weight") == expected


def test_modules_of_multi_token_prediction_are_blocks_too() -> None:
    found = matrices_of("llama", **SIZES, num_kv_heads=2, ffn_size=24, mtp_layers=1)
    assert (
        found["mtp0.block.attention.qkv.weight"] == (8, 4, 4) and found["mtp0.project.weight"] == ()
    )
    assert not [name for name in found if "tokens" in name or name.startswith("head")]


@pytest.mark.parametrize("gated", [False, True])
def test_t5(gated: bool) -> None:
    found = matrices_of(
        "t5", vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, gated=gated, tied=not gated
    )
    assert (
        found["decoder0.attention.qkv.weight"]
        == found["encoder0.attention.qkv.weight"]
        == (4, 4, 4)
    )
    assert (
        found["decoder0.cross_attention.kv.weight"] == (4, 4)
        and found["decoder0.cross_attention.q.weight"] == ()
    )
    assert found["encoder0.mlp.up.weight"] == ((16, 16) if gated else ())
    assert not [
        name for name in found if "relative_bias" in name or "tokens" in name or "head" in name
    ]


def test_the_rows_of_q_are_those_that_attention_reads_as_q() -> None:
    """The declaration against the forward's own view, for grouped queries."""
    model = configured_model(
        config_of("meshwright_models.llama:build", {**SIZES, "num_kv_heads": 2, "ffn_size": 24})
    )
    name = "block0.attention.qkv.weight"
    rows = torch.arange(32)[:, None]
    groups = rearrange(rows, "(g r d) one -> g r d one", g=2, r=4)  # two queries, a key and a value
    info = ParameterInfo(name, (32, 1), matrix=model.matrices[name])
    for part, expected in enumerate((groups[:, :2], groups[:, 2], groups[:, 3])):
        matrix = Matrix(info, part)
        found = [row for row in range(32) if matrix.rows_before(row + 1) > matrix.rows_before(row)]
        assert found == expected.flatten().tolist()


def test_a_model_without_a_declaration() -> None:
    """Numbered layers of nn: the embedding and the last linear are AdamW's, and so are biases."""
    found = configured_model(config_of("tests.support.builders:plain", {})).matrices
    assert found == {"1.weight": (), "3.weight": ()}


def test_other_optimizers_have_none() -> None:
    config = config_of("meshwright_models.gpt2:build", SIZES, optimizer={"name": "adamw"})
    assert configured_model(config).matrices == {}


def test_frozen_weights_have_none() -> None:
    groups = [{"names": ["block0.mlp.*"], "frozen": True}]
    config = config_of("meshwright_models.gpt2:build", SIZES, model={"parameter_groups": groups})
    assert sorted(configured_model(config).matrices) == [
        "block0.attention.out.weight",
        "block0.attention.qkv.weight",
    ]


def declared(matrices: Any = None) -> nn.Sequential:
    """Return two linears between an embedding and a head, and a declaration."""
    model: Any = nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(8, 4), a=nn.Linear(4, 6), b=nn.Linear(6, 4), head=nn.Linear(4, 8)
        )
    )
    model.matrices = matrices
    return model  # type: ignore[no-any-return]


def found_in(matrices: Any) -> dict[str, tuple[int, ...]]:
    return configured_model(
        config_of("tests.framework.model.test_matrices:declared", {"matrices": matrices})
    ).matrices


def test_entries_of_a_declaration() -> None:
    """By module or parameter, the first match counts; a list will do, as JSON has no tuples."""
    assert found_in({"a": [1, 2], "head": "whole", "b.weight": "adamw", "*": "whole"}) == {
        "embedding.weight": (),
        "a.weight": (1, 2),
        "head.weight": (),
    }


@pytest.mark.parametrize(
    ("matrices", "code", "said"),
    [
        ({"a": "adamw", "b": "adamw"}, "MW-MODEL-042", "no matrix to step as a whole"),
        (
            {"aa": (3,)},
            "MW-PLACEMENT-001",
            "'aa' matches no weight of two or three dims of the model",
        ),
        ({"a": (4,)}, "MW-MODEL-045", "a.weight, which has 6 rows, (4,)"),
        ({"a": ()}, "MW-MODEL-045", "whose sum divides the rows"),
        ({"a": "each"}, "MW-MODEL-045", "'each'"),
        ({"a": None}, "MW-MODEL-045", "6 rows, None"),
        ({"a": (True, 5)}, "MW-MODEL-045", "(True, 5)"),
        ({"a": {"q": 6}}, "MW-MODEL-045", "{'q': 6}"),
        ({3: (6,)}, "MW-PLACEMENT-001", "model.matrices: 3 matches no weight"),
        ({"a": (3, -1)}, "MW-MODEL-045", "(3, -1)"),
        ([("a", (3,))], "MW-MODEL-019", "model.matrices is a list"),
    ],
)
def test_declarations_that_fit_no_model_are_refused(matrices: Any, code: str, said: str) -> None:
    with raises(code, said):
        found_in(matrices)


def test_mup_is_for_adamw() -> None:
    options = {**SIZES, "mup_base_size": 8}
    with raises("MW-MODEL-043", "has an eps_factor"):
        configured_model(config_of("meshwright_models.gpt2:build", options))
