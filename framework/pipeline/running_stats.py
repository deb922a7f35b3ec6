"""Running buffers, which a training forward changes (BatchNorm's statistics), and checks of where they are correct.

A running buffer depends on the order of the micro-batches. Each stage sees all of them in one order, so with one
replica a pipeline gives the same buffers as one process. Two replicas would each have their own. A layer with
activation checkpointing (recompute) would count its micro-batches twice. Both are refused before launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.pipeline.values import meta_copy
from meshwright.schedule.action import Kind, Schedule

INSTEAD = (
    "use a layer without running state (GroupNorm, LayerNorm, RMSNorm), or BatchNorm with track_running_stats=False, "
    "which takes the statistics of its micro-batch"
)


class BufferWatch:
    """Detector of the buffers of a model that a training forward changes."""

    def __init__(self, layers: nn.Module) -> None:
        self._layers = layers
        self._before = {name: (buffer, buffer._version) for name, buffer in _named_buffers(layers)}

    def changed(self) -> list[str]:
        """Return the names of the buffers that were changed or replaced since construction, and of their neighbours.

        All buffers of a module with a changed one are listed, because torch's BatchNorm raises the version counter of
        only one of its three. Changes under ``if not x.is_meta`` are not detected on meta.
        """
        after = dict(_named_buffers(self._layers))
        owners = {
            name.rpartition(".")[0]
            for name, (buffer, version) in self._before.items()
            if after.get(name) is not buffer or buffer._version != version
        }
        modules = self._layers.named_modules(remove_duplicate=False)
        owners |= {name for name, module in modules if _keeps_statistics(module)}
        return [name for name in self._before if name.rpartition(".")[0] in owners]


def _named_buffers(layers: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return layers.named_buffers(remove_duplicate=False)


def running_buffers(layers: nn.Sequential, inputs: Any) -> list[str]:
    """Return the names of the buffers that a training forward changes, found by one forward on meta.

    See :class:`BufferWatch`. ``inputs``: inputs of one micro-batch, on meta.
    """
    on_meta = meta_copy(layers)
    watch = BufferWatch(on_meta)
    with torch.no_grad():
        on_meta(inputs)
    return watch.changed()


def _keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is a torch norm that updates running statistics.

    Some kinds (InstanceNorm) count no batches, so no version counter would show it.
    """
    statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
    return statistics and module.track_running_stats  # type: ignore[return-value]


def couples_samples(layers: nn.Sequential, running: Iterable[str]) -> bool:
    """Return whether a sample's output depends on others of its micro-batch, judged by types and buffers."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    return any(running) or any(isinstance(module, batch_norm) and module.training for module in layers.modules())


def cast_running(layers: nn.Sequential, running: Iterable[str], dtype: torch.dtype) -> None:
    """Cast floating-point running buffers, in place, to the training dtype or their own, whichever is finer."""
    for name in running:
        owner, _, attribute = name.rpartition(".")
        buffer = layers.get_buffer(name)
        if buffer.is_floating_point():
            layers.get_submodule(owner)._buffers[attribute] = buffer.to(torch.promote_types(buffer.dtype, dtype))


def cast_statistics(layers: nn.Sequential, dtype: torch.dtype) -> None:
    """Cast the constant statistics of norms in eval mode to the training dtype; torch's kernels take no other."""
    for module in layers.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and not module.training and module.track_running_stats:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def running_values(layers: nn.Sequential, running: Iterable[str]) -> dict[str, Tensor]:
    """Return the current running buffers of these layers, by name."""
    mine = {name for name, _ in layers.named_children()}
    return {name: layers.get_buffer(name) for name in running if name.partition(".")[0] in mine}


def check_running(
    layers: nn.Sequential,
    running: Iterable[str],
    schedule: Schedule,
    *,
    dp: int,
    tp: int,
    plan: Mapping[str, str],
    sequence: bool,
    dtype: torch.dtype,
    recomputed: Iterable[str],
) -> None:
    """Raise :class:`ModelError` where running buffers would differ from those of one process.

    ``recomputed``: names of the layers, and of parts of layers, with activation checkpointing (recompute).
    """
    again = list(recomputed)
    for name in running:
        layer_name, _, inside = name.partition(".")
        layer = f"layer {layer_name} ({type(layers.get_submodule(layer_name)).__name__})"
        what = f"{layer} changes its buffer {inside} in forward"
        if dp > 1:
            raise ModelError(
                "MW-PIPELINE-009",
                f"{what}, and with parallel.dp = {dp} each replica would keep its own, of its own samples: set "
                f"parallel.dp = 1 (pipelines of any length do), or {INSTEAD}. There is no SyncBatchNorm",
            )
        if sequence:
            raise ModelError(
                "MW-PIPELINE-010",
                f"{what}, and under sequence parallelism each rank sees a part of the sequence: set parallel.sequence "
                f"= false, or {INSTEAD}",
            )
        parts = [part for part, _ in layers.named_modules() if part.partition(".")[0] == layer_name]
        split = [part for part in parts if any(fnmatchcase(part, pattern) for pattern in plan)]
        if tp > 1 and split:
            raise ModelError(
                "MW-PIPELINE-011",
                f"{what}, and {split[0]} of the same layer is split over parallel.tp = {tp}: each rank would keep "
                f"another. Put what is split into a layer of its own, or {INSTEAD}",
            )
        inner = next((part for part in again if f"{name}.".startswith(f"{part}.")), None)
        if inner is not None:
            raise ModelError(
                "MW-PIPELINE-012",
                f"{what}, and pipeline.recompute computes {inner} again in backward: each micro-batch would count "
                f'twice. Leave it out of pipeline.recompute_layers, set pipeline.recompute = "none", or {INSTEAD}',
            )
        if dtype.itemsize < 4 and _keeps_statistics(layers.get_submodule(name.rpartition(".")[0])):
            raise ModelError(
                "MW-PIPELINE-013",
                f"{what}: its statistics stay float32, since sums of thousands of steps do, and torch's kernels do not "
                f'take them beside parameters in {str(dtype).removeprefix("torch.")}: set train.dtype = "float32", or '
                f"{INSTEAD}",
            )
        _check_order(schedule, what)


def _check_order(schedule: Schedule, what: str) -> None:
    """Raise :class:`ModelError` unless each stage's forwards are in the order of the micro-batches."""
    for rank in range(schedule.pp):
        last: dict[int, int] = {}
        for _, action in schedule.actions(rank):
            if action.kind is not Kind.F:
                continue
            assert action.stage is not None and action.microbatch is not None
            if action.microbatch < last.get(action.stage, -1):
                raise ModelError(
                    "MW-PIPELINE-014",
                    f"{what}, which depends on the order of the micro-batches, and this schedule has stage "
                    f"{action.stage} do {action} after micro-batch {last[action.stage]}: put its forwards in order, "
                    f"or {INSTEAD}",
                )
            last[action.stage] = action.microbatch
