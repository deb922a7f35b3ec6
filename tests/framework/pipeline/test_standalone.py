"""A layer that leans on another one, on its history or on chance is refused
by name before any rank starts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.model.build import meta_copy
from meshwright.pipeline.plan.boundaries import run_on_meta
from meshwright.verify import Layout, layout_config
from tests.framework.verify.cases import config_of
from tests.support.errors import raises


def draw(kind: str, how: str = "") -> None:
    config = config_of("tests.framework.pipeline.leaning:build", {"kind": kind, "how": how}, 6)
    draw_blueprint(layout_config(config, Layout(), 4, "float32"))


@pytest.mark.parametrize(
    ("kind", "code", "values"),
    [
        ("closure", "MW-PIPELINE-025", ("layer 4 (OtherHead)", "0.weight", "layer 0")),
        ("own closure", "MW-PIPELINE-025", ("layer 4 (Reaching)", "4.linear.weight")),
        ("list", "MW-PIPELINE-027", ("layer 4 (OtherHead)", "(24, 8)")),
        ("talking", "MW-PIPELINE-028", ("layer 3 (Taking)", "layer 1")),
        ("renormed", "MW-PIPELINE-029", ("layer 0 (Embedding)", "0.weight", "embedding_renorm_")),
        ("slopes", "MW-PIPELINE-024", ("layer 1 (RReLU)",)),
    ],
)
def test_what_is_not_its_own(kind: str, code: str, values: tuple[str, ...]) -> None:
    with raises(code, *values):
        draw(kind)


@pytest.mark.parametrize("how", ["clamp", "row", "data", "data in place", "average"])
def test_a_weight_that_forward_changes(how: str) -> None:
    with raises(("MW-PIPELINE-022", "MW-PIPELINE-026", "MW-PIPELINE-029"), "1.linear.weight"):
        draw("writing", how)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("torch", "(randn_like)"),
        ("torch, own", "(randn)"),
        ("slopes", "torch"),
        ("numpy", "numpy.random"),
        ("python", "Python"),
        ("python, own", "generator python"),
        ("numpy, own", "generator sources"),
        ("numpy, own, old", "generator sources"),
    ],
)
def test_a_layer_that_draws(how: str, value: str) -> None:
    with raises(("MW-PIPELINE-023", "MW-PIPELINE-024"), value):
        draw("drawing", how)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("count", "layer 1 (Remembering)"),
        ("count in a tensor", "layer 1 (Remembering)"),
        ("tensor that counts", "layer 1 (Remembering)"),
        ("generator of the module", "layer 1 (Remembering)"),
        ("previous", "layer 1"),
        ("caught", "(rand_like)"),
    ],
)
def test_a_layer_that_remembers(how: str, value: str) -> None:
    for _ in range(2):  # another drawing in the same process refuses it too
        with raises(("MW-PIPELINE-021", "MW-PIPELINE-024", "MW-PIPELINE-028"), value):
            draw("remembering", how)


def test_constants_may_be_kept() -> None:
    """By a layer and by all of a kind: they depend on no sample and no weight."""
    for _ in range(2):
        draw("remembering")


def test_what_stands_alone_is_drawn() -> None:
    """Kernels that are tagged as random and drop nothing, recurrent layers,
    dropouts drawn by name.
    """
    for kind, how in (
        ("plain", ""),
        ("attention", "0.0"),
        ("attention", "0.1"),
        ("recurrent", ""),
    ):
        draw(kind, how)


class MaskOfNoDevice(nn.Module):
    """Makes a tensor without a device, as code for one CPU does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        if self.how == "where":
            return torch.where(place[:, None] > 3, x, -x)
        if self.how == "masked_fill":
            return x.masked_fill(place[None, :, None] > 3, 0.0)
        return x + place[:, None]


@pytest.mark.parametrize("how", ["where", "masked_fill", "sum"])
def test_a_tensor_without_a_device_is_named(how: str) -> None:
    model = meta_copy(nn.Sequential(nn.Embedding(5, 4), MaskOfNoDevice(how)))
    ids = torch.zeros((1, 8), dtype=torch.long, device="meta")
    with raises("MW-PIPELINE-031", "device=x.device"):
        run_on_meta(model, [range(2)], ids)
