"""Operations on meta that are known from equal ones: same results, same counts,
and never a view in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.model.meter import recorder
from meshwright.model.meter.recorder import Operation, OperationRecorder

aten = torch.ops.aten


class Notes(OperationRecorder):  # type: ignore[misc]
    """Recorder of every operation's counts and results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []
        self.ran = 0

    def record(self, operation: Operation) -> None:
        self.ran += operation.counted is None
        outputs = [(each.shape, each.stride(), each.dtype) for each in operation.outputs]
        self.found.append((operation.function, operation.flops, operation.num_bytes, outputs))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KNOWN", {})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def block(x: Tensor, weight: Tensor) -> Tensor:
    """Products, views, broadcasts, an update in place and several outputs."""
    h = torch.nn.functional.silu(x @ weight) * x
    h = h.transpose(0, 1).contiguous().float().softmax(-1).to(torch.bfloat16)
    h = torch.cat([h, h], -1).split(8, -1)[1] + 1.0
    h.mul_(2).add_(h.amax(-1, keepdim=True))
    values, indices = h.topk(2, -1)
    return values.sum() + indices.to(values.dtype).sum()


def test_the_second_run_of_equal_operations_computes_no_shape_and_finds_the_same() -> None:
    runs = []
    for _ in range(2):
        with Notes() as notes:
            block(meta(16, 8, dtype=torch.bfloat16), meta(8, 8, dtype=torch.bfloat16))
        runs.append(notes)
    first, second = runs
    assert first.found == second.found
    assert second.ran <= 5 < first.ran  # views


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, y: x * x, lambda x, y: x * y),  # one tensor is read once
        (lambda x, y: x.int() + 1, lambda x, y: x.int() + 1.5),
        (lambda x, y: (x > 0) * True, lambda x, y: (x > 0) * 1),
        (lambda x, y: x.sum(0, True), lambda x, y: x.sum(1, True)),
        (lambda x, y: x * 2, lambda x, y: x.t() * 2),
        (lambda x, y: x.clone(), lambda x, y: x.t().clone()),
    ],
)
def test_what_only_looks_equal_is_another_operation(
    one: Callable[..., Tensor], other: Callable[..., Tensor]
) -> None:
    alone = []
    for each in (one, other):
        recorder._KNOWN.clear()
        with Notes() as notes:
            each(meta(4, 4), meta(4, 4))
        alone.append(notes.found)
    recorder._KNOWN.clear()
    for each, found in zip((one, other), alone, strict=True):
        with Notes() as notes:
            each(meta(4, 4), meta(4, 4))
        assert notes.found == found
    assert alone[0] != alone[1]


def test_views_share_their_storage_and_new_results_do_not() -> None:
    for _ in range(2):
        with Notes():
            x = meta(4, 4)
            view, copy, changed = x[1:], x + 1, x.add_(1)
            flat = torch.ops.aten._unsafe_view(x, [16])
        base = x.untyped_storage()._cdata
        assert view.untyped_storage()._cdata == flat.untyped_storage()._cdata == base
        assert changed is x
        assert copy.untyped_storage()._cdata != base


def test_tensors_with_values_always_run() -> None:
    for _ in range(2):
        with Notes() as notes:
            assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
        assert notes.ran == len(notes.found)
