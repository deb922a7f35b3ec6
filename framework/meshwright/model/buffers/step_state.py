"""Step state of a model: buffers that are a function of all micro-batches of a step,
the same in every layout.

Two kinds of modules have such buffers:

    step sums       a module with ``step_sums``, names of buffers to which a training forward only adds, and
                    ``end_step()``, called once after each optimizer step, when these buffers hold
                    the sums over the global batch. It updates the module's other buffers and zeroes
                    the sums.
    statistics      torch's BatchNorm. Its running statistics decay once per micro-batch: r <- (1 - m) r + m s. The
                    result after all micro-batches of the global batch, in the order of their
                    samples, is a weighted sum over the replicas.

NOTE [statistics over replicas]: replica d of D runs c micro-batches, from r to r_d = a^c r + own
terms, a = 1 - m. One process would run all of them in the order of the replicas, and end at a^(Dc)
r + sum over d of a^((D-1-d)c) (r_d - a^c r). Nothing else is exchanged: batch statistics are those
of one micro-batch, whose size is part of the model. An nn.SyncBatchNorm has equal statistics on all
replicas already (sync_batch_norm.py), which decay once per group of micro-batches: nothing is left
to combine.

The sums travel in the vector that the step all-reduces anyway, as float64: exact for integers below
2^53.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PRIVATE_TORCH = {
    "torch.nn.modules.batchnorm._BatchNorm": "2.11-2.15",
    "torch.nn.modules.batchnorm._NormBase": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

BatchNorm, BatchStatistics = nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._NormBase
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def has_step_sums(module: nn.Module) -> bool:
    """Return whether a module declares step sums."""
    return bool(getattr(module, "step_sums", ()))


def is_saved(layers: nn.Module, name: str) -> bool:
    """Return whether checkpoints hold a running buffer: all but step sums that are not persistent,
    zero between steps.

    ``register_buffer(..., persistent=False)`` declares it.
    """
    owner, _, attribute = name.rpartition(".")
    module = layers.get_submodule(owner)
    return not (has_step_sums(module) and attribute in module._non_persistent_buffers_set)


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm that updates running statistics in training."""
    return isinstance(module, BatchNorm) and module.training and module.track_running_stats


def counters_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers of one module that a forward must change once
    per micro-batch.
    """
    return STATISTICS if has_statistics(module) else tuple(getattr(module, "step_sums", ()))


class SpareCounters:
    """Spare buffers for the forwards of a recompute (activation checkpointing),
    which must count nothing.
    """

    def __init__(self, layers: nn.Module) -> None:
        counting = [
            (module, counters_of(module)) for module in layers.modules() if counters_of(module)
        ]
        self._spare = [
            (module, {name: module.get_buffer(name).clone() for name in names})
            for module, names in counting
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the spare buffers in the place of the counting ones within the block."""
        kept = [{name: module._buffers[name] for name in spare} for module, spare in self._spare]
        for module, spare in self._spare:
            module._buffers.update(spare)
        try:
            yield
        finally:
            for (module, _), buffers in zip(self._spare, kept, strict=True):
                module._buffers.update(buffers)


