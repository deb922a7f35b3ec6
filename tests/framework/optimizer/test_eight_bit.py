"""AdamW in 8 bits: its levels, its rounding against plain Python,
and that no cut between blocks changes a bit.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config import Optimizer
from meshwright.config.optimizers import MOMENTS
from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.at_rest import state_bytes
from meshwright.optimizer.codecs import StateCodec
from meshwright.optimizer.eight_bit import (
    BlockCodec,
    QuantisedState,
    Quantiser,
    signed_levels,
    unsigned_levels,
    with_blocks,
)
from meshwright.parameters import ParameterInfo, Slice
from tests.support.errors import raises

BETAS, EPS, RATE, DECAY = (0.8, 0.95), 1e-8, 1e-2, 0.1


def drawn(numel: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Over many magnitudes, with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator, dtype=torch.float64)
    spread = 10.0 ** (8 * torch.rand(numel, generator=generator, dtype=torch.float64) - 8)
    kept = torch.rand(numel, generator=generator) > 0.1
    return (numbers * spread * kept).to(dtype)


def optimizer(parameters: list[nn.Parameter], block: int) -> FlatAdamW:
    groups = [{"params": parameters, "codec": BlockCodec(block), "weight_decay": DECAY}]
    return FlatAdamW(groups, MOMENTS, None, lr=RATE, betas=BETAS, eps=EPS)


def stepped(
    weights: Tensor, gradients: list[Tensor], block: int
) -> tuple[Tensor, FlatAdamW, nn.Parameter]:
    parameter = nn.Parameter(weights.clone())
    found = optimizer([parameter], block)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        found.step()
    return parameter.detach(), found, parameter


def test_levels() -> None:
    """As many as a byte has numbers, or one less; seven decades; closest at the top."""
    signed, unsigned = signed_levels(), unsigned_levels()
    assert len(signed) == len(unsigned) == 255
    assert torch.equal(signed, -signed.flip(0)) and signed[127] == 0 and signed[-1] == 1
    assert unsigned[0] == 0 and unsigned[-1] == 1
    for levels in (signed, unsigned):
        assert (levels.diff() > 0).all()
        assert levels[levels > 0].min() < 1.001e-6
    assert signed[-2] == pytest.approx(1 - 0.9 / 64)
    assert unsigned[-2] == pytest.approx(1 - 0.9 / 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [signed_levels(), unsigned_levels()], ids=["signed", "unsigned"])
def test_the_nearest_level_is_found(levels: Tensor, dtype: torch.dtype) -> None:
    """As by binary search among the borders: numbers of all magnitudes, the borders,
    and what is next to them.
    """
    borders = ((levels[1:] + levels[:-1]) / 2).to(dtype)
    if levels[0] == 0:
        borders[0] = 0.0
    one, around = (
        torch.ones(1, dtype=dtype),
        [torch.nextafter(borders, borders + side) for side in (-1.0, 1.0)],
    )
    numbers = torch.cat(
        [one, drawn(2**16, 0, dtype).clamp(-1, 1), borders, *around, torch.zeros(3, dtype=dtype)]
    )
    numbers = numbers.abs() if levels[0] == 0 else numbers
    moment = QuantisedState(
        torch.empty(len(numbers), dtype=torch.uint8), torch.empty(1, dtype=dtype)
    )
    Quantiser(levels, numbers.device, dtype, is_signed=bool(levels[0] < 0)).narrow(
        numbers, moment, len(numbers)
    )
    assert moment.scales.item() == 1.0
    assert torch.equal(moment.codes.long(), torch.bucketize(numbers, borders))


def in_python(weights: list[float], gradients: list[list[float]], block: int) -> list[float]:
    """Return the same in plain Python, number by number."""

    def rounded(numbers: list[float], levels: list[float], *, up_from_zero: bool) -> list[float]:
        found = []
        for start in range(0, len(numbers), block):
            part = numbers[start : start + block]
            scale = max(map(abs, part)) or 1.0
            for number in part:
                choice = levels[1:] if up_from_zero and number > 0 else levels
                found.append(min(choice, key=lambda level: abs(level - number / scale)) * scale)
        return found

    signed, unsigned = signed_levels().tolist(), unsigned_levels().tolist()
    first, root = [0.0] * len(weights), [0.0] * len(weights)
    for step, gradient in enumerate(gradients, 1):
        first = [BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(first, gradient, strict=True)]
        root = [
            math.sqrt(BETAS[1] * r * r + (1 - BETAS[1]) * g * g)
            for r, g in zip(root, gradient, strict=True)
        ]
        for i in range(len(weights)):
            divisor = root[i] / math.sqrt(1 - BETAS[1] ** step) + EPS
            weights[i] -= (
                RATE * DECAY * weights[i] + RATE / (1 - BETAS[0] ** step) * first[i] / divisor
            )
        first = rounded(first, signed, up_from_zero=False)
        root = rounded(root, unsigned, up_from_zero=True)
    return weights


@pytest.mark.parametrize(("numel", "block"), [(64, 16), (50, 16), (7, 8), (40, 40)])
def test_it_is_its_formula(numel: int, block: int) -> None:
    weights, gradients = drawn(numel, 0), [drawn(numel, seed) for seed in range(1, 7)]
    found, _, _ = stepped(weights, gradients, block)
    expected = in_python(weights.tolist(), [gradient.tolist() for gradient in gradients], block)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_read_back_is_the_same_run(dtype: torch.dtype) -> None:
    """Widened and narrowed again: the same bytes, and the same weights from then on;
    also of blocks of zeros.
    """
    gradients = [drawn(300, seed, dtype) for seed in range(6)]
    for gradient in gradients:
        gradient[64:128] = 0
    weights, first, parameter = stepped(drawn(300, 9, dtype), gradients[:3], 64)
    again = nn.Parameter(weights.clone())
    second = optimizer([again], 64)
    second.restore(again, first.read(parameter), 3)
    for name in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in zip(
            second.state[again][name], first.state[parameter][name], strict=True
        ):
            if ours.dtype == torch.uint8:  # zero times any level is zero
                ours, theirs = (codes[torch.arange(300) // 64 != 1] for codes in (ours, theirs))
            assert torch.equal(ours, theirs)
    for gradient in gradients[3:]:
        for optim, held in ((first, parameter), (second, again)):
            held.grad = gradient.clone()
            optim.step()
    assert torch.equal(parameter, again)


def test_no_cut_between_blocks_changes_a_bit() -> None:
    weights, gradients = (
        drawn(320, 0, torch.float32),
        [drawn(320, seed, torch.float32) for seed in range(1, 5)],
    )
    whole, _, _ = stepped(weights, gradients, 32)
    for cuts in ([160, 160], [32, 96, 192]):
        parts = zip(
            weights.split(cuts), *(gradient.split(cuts) for gradient in gradients), strict=True
        )
        assert torch.equal(torch.cat([stepped(part, own, 32)[0] for part, *own in parts]), whole)


@pytest.mark.parametrize("together", [1, 64, 200])
def test_nor_does_what_is_widened_together(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, gradients = (
        drawn(320, 0, torch.float32),
        [drawn(320, seed, torch.float32) for seed in range(1, 5)],
    )
    whole, _, _ = stepped(weights, gradients, 32)
    monkeypatch.setitem(StateCodec.together, "cpu", together)  # type: ignore[arg-type]
    assert torch.equal(stepped(weights, gradients, 32)[0], whole)


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 4), ("cuda", 1)])
def test_cuda_takes_larger_pieces(
    device: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 2**22 elements on fake CPU tensors;
    each piece mixes its gradient into the first moment once.
    """
    sizes, step = StateCodec.together, Counted()
    # torch without CUDA cannot slice a fake CUDA tensor
    monkeypatch.setitem(sizes, "cpu", sizes[device])  # type: ignore[arg-type]
    with FakeTensorMode(), step:
        parameter = nn.Parameter(torch.empty(2**22), requires_grad=False)
        parameter.grad = torch.empty(2**22)
        optimizer([parameter], 256).step()
    assert step.kernels["aten.lerp_.Scalar"] == pieces


