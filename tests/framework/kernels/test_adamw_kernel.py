"""The 8-bit AdamW kernel against the plain step: codes, scales and weights,
and where it is taken.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.kernels import adamw_8bit
from meshwright.kernels.adamw_8bit import LARGEST_BLOCK, StepNumbers
from tests.framework.optimizer.test_eight_bit import drawn, optimizer, stepped


@pytest.mark.parametrize(
    ("block", "numel"),
    [(8, 512), (24, 240), (256, 2048), (256, 2148), (LARGEST_BLOCK, 2 * LARGEST_BLOCK)],
)
def test_four_steps(block: int, numel: int, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller and larger than a program, no power of two, a last one that is short;
    some of zeros alone.
    """
    weights, gradients = (
        drawn(numel, 0, torch.float32),
        [drawn(numel, n, torch.float32) for n in range(1, 5)],
    )
    for each in gradients:
        each[:block] = 0.0
    found, mine, parameter = stepped(weights, gradients, block)
    monkeypatch.setattr("meshwright.kernels.DEVICES", set())
    expected, theirs, other = stepped(weights, gradients, block)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert float((found - weights).abs().max()) > 0.01
    for name in ("exp_avg", "exp_avg_sq"):
        state, wanted = mine.state[parameter][name], theirs.state[other][name]
        torch.testing.assert_close(state.scales, wanted.scales, rtol=1e-6, atol=0.0)
        off = (state.codes.int() - wanted.codes.int()).abs()
        assert int(off.max()) <= 1 and float((off > 0).float().mean()) < 0.005, (
            "numbers at a border between levels"
        )
    assert mine.state[parameter]["step"] == 4


def test_nan_poisons_its_block_alone(on_cpu: None) -> None:
    """As in the plain step: its scale, and no other."""
    gradient = drawn(64, 1, torch.float32)
    gradient[20] = torch.nan
    weights, found, parameter = stepped(
        drawn(64, 0, torch.float32), [gradient, drawn(64, 2, torch.float32)], 16
    )
    for name in ("exp_avg", "exp_avg_sq"):
        assert found.state[parameter][name].scales.isnan().tolist() == [False, True, False, False]
    assert weights.isnan().nonzero().flatten().tolist() == list(range(16, 32))


def test_it_is_taken_on_devices_of_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "meshwright.kernels.adamw_8bit.step_8bit", lambda *arguments: given.append(arguments)
    )
    monkeypatch.setattr("meshwright.kernels.has_tools", lambda: True)
    gradient = drawn(64, 1, torch.float32)

    def step(weights: Tensor, block: int) -> None:
        parameter = nn.Parameter(weights)
        parameter.grad = gradient[: weights.numel()].to(weights.dtype)
        optimizer([parameter], block).step()

    step(torch.ones(64), 16)
    monkeypatch.setattr("meshwright.kernels.DEVICES", {"cpu"})
    step(torch.ones(64, dtype=torch.float64), 16)
    step(torch.ones(64), 2 * LARGEST_BLOCK)
    assert not given
    step(torch.ones(64), 16)
    weights, of, moments, tables, numbers, block = given[0]
    assert torch.equal(weights, torch.ones(64)) and torch.equal(of, gradient) and block == 16
    assert [each.shape[0] for each in moments] == [64, 4, 64, 4] and [
        each.shape[0] for each in tables
    ] == [255, 65536, 65536] * 2
    expected = StepNumbers(0.2, 0.95, 0.05, 0.05**0.5, 1e-8, 1 - 1e-2 * 0.1, -1e-2 / 0.2)
    assert numbers == pytest.approx(expected) and adamw_8bit.takes(weights, 16)
