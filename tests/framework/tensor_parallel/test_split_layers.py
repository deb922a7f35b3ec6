"""Each split layer against the plain one it is made from, in float64: outputs, input gradients,
weight gradients.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.parameters import Slice
from meshwright.pipeline.split_backward import SplitBackward, accumulate_deferred
from meshwright.tensor_parallel import column, regions
from meshwright.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    vocab_slice,
)
from meshwright.tensor_parallel.regions import gather_sequence, join_sequence
from meshwright.tensor_parallel.whole_layers import (
    ColumnEmbedding,
    WholeColumnLinear,
    WholeRowLinear,
)
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import (
    close,
    drawn,
    fill,
    held,
    lonely_group,
    padding,
    part,
    summed,
    tp_group,
)

B, S, I, O = 2, 8, 12, 16  # noqa: E741
FLOAT64 = {"dtype": torch.float64}


def run(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """(y, gradient of x); parameters keep theirs in ``.grad``."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = module(x)
    assert y.is_contiguous()
    y.backward(gradient)
    return y.detach(), x.grad


def strided(tensor: Tensor) -> Tensor:
    """Return the same values as a view that is not contiguous:
    what a transposition hands back in backward.
    """
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def compare_parameters(split: Any, plain: nn.Module, sum_bias: bool = False) -> None:
    """Every gradient is the slice of the plain one's; padding has none."""
    assert [name for name, _ in split.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    for name, whole in plain.named_parameters():
        local = split.get_parameter(name)
        slice_: Slice | None = split.slices[name]
        assert local.grad is not None and whole.grad is not None
        if slice_ is None:
            close(summed(local.grad) if sum_bias else local.grad, whole.grad)
        else:
            length = slice_.stop - slice_.start
            close(local.grad.narrow(slice_.dim, 0, length), held(whole.grad, slice_))
            assert (
                not padding(local.grad, slice_).any() and not padding(local.detach(), slice_).any()
            )


def linears_rank(rank: int, tp: int, sequence: bool, bias: bool) -> None:
    group = tp_group(rank, tp)
    x, gradient = drawn(B, S, I), drawn(B, S, O, seed=1)

    def along_sequence(whole: Tensor) -> Tensor:
        return part(whole, 1, rank, tp) if sequence else whole

    plain = fill(nn.Linear(I, O, bias=bias, **FLOAT64))
    column = ColumnLinear(plain, group, sequence)
    y, dx = run(plain, x, gradient)
    y_split, dx_split = run(column, along_sequence(x), strided(part(gradient, 2, rank, tp)))
    close(y_split, part(y, 2, rank, tp))
    close(dx_split, along_sequence(dx))
    compare_parameters(column, plain)
    assert column.weight.shape == (O // tp, I)

    row = RowLinear(copy.deepcopy(plain), group, sequence)
    row.zero_grad()
    y_split, dx_split = run(row, part(x, 2, rank, tp), strided(along_sequence(gradient)))
    close(y_split, along_sequence(y))
    close(dx_split, part(dx, 2, rank, tp))
    compare_parameters(row, plain, sum_bias=sequence)
    assert row.weight.shape == (O, I // tp)

    whole_column = WholeColumnLinear(copy.deepcopy(plain), group, sequence)
    whole_column.zero_grad()
    y_put, dx_split = run(whole_column, along_sequence(x), strided(gradient))
    close(y_put, y)
    close(dx_split, along_sequence(dx))
    compare_parameters(whole_column, plain)

    whole_row = WholeRowLinear(copy.deepcopy(plain), group, sequence)
    whole_row.zero_grad()
    y_split, dx_put = run(whole_row, x, strided(along_sequence(gradient)))
    close(y_split, along_sequence(y))
    close(dx_put, dx)
    compare_parameters(whole_row, plain, sum_bias=sequence)


@pytest.mark.parametrize(
    ("tp", "sequence", "bias"),
    [(2, False, True), (2, True, True), (4, True, True), (4, False, False)],
)
def test_column_and_row_equal_the_plain_linear(
    pool: RankPool, tp: int, sequence: bool, bias: bool
) -> None:
    pool.run(linears_rank, tp, sequence, bias)


def vocab_rank(rank: int, tp: int, vocab_size: int, sequence: bool) -> tuple[int, int]:
    group = tp_group(rank, tp)
    ids = torch.randint(vocab_size, (B, S), generator=torch.Generator().manual_seed(3))
    ids[0, :2] = torch.tensor([0, vocab_size - 1])
    gradient = drawn(B, S, I, seed=1)

    def along_sequence(whole: Tensor) -> Tensor:
        return part(whole, 1, rank, tp) if sequence else whole

    plain = fill(nn.Embedding(vocab_size, I, **FLOAT64))
    embedding = VocabEmbedding(plain, group, sequence)
    y, _ = run(plain, ids, gradient)
    y_split, _ = run(embedding, ids, strided(along_sequence(gradient)))
    assert torch.equal(y_split, along_sequence(y))
    compare_parameters(embedding, plain)

    x, gradient = drawn(B, S, I), drawn(B, S, vocab_size, seed=1)
    linear = fill(nn.Linear(I, vocab_size, **FLOAT64))
    head = VocabHead(linear, group, sequence)
    slice_ = head.slices["weight"]
    assert slice_ is not None
    y, dx = run(linear, x, gradient)
    local_gradient = torch.zeros(B, S, slice_.padded, **FLOAT64)
    local_gradient[..., : slice_.stop - slice_.start] = gradient[..., slice_.start : slice_.stop]
    y_split, dx_split = run(head, along_sequence(x), strided(local_gradient))
    close(y_split[..., : slice_.stop - slice_.start], y[..., slice_.start : slice_.stop])
    assert not y_split[..., slice_.stop - slice_.start :].any()
    close(dx_split, along_sequence(dx))
    compare_parameters(head, linear)
    return slice_.start, slice_.stop


@pytest.mark.parametrize(
    ("tp", "vocab_size", "sequence"),
    [(2, 64, False), (4, 257, True), (4, 257, False), (8, 9, False), (8, 9, True)],
)
def test_vocabulary_equals_the_plain_embedding_and_head(
    pool: RankPool, tp: int, vocab_size: int, sequence: bool
) -> None:
    held_rows = pool.run(vocab_rank, tp, vocab_size, sequence)
    assert [row for start, stop in held_rows for row in range(start, stop)] == list(
        range(vocab_size)
    )


def test_a_rank_may_hold_nothing_but_padding() -> None:
    assert [vocab_slice(9, rank, 8)[:4] for rank in (0, 3, 4, 5, 7)] == [
        (0, 0, 2, 2),
        (0, 6, 8, 2),
        (0, 8, 9, 2),
        (0, 9, 9, 2),
        (0, 9, 9, 2),
    ]
    assert not VocabEmbedding(nn.Embedding(9, 4), lonely_group(6, 8), False).weight.any()


def padding_idx_rank(rank: int, tp: int) -> None:
    plain = fill(nn.Embedding(8, I, padding_idx=5, **FLOAT64))
    split = VocabEmbedding(plain, tp_group(rank, tp), False)
    ids, gradient = torch.tensor([[5, 1, 7, 5]]), drawn(1, 4, I)
    run(plain, ids, gradient)
    run(split, ids, gradient)
    compare_parameters(split, plain)


def test_the_row_of_padding_idx_gets_no_gradient(pool: RankPool) -> None:
    pool.run(padding_idx_rank, 2)


def column_embedding_rank(rank: int, tp: int) -> None:
    plain = fill(nn.Embedding(9, I, padding_idx=5, **FLOAT64))
    group = tp_group(rank, tp)
    split = ColumnEmbedding(plain, group)
    ids, gradient = torch.tensor([5, 1, 7, 5, 1, 8]), drawn(6, I)
    y, _ = run(plain, ids, gradient)
    y_split, _ = run(split, ids, strided(part(gradient, 1, rank, tp)))
    assert torch.equal(y_split, part(y, 1, rank, tp))
    compare_parameters(split, plain)
    assert split.weight.shape == (9, I // tp)
    assert not group.traffic.counts


def test_an_embedding_split_by_its_features_equals_the_plain_one(pool: RankPool) -> None:
    pool.run(column_embedding_rank, 4)


def test_layers_keep_names_freezing_dtype_and_the_meta_device() -> None:
    plain = nn.Linear(I, O, device="meta", dtype=torch.bfloat16)
    plain.weight.requires_grad_(False)
    for split in (
        ColumnLinear(plain, lonely_group(1, 2), True),
        RowLinear(plain, lonely_group(1, 2), True),
    ):
        assert {name: p.requires_grad for name, p in split.named_parameters()} == {
            "weight": False,
            "bias": True,
        }
        assert split.weight.is_meta and split.weight.dtype == torch.bfloat16
    column, row = (
        ColumnLinear(plain, lonely_group(1, 2), True),
        RowLinear(plain, lonely_group(1, 2), True),
    )
    x = torch.empty(B, S // 2, I, device="meta", dtype=torch.bfloat16)
    assert column(x).shape == (B, S, O // 2)
    assert row(torch.empty(B, S, I // 2, device="meta", dtype=torch.bfloat16)).shape == (
        B,
        S // 2,
        O,
    )


def memory_rank(rank: int, tp: int, plain: bool) -> bool:
    """Is the gathered input of a column gone once forward is done?"""
    gathered: list[StorageWeakRef] = []

    def watched(parts: Tensor) -> Tensor:
        whole = join_sequence(parts)
        gathered.extend(StorageWeakRef(each.untyped_storage()) for each in (parts, whole))
        return whole

    layer = ColumnLinear(fill(nn.Linear(I, O, **FLOAT64)), tp_group(rank, tp), True)
    x = drawn(B, S // tp, I).requires_grad_()
    column.join_sequence = regions.join_sequence = watched
    try:
        y = (
            layer(x)
            if not plain
            else nn.functional.linear(gather_sequence(x, layer.group), layer.weight, layer.bias)
        )
    finally:
        column.join_sequence = regions.join_sequence = join_sequence
    assert y.requires_grad
    end_s = time.monotonic() + (1 if plain else 60)
    while not (gone := all(each.expired() for each in gathered)) and time.monotonic() < end_s:
        time.sleep(0.01)  # a thread of gloo drops its message a moment after the wait
    return gone


def test_under_sequence_parallelism_a_column_keeps_only_its_part_of_the_input(
    pool: RankPool,
) -> None:
    assert pool.run(memory_rank, 2, False) == [True, True]
    assert pool.run(memory_rank, 2, True) == [False, False]  # what a plain linear would keep


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    assert len(found) == len(parameters)
    return found


def regather_rank(rank: int, tp: int) -> None:
    """The second gathering survives recomputation,
    and a backward that takes inputs first and weights later.
    """
    group = tp_group(rank, tp)
    column = ColumnLinear(fill(nn.Linear(I, O, **FLOAT64)), group, True)
    row = RowLinear(fill(nn.Linear(O, I, **FLOAT64), 1), group, True)
    layer = nn.Sequential(column, nn.GELU(), row, nn.Tanh())
    parameters = list(layer.parameters())
    x, gradient = (
        drawn(B, S // tp, I, seed=rank).requires_grad_(),
        drawn(B, S // tp, I, seed=9 + rank),
    )
    layer(x).backward(gradient)
    want = [x.grad, *gradients(parameters)]
    # column forward, row backward, and once more
    assert dict(group.traffic.counts)["tp", "all_gather"].calls == 3

    x.grad = None
    layer.zero_grad()
    y = checkpoint(layer, x, use_reentrant=False)
    y.backward(gradient)
    for got, expected in zip([x.grad, *gradients(parameters)], want, strict=True):
        assert torch.equal(got, expected)

    y = layer(x)
    (dx,) = torch.autograd.grad(y, [x], gradient, retain_graph=True)
    later = torch.autograd.grad(y, parameters, gradient)
    for got, expected in zip([dx, *later], want, strict=True):
        assert torch.equal(got, expected)


def test_the_second_gathering_survives_recomputation_and_a_split_backward(pool: RankPool) -> None:
    pool.run(regather_rank, 2)


class RecordingGroup(Group):
    """Group that records when its collectives are posted and awaited."""

    events: list[str]

    def _handle(self, work: Any, what: str, *args: Any) -> CollectiveHandle:
        events, handle = self.events, super()._handle(work, what, *args)
        events.append(f"post {what.partition(' ')[0]}")
        wait = handle.wait
        handle.wait = lambda: (events.append(f"wait {what.partition(' ')[0]}"), wait())[1]  # type: ignore[method-assign]
        return handle


def overlap_rank(rank: int, tp: int, sequence: bool) -> tuple[list[str], list[str]]:
    """Events of one backward, and of one that defers the weight gradients."""
    group = tp_group(rank, tp)
    group.__class__, group.events = RecordingGroup, []  # type: ignore[attr-defined]
    layer = ColumnLinear(fill(nn.Linear(I, O, **FLOAT64)), group, sequence)
    x, gradient = (
        drawn(B, S // tp if sequence else S, I, seed=rank),
        drawn(B, S, O // tp, seed=9 + rank),
    )
    multiplied = torch.Tensor.mm

    def found(mode: SplitBackward, defers: bool) -> list[str]:
        group.events.clear()  # type: ignore[attr-defined]
        layer.zero_grad()
        x.grad = None
        with mode:
            y = layer(x.requires_grad_())
        with mode.deferring() if defers else nullcontext([]) as deferred:
            y.backward(gradient)
        assert layer.weight.grad is None or not defers
        accumulate_deferred(deferred)
        return list(group.events)  # type: ignore[attr-defined]

    def watched(self: Tensor, other: Tensor) -> Tensor:
        group.events.append("product")  # type: ignore[attr-defined]
        return multiplied(self, other)

    torch.Tensor.mm = watched  # type: ignore[method-assign]
    try:
        whole = found(SplitBackward(), False)
        want = [x.grad, layer.weight.grad, layer.bias.grad]
        split = found(SplitBackward(), True)
        assert all(map(torch.equal, want, [x.grad, layer.weight.grad, layer.bias.grad]))  # type: ignore[arg-type]
    finally:
        torch.Tensor.mm = multiplied  # type: ignore[method-assign]
    return whole, split


@pytest.mark.parametrize("sequence", [False, True])
def test_a_column_communicates_while_it_multiplies(pool: RankPool, sequence: bool) -> None:
    """dx while x is gathered, dW while dx is reduced; a deferred dW comes after the waits."""
    reduction = "reduce-scatter" if sequence else "all-reduce"
    forward = ["post all-gather", "wait all-gather"] if sequence else []
    first = ["post all-gather", "product", "wait all-gather"] if sequence else ["product"]
    whole = [*forward, *first, f"post {reduction}", "product", f"wait {reduction}"]
    split = [*forward, *first, f"post {reduction}", f"wait {reduction}", "product"]
    assert pool.run(overlap_rank, 2, sequence) == [(whole, split)] * 2


def test_a_whole_copy_is_not_kept() -> None:
    """The split weight is a copy of its slice: the whole weight can be freed."""
    plain = nn.Linear(I, O)
    column = ColumnLinear(copy.deepcopy(plain), lonely_group(0, 2), False)
    assert column.weight.untyped_storage().nbytes() == O // 2 * I * 4
