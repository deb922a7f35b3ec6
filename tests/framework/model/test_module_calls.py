"""A module that a layer uses without calling it: what is placed on it would have no effect,
or a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright.pipeline.plan.describe
from meshwright.blueprint import draw_blueprint
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.plain_adapter import use_adapters
from meshwright.verify.plain_fp8 import use_fp8
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of
from tests.support.errors import raises

D, V, S, HEADS = 16, 32, 8, 2
Use = Callable[["Block", Tensor], Tensor]


class Core(nn.Module):
    """Attention without a mask, (B, H, Q, d) x (B, H, S, d)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None = None) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Experts(nn.Module):
    """Two experts, each a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, D, D))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        y = torch.einsum("...d,...kde->...ke", x, self.weight[ids])
        return y.sum(-2) if weights is None else (y * weights.unsqueeze(-1)).sum(-2)


class Block(nn.Module):
    """Residual block; ``use`` says how it uses its linears."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.l, self.down, self.other = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.use = use
        if use == "attention":
            self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True)
        if use.startswith("core"):
            self.core = Core()
        if use.startswith("experts"):
            self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + USES[self.use](self, x)


def attend(block: Block, x: Tensor, core: Callable[..., Tensor]) -> Tensor:
    q, k, v = (
        each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for each in (block.l(x), block.down(x), block.other(x))
    )
    return core(q, k, v).transpose(1, 2).flatten(2)


def dispatched(block: Block, x: Tensor, experts: Callable[..., Tensor]) -> Tensor:
    ids = torch.zeros(*x.shape[:-1], 1, dtype=torch.long, device=x.device)
    return experts(block.other(x), ids, torch.ones_like(x[..., :1]))


USES: dict[str, Use] = {
    "called": lambda b, x: b.other(b.down(torch.tanh(b.l(x)))),
    "by keyword": lambda b, x: b.other(b.down(input=torch.tanh(b.l(input=x)))),
    "weight": lambda b, x: b.other(b.down(torch.tanh(F.linear(x, b.l.weight, b.l.bias)))),
    "product": lambda b, x: b.other(b.down(torch.tanh(x @ b.l.weight.t()))),
    "detached": lambda b, x: b.other(b.down(b.l(x))) * b.l.weight.data.norm(),
    "also": lambda b, x: b.other(b.down(torch.tanh(b.l(x)))) + F.linear(x, b.l.weight),
    "forward": lambda b, x: b.other(b.down(torch.tanh(b.l.forward(x)))),
    "never": lambda b, x: b.other(torch.tanh(x)),
    "eval only": lambda b, x: b.other(torch.tanh(x if b.training else b.l(x))),
    "training only": lambda b, x: b.other(torch.tanh(b.l(x) if b.training else x)),
    "both weights": lambda b, x: b.other(
        F.linear(torch.tanh(F.linear(x, b.l.weight)), b.down.weight)
    ),
    "attention": lambda b, x: b.other(b.attention(x, x, x, need_weights=False)[0]),
    "core": lambda b, x: attend(b, x, b.core),
    "core's function": lambda b, x: b.other(attend(b, x, F.scaled_dot_product_attention)),
    "core's forward": lambda b, x: b.other(attend(b, x, b.core.forward)),
    "experts": lambda b, x: dispatched(b, x, b.experts),
    "experts' weight": lambda b, x: dispatched(b, x, lambda y, ids, w: y @ b.experts.weight[0]),
}


def build(
    use: str, plan: dict[str, str] | None = None, selective: tuple[str, ...] = (), table: str = ""
) -> Any:
    model = nn.Sequential()
    model.add_module("embedding", Table(table) if table else nn.Embedding(V, D))
    model.add_module("block0", Block(use))
    model.add_module("block1", Block("called"))
    model.add_module("head", nn.Linear(D, V))
    given: Any = model
    given.sharding_plan, given.selective_recompute = plan or {}, list(selective)
    return model


