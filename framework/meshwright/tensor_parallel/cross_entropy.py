"""Cross-entropy of logits that are split over the vocabulary:
no rank ever holds a full row of them.

With x the logits of one token, m the largest of them over all ranks, and t its label:

    loss = log(sum over V of exp(x - m)) - (x[t] - m)          d loss / d x[v] = exp(x[v] - m) / sum - (v == t)

    rank 0   max |            | sum exp, x[t] - m if t is local |            | loss
             --- |-all-reduce-| ------------------------------- |-all-reduce-| ---- the same on all ranks
    rank 1   max |    max     | sum exp, 0                      |    sum     | loss

With label smoothing e and a z-loss of z (lse = m + log(sum)), q[v] = (1 - e) (v == t) + e/V as in
torch:

    loss = log(sum) - sum over V of q[v] (x[v] - m) + z lse^2
    d loss / d x[v] = (1 + 2 z lse) exp(x[v] - m) / sum - q[v]

Backward keeps the input logits themselves and two numbers per token. The caller must not overwrite
the logits before backward (autograd would notice). megatron-core's function is the reference in the
tests and not used here: it computes in float32 for every input, overwrites float32 logits, has no
padding and reads a global group.

Shapes: B micro-batch, S sequence, V vocabulary, L = ceil(V/tp) columns on this rank; the last may
be padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.errors import ModelError
from meshwright.mesh.comm import Group
from meshwright.model.chunked_loss import rows_per_chunk
from meshwright.parameters import ParameterInfo
from meshwright.tensor_parallel.layers import VocabHead, vocab_slice
from meshwright.tensor_parallel.ranges import check_range


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    vocab_size: int,
    ignore: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the per-token losses (B, S), the same on all ranks; 0 where ignored.

    They are float64 for float64 logits, else float32. All tp ranks must call it together. Forward
    blocks for two all-reduces over tp, of (B, S) and (2, B, S): in total 6 B S (tp-1)/tp numbers of
    the losses' dtype on the wire per rank; with label smoothing (3, B, S) and 8. Backward does not
    communicate. Logits are never overwritten.

    Args:
        logits: (B, S, L), this rank's columns; (B, S, V) on every rank where the head is not split
            over the vocabulary.
        labels: (B, S) int64, each in [0, V) or equal to ``ignore``.
        group: the tp group.
        label_smoothing: share of each label spread evenly over the V real tokens.
        z_loss: factor of the squared logarithm of the softmax's normaliser.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if group.size == 1 or logits.shape[-1] == vocab_size:
        assert logits.shape[-1] == vocab_size, (tuple(logits.shape), vocab_size)
        flat, targets = logits.flatten(0, -2).to(dtype), labels.flatten()
        smooth = {"reduction": "none", "label_smoothing": label_smoothing}
        losses = F.cross_entropy(flat, targets, ignore_index=ignore, **smooth)  # type: ignore[arg-type]
        if z_loss:
            losses = losses + z_loss * flat.logsumexp(-1).square().masked_fill(targets == ignore, 0)
        return losses.view(labels.shape)
    check_range(labels, vocab_size, ignore)
    rows = vocab_slice(vocab_size, group.rank, group.size)
    assert logits.shape == (*labels.shape, rows.padded), (
        tuple(logits.shape),
        tuple(labels.shape),
        rows,
    )
    columns = _Columns(
        group, rows.start, rows.stop, ignore, dtype, label_smoothing, z_loss, vocab_size
    )
    losses = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), columns)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)  # type: ignore[no-any-return]


def _chunks(logits: Tensor, group: Group) -> Iterator[slice]:
    """Yield slices of tokens, each with a chunk of logits (:func:`rows_per_chunk`).

    In a dry run (:class:`meshwright.mesh.fake.CountingGroup`) the first slice stands for all.
    """
    tokens, step = len(logits), rows_per_chunk(logits)
    starts = range(0, tokens, step)
    for start in group.chunks(starts):
        yield slice(start, min(start + step, tokens))


class _Columns(NamedTuple):
    """This rank's columns [start, stop) of the vocabulary, and the options of the loss."""

    group: Group
    start: int
    stop: int
    ignore: int
    dtype: torch.dtype
    smoothing: float
    z_loss: float
    vocab_size: int


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of flat tokens: logits (B*S, L), labels (B*S,) -> losses (B*S,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, columns: _Columns) -> Tensor:
        group, start, stop, ignore, dtype, smoothing, z_loss, vocab_size = columns
        count = stop - start
        tokens = len(labels)
        largest = logits.new_full((tokens,), -torch.inf, dtype=dtype)
        if count:
            largest = logits[:, :count].amax(-1).to(dtype)
        group.all_reduce(largest, "max").wait()

        mine = (labels >= start) & (labels < stop)
        target = (labels - start).masked_fill_(~mine, 0)
        # sum of exp(x - m), x[t] - m, and for label smoothing the sum of x - m: one all-reduce
        sums = logits.new_zeros((3 if smoothing else 2, tokens), dtype=dtype)
        if count:
            for part in _chunks(logits, group):
                shifted = logits[part, :count].to(dtype) - largest[part, None]
                picked = shifted.gather(1, target[part, None]).squeeze(1)
                sums[1, part] = picked.masked_fill_(~mine[part], 0)
                if smoothing:
                    sums[2, part] = shifted.sum(-1)
                sums[0, part] = shifted.exp_().sum(-1)
        group.all_reduce(sums).wait()

        log_sum = sums[0].log_()
        # kept apart: largest + log_sum would lose digits
        ctx.save_for_backward(logits, labels, largest, log_sum)
        ctx.columns = columns
        losses = log_sum - sums[1]
        if smoothing:
            losses = log_sum - (1 - smoothing) * sums[1] - smoothing / vocab_size * sums[2]
        if z_loss:
            losses += z_loss * (largest + log_sum).square_()
        return losses.masked_fill_(labels == ignore, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, largest, log_sum = ctx.saved_tensors
        group, start, stop, ignore, dtype, smoothing, z_loss, vocab_size = ctx.columns
        count = stop - start
        gradient = gradient.masked_fill(labels == ignore, 0)
        mine = (labels >= start) & (labels < stop)
        target = (labels - start).masked_fill_(~mine, 0)
        at_target = gradient.masked_fill(~mine, 0) * (1 - smoothing)
        of_softmax = gradient * (1 + 2 * z_loss * (largest + log_sum)) if z_loss else gradient
        result = torch.empty_like(logits)
        result[:, count:] = 0
        if count:
            for part in _chunks(logits, group):
                share = logits[part, :count].to(dtype) - largest[part, None]
                share = share.sub_(log_sum[part, None]).exp_()
                share *= of_softmax[part, None]
                if smoothing:
                    share -= smoothing / vocab_size * gradient[part, None]
                index = target[part, None]
                share.scatter_(1, index, share.gather(1, index) - at_target[part, None])
                result[part, :count] = share
        return result, None, None


def split_vocab_size(layers: nn.Sequential, infos: Mapping[str, ParameterInfo]) -> int | None:
    """Return the full vocabulary size if the last layer's logits are split over it on this rank;
    None: they are full.

    ``infos``: parameters by name in the whole model.
    """
    name, last = list(layers.named_children())[-1]
    heads = [
        name for name, module in last.named_modules(prefix=name) if isinstance(module, VocabHead)
    ]
    return infos[f"{heads[-1]}.weight"].global_shape[0] if heads else None


def check_output_shape(
    layers: nn.Sequential, local: Sequence[int], full: Sequence[int], tp: int, *, has_own_loss: bool
) -> None:
    """Check that the loss can take the sharded model's output.

    Args:
        local: shape of the output with the layers sharded over tp; ``full``: not sharded.
        has_own_loss: the model defines its own loss.

    Raises:
        ModelError: sharding changes the shape, and not as the vocabulary-parallel loss expects.
    """
    if local == full:
        return
    name, last = list(layers.named_children())[-1]
    gives = f"with parallel.tp = {tp} the last layer, {name}, gives {local} instead of {full}"
    if has_own_loss:
        raise ModelError(
            "MW-RUN-002",
            f"{gives}, and the model's own loss wants all of it: leave that layer out of the"
            " sharding_plan",
        )
    if (
        not any(isinstance(module, VocabHead) for module in last.modules())
        or local[:-1] != full[:-1]
    ):
        raise ModelError(
            "MW-RUN-003",
            f"{gives}: it comes after the linear sharded as 'vocab' and sees a part of the"
            " vocabulary, or beside it and sees a part of the sequence. Make each linear that"
            " returns logits part of the last layer and 'vocab', or leave all of them out of the"
            " sharding_plan",
        )


def check_full_sequence(layers: nn.Sequential, *, sequence: bool) -> None:
    """Raise :class:`ModelError` where the logits are full,
    but sequence parallelism leaves a part of the sequence.
    """
    if sequence:
        raise ModelError(
            "MW-RUN-006",
            f"parallel.sequence = true, but the last layer, {list(layers._modules)[-1]}, has no"
            " linear sharded as 'vocab': its input would be a part of the sequence only. Add it to"
            " the model's sharding_plan, or set parallel.sequence = false",
        )
