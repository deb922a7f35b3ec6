"""One pipeline stage: a piece of the Sequential, its saved tensors per micro-batch, forward, and whole or split
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from meshwright.errors import ModelError
from meshwright.pipeline.recompute import Context, recomputed
from meshwright.pipeline.running_stats import INSTEAD
from meshwright.pipeline.split_backward import DeferredGradient, SplitBackward, accumulate_deferred, parameters_of
from meshwright.pipeline.values import IGNORED_LABEL, Loss, TensorSpec, ValueSpec, check_ignored, leaves_of
from meshwright.seeding import dropouts_of, restart_calls


class LossPart(NamedTuple):
    """Loss of one micro-batch as sums, so that parts of unequal size add up correctly."""

    loss_sum: Tensor  # () in the logits' accumulation dtype
    num_tokens: Tensor  # () int64, labels that count


class _Saved(NamedTuple):
    """Saved tensors of a micro-batch between F and its backward: the input leaves, and the roots of backward."""

    inputs: list[Tensor]
    roots: list[Tensor]


class Stage:
    """One stage on one rank.

    ``before_layer(name)`` is called just before each layer, because its weights may still be in an all-gather.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        layers: nn.Sequential,
        *,
        input_spec: ValueSpec | None,
        output_spec: ValueSpec | None,
        loss: Loss,
        loss_scale: float,
        before_layer: Callable[[str], None] = lambda name: None,
        recompute: Mapping[str, Context] | None = None,
        splits_backward: bool = False,
        running: Collection[str] = (),
    ) -> None:
        self.index = index
        self.num_stages = num_stages
        self.layers = layers
        self.input_spec = input_spec
        """Spec of the received value; None on the first stage, which takes the samples."""
        self.output_spec = output_spec
        """Spec of the sent value; None on the last stage, which computes the loss."""
        self.loss = loss
        self.loss_scale = loss_scale
        """Factor of ``loss_sum`` in backward: 1 / (labels of the global batch), known from the configuration."""
        self.before_layer = before_layer
        self.recompute = dict(recompute or {})
        """Layers with activation checkpointing (recompute), each with the context that its second forward restores."""
        self.split = SplitBackward() if splits_backward else None
        self.running = running
        """Names of the buffers that forward may change."""
        self.checks_loss = False
        """True for a model's own loss, which the first forward computes once more to check ignored labels."""
        self._layers = tuple(layers.named_children())
        self._dropouts = {name: dropouts_of(layer) for name, layer in self._layers}
        self._seen_all = False
        self._saved: dict[int, _Saved] = {}
        self._notes: dict[int, list[DeferredGradient]] = {}

    def skip_first_look(self) -> None:
        """Skip the first forward's checks, as if the layers kept no state and drew no random numbers.

        The first forward then costs as much as all others and reads no values.
        """
        self._seen_all = True

    @property
    def is_first(self) -> bool:
        """True when this stage takes the samples."""
        return self.input_spec is None

    @property
    def is_last(self) -> bool:
        """True when this stage computes the loss."""
        return self.output_spec is None

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches with saved tensors: from F to B, or to W."""
        return len(self._saved) + len(self._notes)

    def roots_of(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that the backward of a micro-batch starts from."""
        return self._saved[microbatch].roots

    def splitting(self) -> AbstractContextManager[object]:
        """Return the context for a forward with a split backward; its recompute enters it again."""
        return self.split if self.split is not None else nullcontext()

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
        with torch.set_grad_enabled(train), self.split or nullcontext():
            value = inputs
            if self.input_spec is not None:
                pairs = zip(inputs, self.input_spec.leaves, strict=True)
                leaves = [tensor.detach().requires_grad_(train and spec.needs_gradient) for tensor, spec in pairs]
                value = self.input_spec.value_of(leaves)
            for name, layer in self._layers:
                self.before_layer(name)
                value = self._run(name, layer, value, train)
            if self.output_spec is not None:
                self._seen_all = self._seen_all or train
                outputs = leaves_of(value)
                self._check_outputs(outputs, train)
                if train:
                    specs = zip(outputs, self.output_spec.leaves, strict=True)
                    self._saved[microbatch] = _Saved(leaves, [out for out, spec in specs if spec.needs_gradient])
                return [output.detach().contiguous() for output in outputs]
            assert labels is not None
            if train and self.checks_loss and not self._seen_all:
                check_ignored(self.loss, value, labels)
            loss_sum = self.loss(value, labels).sum()
            self._seen_all = self._seen_all or train
            if train:
                self._saved[microbatch] = _Saved(leaves, [loss_sum])
            return LossPart(loss_sum.detach(), torch.count_nonzero(labels != IGNORED_LABEL))

    def _check_outputs(self, outputs: list[Tensor], train: bool) -> None:
        """Check the outputs' shapes and dtypes against those that the next stage has allocated, found on meta in train
        mode.

        Raises:
            ModelError: they differ.
        """
        assert self.output_spec is not None
        expected = self.output_spec.leaves
        if [(tensor.shape, tensor.dtype) for tensor in outputs] == [(spec.shape, spec.dtype) for spec in expected]:
            return
        last_name = list(self.layers._modules)[-1]
        raise ModelError(
            "MW-PIPELINE-015",
            f"layer {last_name}, the last of stage {self.index}, hands on {_told(outputs)} in "
            f"{'training' if train else 'eval mode'}, and {_told(expected)} on the meta device in training, where "
            f"the run was planned: the next stage has room for that only. Give the same shapes and dtypes in train and "
            f"eval mode, on every device and for all data (a dtype that torch.autocast chooses: .to() it at the end)",
        )

    def _run(self, name: str, layer: nn.Module, value: Any, train: bool) -> Any:
        inner: Callable[[Any], Any] = _Watched(name, layer, self.running) if train and not self._seen_all else layer

        def run(value: Any) -> Any:
            restart_calls(self._dropouts[name])  # also in the second forward of a recompute
            return inner(value)

        try:
            return recomputed(run, self.recompute[name], value) if name in self.recompute else run(value)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                raise ModelError(
                    "MW-PIPELINE-016",
                    f"layer {name} uses a weight that several modules share without calling its module: with "
                    f"parallel.zero = 3 torch gathers a weight when its module is called. Call it (self.table(ids) for "
                    f"F.embedding(ids, self.table.weight)), or choose parallel.zero = 2",
                ) from error
            if "modified inplace" not in str(error) or "RegisterPostBackward" not in str(error):
                raise
            raise ModelError(
                "MW-PIPELINE-017",
                f"layer {name} changes what it is handed in place: with parallel.zero = 3 torch has to know when its "
                f"gradient comes by. Write x = x + y for x += y, or choose parallel.zero = 2",
            ) from error

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the backward of one micro-batch; weight gradients accumulate in place.

        Args:
            gradients: one per output leaf that needs a gradient, in its shape; None on the last stage, which starts
                from its loss.

        Returns:
            the gradients of the input leaves that need one, in their shapes; an empty list on the first stage.
        """
        inputs, roots = self._saved.pop(microbatch)
        if self.is_last:
            gradients = [torch.full_like(root, self.loss_scale) for root in roots]
        if roots:
            try:
                torch.autograd.backward(roots, gradients)
            except CheckpointError as error:
                if self.split is None:
                    raise
                raise ModelError(
                    "MW-PIPELINE-018",
                    f"a layer of stage {self.index} computes itself again in backward (torch.utils.checkpoint), "
                    f"outside of what splits this schedule's backward into halves: take it out and set "
                    f"pipeline.recompute, or choose 1f1b or interleaved_1f1b. torch says: {str(error).splitlines()[0]}",
                ) from error
        if self.input_spec is None:
            return []
        found = []
        for tensor, spec in zip(inputs, self.input_spec.leaves, strict=True):
            if spec.needs_gradient:
                found.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        return [gradient.contiguous() for gradient in found]

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run I: :meth:`backward`, with the weight gradients of linears and embeddings noted for later."""
        assert self.split is not None, f"stage {self.index} was built for whole backwards"
        with self.split.putting_off() as notes:
            found = self.backward(microbatch, gradients)
        self._notes[microbatch] = notes
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Run W: compute the weight gradients that I has noted."""
        accumulate_deferred(self._notes.pop(microbatch))

    def awaited(self, microbatch: int) -> set[Tensor]:
        """Return the parameters to which W of this micro-batch will add gradients."""
        return parameters_of(self._notes[microbatch])


def _told(leaves: Sequence[Tensor | TensorSpec]) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves) or "nothing"


class _Watched:
    """Layer in its first training forward, checked to keep no state and draw no random numbers by itself."""

    def __init__(self, name: str, layer: nn.Module, running: Collection[str]) -> None:
        self.name = name
        self.layer = layer
        self.running = running

    def __call__(self, value: Any) -> Any:
        """Run the layer.

        Raises:
            ModelError: it changes a buffer and did not do so on meta, or draws from torch's generator (``F.dropout``).
                Its result would depend on the layout, and on whether the run was resumed.
        """
        constant = {
            key: buffer for key, buffer in self.layer.named_buffers() if f"{self.name}.{key}" not in self.running
        }
        before = {key: (buffer._version, buffer.clone()) for key, buffer in constant.items()}
        drawn = torch.default_generator.get_state()
        value = self.layer(value)
        for key, (version, numbers) in before.items():
            now = self.layer.get_buffer(key)
            if now is not constant[key] or now._version != version or not _same(now, numbers):
                raise ModelError(
                    "MW-PIPELINE-019",
                    f"layer {self.name} changes its buffer {key} in forward, and did not do so on the meta device, "
                    f"where the run was planned: it would be in no checkpoint. Write it in place "
                    f"(self.{key}.mul_(...)) and not under `if not x.is_meta`, or {INSTEAD}",
                )
        if not torch.equal(drawn, torch.default_generator.get_state()):
            raise ModelError(
                "MW-PIPELINE-020",
                f"layer {self.name} draws from torch's random generator in forward: the draw would differ between "
                f"layouts and after a resume. Use the module nn.Dropout itself (no subclass, no F.dropout): it is "
                f"drawn by name",
            )
        return value


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
