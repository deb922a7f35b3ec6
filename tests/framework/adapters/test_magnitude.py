"""Weight-decomposed adapters (DoRA) on layouts:
the numbers of the formula on whole weights in plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright.adapters.magnitude
import meshwright.tensor_parallel.layers
from meshwright.adapters.attach import is_adapter
from meshwright.adapters.magnitude import MAGNITUDE, merged, row_norms
from meshwright.config import RunConfig
from meshwright.config.rules import RULES
from meshwright.model.build import configured_model
from meshwright.verify import compare, parse_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.adapters.test_attach import BLOCKS, adapted, found_by
from tests.framework.verify.cases import LATER, References, assert_agrees, model_config, size_for
from tests.support.errors import raises
from tests.support.marks import long_row

LINEARS = [*BLOCKS, "head"]
WHOLE = {"qk_norm": "whole"}


def decomposed(
    model: str, layout: str, targets: list[str], **options: Any
) -> tuple[RunConfig, int]:
    """Return a small model whose adapters have magnitudes, and the samples of a step."""
    config, global_batch = adapted(model, layout, targets, dora=True)
    return config.replace(model={"options": {**config.model.options, **options}}), global_batch


@pytest.mark.parametrize(
    ("model", "layout", "targets", "dtype", "options"),
    [
        long_row("llama", "pp2,tp2,zb_h1,sequence", LINEARS, "float64", {}),
        long_row("gpt2", "dp2,tp2,full", BLOCKS, "float64", {}),
        LATER("llama", "tp4,sequence", LINEARS, "float64", {"num_kv_heads": 2, "qkv_bias": True}),
        LATER("llama", "tp2,sequence", LINEARS, "float64", WHOLE),
        LATER("gpt2", "dp2,zero3,mbs2", BLOCKS, "float64", {}),
        LATER("gpt2", "dp2,pp2,tp2,zero2,sequence", BLOCKS, "float64", {}),
        LATER("llama", "dp2,zero1,pp2,interleaved_1f1b", LINEARS, "float64", {}),
        LATER("llama", "pp2,zb_v,tp2,full", LINEARS, "float64", {}),
        LATER("llama", "dp2,zero3,tp2,sequence", LINEARS, "float32", {}),
        LATER("gpt2", "pp2,tp2,sequence,selective", BLOCKS, "bfloat16", {}),
        LATER("llama", "cp2,tp2", LINEARS, "float64", {}),
        LATER("t5", "dp2,tp2", ["*.q", "*.up"], "float64", {}),
    ],
)
def test_numbers_of_one_plain_process(
    model: str,
    layout: str,
    targets: list[str],
    dtype: str,
    options: dict[str, Any],
    pool: RankPool,
    references: References,
) -> None:
    config, global_batch = decomposed(model, layout, targets, **options)
    chosen = parse_layout(layout)
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=3, dtype=dtype)


@pytest.mark.parametrize("layout", ["dp1", long_row("cp2,tp2,sequence")])
def test_on_linears_in_float8(layout: str, pool: RankPool, references: References) -> None:
    """The plain run multiplies by the base in float8 too."""
    config, global_batch = decomposed("llama", layout, BLOCKS)
    config = config.replace(train={"linear": "fp8", "fp8_keep": ["head"]})
    chosen = parse_layout(layout)
    assert_agrees(
        config, chosen, pool, references, global_batch=global_batch, steps=2, dtype="float64"
    )


def norm_of_the_shard(patch: pytest.MonkeyPatch) -> None:
    """The norm of a row is that of the columns which a rank holds."""
    patch.setattr(
        meshwright.tensor_parallel.layers.RowLinear, "whole_sums", lambda self, sums: sums
    )


def norm_of_the_base(patch: pytest.MonkeyPatch) -> None:
    """The direction is divided by the norm of the frozen row."""

    def norms(*args: Any) -> tuple[Tensor, Tensor]:
        before, _ = row_norms(*args)
        return before, before

    patch.setattr(meshwright.adapters.magnitude, "row_norms", norms)


def norm_with_gradient(patch: pytest.MonkeyPatch) -> None:
    """Backward goes through the norm of the direction."""

    def norms(module: Any, down: Tensor, up: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return row_norms(module, down, up, factor)[0], (module.weight + factor * up @ down).norm(
            dim=1
        )

    patch.setattr(meshwright.adapters.magnitude, "row_norms", norms)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        long_row(norm_of_the_shard, "dp2,tp2,full"),
        LATER(norm_of_the_base, "dp2,tp2,full"),
        LATER(norm_with_gradient, "dp2"),
    ],
)
def test_seeded_faults_are_caught(
    change: Any, layout: str, pool: RankPool, references: References
) -> None:
    config, global_batch = decomposed("gpt2", layout, BLOCKS)
    expected = references.expected(config, global_batch, 3, "float64")
    numbers = found_by(config, layout, global_batch, pool, change, 3)
    assert compare(layout, numbers, None, expected.findings, TOLERANCES["float64"]).problems


def test_first_values_change_nothing_and_merging_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (
        torch.randn(*each, generator=generator).double() for each in ((5, 4), (2, 4), (5, 2))
    )
    weight[3] = 0
    module = torch.nn.Linear(4, 5).double()
    module.weight.data.copy_(weight)
    before, after = row_norms(module, down, up, 1.5)
    assert torch.allclose(before, weight.norm(dim=1), rtol=1e-13)
    assert torch.allclose(after, (weight + 1.5 * up @ down).norm(dim=1), rtol=1e-13)
    assert torch.equal(*row_norms(module, down, 0 * up, 1.5))
    whole = merged(weight, 1.5 * up @ down, torch.full((5,), 0.25).double())
    assert torch.allclose(whole.norm(dim=1), weight.norm(dim=1) + 0.25, rtol=1e-13)
    assert torch.equal(merged(weight, 0 * weight, torch.zeros(5).double())[3], weight[3])


def test_embeddings_have_no_magnitudes_and_a_rank_is_needed() -> None:
    config, _ = decomposed("llama", "tp2", ["embedding.tokens"])
    with raises("MW-MODEL-041", "adapter.dora is for linears"):
        configured_model(config)
    alone = model_config("gpt2", size_for(parse_layout("dp1"))).replace(adapter={"dora": True})
    assert [rule.code for rule in RULES if rule.check(alone)] == ["MW-CONFIG-066"]


def test_magnitudes_are_vectors_of_the_adapter() -> None:
    model = configured_model(decomposed("llama", "tp2", LINEARS)[0])
    found = {name: p for name, p in model.layers.named_parameters() if name.endswith(MAGNITUDE)}
    assert all(is_adapter(name) and p.requires_grad and p.dim() == 1 for name, p in found.items())
    assert {"head.lora_magnitude", "block0.mlp.down.lora_magnitude"} <= set(found)
    assert not any(model.initial(name).any() for name in found)
