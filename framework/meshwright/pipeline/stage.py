"""One pipeline stage: consecutive layers of the model, and the tensors saved per micro-batch for backward.

forward          F     layers, then the loss on the last stage
backward         B     gradients of the inputs and of the weights
backward_input   I     gradients of the inputs; those of the weights are deferred
backward_weight  W     the deferred gradients
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.pipeline.activation_offload import activation_offload as activation_offload  # for build.py
from meshwright.pipeline.compiled import compile_layers as compile_layers
from meshwright.pipeline.layer_calls import LayerCalls
from meshwright.pipeline.split_backward import DeferredGradient, SplitBackward, accumulate_deferred
from meshwright.pipeline.stage_checks import check_outputs
from meshwright.pipeline.values import IGNORED_LABEL, Loss, ValueSpec, leaves_of
from meshwright.seeding import Draw


class LossPart(NamedTuple):
    """Loss of one micro-batch as sums, so that parts of unequal size add up correctly."""

    loss_sum: Tensor  # (), float32 or float64
    num_tokens: Tensor  # () int64, labels that count


@dataclass(frozen=True)
class StageSpec:
    """Plan of a stage, without its layers."""

    index: int
    input: ValueSpec | None
    """Spec of the received value; None on the first stage, which takes the samples."""
    output: ValueSpec | None
    """Spec of the sent value; None on the last stage, which computes the loss."""
    loss_scale: float = 1.0
    """Factor of ``loss_sum`` in backward: 1 / ``Blueprint.label_positions``. Not that of float16: ``step_scale``."""
    splits_backward: bool = False
    recomputed: Collection[str] = ()
    """Layers, and parts of layers, with activation checkpointing (recompute)."""
    running: Collection[str] = ()
    """Buffers of the model that forward may change, by name."""
    offloaded: Collection[str] = ()
    """Layers with activation offload: their saved tensors are in host memory until backward."""


class _SavedMicrobatch(NamedTuple):
    """Saved tensors of a micro-batch between F and its backward: the input leaves, and the roots of backward."""

    inputs: list[Tensor]
    roots: list[Tensor]


class Stage:
    """One stage on one rank.

    Args:
        before_layer: function called with the name of each layer before it runs, which waits for the all-gather of its
            weights.
        draw: sample indices of the current micro-batch, restored when a forward is recomputed.
        validation_loss: loss in eval mode; None: ``loss``.
        checks_loss: check in the first training forward that the loss is zero where labels are ignored.
    """

    def __init__(
        self,
        spec: StageSpec,
        layers: nn.Sequential,
        loss: Loss,
        *,
        before_layer: Callable[[str], None] = lambda name: None,
        draw: Draw | None = None,
        checks_loss: bool = False,
        validation_loss: Loss | None = None,
    ) -> None:
        self.index = spec.index
        self.input_spec, self.output_spec = spec.input, spec.output
        self.loss_scale = spec.loss_scale
        self.step_scale = 1.0
        """Further factor on the loss in this step: the dynamic loss scale of float16 training, else 1."""
        self.layers = layers
        self.loss, self.validation_loss = loss, validation_loss or loss
        self.split = SplitBackward() if spec.splits_backward else None
        self.checks_loss = checks_loss
        self._splitting: AbstractContextManager[object] = self.split or nullcontext()
        self.calls = LayerCalls(layers, spec, before_layer, draw or Draw(), self.split)
        self._saved: dict[int, _SavedMicrobatch] = {}
        self._deferred: dict[int, list[DeferredGradient]] = {}

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches with saved tensors: from F to B, or to W."""
        return len(self._saved) + len(self._deferred)

    def roots_of(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that the backward of a micro-batch starts from."""
        return self._saved[microbatch].roots

    def forward(self, microbatch: int, inputs: Any, labels: Tensor | None, *, train: bool) -> list[Tensor] | LossPart:
        """Run the layers on one micro-batch; when training, save the tensors that backward needs. All shapes are local.

        Args:
            inputs: on the first stage the samples, a value of tensors (B, ...); on others the list of leaves that the
                previous stage sent, in the shapes of ``input_spec``.
            labels: (B, ...) on the last stage, None on others.

        Returns:
            the leaves of the output value, detached, or the last stage's part of the loss.
        """
        assert microbatch not in self._saved, f"micro-batch {microbatch} is already in flight on stage {self.index}"
        leaves: list[Tensor] = []
        found: list[Tensor] | LossPart
        with self._splitting if train else torch.no_grad():
            value = inputs
            if self.input_spec is not None:
                pairs = zip(inputs, self.input_spec.leaves, strict=True)
                leaves = [tensor.detach().requires_grad_(train and spec.needs_gradient) for tensor, spec in pairs]
                value = self.input_spec.value_of(leaves)
            if train:
                self.calls.begin_forward(self.index, microbatch, leaves)
            value = self.calls.run(value, train=train)
            if self.output_spec is not None:
                outputs = leaves_of(value)
                check_outputs(outputs, self.output_spec, self.layers, self.index, train)
                specs = zip(outputs, self.output_spec.leaves, strict=True)
                roots = [output for output, spec in specs if spec.needs_gradient]
                found = [output.detach().contiguous() for output in outputs]
            else:
                assert labels is not None
                loss = self.loss if train else self.validation_loss
                loss_sum = self.calls.run_loss(loss, value, labels, checks=train and self.checks_loss)
                roots = [loss_sum]
                found = LossPart(loss_sum.detach(), torch.count_nonzero(labels != IGNORED_LABEL))
        if train:
            self._saved[microbatch] = _SavedMicrobatch(leaves, roots)
        return found

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the backward of one micro-batch; hooks of data_parallel/replica.py add weight gradients to the buckets.

        Args:
            gradients: one per output leaf that needs a gradient, in its shape; None on the last stage, which starts
                from its loss.

        Returns:
            the gradients of the input leaves that need one, in their shapes; an empty list on the first stage.
        """
        inputs, roots = self._saved.pop(microbatch)
        if self.output_spec is None:
            gradients = [torch.full_like(root, self.loss_scale * self.step_scale) for root in roots]
        self.calls.run_backward(self.index, microbatch, roots, gradients)
        if self.input_spec is None:
            return []
        found = []
        for tensor, spec in zip(inputs, self.input_spec.leaves, strict=True):
            if spec.needs_gradient:
                found.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        return [gradient.contiguous() for gradient in found]

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run I: :meth:`backward`, with the weight gradients of linears and embeddings deferred."""
        assert self.split is not None, f"stage {self.index} was built for whole backwards"
        with self.split.deferring() as deferred:
            found = self.backward(microbatch, gradients)
        self._deferred[microbatch] = deferred
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Run W: compute the weight gradients that I has deferred."""
        accumulate_deferred(self._deferred.pop(microbatch))

    def deferred_parameters(self, microbatch: int) -> set[Tensor]:
        """Return the parameters whose gradients W of this micro-batch will compute."""
        return {each.parameter for each in self._deferred[microbatch]}
