"""Low-rank adapters on layouts: the numbers of the user's model with the formula in plain torch,
and a frozen base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshwright.adapters.attach
import meshwright.model.build
import meshwright.tensor_parallel.plan
from meshwright.adapters.attach import is_adapter
from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.config.rules import RULES
from meshwright.model.build import configured_model
from meshwright.parameters import ParameterInfo
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import merge
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    References,
    assert_agrees,
    model_config,
    prove,
    size_for,
)
from tests.support.errors import raises
from tests.support.marks import long_row
from tests.support.run import nothing, run_broken

BLOCKS = ["block*.attention.*", "block*.mlp.*"]
ALL = [*BLOCKS, "embedding.tokens", "head"]
"""Of the Llama: in the GPT-2 the last two are tied."""


def adapted(
    model: str, layout: str, targets: list[str] = BLOCKS, rank: int = 3, **more: Any
) -> tuple[RunConfig, int]:
    """A small model with adapters of a rank that no degree divides, and the samples of a step."""
    size = size_for(parse_layout(layout))
    adapter = {"rank": rank, "alpha": 8.0, "targets": targets, "dropout": 0.1, **more}
    return model_config(model, size).replace(adapter=adapter), size.global_batch


@pytest.mark.parametrize(
    ("model", "layout", "targets", "dtype"),
    [
        long_row("llama", "pp2,tp2,zb_h1,sequence", ALL, "float64"),
        long_row("llama", "dp2,tp2,full", ALL, "float64"),
        ("gpt2", "dp2,zero3,mbs2", BLOCKS, "float64"),
        LATER("gpt2", "tp4,sequence", BLOCKS, "float64"),
        LATER("gpt2", "dp2,pp2,tp2,zero2,sequence", BLOCKS, "float64"),
        LATER("llama", "dp2,zero1,pp2,interleaved_1f1b", ALL, "float64"),
        LATER("llama", "pp2,zb_v,tp2,full", ALL, "float64"),
        LATER("llama", "dp2,zero3,tp2,sequence", ALL, "float32"),
        LATER("gpt2", "dp4,zero0", BLOCKS, "float64"),
        LATER("gpt2", "pp2,tp2,sequence,selective", BLOCKS, "bfloat16"),
        LATER("llama", "pp4,v_half", ALL, "float64"),
        LATER("t5", "dp2,tp2", ["*.q", "*.up"], "float64"),
    ],
)
def test_numbers_of_one_plain_process(
    model: str, layout: str, targets: list[str], dtype: str, pool: RankPool, references: References
) -> None:
    config, global_batch = adapted(model, layout, targets)
    chosen = parse_layout(layout)
    assert_agrees(config, chosen, pool, references, global_batch=global_batch, steps=2, dtype=dtype)


@pytest.mark.long
def test_rank_above_tp_and_above_the_width(pool: RankPool, references: References) -> None:
    config, global_batch = adapted("llama", "tp2,sequence", ALL, rank=41, init="gaussian")
    layout = parse_layout("tp2,sequence")
    assert prove(
        config, layout, pool, references, global_batch=global_batch, steps=2, twice=False
    ).passed


def found_by(
    config: RunConfig,
    layout: str,
    global_batch: int,
    pool: RankPool,
    change: Any = None,
    steps: int = 2,
) -> Any:
    """What the ranks of a layout find in these steps; ``change``: of the code, in each rank."""
    chosen = parse_layout(layout)
    text = layout_config(config, chosen, global_batch, "float64").model_dump_json()
    return merge(pool.run(run_broken, chosen.size, change or nothing, text, steps))


def test_a_first_stage_without_adapters_gets_no_gradients_and_the_base_keeps_its_bits(
    pool: RankPool, references: References
) -> None:
    config, global_batch = adapted("gpt2", "pp2", ["block1.mlp.up"])
    layout = parse_layout("pp2")
    spec = draw_blueprint(layout_config(config, layout, global_batch, "float64")).boundaries[0]
    assert not spec.with_gradient
    assert_agrees(config, layout, pool, references, global_batch=global_batch, steps=2)
    numbers = found_by(config, "pp2", global_batch, pool)
    same = {
        name for name, first in numbers.initial.items() if torch.equal(first, numbers.weights[name])
    }
    assert same == {name for name in numbers.initial if not is_adapter(name)}
    assert set(numbers.gradients) == {name for name in numbers.initial if is_adapter(name)}


def not_summed(patch: pytest.MonkeyPatch) -> None:
    """The gradients of adapters are left as partial sums over tp."""
    info = ParameterInfo

    def made(
        name: str, shape: tuple[int, ...], part: Any = None, partial_sum: bool = False
    ) -> ParameterInfo:
        return info(name, shape, part, partial_sum and not is_adapter(name))

    patch.setattr(meshwright.tensor_parallel.plan, "ParameterInfo", made)


def freezing_lost(patch: pytest.MonkeyPatch) -> None:
    """The base is trained with the adapters."""
    patch.setattr(meshwright.model.build, "freeze_base", lambda model, adapters: None)


def not_scaled(patch: pytest.MonkeyPatch) -> None:
    """The factor alpha / rank is left out."""
    patch.setattr(meshwright.adapters.attach, "factor_of", lambda config: 1.0)


@pytest.mark.parametrize(
    ("change", "layout", "named"),
    [
        long_row(not_summed, "tp2,sequence", "gradients of step 1 differ in"),
        (freezing_lost, "dp2", "weights after 2 steps differ"),
        LATER(not_scaled, "dp2", "loss of step 2 is"),
    ],
)
def test_traps_are_caught_and_named(
    change: Callable[[pytest.MonkeyPatch], None],
    layout: str,
    named: str,
    pool: RankPool,
    references: References,
) -> None:
    config, global_batch = adapted("llama", layout, ALL)
    expected = references.expected(config, global_batch, 2, "float64")
    numbers = found_by(config, layout, global_batch, pool, change)
    problems = compare(layout, numbers, None, expected.findings, TOLERANCES["float64"]).problems
    assert any(named in problem for problem in problems), problems


def test_first_values_do_not_depend_on_other_adapters() -> None:
    one = configured_model(adapted("llama", "tp2", ["block1.mlp.down"])[0])
    all_of_them = configured_model(adapted("llama", "tp2", ALL)[0])
    name = "block1.mlp.down.lora_a.weight"
    assert torch.equal(one.initial(name), all_of_them.initial(name)) and one.initial(name).std() > 0
    assert not one.initial("block1.mlp.down.lora_b.weight").any()
    assert not all_of_them.initial("embedding.tokens.lora_a.weight").any()


def ruled() -> nn.Sequential:
    """A model with a layer that a function splits, and an embedding that is split by features."""
    model = nn.Sequential()
    model.add_module("table", nn.Embedding(5, 4))
    model.add_module("up", nn.Sequential(nn.Linear(4, 4)))
    model.add_module("down", nn.Linear(4, 4))
    model.sharding_plan = {"table": "column", "up": lambda layer, tp_rank, tp: None, "down": "row"}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("builder", "target", "code", "named"),
    [
        (
            "meshwright_models.gpt2:build",
            "block*.atention.qkv",
            "MW-PLACEMENT-001",
            "near names: block0.attention.qkv",
        ),
        ("meshwright_models.gpt2:build", "head", "MW-MODEL-041", "shared with another module"),
        (
            "tests.framework.adapters.test_attach:ruled",
            "up.0",
            "MW-MODEL-041",
            "a function of the sharding_plan",
        ),
        (
            "tests.framework.adapters.test_attach:ruled",
            "table",
            "MW-MODEL-041",
            "features are split",
        ),
    ],
)
def test_targets_that_cannot_be_adapted(builder: str, target: str, code: str, named: str) -> None:
    config = adapted("gpt2", "tp2", [target])[0]
    options = config.model.options if "gpt2" in builder else {}
    with raises(code, named):
        configured_model(config.replace(model={"builder": builder, "options": options}))


def test_a_wide_pattern_of_the_plan_does_not_take_the_adapters() -> None:
    model = configured_model(
        adapted("gpt2", "tp2", ["down"])[0].replace(
            model={"builder": f"{__name__}:wide", "options": {}}
        )
    )
    assert model.plan == {
        "up": "column",
        "down": "row",
        "down*.lora_a": "row",
        "down*.lora_dropout": "features",
    }


def wide() -> nn.Sequential:
    """Return a model whose plan has a pattern that would match what lies below its target."""
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 4))
    model.add_module("down", nn.Linear(4, 4))
    model.sharding_plan = {"up": "column", "down*": "row"}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("given", [{"rank": 4}, {"targets": ["head"]}])
def test_rank_and_targets_belong_together(given: dict[str, Any]) -> None:
    config = model_config("gpt2", size_for(parse_layout("dp1"))).replace(adapter=given)
    assert [rule.code for rule in RULES if rule.check(config)] == ["MW-CONFIG-066"]


def test_the_plan_of_a_rank_counts_adapters_as_trained_and_no_weight_gradients_of_the_base() -> (
    None
):
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.planner.kernels import ExecutionOptions
    from meshwright_plan.planner.model_cache import ModelCache

    config = layout_config(adapted("llama", "tp2")[0], parse_layout("tp2"), 4, "float64")
    cache, blueprint = (
        ModelCache(config, ExecutionOptions(fuses_any_attention=False)),
        draw_blueprint(config),
    )
    local = {name: torch.Size(info.local_shape).numel() for name, info in blueprint.infos.items()}
    elements = cache.total_elements(2, False)
    assert elements.trained == sum(numel for name, numel in local.items() if is_adapter(name))
    assert elements.frozen == sum(numel for name, numel in local.items() if not is_adapter(name))
    assert cache.flops_per_step(config) == blueprint.flops_per_step
    layers = configured_model(config).layers
    linears = [
        each.weight
        for each in layers.modules()
        if isinstance(each, nn.Linear) and not each.weight.requires_grad
    ]
    tokens = 4 * config.data.sequence_length
    trained = layout_config(
        adapted("llama", "tp2")[0].replace(adapter={"rank": 0}), parse_layout("tp2"), 4, "float64"
    )
    added = 6.0 * tokens * sum(p.numel() for n, p in layers.named_parameters() if is_adapter(n))
    saved = 2.0 * tokens * sum(weight.numel() for weight in linears)
    expected = draw_blueprint(trained).flops_per_step + added - saved
    assert blueprint.flops_per_step == pytest.approx(expected, rel=0.01)
