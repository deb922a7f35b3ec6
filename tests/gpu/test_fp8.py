"""The float8 kernel of torch against its emulation on CPU: outputs, gradients,
and a short training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.fp8.linear import Fp8Linear
from meshwright.fp8.quantise import dequantise, encode, exponents_of, quantise
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import run_layout
from tests.framework.tensor_parallel.ranks_of_tp import drawn
from tests.framework.verify.cases import config_of

DEVICE = os.environ.get("MESHWRIGHT_GPU_TESTS", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="needs a CUDA device, and `pytest -m gpu`",
    ),
]


def linear_on(device: str, tokens: int, width: int, height: int) -> list[Tensor]:
    """Output, input gradient and weight gradient of a linear in float8, on CPU."""
    linear = nn.Linear(width, height, bias=False, dtype=torch.bfloat16)
    linear.__class__ = Fp8Linear
    with torch.no_grad():
        linear.weight.copy_(
            drawn(height, width, seed=2) * torch.logspace(-3, 1, height).unsqueeze(-1)
        )
    linear.to(device)
    x = (drawn(2, tokens, width) * torch.logspace(-4, 4, tokens).unsqueeze(-1)).to(
        device, torch.bfloat16
    )
    x.requires_grad_()
    y = linear(x)
    y.backward(drawn(2, tokens, height, seed=1).to(device, torch.bfloat16))
    assert x.grad is not None and linear.weight.grad is not None
    return [each.detach().cpu() for each in (y, x.grad, linear.weight.grad)]


def quantised_on(device: str, transposed: bool, width: int) -> list[Tensor]:
    """Codes as bytes, exponents and values of rows over many magnitudes in one pass, codes in two,
    on CPU.
    """
    x = (drawn(300, width) * torch.exp2(drawn(300, 1, seed=1) * 20)).to(device, torch.bfloat16)
    x = x.t() if transposed else x
    (found,) = quantise([x], None)
    values, again = dequantise(found, torch.bfloat16), encode(x, exponents_of(x)).codes
    return [
        each.cpu()
        for each in (
            found.codes.view(torch.uint8),
            again.view(torch.uint8),
            found.exponents,
            values,
        )
    ]


@pytest.mark.parametrize("width", [300, 512, 20000])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_give_the_codes_of_the_cpu(
    transposed: bool, width: int, on_device: Callable[..., Any]
) -> None:
    found, expected = (
        on_device(quantised_on, DEVICE, transposed, width),
        quantised_on("cpu", transposed, width),
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("tokens", "width", "height"), [(128, 256, 512), (17, 64, 48), (1000, 4096, 1024)]
)
def test_kernel_against_emulation(
    tokens: int, width: int, height: int, on_device: Callable[..., Any]
) -> None:
    found, expected = (
        on_device(linear_on, DEVICE, tokens, width, height),
        linear_on("cpu", tokens, width, height),
    )
    for mine, theirs in zip(found, expected, strict=True):
        rows = (mine.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)
        assert rows.max() < 1e-2


def test_training_against_emulation(on_device: Callable[..., Any]) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 96,
    }
    base = config_of("meshwright_models.llama:build", {**sizes, "max_sequence_length": 32}, 32)
    base = base.replace(train={"linear": "fp8", "dtype": "bfloat16"})
    texts = [
        layout_config(base, parse_layout("mbs2"), 4, "bfloat16", d).model_dump_json()
        for d in (DEVICE, "cpu")
    ]
    found, expected = (on_device(run_layout, 0, 1, text, 5, True).losses for text in texts)
    assert found == pytest.approx(expected, rel=5e-3)
