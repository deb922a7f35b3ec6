"""The recipe that cuts a module at its nn.ModuleList, as the message prints it:
the same outputs and gradients.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.build import build_model
from meshwright.model.cut_recipe import cut_at_lists
from tests.support import whole_models
from tests.support.errors import raises

BODIES = {
    "gpt": (
        "self.transformer_wte(x) + self.transformer_wpe(torch.arange(x.shape[1], device=x.device))",
        "self.lm_head(self.transformer_ln_f(x))",
    ),
    "vit": (
        (
            "torch.cat((self.cls.expand(len(x), -1, -1), self.patch(x).flatten(2).mT), dim=1) +"
            " self.positions"
        ),
        "self.head(self.norm(x)[:, 0])",
    ),
}
"""What a user writes in place of the two ``...``:
the module's forward before and after its blocks.
"""
TIED = {
    "gpt": [("0.transformer_wte.weight", f"{whole_models.DEPTH + 1}.lm_head.weight")],
    "vit": [],
}


def cut(how: str) -> dict[str, Any]:
    """Return the names that the message's lines define, with the forward's code filled in."""
    with raises("MW-MODEL-004") as caught:
        build_model("tests.support.whole_models:build", {"how": how}, 7)
    _, _, lines = str(caught.value).partition("\n\n")
    for body in BODIES[how]:
        lines = lines.replace("lambda self, x: ...", f"lambda self, x: {body}", 1)
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "GPT": whole_models.GPT,
        "ViT": whole_models.ViT,
    }
    exec(lines, names)
    return names


def inputs_of(how: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if how == "gpt":
        return torch.randint(whole_models.V, (4, whole_models.LENGTH), generator=generator)
    return torch.randn(4, 1, 4, 4, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("how", ["gpt", "vit"])
def test_the_printed_recipe_is_the_module(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = cut(how)
    torch.manual_seed(7)
    whole = whole_models.build(how).double()
    torch.manual_seed(7)
    layers = names["build"]().double()
    outputs = [model(inputs_of(how)) for model in (whole, layers)]
    assert torch.equal(*outputs)
    for output in outputs:
        F.cross_entropy(output.flatten(0, -2), torch.arange(output[..., 0].numel()) % 10).backward()
    of_whole, of_layers = list(whole.parameters()), list(layers.parameters())
    assert len(of_whole) == len(of_layers)
    by_size = [
        sorted(p.grad.flatten().tolist() for p in each if p.grad is not None)
        for each in (of_whole, of_layers)
    ]
    assert by_size[0] == by_size[1]

    def build() -> nn.Sequential:
        model: nn.Sequential = names["build"]()
        model.tied_weights = TIED[how]  # type: ignore[assignment]
        return model

    module = ModuleType("a_cut_module")
    module.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_cut_module", module)
    described = build_model("a_cut_module:build", {}, 7)
    for name, parameter in layers.named_parameters():
        assert torch.equal(described.initial(name).double(), parameter.detach()), name


def test_what_has_no_list_gets_no_recipe() -> None:
    with raises("MW-MODEL-004", "head"):
        build_model("torch.nn:Linear", {"in_features": 2, "out_features": 2}, 7)


class Holder(nn.Module):
    """Module with children of given names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def blocks() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (
            Holder(
                features=nn.Sequential(nn.Linear(2, 2), Holder(blocks=blocks()), nn.Linear(2, 2)),
                head=nn.ReLU(),
            ),
            [
                "features_0=m.features[0]",
                "*m.features[1].blocks,",
                "features_2=m.features[2], head=m.head",
            ],
        ),
        (
            Holder(stages=nn.ModuleDict({"1-a": Holder(blocks=blocks())})),
            ["*getattr(m.stages, '1-a').blocks"],
        ),
        (
            Holder(**{"0": nn.ReLU(), "class": nn.ReLU(), "l": blocks()}),
            ["_0=getattr(m, '0')", "_class=getattr(m, "],
        ),
        (
            Holder(a=Holder(b=nn.ReLU(), l=blocks()), a_b=nn.ReLU(), run=nn.ReLU()),
            ["a_b=m.a.b", "a_b=m.a_b, _run=m.run"],
        ),
    ],
)
def test_the_recipe_is_python_for_any_names(model: nn.Module, shown: list[str]) -> None:
    recipe = cut_at_lists(model)
    _, _, lines = recipe.partition("\n\n")
    names: dict[str, Any] = {"nn": nn, "Holder": lambda: model}
    exec(compile(lines, "recipe", "exec"), names)
    assert len(names["build"]()) == 4
    assert all(each in recipe for each in shown), recipe


def test_a_list_by_itself_has_no_recipe() -> None:
    assert cut_at_lists(blocks()) == ""
