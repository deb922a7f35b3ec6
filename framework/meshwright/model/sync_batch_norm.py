"""BatchNorm with the batch statistics of all replicas: the user's ``nn.SyncBatchNorm``, on CPU and
GPU.

    forward     count, mean, squared deviations of this rank  -- all-gather -->  those of the group, per channel
    backward    sums of dy and of dy * xhat of this rank      -- all-reduce -->  those of the group, per channel

torch's own module needs a GPU, and exchanges over all processes, pipeline stages included.

NOTE [samples of a group]: statistics are those of the m-th micro-batches of all replicas, dp x
micro_batch_size samples. StepFeed deals a model with such modules so that these are consecutive
samples of the step. One process that runs the untouched model on batches of that many samples
computes the same, and so does every layout with an equal dp x micro_batch_size. Context-parallel
ranks have parts of the same samples, whose elements add up to the whole. So all replicas, dp x cp,
are one group.

NOTE [order of the exchanges]: all replicas of a stage run the same row of the schedule, so they
exchange in one order, in recomputed forwards too. The group has a communicator of its own: on that
of the gradients an exchange would wait for a bucket of the layer before.

Shapes: x (B, C, ...), C channels, n ranks in the group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.errors import ModelError
from meshwright.mesh.comm import Group


class GroupStatistics(NamedTuple):
    """Statistics of the elements of each channel, over all ranks of a group."""

    num_elements: Tensor  # (), of a channel
    mean: Tensor  # (C,)
    squares: Tensor  # (C,), sum of squared deviations from the mean


class ReplicaBatchNorm(nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` over the replicas of a stage.

    It becomes the class of the user's module, which keeps its parameters, buffers and hooks.
    """

    group: Group | None = None
    """Replicas of the stage, dp x cp; None: not known, as in a forward on meta."""

    @property
    def uses_batch_statistics(self) -> bool:
        """True if forward normalises by the statistics of the batch: in training, and always
        without running ones.
        """
        return self.training or not self.track_running_stats

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...) per channel. In training collective over the group; blocks."""
        if x.dim() < 2 or not x.shape[1]:
            raise ValueError(f"expected (samples, channels, ...), got {tuple(x.shape)}")
        if not self.uses_batch_statistics:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        is_tracked = self.training and self.track_running_stats
        is_alone = self.group is not None and self.group.size == 1
        if is_alone and not (is_tracked and self.momentum is None):
            return self._normalise_alone(x, is_tracked=is_tracked)
        found = gather_statistics(x.detach(), self.group)
        if is_tracked:
            self._update_running(found)
        normalised: Tensor = _Normalisation.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, found, self.eps, self.group
        )
        return normalised

    def _normalise_alone(self, x: Tensor, *, is_tracked: bool) -> Tensor:
        """Normalise x by its own statistics in torch's fused kernel."""
        running: tuple[Tensor | None, Tensor | None] = None, None
        momentum = 0.0
        if is_tracked:
            assert self.momentum is not None and self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            running, momentum = (self.running_mean, self.running_var), self.momentum
        return F.batch_norm(
            x, *running, self.weight, self.bias, training=True, momentum=momentum, eps=self.eps
        )

    def _update_running(self, found: GroupStatistics) -> None:
        """Move the running statistics towards those of the group: equal bits on all its ranks."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share: float | Tensor | None = self.momentum
        if share is None:  # a mean over all batches ever
            share = 1.0 / self.num_batches_tracked.double()
        variance = found.squares / (found.num_elements - 1.0).clamp(min=1.0)
        for running, now in ((self.running_mean, found.mean), (self.running_var, variance)):
            assert running is not None
            running.copy_((1.0 - share) * running + share * now.to(running.dtype))


def gather_statistics(x: Tensor, group: Group | None) -> GroupStatistics:
    """All-gather the statistics of x (B, C, ...) over the group, and merge them in rank order.
    Blocks.

    Counts may differ between ranks, and be zero. The deviations are from each rank's own mean:
    sums of squares would cancel where the mean is large (Chan et al. 1979).

    Wire: M (n-1)/n bytes, M = n (2 C + 1) elements, at least float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    channels, count = x.shape[1], x.numel() // x.shape[1]
    if group is not None and count * group.size == 1:
        raise ValueError(f"one value per channel has no variance, got {tuple(x.shape)}")
    own = torch.zeros(2 * channels + 1, dtype=wide, device=x.device)
    if count:
        variance, mean = torch.var_mean(x.to(wide), _dims(x), correction=0)
        own = torch.cat([own[:1] + count, mean, variance * count])
    everyone = own.new_empty(1 if group is None else group.size, len(own))
    if group is None:
        everyone.copy_(own)
    else:
        group.all_gather(everyone.view(-1), own).wait()
    counts, means, squares = torch.split(everyone, [1, channels, channels], dim=1)
    total = counts.sum()
    merged = (counts * means).sum(0) / total
    apart = (counts * (means - merged).square()).sum(0)
    return GroupStatistics(total, merged, squares.sum(0) + apart)