class Table(nn.Module):
    """Embedding that is called, or whose table is read."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.tokens, self.use = nn.Embedding(V, D), use

    def forward(self, ids: Tensor) -> Tensor:
        if self.use == "weight":
            return F.embedding(ids, self.tokens.weight)
        y: Tensor = self.tokens.forward(ids) if self.use == "forward" else self.tokens(ids)
        return y


def draw(
    use: str, layout: str = "dp1", options: dict[str, Any] | None = None, **sections: Any
) -> None:
    """Draw the blueprint of a layout, as the launcher does before any rank starts."""
    config = config_of(f"{__name__}:build", {"use": use, **(options or {})}, S, **sections)
    draw_blueprint(layout_config(config, parse_layout(layout), 4, "float64"))


def adapter(*targets: str, **more: Any) -> dict[str, Any]:
    return {"rank": 2, "targets": list(targets), **more}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [["block0.l"], ["block*.l", "head"]])
@pytest.mark.parametrize(
    "use", ["weight", "product", "also", "forward", "never", "eval only", "both weights"]
)
def test_an_adapter_whose_target_is_not_called_is_refused(
    use: str, targets: list[str], dora: bool
) -> None:
    """Alone, where torch would find nothing to differentiate, and beside others,
    where B would stay zero.
    """
    with raises("MW-MODEL-051", "block0.l") as error:
        draw(use, adapter=adapter(*targets, dora=dora))
    assert "block1.l" not in error.value.message


def test_the_place_is_named_and_attention_of_torch_is_a_case_of_it() -> None:
    with raises("MW-MODEL-051", "block0.attention.out_proj", "block0.l") as error:
        draw("attention", adapter=adapter("block0.*"))
    assert re.search(r" at \S*test_module_calls\.py:\d+, `.*attention", error.value.message)


@pytest.mark.parametrize("use", ["called", "by keyword", "training only"])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_whose_target_is_called_is_accepted(use: str, dora: bool) -> None:
    draw(use, adapter=adapter("block*.l", "head", dora=dora))


def test_other_reads_of_a_weight_do_not_matter_without_an_adapter_on_it() -> None:
    draw("also", adapter=adapter("block*.down"))
    draw(
        "weight", "tp2", {"plan": {"block*.other": "column_whole"}}, adapter=adapter("block*.down")
    )


def test_float8_on_a_linear_whose_weight_is_read_is_refused() -> None:
    """Where the linear is never called; calls beside it, in the training dtype, are documented."""
    for use in ("weight", "product"):
        with raises("MW-MODEL-052", "block0.l") as error:
            draw(use, train={"linear": "fp8", "fp8_keep": ["head"], "steps": 10})
        assert "block1" not in error.value.message
    for use in ("called", "by keyword", "also", "forward", "eval only"):
        draw(use, train={"linear": "fp8", "fp8_keep": ["head"], "steps": 10})


def test_float8_that_no_layer_runs_is_refused() -> None:
    keep = ["head", "block1", "block0.down", "block0.other"]
    with raises("MW-MODEL-052"):
        draw("never", train={"linear": "fp8", "fp8_keep": keep, "steps": 10})


PLAN = {"block*.l": "column", "block*.down": "row"}


@pytest.mark.parametrize("layout", ["dp1", "tp2"])
@pytest.mark.parametrize(
    ("use", "options", "named"),
    [
        ("weight", {"plan": PLAN}, "block0.l"),
        ("both weights", {"plan": PLAN}, "block0."),
        ("detached", {"plan": PLAN}, "block0.l"),
        ("experts' weight", {"plan": {"*.experts": "experts"} | PLAN}, "block0.experts"),
        ("called", {"plan": {"embedding.tokens": "vocab"}, "table": "weight"}, "embedding.tokens"),
        ("called", {"plan": {"embedding.tokens": "vocab"}, "table": "forward"}, "embedding.tokens"),
        ("never", {"plan": {"block0.l": "gather"} | {"block1.l": "column"}}, "block0.l"),
    ],
)
def test_a_plan_for_a_module_that_is_not_called_is_refused_on_every_layout(
    use: str, options: dict[str, Any], named: str, layout: str
) -> None:
    with raises("MW-MODEL-053") as error:
        draw(use, layout, options)
    assert f"gives {named}" in error.value.message


@pytest.mark.parametrize("use", ["called", "by keyword", "forward", "eval only", "experts"])
def test_a_plan_for_modules_that_run_is_accepted(use: str) -> None:
    plan = {"*.experts": "experts"} if use == "experts" else {}
    draw(use, "tp2", {"plan": PLAN | plan})


@pytest.mark.parametrize(
    ("use", "is_right"), [("core", True), ("core's function", False), ("core's forward", False)]
)
def test_context_parallelism_needs_a_core_that_is_called(use: str, is_right: bool) -> None:
    """Otherwise each rank attends to its own tokens."""
    options = {"plan": {"embedding": "vocab", "block0.core": "context"}}
    if is_right:
        draw(use, "cp2", options)
    else:
        with raises("MW-CP-017"):
            draw(use, "cp2", options)


def test_recompute_of_a_part_that_does_not_run_is_refused() -> None:
    draw("called", "full", {"selective": ("block0.l",)})
    draw("never", "selective", {"selective": ("block*.l",)})
    with raises("MW-MODEL-054"):
        draw("never", "selective", {"selective": ("block0.l",)})


def test_calls_by_keyword_have_the_numbers_of_the_plain_model(pool: RankPool) -> None:
    options = {"use": "by keyword", "plan": PLAN | {"head": "vocab", "embedding": "vocab"}}
    config = config_of(f"{__name__}:build", options, S, adapter=adapter("block*.l", "block*.down"))
    assert_agrees(config, "tp2", pool, References(), global_batch=4, steps=2)


@pytest.mark.parametrize("use", ["weight", "also", "forward", "attention", "called"])
def test_the_plain_run_of_verify_adapts_the_weight_however_it_is_used(use: str) -> None:
    """So verify would differ from a layout that misses a use.
    An adapter is right if it equals the merged weight.
    """
    target = "attention.out_proj" if use == "attention" else "l"
    config = config_of(f"{__name__}:build", {}, S, adapter=adapter(f"block0.{target}", alpha=4.0))
    torch.manual_seed(0)
    model: nn.Sequential = build(use)
    x, merged = torch.randn(2, S, D), build(use)
    merged.load_state_dict(model.state_dict())
    use_adapters(model, config.adapter)
    target_module: Any = model.get_submodule(f"block0.{target}")
    a, b = target_module.lora_a.weight, nn.init.normal_(target_module.lora_b.weight)
    with torch.no_grad():
        merged.get_parameter(f"block0.{target}.weight").add_(2.0 * b @ a)
    torch.testing.assert_close(model[1](x), merged[1](x))
    model[1](x).square().sum().backward()
    assert b.grad.abs().sum() > 0


def test_the_plain_run_of_verify_has_no_float8_weight_to_read() -> None:
    model = build("weight")
    use_fp8(model, ["block0.l"])
    with pytest.raises(AssertionError, match="float8"):
        model[1](torch.randn(2, S, D))
    called = build("called")
    use_fp8(called, ["block0.l"])
    assert called[1](torch.randn(2, S, D)).isfinite().all()


def test_the_check_is_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it an adapter without effect, and a shard that is taken for the weight, pass."""
    monkeypatch.setattr(meshwright.pipeline.plan.describe, "check_calls", lambda *args: None)
    draw("weight", adapter=adapter("block0.l", "head"))
    draw("both weights", "tp2", {"plan": PLAN})