class StepState:
    """Running buffers of one rank's stages during a step.

    Args:
        layers: all layers of the model; those of other stages may be on meta.
        running: names of all buffers that forward changes, in an order that is the same on all
            ranks.
        own: names of this rank's layers.
        replica: (index, number) of this rank's replica, dp x cp of them.
        adds: False on ranks whose sums another rank has too (tensor parallelism without sequence
            parallelism).
    """

    def __init__(
        self,
        layers: nn.Sequential,
        running: Iterable[str],
        own: Iterable[str],
        replica: tuple[int, int],
        adds: bool,
    ) -> None:
        self._layers, self._adds = layers, adds
        self._replica, self._num_replicas = replica
        mine = set(own)
        self._own = [name for name in running if name.partition(".")[0] in mine]
        summed = [name for name in running if self._is_summed(name)]
        self._slots = {name: tuple(layers.get_buffer(name).shape) for name in summed}
        self.size = sum(torch.Size(shape).numel() for shape in self._slots.values())
        """Number of elements that this state adds to the vector that a step all-reduces."""
        modules = [
            module for name, module in layers.named_modules() if name.partition(".")[0] in mine
        ]
        self._ending: list[Any] = [module for module in modules if has_step_sums(module)]
        self._scaled: list[Any] = [
            module for module in modules if hasattr(module, "gradient_scale")
        ]
        self._before: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        """Sums over the global batch of the last step, float64, by name: those of all stages."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the summed buffers of all stages."""
        return tuple(self._slots)

    def buffers(self) -> dict[str, Tensor]:
        """Return all running buffers of this rank's stages by name, as they are now.
        Equal on every tp rank.
        """
        return {name: self._layers.get_buffer(name) for name in self._own}

    def step_sums(self) -> dict[str, Tensor]:
        """Return the step sums of the last step, those of all stages, without BatchNorm's terms."""
        return {name: total for name, total in self.sums.items() if not self._is_statistic(name)}

    def _is_statistic(self, name: str) -> bool:
        owner = name.rpartition(".")[0]
        return isinstance(self._layers.get_submodule(owner), BatchNorm)

    def _is_summed(self, name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        module = self._layers.get_submodule(owner)
        if has_statistics(module):
            is_combined = self._num_replicas > 1 and not isinstance(module, nn.SyncBatchNorm)
            return is_combined and attribute in STATISTICS
        return attribute in getattr(module, "step_sums", ())

    def begin(self, scale: float) -> None:
        """Begin a step. ``scale``: gradient of each loss,
        which modules that add losses read as ``gradient_scale``.
        """
        self._before = {name: self._layers.get_buffer(name).clone() for name in self._own}
        for module in self._scaled:
            module.gradient_scale = scale

    def vector(self, device: torch.device) -> Tensor:
        """Return this rank's terms of the sums, (size,) float64. No device synchronisation."""
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        for name, shape in self._slots.items():
            is_mine = self._adds and name in self._before
            if is_mine:
                part = self._term(name)
            else:
                part = torch.zeros(shape, dtype=torch.float64, device=device)
            parts.append(part.reshape(-1))
        return torch.cat(parts)

    def _term(self, name: str) -> Tensor:
        """Return this replica's term of one buffer: see NOTE [statistics over replicas]."""
        owner, _, attribute = name.rpartition(".")
        module: Any = self._layers.get_submodule(owner)
        now, before = self._layers.get_buffer(name).double(), self._before[name].double()
        if not isinstance(module, BatchNorm) or attribute == "num_batches_tracked":
            return now - before
        counter = f"{owner}.num_batches_tracked"
        tracked = self._before[counter].double()
        count = self._layers.get_buffer(counter).double() - tracked
        if module.momentum is None:  # a mean over all micro-batches ever
            return (tracked + count) * now - tracked * before
        decay = (1.0 - module.momentum) ** count
        return decay ** (self._num_replicas - 1 - self._replica) * (now - decay * before)

    def split_off(self, vector: Tensor) -> Tensor:
        """Store the sums, the last ``size`` elements of a step's all-reduced vector;
        return the other elements.
        """
        rest, mine = vector[: vector.numel() - self.size], vector[vector.numel() - self.size :]
        sizes = [torch.Size(shape).numel() for shape in self._slots.values()]
        parts = zip(self._slots.items(), torch.split(mine, sizes), strict=True)
        self.sums = {name: part.view(shape) for (name, shape), part in parts}
        return rest

    def end(self) -> None:
        """Write the sums into the buffers of this rank, and call each module's ``end_step``."""
        for name, total in self.sums.items():
            if name in self._before:
                self._layers.get_buffer(name).copy_(self._combined(name, total))
        for module in self._ending:
            module.end_step()

    def _combined(self, name: str, total: Tensor) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        module: Any = self._layers.get_submodule(owner)
        before = self._before[name].double()
        if not isinstance(module, BatchNorm) or attribute == "num_batches_tracked":
            return before + total
        count = self.sums[f"{owner}.num_batches_tracked"]
        if module.momentum is None:
            tracked = self._before[f"{owner}.num_batches_tracked"].double()
            return (tracked * before + total) / (tracked + count)
        return (1.0 - module.momentum) ** count * before + total

    def undo(self) -> None:
        """Restore the buffers of this rank as they were before a step that is skipped."""
        for name, before in self._before.items():
            self._layers.get_buffer(name).copy_(before)


def step_sum_problem(module: nn.Module) -> str | None:
    """Return the reason why the declared step sums of a module cannot work, or None."""
    sums: Sequence[str] = module.step_sums  # type: ignore[assignment]
    buffers = dict(module.named_buffers(recurse=False))
    missing = [name for name in sums if name not in buffers]
    if missing:
        return f"step_sums names {missing[0]}, which is no buffer of the module"
    if not callable(getattr(module, "end_step", None)):
        return "it has step_sums and no method end_step()"
    return None
