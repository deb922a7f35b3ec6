"""A layer that leans on another one, on its history or on chance is refused by name before any rank starts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.errors import ModelError
from meshwright.model.build import meta_copy
from meshwright.pipeline.plan.boundaries import run_on_meta
from meshwright.verify import Layout, layout_config
from tests.framework.verify.cases import config_of
from tests.support.errors import has_code


def draw(kind: str, how: str = "") -> None:
    config = config_of("tests.framework.pipeline.leaning:build", {"kind": kind, "how": how}, 6)
    draw_blueprint(layout_config(config, Layout(), 4, "float32"))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("closure", r"layer 4 \(OtherHead\) uses 0.weight, which layer 0 holds and it does not .*tied_weights"),
        ("own closure", r"layer 4 \(Reaching\) uses 4.linear.weight, but not as its attribute"),
        ("list", r"layer 4 \(OtherHead\) uses a parameter of shape \(24, 8\) that belongs to no layer"),
        ("talking", r"layer 3 \(Taking\) uses a tensor of shape .* of layer 1 that is not in its input"),
        ("renormed", r"layer 0 \(Embedding\) writes to its parameter 0.weight in forward \(embedding_renorm_\)"),
        ("alpha", r"layer 1 \(AlphaDropout\) draws from torch's random generator"),
    ],
)
def test_what_is_not_its_own(kind: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        draw(kind)


@pytest.mark.parametrize("how", ["clamp", "row", "data", "data in place", "average"])
def test_a_weight_that_forward_changes(how: str) -> None:
    with pytest.raises(
        ModelError,
        match=r"layer 1 \(Writing\) writes to its parameter 1.linear.weight in forward",
        check=has_code("MW-PIPELINE-026", "MW-PIPELINE-029"),
    ):
        draw("writing", how)


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("torch", r"torch's random generator \(randn_like\)"),
        ("torch, own", r"torch's random generator \(randn\)"),
        ("functional", "torch's random generator"),
        ("numpy", "numpy.random"),
        ("python", "Python's random"),
        ("python, own", "its own generator python"),
        ("numpy, own", "its own generator sources"),
        ("numpy, own, old", "its own generator sources"),
    ],
)
def test_a_layer_that_draws(how: str, source: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"layer 1 \(Drawing\) draws from {source}.* in forward.*nn.Dropout",
        check=has_code("MW-PIPELINE-023", "MW-PIPELINE-024"),
    ):
        draw("drawing", how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("count", r"layer 1 \(Remembering\) does something else in each call for the same input"),
        ("count in a tensor", r"layer 1 \(Remembering\) does something else in each call for the same input"),
        ("tensor that counts", r"layer 1 \(Remembering\) does something else in each call for the same input"),
        ("generator of the module", r"layer 1 \(Remembering\) does something else in each call for the same input"),
        ("previous", r"uses a tensor of shape .* of layer 1 in an earlier forward that is not in its input"),
        ("caught", r"layer 1 \(Remembering\) draws from torch's random generator \(rand_like\)"),
    ],
)
def test_a_layer_that_remembers(how: str, message: str) -> None:
    for _ in range(2):  # another drawing in the same process refuses it too
        with pytest.raises(
            ModelError, match=message, check=has_code("MW-PIPELINE-021", "MW-PIPELINE-024", "MW-PIPELINE-028")
        ):
            draw("remembering", how)


def test_constants_may_be_kept() -> None:
    """By a layer and by all of a kind: they depend on no sample and no weight."""
    for _ in range(2):
        draw("remembering")


def test_what_stands_alone_is_drawn() -> None:
    """Kernels that are tagged as random and drop nothing, recurrent layers, dropouts drawn by name."""
    for kind, how in (("plain", ""), ("attention", "0.0"), ("recurrent", "")):
        draw(kind, how)
    with pytest.raises(ModelError, match="draws from torch's random generator", check=has_code("MW-PIPELINE-024")):
        draw("attention", "0.1")


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
    with pytest.raises(ModelError, match=r"make it with device=x\.device"):
        run_on_meta(model, [range(2)], ids)
