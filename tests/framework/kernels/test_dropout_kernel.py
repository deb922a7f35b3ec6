"""The dropout kernel against the plain code: bit-equal outputs and gradients,
and where it is taken.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import seeding
from meshwright.current import CurrentMicrobatch
from meshwright.seeding import SeededDropout, restart_calls

SAMPLES = [0, 7, 2**40 + 3, 2**62 + 5]
Shard = tuple[int, int, int] | None
CASES: list[tuple[tuple[int, ...], Shard]] = [
    ((5,), None),
    ((3, 20, 24), None),
    ((4, 12, 6), (1, 1, 2)),
    ((33,), (-1, 2, 3)),
    ((2000,), (1, 1, 2)),
    ((7, 300), (2, 3, 4)),
    ((7, 1100), (1, 1, 3)),
    ((2, 3, 500), (-1, 0, 2)),
]


def dropout(shard: Shard = None, p: float = 0.3) -> SeededDropout:
    found = SeededDropout(p, 3, "block0.after_mlp", CurrentMicrobatch(torch.tensor(SAMPLES)))
    found.shard = shard
    return found.train()


def calls(module: SeededDropout, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Outputs and gradients of two calls, the second on the output of the first."""
    restart_calls([module])
    x = x.clone().requires_grad_()
    first = module(x)
    second = module(first)
    return [first.detach(), second.detach(), *torch.autograd.grad(second, x, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "shard"), CASES)
def test_bits_are_those_of_the_plain_code(
    shape: tuple[int, ...],
    shard: Shard,
    dtype: torch.dtype,
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elements, samples over all 63 bits,
    and slices of a dim that are shorter or longer than a program.
    """
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 4, *shape).to(dtype)
    taken: list[int] = []
    real = seeding.dropout.drop_elements
    monkeypatch.setattr(
        "meshwright.kernels.dropout.drop_elements", lambda *a: taken.append(1) or real(*a)
    )
    found = calls(dropout(shard), x, upstream)
    assert len(taken) == 2
    monkeypatch.setattr("meshwright.kernels.DEVICES", set())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for mine, theirs in zip(found, calls(dropout(shard), x, upstream), strict=True):
        assert torch.equal(mine.view(bits), theirs.view(bits))
    assert len(taken) == 2


def test_nothing_is_kept_for_backward_but_samples_and_key(on_cpu: None) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropout()(torch.ones(4, 100, requires_grad=True))
    assert sorted(each.numel() for each in kept) == [1, 4]


def test_it_is_taken_on_devices_of_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in float64, nor without tools, nor in a compiled layer:
    there the compiler fuses the plain code.
    """
    given: list[Any] = []

    def record(x: Tensor, *others: Any) -> Tensor:
        given.append(others)
        return x

    monkeypatch.setattr("meshwright.kernels.dropout.drop_elements", record)
    module, x = dropout((1, 1, 2)), torch.ones(4, 6)
    module(x)
    monkeypatch.setattr("meshwright.kernels.DEVICES", {"cpu"})
    monkeypatch.setattr("meshwright.kernels.has_tools", lambda: False)
    module(x)
    monkeypatch.setattr("meshwright.kernels.has_tools", lambda: True)
    module(x.double())
    assert not given
    compiled = torch.compile(module, backend="eager")
    compiled(x)
    assert not given
    restart_calls([module])
    assert module(x) is x
    samples, key, p, shard = given[0]
    assert samples.tolist() == SAMPLES and key == module.key and (p, shard) == (0.3, (1, 1, 2))
    assert module.num_calls == 1
