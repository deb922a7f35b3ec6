"""Weights, buffers and hooks that a model has at several places, or that a replaced module had."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import ParameterGroup, RunConfig
from meshwright.config.combinations.layout import parse_layout
from meshwright.model.build import build_model, configured_model
from meshwright.seeding import seed_dropouts
from meshwright.tensor_parallel.plan import apply
from meshwright.verify.layouts import layout_config
from tests.framework.tensor_parallel.ranks_of_tp import lonely_group
from tests.framework.verify.cases import config_of
from tests.support.errors import raises

HERE = "tests.framework.model.test_shared_state"
WIDTH, VOCAB = 8, 17


def parts(**layers: nn.Module) -> nn.Sequential:
    """Embedding, these layers and a head."""
    first, last = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    return nn.Sequential(OrderedDict(embedding=first, **layers, head=last))


def tied(order: str) -> nn.Sequential:
    """Return a tie whose canonical name is that of the first or of the last layer."""
    model = parts(mid=nn.Linear(WIDTH, WIDTH, bias=False))
    model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    names = ["embedding.weight", "head.weight"]
    model.tied_weights = [tuple(names if order == "first" else reversed(names))]  # type: ignore[assignment]
    model.initialise = lambda name, weight: weight.normal_()  # type: ignore[assignment]
    return model


def config(builder: str, **sections: Any) -> RunConfig:
    options = sections.pop("options", {})
    return config_of(f"{HERE}:{builder}", options, 8, **sections)


@pytest.mark.parametrize("order", ["first", "last"])
def test_adapters_freeze_a_tied_weight(order: str) -> None:
    adapted = config("tied", options={"order": order}).replace(
        adapter={"rank": 2, "targets": ["mid"]}
    )
    model = configured_model(adapted)
    named = model.layers.named_parameters(remove_duplicate=False)
    assert {name for name, each in named if each.requires_grad} == {
        "mid.lora_a.weight",
        "mid.lora_b.weight",
    }


def every_third(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"learning_rate_factor": 1 / 3}


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(
    "groups", [[ParameterGroup(names=["*"], learning_rate_factor=0.1)], f"{HERE}:every_third"]
)
def test_groups_reach_a_tied_weight(order: str, groups: Any) -> None:
    canonical = {"first": "embedding.weight", "last": "head.weight"}[order]
    found = configured_model(
        config("tied", options={"order": order}).replace(model={"parameter_groups": groups})
    ).groups
    assert set(found) == {canonical, "mid.weight"}


def half_frozen() -> nn.Sequential:
    """Return two parameters, declared as one weight; one of them requires no gradient."""
    model = parts()
    model.embedding.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.tied_weights = [("embedding.weight", "head.weight")]  # type: ignore[assignment]
    return model


def test_half_a_frozen_tie_is_refused() -> None:
    with raises("MW-MODEL-047", "embedding.weight"):
        build_model(f"{HERE}:half_frozen", {}, 0)


class Norm(nn.Module):
    """A linear and statistics."""

    def __init__(self, statistics: nn.BatchNorm1d | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bn = statistics or nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x).transpose(1, 2)).transpose(1, 2)


def shared_statistics() -> nn.Sequential:
    """Return one BatchNorm in two layers, its weights declared as tied."""
    one = nn.BatchNorm1d(WIDTH)
    model = parts(b=Norm(one), c=Norm(one))
    model.tied_weights = [(f"b.bn.{each}", f"c.bn.{each}") for each in ("weight", "bias")]  # type: ignore[assignment]
    return model


def repeated_layer() -> nn.Sequential:
    """Return the same layer twice."""
    one = Norm()
    model = parts(b=one, c=one)
    names = [name for name, _ in one.named_parameters()]
    model.tied_weights = [(f"b.{name}", f"c.{name}") for name in names]  # type: ignore[assignment]
    return model


def two_layers() -> nn.Sequential:
    """Statistics of their own."""
    return parts(b=Norm(), c=Norm())


@pytest.mark.parametrize("layout", ["", "pp2"])
@pytest.mark.parametrize("builder", ["shared_statistics", "repeated_layer", "two_layers"])
def test_running_buffers_at_two_places_are_refused(builder: str, layout: str) -> None:
    asked = layout_config(
        config(builder, batch={"micro_batch_size": 1}), parse_layout(layout), 4, "float32"
    )
    if builder == "two_layers":
        assert draw_blueprint(asked).running
        return
    with raises("MW-PIPELINE-044"):
        draw_blueprint(asked)


def test_a_seeded_dropout_has_the_hooks_of_the_one_before() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[0].register_forward_hook(
        lambda module, args, kwargs, output: output * 2, with_kwargs=True
    )
    model[0].register_full_backward_hook(lambda module, gi, go: seen.append("backward"))
    seed_dropouts(model, 7)
    model.eval()
    x = torch.ones(2, 3, requires_grad=True)
    output = model(x)
    output.sum().backward()
    assert torch.equal(output, 2 * x) and seen == ["before", "backward"]


def hooks_of(model: nn.Module) -> dict[str, list[int]]:
    """Number of hooks of each kind."""
    kinds = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return {
        name: [len(vars(each)[kind]) for kind in kinds] for name, each in model.named_children()
    }


def test_a_split_module_has_the_hooks_of_the_one_before() -> None:
    """On meta with two ranks: no communication."""
    model = nn.Sequential(OrderedDict(up=nn.Linear(8, 12), down=nn.Linear(12, 8))).to("meta")
    model.up.register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.5,))
    model.up.register_full_backward_pre_hook(lambda module, go: (go[0] * 0.5,))
    model.down.register_forward_hook(
        lambda module, args, kwargs, output: output + kwargs.get("a", 1), with_kwargs=True
    )
    before = hooks_of(model)
    apply(model, {"up": "column", "down": "row"}, [], lonely_group(0, 2), False, {})
    assert type(model.up) is not nn.Linear and sum(map(sum, before.values())) == 4
    assert hooks_of(model) == before
    assert vars(model.up)["_is_full_backward_hook"] is True


def test_a_tie_of_a_partial_and_a_whole_gradient_is_refused() -> None:
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    model = nn.Sequential(OrderedDict(a=nn.LayerNorm(4), f=nn.LayerNorm(4), up=up, down=down)).to(
        "meta"
    )
    plan = {"up": "column", "down": "row"}
    ties = [("a.weight", "f.weight")]
    with raises("MW-PLACEMENT-002", "a.weight is heads", "f.weight is replicate"):
        apply(model, plan | {"a": "heads"}, ties, lonely_group(0, 2), False, {})
    model.up, model.down = up.to("meta"), down.to("meta")
    apply(model, plan | {"a": "heads", "f": "heads"}, ties, lonely_group(0, 2), False, {})