class _Normalisation(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, by the statistics of a group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        found: GroupStatistics,
        eps: float,
        group: Group | None,
    ) -> Tensor:
        ctx.group = group
        variance = found.squares / found.num_elements
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, found.mean, inverse, found.num_elements)
        if weight is not None and bias is not None:
            weight, bias = weight.to(variance.dtype), bias.to(variance.dtype)
        # with given statistics this is element-wise: one pass
        return F.batch_norm(x, found.mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias. Those of weight and bias are of this rank's
        elements: they are summed with all other gradients.

        Collective over the group if x needs a gradient; blocks. Wire: 2 M (n-1)/n bytes, M = 2 C
        elements, at least float32.
        """
        x, weight, mean, inverse, count = ctx.saved_tensors
        at = (1, -1, *[1] * (x.dim() - 2))  # a channel's number beside its elements
        wide = dy.to(mean.dtype)
        normalised = (x.to(mean.dtype) - mean.view(at)) * inverse.view(at)
        own = torch.cat([wide.sum(_dims(x)), (wide * normalised).sum(_dims(x))])
        of_bias, of_weight = own.chunk(2)
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            total = own.clone()  # the halves of ``own`` are this rank's gradients
            if ctx.group is not None:
                ctx.group.all_reduce(total).wait()
            mean_dy, mean_dy_normalised = (total / count).chunk(2)
            factor = inverse if weight is None else inverse * weight.to(mean.dtype)
            apart = wide - mean_dy.view(at) - normalised * mean_dy_normalised.view(at)
            of_x = (apart * factor.view(at)).to(x.dtype)
        return (
            of_x,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 3,
        )


def _dims(x: Tensor) -> list[int]:
    """Return the dims of x (B, C, ...) over which the elements of a channel lie."""
    return [dim for dim in range(x.dim()) if dim != 1]


@functools.cache
def _over_replicas(kind: Any) -> Any:
    """Return a module's class with the forward of :class:`ReplicaBatchNorm`, under its own name."""
    return type(kind.__name__, (ReplicaBatchNorm, kind), {"__module__": kind.__module__})


def use_replica_statistics(path: str, layers: nn.Module) -> Iterator[ModelError]:
    """Make each ``nn.SyncBatchNorm`` of a model exchange over its replicas, in place; yield an error
    for each that cannot. No communication. ``path``: of the builder.
    """
    for name, module in layers.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        kind: Any = type(module)
        if module.process_group is not None:
            yield ModelError(
                "MW-MODEL-064",
                f"{path}: {name} ({kind.__name__}) has a process_group of its own, and its"
                " statistics are those of all replicas of its stage here: leave process_group out",
            )
        elif kind.forward is not nn.SyncBatchNorm.forward:
            yield ModelError(
                "MW-MODEL-065",
                f"{path}: {name} ({kind.__name__}) is an nn.SyncBatchNorm with a forward of its"
                " own, and torch's exchanges over all processes, pipeline stages included: derive"
                " it from nn.Module, with an nn.SyncBatchNorm as an attribute that it calls",
            )
        else:
            module.__class__ = _over_replicas(kind)


def synchronised(layers: nn.Module) -> Iterator[tuple[str, ReplicaBatchNorm]]:
    """Yield the names and modules that normalise by the batch statistics of all replicas."""
    for name, module in layers.named_modules():
        if isinstance(module, ReplicaBatchNorm) and module.uses_batch_statistics:
            yield name, module


def join_replicas(layers: nn.Module, group: Group) -> None:
    """Set the replicas over which the modules of these layers exchange."""
    for module in layers.modules():
        if isinstance(module, ReplicaBatchNorm):
            module.group = group
