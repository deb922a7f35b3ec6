"""Codes and scales of rows, against the definition written with a table
of values (verify/plain_fp8.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.fp8.linear import Fp8Linear
from meshwright.fp8.quantise import dequantise, encode, exponents_of, quantise
from meshwright.pipeline.split_backward import SplitBackward, accumulate_deferred
from meshwright.verify.plain_fp8 import MAGNITUDES, nearest, rounded_rows
from tests.framework.tensor_parallel.ranks_of_tp import drawn
from tests.support.marks import long_row

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def hard_rows(dtype: torch.dtype) -> Tensor:
    """Rows of random values over many magnitudes, amax just around powers of two times 1.75, ties,
    zeros.
    """
    x = drawn(40, 64) * torch.exp2(drawn(40, 1, seed=1) * 20)
    x[0], x[1, 1:], x[2] = 0.0, 0.0, x[2] * 2.0**-100
    for row, amax in enumerate(
        (448.0, 449.0, 447.0, 3.5, 3.5 * (1 + 2.0**-20), 256.0, 464.0), start=3
    ):
        x[row] = x[row] / x[row].abs().max() * amax
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64)
    x[20:24] = ((magnitudes[1:] + magnitudes[:-1]) / 2)[-64:]
    x[20:24, 0] = 448.0
    x[24, : len(MAGNITUDES[:64])] = magnitudes[:64]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_become_the_nearest_values_of_the_table(dtype: torch.dtype) -> None:
    x = hard_rows(dtype)
    (found,) = quantise([x], None)
    assert found.codes.dtype == torch.float8_e4m3fn and found.exponents.shape == (40, 1)
    assert torch.equal(dequantise(found, dtype), rounded_rows(x))
    largest = found.codes.float().abs().amax(-1)
    # the scale is the largest that fits
    assert bool((largest[1:] >= 224).all()) and largest[0] == 0
    distance = (dequantise(found, dtype).double() - x.double()).abs()
    assert bool((distance <= x.double().abs().amax(-1, keepdim=True) / 16).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_pass_gives_the_bits_of_two(dtype: torch.dtype) -> None:
    for x in (hard_rows(dtype), hard_rows(dtype)[:, :33].t()):
        (found,) = quantise([x], None)
        exponents = exponents_of(x)
        assert torch.equal(found.exponents, exponents) and found.codes.is_contiguous()
        assert torch.equal(
            found.codes.view(torch.uint8), encode(x, exponents).codes.view(torch.uint8)
        )


def test_the_table_has_every_code() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == MAGNITUDES
    assert nearest(torch.tensor([0.0, 17.0, 19.0, 448.0], dtype=torch.float64)).tolist() == [
        0.0,
        16.0,
        20.0,
        448.0,
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = drawn(3, 16, dtype=torch.float32)
    x[1, 5] = bad
    (found,) = quantise([x], None)
    values = dequantise(found, torch.float32)
    assert not values[1].isfinite().all() and values[::2].isfinite().all()


def test_a_linear_keeps_codes_between_forward_and_backward() -> None:
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    linear.__class__ = Fp8Linear
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        linear(drawn(4, 8, 64, dtype=torch.bfloat16).requires_grad_())
    assert sum(tensor.numel() * tensor.itemsize for tensor in kept) == 4 * 8 * (64 + 1)


@pytest.mark.parametrize("compiled", [False, long_row(True)])
def test_a_split_backward_defers_its_weight_gradient(compiled: bool) -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    linear.__class__ = Fp8Linear
    x, mode = drawn(4, 8, 64, dtype=torch.bfloat16).requires_grad_(), SplitBackward()
    linear(x).square().sum().backward()
    whole = [x.grad, linear.weight.grad, linear.bias.grad]
    x.grad = linear.weight.grad = linear.bias.grad = None
    forward = torch.compile(linear, backend="aot_eager") if compiled else linear
    with mode:
        y = forward(x)
    with mode.deferring() as deferred:
        y.square().sum().backward()
    assert [each.parameter for each in deferred] == [linear.weight] and linear.weight.grad is None
    accumulate_deferred(deferred)
    found = [x.grad, linear.weight.grad, linear.bias.grad]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, whole, strict=True))
