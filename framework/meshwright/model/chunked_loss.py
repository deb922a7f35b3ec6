"""Cross-entropy of whole logits, some tokens at a time:
the logits never exist a second time in float32.

    forward    logits (N, V) bf16 -> chunk of tokens in float32 -> losses (N,); saved: the logits themselves
    backward   the same chunk once more -> softmax - one-hot, scaled -> gradient (N, V) bf16

With torch's function, 8,192 bf16 tokens of a vocabulary of 128k, logits of 2 GB, need 12.6 GB more
at the peak. Here backward allocates the gradient, in the logits' dtype, and a chunk: 2.9 GB.

# NOTE [logits are not overwritten]
The gradient could be written over the saved logits. But other code may hold them: a module whose
backward needs its output (a tanh), a hook, a metric, a second head, a second backward. No public
API of torch can exclude it.

Shapes: N tokens (B*S), V vocabulary; all local to this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels import device_kind

CPU_CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS = 2**22, 2**26
"""Elements of the logits that a loss converts to float32 at a time: 16 MiB suit a CPU's cache,
256 MiB hide launches.
"""


class LossOptions(NamedTuple):
    """Options of the cross-entropy. Labels equal to ``ignore`` have zero loss."""

    ignore: int
    smoothing: float
    z_loss: float


def rows_per_chunk(logits: Tensor) -> int:
    """Return the rows of a chunk of logits (N, V), or (N, V/tp), on their device;
    meta tensors of dry runs count as CUDA.
    """
    elements = CPU_CHUNK_ELEMENTS if device_kind(logits) == "cpu" else CUDA_CHUNK_ELEMENTS
    return max(1, elements // max(1, logits.shape[1]))


def chunked_cross_entropy(logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Return the loss per label: logits (..., V), labels (...) -> (...), in float32,
    or float64 for float64 logits.

    Values are those of ``F.cross_entropy``, plus ``z_loss`` logsumexp(logits)^2. No communication.
    """
    losses = _ChunkedCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), options)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)  # type: ignore[no-any-return]


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = rows_per_chunk(logits)
    rows = logits.shape[0]
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of flat tokens: logits (N, V), labels (N,) -> losses (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        losses = logits.new_empty(logits.shape[0], dtype=dtype)
        for part in _chunks(logits):
            chunk, target = logits[part].to(dtype), labels[part]
            found = F.cross_entropy(
                chunk,
                target,
                ignore_index=options.ignore,
                reduction="none",
                label_smoothing=options.smoothing,
            )
            if options.z_loss:
                found += options.z_loss * chunk.logsumexp(-1).square().masked_fill(
                    target == options.ignore, 0
                )
            losses[part] = found
        ctx.save_for_backward(logits, labels)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        ignore, smoothing, z_loss = ctx.options
        is_ignored = labels == ignore
        gradient = gradient.masked_fill(is_ignored, 0)[:, None]
        target = labels.masked_fill(is_ignored, 0)[:, None]
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            share = torch.softmax(logits[part], -1, dtype=gradient.dtype)
            if z_loss:
                share *= 1 + 2 * z_loss * logits[part].to(gradient.dtype).logsumexp(
                    -1, keepdim=True
                )
            share.scatter_add_(1, target[part], share.new_full((share.shape[0], 1), smoothing - 1))
            if smoothing:
                share -= smoothing / logits.shape[-1]
            torch.mul(share, gradient[part], out=result[part])
        return result, None, None
