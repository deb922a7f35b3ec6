"""Running buffers of a model, those that a training forward changes (BatchNorm's statistics):
search, cast, values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.buffers.step_state import BatchNorm, BatchStatistics, has_step_sums
from meshwright.model.build import meta_copy
from meshwright.model.requirements import REPEATED
from meshwright.model.sync_batch_norm import synchronised

INSTEAD = (
    "use a layer without running state (GroupNorm, LayerNorm, RMSNorm), or BatchNorm with"
    " track_running_stats=False, which takes the statistics of its micro-batch"
)


class BufferWatch:
    """Detector of the buffers of a model that a training forward changes."""

    def __init__(self, layers: nn.Module) -> None:
        self._layers = layers
        self._before = {
            name: (buffer, buffer._version)
            for name, buffer in layers.named_buffers(remove_duplicate=False)
        }

    def changed(self) -> list[str]:
        """Return the names of the buffers that were changed or replaced since construction,
        and of their neighbours.

        All buffers of a module with a changed one are listed, because torch's BatchNorm raises the
        version counter of only one of its three. Changes under ``if not x.is_meta`` are not
        detected on meta.
        """
        after = dict(self._layers.named_buffers(remove_duplicate=False))
        owners = {
            name.rpartition(".")[0]
            for name, (buffer, version) in self._before.items()
            if after.get(name) is not buffer or buffer._version != version
        }
        modules = self._layers.named_modules(remove_duplicate=False)
        owners |= {name for name, module in modules if keeps_statistics(module)}
        return [name for name in self._before if name.rpartition(".")[0] in owners]


def running_buffers(layers: nn.Sequential, inputs: Any) -> list[str]:
    """Return the names of the buffers that a training forward changes,
    found by one forward on meta.

    See :class:`BufferWatch`. ``inputs``: inputs of one micro-batch, on meta.
    """
    on_meta = meta_copy(layers)
    watch = BufferWatch(on_meta)
    with torch.no_grad():
        on_meta(inputs)
    return watch.changed()


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is a torch norm that updates running statistics.

    Version counters do not detect all of them: InstanceNorm counts no batches.
    """
    statistics = isinstance(module, BatchStatistics) and module.training
    return statistics and module.track_running_stats  # type: ignore[return-value]


def couples_samples(layers: nn.Sequential, running: Iterable[str]) -> bool:
    """Return whether a sample's outputs or gradients depend on others of its micro-batch,
    from types and buffers; see :func:`coupling_modules`.
    """
    return bool(coupling_modules(layers, running)) or any(True for _ in synchronised(layers))


def coupling_modules(layers: nn.Sequential, running: Iterable[str]) -> list[str]:
    """Return the names of the modules in which samples of one replica's micro-batch depend on each
    other, without those that synchronise over the replicas.

    A module may declare it: ``couples_samples = True``, as a router with a batch loss does. Step
    sums couple none.
    """
    of_replicas = {module for _, module in synchronised(layers)}
    changed = {name.rpartition(".")[0] for name in running}
    found = []
    for name, module in layers.named_modules(remove_duplicate=False):
        is_changed = name in changed and not has_step_sums(module)
        is_batch_norm = isinstance(module, BatchNorm) and module.training
        declares = getattr(module, "couples_samples", False)
        if module not in of_replicas and (is_changed or is_batch_norm or declares):
            found.append(name)
    return found


def owner_of(layers: nn.Module, name: str) -> nn.Module:
    """Return the module that has the buffer ``name``."""
    return layers.get_submodule(name.rpartition(".")[0])


def is_reused(layers: nn.Module, name: str) -> bool:
    """Return whether the module with the buffer ``name`` is used more than once in the model."""
    buffer, named = layers.get_buffer(name), layers.named_buffers(remove_duplicate=False)
    return hasattr(owner_of(layers, name), REPEATED) or sum(each is buffer for _, each in named) > 1


def cast_model(layers: nn.Sequential, running: Iterable[str], dtype: torch.dtype) -> None:
    """Cast parameters, running buffers and constant statistics to the training dtype, in place."""
    cast_parameters(layers, dtype)
    cast_running(layers, running, dtype)
    cast_statistics(layers, dtype)


def cast_parameters(layers: nn.Sequential, dtype: torch.dtype) -> None:
    """Cast floating-point parameters to the training dtype, in place.
    Constant buffers keep their dtype.
    """
    for parameter in layers.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def cast_running(layers: nn.Sequential, running: Iterable[str], dtype: torch.dtype) -> None:
    """Cast floating-point running buffers, in place,
    to the training dtype unless their own is wider.
    """
    for name in running:
        owner, _, attribute = name.rpartition(".")
        buffer = layers.get_buffer(name)
        if buffer.is_floating_point():
            layers.get_submodule(owner)._buffers[attribute] = buffer.to(
                torch.promote_types(buffer.dtype, dtype)
            )


def cast_statistics(layers: nn.Sequential, dtype: torch.dtype) -> None:
    """Cast the constant statistics of norms in eval mode to the training dtype;
    torch's kernels take no other.
    """
    for module in layers.modules():
        if (
            isinstance(module, BatchStatistics)
            and not module.training
            and module.track_running_stats
        ):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def running_values(layers: nn.Sequential, running: Iterable[str]) -> dict[str, Tensor]:
    """Return the current running buffers of these layers, by name."""
    mine = {name for name, _ in layers.named_children()}
    return {name: layers.get_buffer(name) for name in running if name.partition(".")[0] in mine}