class Counted(TorchDispatchMode):
    """Number of kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_second_moment_is_not_lost() -> None:
    """An element that is ten billion times smaller than its neighbour takes no giant step."""
    weights = torch.zeros(8, dtype=torch.float64)
    gradient = torch.tensor([1e4, *[1e-6] * 7], dtype=torch.float64)
    found, _, _ = stepped(weights, [gradient] * 5, 8)
    assert found.abs().max() < 6 * RATE


def test_bytes() -> None:
    parameter = nn.Parameter(torch.zeros(1024))
    found = optimizer([parameter], 256)
    parameter.grad = torch.ones(1024)
    found.step()
    moments = [found.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
    held = sum(tensor.numel() * tensor.element_size() for moment in moments for tensor in moment)
    config = Optimizer(name="adamw8bit", block_size=256)
    assert held == 1024 * state_bytes(config, 4, is_eight_bit=True) == 1024 * (2 + 8 / 256)
    assert (
        state_bytes(config, 4, is_eight_bit=False)
        == state_bytes(Optimizer(), 4, is_eight_bit=False)
        == 8
    )


INFOS = {
    "small": ParameterInfo("small", (64, 10)),
    "by_rows": ParameterInfo("by_rows", (64, 96), Slice(0, 0, 32, 32)),
    "by_columns": ParameterInfo("by_columns", (64, 96), Slice(1, 0, 48, 48)),
    "kernel": ParameterInfo("kernel", (8, 4, 4, 2)),
    "vector": ParameterInfo("vector", (96,), Slice(0, 0, 48, 48)),
}


def test_which_are_kept_in_8_bits() -> None:
    """Those of whose rows a block is a part, whatever the layout;
    a layout that would cut one is refused.
    """
    assert [name for name, info in with_blocks(INFOS, 16).items() if info.is_eight_bit] == [
        "by_rows",
        "by_columns",
        "kernel",
    ]
    with raises("MW-OPTIM-001", "block_size = 32", "by_columns", 48, "optimizer.block_size = 24"):
        with_blocks(INFOS, 32)
    thick = {"thick": ParameterInfo("thick", (4, 48), Slice(1, 0, 24, 24))}
    with raises("MW-OPTIM-001", "24 elements", "optimizer.block_size = 24"):
        with_blocks(thick, 48)
    with_blocks(thick, 24)
    with raises("MW-OPTIM-001", "12 elements"):
        # in blocks of 16 nothing is kept
        with_blocks({"odd": ParameterInfo("odd", (4, 24), Slice(1, 0, 12, 12))}, 24)
    with raises("MW-OPTIM-001", "6 elements"):
        with_blocks({"thin": ParameterInfo("thin", (4, 24), Slice(1, 0, 6, 6))}, 8)
