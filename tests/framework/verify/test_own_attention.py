"""``attention = "module:function"`` of meshwright's models: the built-in numbers, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.model.builder import find_builder
from meshwright.model.own_attention import use_own_attention
from meshwright.run.trust import check_trusted
from meshwright.verify import layout_config, parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, model_config, size_for
from tests.support.errors import raises
from tests.support.marks import long_row

NAME = "tests.framework.verify.own_attention:attend"
SOME = f"{NAME}_some"
LATENT = {"kv_rank": 8, "nope_dim": 4, "rope_dim": 2, "v_dim": 6}
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "dropout": 0.0}


def own(model: str, layout: str, function: str = NAME) -> RunConfig:
    config = model_config(model, size_for(parse_layout(layout)))
    return config.replace(model={"attention": function})


@pytest.mark.parametrize(
    ("builder", "options"),
    [
        ("gpt2", {}),
        ("llama", {"num_kv_heads": 2, "ffn_size": 32, "sliding_window": 3}),
        ("llama", {"num_kv_heads": 4, "ffn_size": 32, "mla": LATENT}),
        ("decoder", {"num_kv_heads": 2, "ffn_size": 32, "sliding_window": 5}),
    ],
)
@pytest.mark.parametrize("has_documents", [False, True])
def test_it_gives_the_built_in_numbers(
    builder: str, options: dict[str, Any], has_documents: bool
) -> None:
    build = find_builder(f"meshwright_models.{builder}:build")
    models = []
    for attention in (None, NAME):
        torch.manual_seed(0)
        models.append(build(**SIZES, **options).double())
        assert use_own_attention(models[-1], attention).keys() == ({"cp"} if attention else set())
    tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 0] = starts[0, 3] = starts[1, 6] = True
    inputs = {"tokens": tokens, "starts": starts} if has_documents else tokens
    logits = [model(inputs) for model in models]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad(out.square().sum(), list(model.parameters()))
        for out, model in zip(logits, models, strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "layout", "function"),
    [
        ("llama", "tp2,sequence,pointwise", NAME),
        ("llama", "cp2,zero3", SOME),
        long_row("gpt2", "dp2,pp2,zb_h1", NAME),
        long_row("gpt2", "tp2,selective", NAME),
        long_row("gpt2", "cp2,tp2,heads,full", SOME),
        long_row("llama", "cp2,pp2", SOME),
    ],
)
def test_layouts_agree(model: str, layout: str, function: str, pool: RankPool) -> None:
    """GPT-2 with dropout of the probabilities."""
    config = own(model, layout, function)
    size = size_for(parse_layout(layout))
    assert_agrees(config, layout, pool, References(), global_batch=size.global_batch, steps=2)


def test_without_places_there_is_no_context_parallelism() -> None:
    layout = parse_layout("cp2")
    with raises("MW-RUN-004", NAME, "takes_places", "parallel.cp = 2"):
        draw_blueprint(layout_config(own("llama", "cp2"), layout, 4, "float32"))
    draw_blueprint(layout_config(own("llama", "cp2", SOME), layout, 4, "float32"))


@pytest.mark.parametrize(
    ("model", "path", "code"),
    [
        ("gpt2", f"{NAME}_all", "MW-CONFIG-010"),
        ("gpt2", "no_such_module:attend", "MW-CONFIG-008"),
        ("gpt2", f"{NAME}_wrongly", "MW-MODEL-062"),
        ("t5", NAME, "MW-MODEL-063"),
    ],
)
def test_a_function_that_does_not_fit(model: str, path: str, code: str) -> None:
    config = layout_config(own(model, "pp1", path), parse_layout("pp1"), 4, "float32")
    with raises(code, path):
        draw_blueprint(config)


def test_a_run_that_names_one_is_asked_for() -> None:
    """As for every named code: the function and its file, before anything is imported."""
    config = own("gpt2", "pp1", "planted.attention:attend")
    with raises("MW-RUN-030", "model.attention", "planted.attention:attend", "--trust-code"):
        check_trusted(config, "run/resolved.json")
    check_trusted(config, "run/resolved.json", trust_code=True)
    named = "--model.attention=planted.attention:attend"
    check_trusted(config, "run/resolved.json", [named])
