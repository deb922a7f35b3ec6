"""Calls of a stage's layers, resolved once:
a feature that a layer does not use costs nothing per micro-batch.

forward    wait for a layer's weights -> offload of saved tensors -> recompute -> restart of its dropouts -> the layer
loss       the loss; in the first forward of training also the check that it ignores ignored labels
backward   prefetch of offloaded tensors -> torch's backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from meshwright.current import CurrentMicrobatch
from meshwright.model.buffers import SpareCounters
from meshwright.model.functional_dropout import FunctionalDropout
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.pointwise import Hooks
from meshwright.pipeline.recompute import RecomputeContext, recompute_layers, recomputed
from meshwright.pipeline.split_backward import SplitBackward
from meshwright.pipeline.stage_checks import (
    BackwardWatch,
    InspectedLayer,
    advise,
    check_ignored,
    explained,
    nested_checkpoint,
)
from meshwright.pipeline.values import IGNORED_LABEL, Loss, StageSpec
from meshwright.seeding import dropouts_of, restart_calls


class LayerCalls:
    """Layers of a stage as functions of a value, called in order.

    Args:
        before_layer: function called with the name of each layer before it runs.
        current: sample indices of the current micro-batch, restored when a forward is recomputed.
        split: mode that splits backward into I and W; None: backward is whole.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        spec: StageSpec,
        before_layer: Callable[[str], None],
        current: CurrentMicrobatch,
        split: SplitBackward | None,
        offload: ActivationOffload | None = None,
    ) -> None:
        self.offload = offload
        """Offload of the tensors that the layers in ``spec.offloaded`` save for backward."""
        self._layers = layers
        self._before_layer = before_layer
        self._running = spec.running
        self._split = split
        self._context = RecomputeContext(current, split, SpareCounters(layers))
        self._whole = recompute_layers(layers, spec.recomputed, self._context, self._outer_hooks)
        self._offloaded = [name for name, _ in layers.named_children() if name in spec.offloaded]
        self._calls = [
            (name, self._call_of(name, layer, layer)) for name, layer in layers.named_children()
        ]
        self._checks_backward = any(
            isinstance(each, FunctionalDropout) for each in layers.modules()
        )
        """True until the first backward, if a layer's own recompute could drop other elements."""
        self._checks_layers = self._checks_loss = True
        """True until the first training forward."""

    def skip_first_checks(self) -> None:
        """Skip the checks of the first forward, which read values and cost time."""
        self._checks_layers = self._checks_loss = self._checks_backward = False

    def _outer_hooks(self) -> Hooks | None:
        return None if self.offload is None else self.offload.hooks()

    def _call_of(
        self, name: str, layer: nn.Module, inner: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        dropouts = dropouts_of(layer)

        def run(value: Any) -> Any:
            # also in the second forward of a recompute: its first call draws as that of the first
            restart_calls(dropouts)
            return inner(value)

        call = run if dropouts else inner
        return partial(recomputed, call, self._context) if name in self._whole else call

    def begin_forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> None:
        """Begin a training forward. ``received``: tensors that stay on the device anyway,
        and are not offloaded.
        """
        if self.offload is not None:
            self.offload.begin_forward(stage, microbatch, [*received, *self._layers.buffers()])

    def run(self, value: Any, *, train: bool) -> Any:
        """Run the layers on the first one's input; return the output of the last one."""
        calls, name = self._calls, ""
        if train and self._checks_layers:
            self._checks_layers = False
            calls = self._inspected_calls()
        offload = self.offload if train and self._offloaded else None
        try:
            for name, call in calls:
                self._before_layer(name)
                if offload is None or name not in self._offloaded:
                    value = call(value)
                else:
                    with offload.around_layer(is_last=name == self._offloaded[-1]):
                        value = call(value)
        except (RuntimeError, IndexError) as error:
            advise(f"layer {name}", error, self._context.current.sample_indices)
            raise
        return value

    def _inspected_calls(self) -> list[tuple[str, Callable[[Any], Any]]]:
        """Return the calls of the first training forward, each with the checks of its layer."""
        calls: list[tuple[str, Callable[[Any], Any]]] = []
        for name, layer in self._layers.named_children():
            inspected = InspectedLayer(name, layer, self._running)
            calls.append((name, self._call_of(name, layer, inspected)))
        return calls

    def run_loss(self, loss: Loss, value: Any, labels: Tensor, *, checks: bool) -> Tensor:
        """Return the sum of the losses of labels (B, ...), ().

        ``checks``: check once that ignored labels have none.
        """
        if checks and self._checks_loss:
            check_ignored(loss, value, labels)
            self._checks_loss = False
        losses: Tensor = explained("the loss", self._context.current, loss, value, labels)
        if labels.is_floating_point():  # of a model's own loss, which may ignore none
            losses = losses.masked_fill(labels == IGNORED_LABEL, 0.0)
        return losses.sum()

    def run_backward(
        self, stage: int, microbatch: int, roots: list[Tensor], gradients: list[Tensor] | None
    ) -> None:
        """Run torch.autograd.backward from these roots, with their gradients."""
        if self.offload is not None:
            self.offload.begin_backward(stage, microbatch)
        if roots:
            try:
                watch = BackwardWatch() if self._checks_backward else nullcontext()  # type: ignore[no-untyped-call]
                with watch:
                    torch.autograd.backward(roots, gradients)
            except CheckpointError as error:
                if self._split is None:
                    raise
                raise nested_checkpoint(stage, error) from error
            self._checks_backward = False
        if self.offload is not None:
            self.offload.end_backward()
