"""Profiles of layers for one micro-batch on one tp rank,
measured by running the real modules on the meta device.

    plain model on meta -> split over tp -> one layer after the other, forward and backward, under a WorkRecorder

    LayerProfile   work      operations of forward and backward, to be timed on a device
                   messages  collectives of its tp group
                   memory    bytes kept for backward, and peaks in forward and in backward

There are no formulas per model. Equal layers with equal inputs are run once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.current import CurrentMicrobatch
from meshwright.mesh.fake import CountingGroup
from meshwright.pipeline.plan import outline_of, outline_of_value
from meshwright.pipeline.values import Loss
from meshwright.seeding import SeededDropout
from meshwright_plan.planner.context import ContextMeter
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import LayerProfile
from meshwright_plan.planner.layer_run import LayerRun


def counting_group(tp: int) -> CountingGroup:
    """Return a fake tensor-parallel group of ``tp`` ranks, seen from rank 0;
    it counts traffic and sends nothing.
    """
    return CountingGroup("tp", tuple(range(tp)), 0)


@dataclass
class LayerProfiler:
    """Profiler of the layers of one model on one tp rank."""

    tp: CountingGroup
    loss: Loss
    execution: ExecutionOptions
    results: dict[Any, tuple[LayerProfile, Any]] = field(default_factory=dict)
    """Cache, which profilers of the same model and loss can share."""
    meter: ContextMeter | None = None
    """Meter of the layers' attention cores."""
    load: tuple[int, float] = (1, 1.0)
    """(ep, rows of the busiest rank's experts over the mean)."""

    def profile(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        inputs: Any,
        labels: Tensor | None,
        *,
        recompute: Sequence[str] = (),
        splits_backward: bool = False,
    ) -> tuple[LayerProfile, ...]:
        """Profile every layer, first to last.

        Args:
            layers: (name, module), split over tp already, in the training dtype, on meta. A module
                that represents several layers is repeated.
            inputs: Inputs of one micro-batch, on meta; full tensors, as every tp rank receives
                them.
            labels: Labels of that micro-batch; None leaves the loss out.
            recompute: names of the layers and modules that are recomputed in backward (activation
                checkpointing).

        Raises:
            ModelError: a layer, or the loss, fails on meta.
        """
        value = inputs
        current = CurrentMicrobatch(
            torch.empty(len(tree_leaves(value)[0]), dtype=torch.int64, device="meta"),
            is_recompute=True,
        )
        profiles = []
        outlines: dict[int, Any] = {}
        for index, (name, original) in enumerate(layers):
            if id(original) not in outlines:
                outlines[id(original)] = outline_of(original)
            own_labels = labels if index == len(layers) - 1 else None
            parts = tuple(
                part.removeprefix(name) for part in recompute if part.split(".")[0] == name
            )
            key: Any = (
                outlines[id(original)],
                outline_of_value(value),
                None if own_labels is None else outline_of_value(own_labels),
                parts,
                self.execution,
                self.tp.size,
                splits_backward,
                self.meter and self.meter.key,
                self.load,
            )
            if key not in self.results:
                loss = None if own_labels is None else partial(self._loss, own_labels)
                layer = _copy_on_meta(original, current)
                run = LayerRun(name, layer, self.tp, self.execution, loss, parts, splits_backward)
                run.meter = self.meter
                self.results[key] = run.profile(value)
            profile, value = self.results[key]
            profiles.append(profile if profile.name == name else replace(profile, name=name))
        return tuple(profiles)

    def _loss(self, labels: Tensor, output: Any) -> Tensor:
        return self.loss(output, labels.to("meta"))


def _copy_on_meta(original: nn.Module, current: CurrentMicrobatch) -> nn.Module:
    """Return a copy of a layer on meta in train mode,
    whose dropouts draw for samples without values.
    """
    layer = copy.deepcopy(original).to("meta").train()
    for module in layer.modules():
        if isinstance(module, SeededDropout):
            module.current, module.name = current, ""
    return layer
