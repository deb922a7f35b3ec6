"""Options of the initial weights against the functions of megatron-core and the rules
of torchtitan and nanotron.
"""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from torch import nn

from meshwright.model.build import build_model
from meshwright_models import gpt2, llama

RESIDUAL = ("attention.out.weight", "mlp.down.weight")
L = 3


def gpt2_of(**options) -> nn.Sequential:
    return gpt2.build(500, 64, L, 4, 16, **options)


def llama_of(**options) -> nn.Sequential:
    return llama.build(500, 64, L, 4, 2, 96, **options)


BUILDERS = (gpt2_of, llama_of)


def drawn(model: nn.Sequential, name: str) -> torch.Tensor:
    filled = torch.empty_like(model.get_parameter(name))
    torch.manual_seed(5)
    with torch.no_grad():
        model.initialise(name, filled)
    return filled


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("std", [0.02, 0.0045])
def test_megatrons_functions_draw_the_same_weights(build, std: float) -> None:
    model = build(init_std=std)
    plain, scaled = init_method_normal(std), scaled_init_method_normal(std, L)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue
        torch.manual_seed(5)
        expected = (scaled if name.endswith(RESIDUAL) else plain)(torch.empty_like(parameter))
        assert torch.equal(drawn(model, name), expected), name
        own = std / math.sqrt(2 * L) if name.endswith(RESIDUAL) else std
        assert parameter.std().item() == pytest.approx(own, rel=0.1), name


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    ("residual", "divisors"),
    [("none", [1, 1, 1]), ("layer_index", [math.sqrt(2), 2, math.sqrt(6)])],
)
def test_other_rules_for_the_ends_of_residual_branches(
    build, residual: str, divisors: list[float]
) -> None:
    """torchtitan's ``depth_init`` (0.02 / sqrt(2 (layer_id + 1)))
    and nanotron's scaling method NONE.
    """
    model = build(init_std=0.05, residual_init=residual)
    for layer, divisor in enumerate(divisors):
        for ending in RESIDUAL:
            name = f"block{layer}.{ending}"
            torch.manual_seed(5)
            expected = torch.empty_like(model.get_parameter(name)).normal_(std=0.05 / divisor)
            assert torch.equal(drawn(model, name), expected), name
    assert torch.equal(drawn(model, "head.weight"), drawn(build(init_std=0.05), "head.weight"))


@pytest.mark.parametrize("build", BUILDERS)
def test_defaults_draw_what_they_always_drew(build) -> None:
    """Weights of runs before these options, by name: their sum and one element."""
    path = f"meshwright_models.{'gpt2' if build is gpt2_of else 'llama'}:build"
    options = {"vocab_size": 500, "hidden_size": 64, "num_layers": L, "num_heads": 4}
    if build is llama_of:
        options |= {"num_kv_heads": 2, "ffn_size": 96}
    model = build_model(path, options, seed=7)
    found = [float(model.initial(f"block1.{ending}").double().sum()) for ending in RESIDUAL]
    assert found == pytest.approx(FORMER[build], rel=1e-4)


FORMER = {gpt2_of: [-0.7428784988, -0.2325350724], llama_of: [-0.7428784988, 0.3169674987]}


@pytest.mark.parametrize("build", BUILDERS)
def test_options_without_a_meaning(build) -> None:
    with pytest.raises(ValueError, match="init_std=0 must be positive"):
        build(init_std=0)
    with pytest.raises(
        ValueError, match="residual_init='depth' must be one of num_layers, layer_index, none"
    ):
        build(residual_init="depth")
