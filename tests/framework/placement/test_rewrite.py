"""Rewriting of a model by rules: a toy feature, shared objects, the order of features."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.model.buffers import SpareCounters
from meshwright.parameters import Slice
from meshwright.pipeline.recompute import RecomputeContext, recompute_layers
from meshwright.placement.rewrite import (
    ORDER,
    ModuleSite,
    Placed,
    PlacementRule,
    Rewritten,
    copy_of,
    rewrite,
)
from meshwright.placement.ties import Held, check_ties
from meshwright.seeding import dropouts_of, restart_calls, seed_dropouts
from tests.support.errors import raises

D = 4


class HalfLinear(nn.Module):
    """The first rows of a linear: what the toy feature puts in its place."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        rows = plain.out_features // 2
        self.weight = nn.Parameter(plain.weight.detach()[:rows].clone())
        self.bias = nn.Parameter(plain.bias.detach()[:rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def halve(sites: list[ModuleSite], site: ModuleSite) -> Placed:
    """Replace a linear by its first rows."""
    sites.append(site)
    assert isinstance(site.module, nn.Linear)
    rows = site.module.out_features
    part = Slice(0, 0, rows // 2, rows // 2)
    return Placed(HalfLinear(site.module), {"weight": part, "bias": part})


def tripled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3.0 * output


class Layer(nn.Module):
    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up, self.drop, self.down = up, nn.Dropout(0.1), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


def model() -> Any:
    """Build two layers with one linear, which has a hook, and a third linear with its weight."""
    up = nn.Linear(D, 2 * D)
    up.register_forward_hook(tripled)
    third = nn.Linear(D, 2 * D)
    third.weight = up.weight
    return nn.Sequential(OrderedDict(one=Layer(up), two=Layer(up).eval(), third=third))


def toy(**more: Any) -> tuple[Any, Rewritten, list[ModuleSite]]:
    layers, sites = model(), list[ModuleSite]()
    rule = PlacementRule("tensor", "*.up", "half", partial(halve, sites), **more)
    other = PlacementRule("tensor", "third", "half", partial(halve, sites))
    return layers, rewrite(layers, [rule, other]), sites


def test_a_toy_rule() -> None:
    layers, found, sites = toy()
    assert isinstance(layers.one.up, HalfLinear) and isinstance(layers.third, HalfLinear)
    part = Slice(0, 0, D, D)
    names = [
        f"{name}.{each}" for name in ("one.up", "two.up", "third") for each in ("weight", "bias")
    ]
    assert found.slices == dict.fromkeys(names, part)
    assert found.kinds == {"one.up": "half", "two.up": "half", "third": "half"}
    assert [site.name for site in sites] == ["one.up", "third"]
    x = torch.randn(3, D)
    expected = 3.0 * nn.functional.linear(x, layers.one.up.weight, layers.one.up.bias)
    assert torch.equal(layers.one.up(x), expected)  # with the user's hook


def test_shared_objects_stay_shared_and_are_replaced_once() -> None:
    layers, _, sites = toy()
    assert layers.one.up is layers.two.up is not layers.third
    assert layers.one.up.weight is layers.third.weight
    assert sites[0].names == ("one.up", "two.up") and sites[1].names == ("third",)


def test_a_hook_is_registered_once_on_a_shared_module() -> None:
    layers = model()

    def hook(site: ModuleSite) -> None:
        site.module.register_forward_hook(tripled)

    rewrite(layers, [PlacementRule("context", "*.up", "hooked", hook)])
    assert list(layers.one.up._forward_hooks.values()) == [tripled, tripled]  # the user's, and one


def test_modules_that_a_rule_adds_are_not_visited_by_it() -> None:
    layers = nn.Sequential(OrderedDict(a=nn.Linear(D, D)))

    def add(site: ModuleSite) -> None:
        site.module.add_module("inner", nn.Linear(D, D))

    rule = PlacementRule("adapters", "*", "adapter", add, of=nn.Linear)
    assert rewrite(layers, [rule]).kinds == {"a": "adapter"}


def test_kinds_around_a_module_are_those_of_earlier_rules() -> None:
    layers, seen = model(), dict[str, tuple[str, ...]]()

    def note(site: ModuleSite) -> None:
        seen[site.name] = site.kinds

    rules = [
        PlacementRule("tensor", "one", "outer"),
        PlacementRule("tensor", "*.drop", "named"),
        PlacementRule("tensor", "*", "dropout", note, of=nn.Dropout),
    ]
    rewrite(layers, rules)
    assert seen == {"one.drop": ("outer", "named"), "two.drop": ("named",)}


def test_a_deep_copy_is_cut_by_its_slices_and_shares_the_rest() -> None:
    layers = model()
    current = seed_dropouts(layers, 3)
    whole = layers.one.down.bias
    part = Slice(1, D, 2 * D, D)

    def split(site: ModuleSite) -> Placed:
        return Placed(copy_of(site.module), {"down.weight": part, "down.bias": None})

    weight = layers.one.down.weight.detach().clone()
    rewrite(layers, [PlacementRule("experts", "one", "deep", split, is_deep=True)])
    assert torch.equal(layers.one.down.weight, weight[:, D:]) and layers.one.down.bias is whole
    assert layers.one.drop.current is current and layers.one.up.weight is layers.two.up.weight


def test_a_key_whose_pattern_matches_no_module_of_the_class() -> None:
    with raises("MW-PLACEMENT-001", "toy.names", "'*.drop'", "Linear", "one.down"):
        rule = PlacementRule("adapters", "*.drop", "half", of=nn.Linear, key="toy.names")
        rewrite(model(), [rule])


def test_features_are_placed_in_their_order() -> None:
    layers, seen = model(), list[str]()

    def rule(feature: str) -> PlacementRule:
        return PlacementRule(feature, "third", feature, lambda site: seen.append(feature))

    rewrite(layers, [rule(feature) for feature in reversed(ORDER[:4])])
    assert seen == [*ORDER[:4]]
    rewrite(layers, [rule("experts")])
    with pytest.raises(AssertionError):
        rewrite(layers, [rule("fp8")])


class Caller(nn.Module):
    """Layer that passes a dropout of its own to a module that it shares with others."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.drop = core, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core(x, self.drop)


class Core(nn.Module):
    def forward(self, x: Tensor, drop: nn.Module) -> Tensor:
        return drop(torch.tanh(x)).square()


def test_a_module_of_several_layers_is_recomputed_once_with_the_dropouts_of_all() -> None:
    core = Core()
    layers: Any = nn.Sequential(OrderedDict(a=Caller(core), b=Caller(core)))
    current = seed_dropouts(layers, 3)
    current.sample_indices = torch.arange(4)
    x = torch.randn(4, D, requires_grad=True)
    (expected,) = torch.autograd.grad(layers(x).sum(), x)
    restart_calls(dropouts_of(layers))
    recompute_layers(
        layers, ["a.core", "b.core"], RecomputeContext(current, None, SpareCounters(layers))
    )
    function = core.forward
    assert isinstance(function, partial) and not isinstance(function.args[0], partial)
    (found,) = torch.autograd.grad(layers(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_tied_weight_is_held_alike_at_all_places() -> None:
    part = Slice(0, 0, 2, 2)
    held = {
        "a.weight": Held(part, False, "column"),
        "b.weight": Held(part, False, "vocab"),
        "c.weight": Held(None, False, "replicate"),
        "d.weight": Held(None, True, "heads"),
    }
    check_ties(held, [("a.weight", "b.weight")], "parallel.tp")
    with raises("MW-PLACEMENT-002", "parallel.tp", "a.weight is column", "c.weight is replicate"):
        check_ties(held, [("a.weight", "c.weight")], "parallel.tp")
    with raises("MW-PLACEMENT-002", "d.weight is heads (whole, with a part of the gradient)"):
        check_ties(held, [("c.weight", "d.weight")], "parallel.tp")
