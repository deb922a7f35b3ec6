"""One pipeline stage: consecutive layers of the model,
and the tensors saved per micro-batch for backward.

forward          F     layers, then the loss on the last stage
backward         B     gradients of the inputs and of the weights
backward_input   I     gradients of the inputs; those of the weights are deferred
backward_weight  W     the deferred gradients

The autograd graph of a micro-batch ends at both sides of the stage: inputs are leaves, outputs are
detached. The executor carries values and gradients from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.current import CurrentMicrobatch
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.layer_calls import LayerCalls
from meshwright.pipeline.split_backward import DeferredGradient, SplitBackward, accumulate_deferred
from meshwright.pipeline.stage_checks import check_outputs
from meshwright.pipeline.values import IGNORED_LABEL, Loss, StageSpec, ValueSpec, leaves_of


class LossPart(NamedTuple):
    """Loss of one micro-batch as sums, so that parts of unequal size add up correctly."""

    loss_sum: Tensor  # (), float32 or float64
    num_tokens: Tensor  # () int64, labels that count


class _SavedMicrobatch(NamedTuple):
    """Saved tensors of a micro-batch between F and its backward: the input leaves,
    and the roots of backward.
    """

    inputs: list[Tensor]
    roots: list[Tensor]


class Stage:
    """One stage on one rank.

    Args:
        before_layer: function called with the name of each layer before it runs, which waits for
            the all-gather of its weights.
        offload: offload of the tensors that layers in ``spec.offloaded`` save for backward.
        current: sample indices of the current micro-batch, restored when a forward is recomputed, so
            that its dropouts draw the same masks.
        validation_loss: loss in eval mode; None: ``loss``.
    """

    def __init__(
        self,
        spec: StageSpec,
        layers: nn.Sequential,
        loss: Loss,
        *,
        before_layer: Callable[[str], None] = lambda name: None,
        offload: ActivationOffload | None = None,
        current: CurrentMicrobatch | None = None,
        validation_loss: Loss | None = None,
    ) -> None:
        self.index = spec.index
        self.input_spec, self.output_spec = spec.input, spec.output
        self.label_scale = spec.label_scale
        self.loss_scale = 1.0
        """Loss scale of this step: dynamic in float16 training, else 1."""
        self.layers = layers
        self.loss, self.validation_loss = loss, validation_loss or loss
        self.split = SplitBackward() if spec.splits_backward else None
        self.checks_loss = spec.checks_loss
        self._splitting: AbstractContextManager[object] = self.split or nullcontext()
        self.calls = LayerCalls(
            layers, spec, before_layer, current or CurrentMicrobatch(), self.split, offload
        )
        self._saved: dict[int, _SavedMicrobatch] = {}
        self._deferred: dict[int, list[DeferredGradient]] = {}

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches with saved tensors: from F to B, or to W."""
        return len(self._saved) + len(self._deferred)

    def roots_of(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that the backward of a micro-batch starts from."""
        return self._saved[microbatch].roots

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        labels: Tensor | None,
        *,
        train: bool,
        length: int | None = None,
    ) -> list[Tensor] | LossPart:
        """Run the layers on one micro-batch; when training, save the tensors that backward needs.
        All shapes are local.

        Args:
            inputs: on the first stage the samples, a value of tensors (B, ...); on others the list
                of leaves that the previous stage sent, in the shapes of ``input_spec``.
            labels: (B, ...) on the last stage, None on others.
            length: tokens of the samples where they are trimmed; None: those of the specs.

        Returns:
            the leaves of the output value, detached, or the last stage's part of the loss.
        """
        assert microbatch not in self._saved, (
            f"micro-batch {microbatch} is already in flight on stage {self.index}"
        )
        with self._splitting if train else torch.no_grad():
            received: list[Tensor] = []
            value = inputs
            if self.input_spec is not None:
                received = _as_leaves(inputs, self.input_spec, train=train)
                value = self.input_spec.value_of(received)
            if train:
                self.calls.begin_forward(self.index, microbatch, received)
            value = self.calls.run(value, train=train)
            result: list[Tensor] | LossPart
            if self.output_spec is None:
                assert labels is not None
                loss_sum = self._loss_of(value, labels, train=train)
                roots = [loss_sum]
                result = LossPart(loss_sum.detach(), torch.count_nonzero(labels != IGNORED_LABEL))
            else:
                outputs = leaves_of(value)
                expected = self.output_spec.at(length)
                check_outputs(outputs, expected, self.layers, self.index, train)
                specs = zip(outputs, self.output_spec.leaves, strict=True)
                roots = [output for output, spec in specs if spec.needs_gradient]
                result = [output.detach().contiguous() for output in outputs]
        if train:
            self._saved[microbatch] = _SavedMicrobatch(received, roots)
        return result

    def _loss_of(self, output: Any, labels: Tensor, *, train: bool) -> Tensor:
        """Return the sum of the losses of a micro-batch, ()."""
        loss = self.loss if train else self.validation_loss
        return self.calls.run_loss(loss, output, labels, checks=train and self.checks_loss)

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the backward of one micro-batch; hooks of data_parallel/replica.py add weight
        gradients to the buckets.

        Args:
            gradients: one per output leaf that needs a gradient, in its shape; None on the last
                stage, which starts from its loss.

        Returns:
            the gradients of the input leaves that need one, in their shapes; an empty list on the
            first stage.
        """
        received, roots = self._saved.pop(microbatch)
        if self.output_spec is None:
            # Scaled here and not in forward, so that the reported loss is a plain sum.
            gradients = [
                torch.full_like(root, self.label_scale * self.loss_scale) for root in roots
            ]
        self.calls.run_backward(self.index, microbatch, roots, gradients)
        if self.input_spec is None:
            return []
        input_gradients: list[Tensor] = []
        for tensor, spec in zip(received, self.input_spec.leaves, strict=True):
            if spec.needs_gradient:
                # None: no layer used the tensor, but the stage before waits for its gradient
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                input_gradients.append(gradient.contiguous())
        return input_gradients

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run I: :meth:`backward`, with the weight gradients of linears and embeddings deferred."""
        assert self.split is not None, f"stage {self.index} was built for whole backwards"
        with self.split.deferring() as deferred:
            input_gradients = self.backward(microbatch, gradients)
        self._deferred[microbatch] = deferred
        return input_gradients

    def backward_weight(self, microbatch: int) -> None:
        """Run W: compute the weight gradients that I has deferred."""
        accumulate_deferred(self._deferred.pop(microbatch))

    def deferred_parameters(self, microbatch: int) -> set[Tensor]:
        """Return the parameters whose gradients W of this micro-batch will compute."""
        return {deferred.parameter for deferred in self._deferred[microbatch]}


def _as_leaves(tensors: list[Tensor], spec: ValueSpec, *, train: bool) -> list[Tensor]:
    """Return received tensors as leaves of this stage's graph: backward ends there, and leaves the
    gradient for the stage before in their ``grad``.
    """
    pairs = zip(tensors, spec.leaves, strict=True)
    return [tensor.detach().requires_grad_(train and leaf.needs_gradient) for tensor, leaf in pairs]
