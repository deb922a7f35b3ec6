"""A stage: a contiguous piece of the Sequential, what it saved per micro-batch, forward and backward.

Between layers goes a *value*: a tensor, or a tuple, list or dict of tensors, some without gradient. What a stage
receives and sends is worked out once, on the meta device, as a :class:`ValueSpec`; at run time only numbers travel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from framework.errors import ModelError

Loss = Callable[[Any, Tensor], Tensor]
"""(output of the last layer, labels (B, S)) -> loss of each token (B, S), zero where the label is ignored."""

IGNORED_LABEL = -100


class TensorSpec(NamedTuple):
    """One tensor of a value, local to this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class ValueSpec(NamedTuple):
    """The shape of a value between two stages."""

    tree: TreeSpec
    leaves: tuple[TensorSpec, ...]

    def empty_leaves(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive the value's tensors into."""
        return [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in self.leaves]

    def empty_gradients(self, device: torch.device) -> list[Tensor]:
        """Buffers to receive the gradients of the tensors that need one."""
        return [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in self.leaves if leaf.needs_gradient]


def describe_value(value: Any, where: str) -> ValueSpec:
    """The spec of a value that a layer handed on.

    Raises:
        ModelError: something in it is not a tensor.
    """
    leaves, tree = tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"{where} hands on a {type(leaf).__name__}: between layers go tensors, or tuples and dicts of tensors"
            )
    return ValueSpec(tree, tuple(TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves))


def describe_boundaries(
    layers: nn.Sequential, stages: Sequence[range], tokens_BS: tuple[int, int]
) -> tuple[list[ValueSpec], ValueSpec]:
    """What each stage hands to the next one, and what the last layer returns, found by one forward on meta.

    Args:
        layers: the whole model with its parameters on meta and tensor parallelism applied: shapes are this rank's.
        tokens_BS: shape of one micro-batch of token ids.

    Raises:
        ModelError: a layer does not take what the one before it hands on, with both named; the last gives no logits.
    """
    on_meta = copy.deepcopy(layers).to("meta")
    value: Any = torch.zeros(tokens_BS, dtype=torch.int64, device="meta")
    last_of_stage = {stage[-1] for stage in stages[:-1]}
    specs = []
    previous = "the token ids"
    for index, (name, layer) in enumerate(on_meta.named_children()):
        try:
            value = layer(value)
        except Exception as error:
            taken = " ".join(str(tuple(leaf.shape)) for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
            raise ModelError(
                f"layer {name} ({type(layer).__name__}) cannot take what {previous} hands on, shape {taken} for a "
                f"micro-batch of (B, S) = {tokens_BS}: {type(error).__name__}: {error}"
            ) from error
        previous = f"layer {name}"
        if index in last_of_stage:
            specs.append(describe_value(value, previous))
            # as the next stage will have it: a leaf, which autograd does not let a layer overwrite
            value = tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)
    last = describe_value(value, previous)
    if not isinstance(value, Tensor) or value.dim() != 3 or tuple(value.shape[:2]) != tokens_BS:
        found = ", ".join(str(leaf.shape) for leaf in last.leaves)
        raise ModelError(
            f"{previous} is the last and returns {type(value).__name__} {found} for token ids of shape (B, S) = "
            f"{tokens_BS}: it must return logits of shape (B, S, V), one row for each token"
        )
    return specs, last


class LossPart(NamedTuple):
    """What one micro-batch contributes to the loss; sums, so that parts of unequal size add up right."""

    loss_sum: Tensor  # () in the logits' accumulation dtype
    num_tokens: Tensor  # () int64, labels that count


class Stage:
    """One stage on one rank. ``before_layer(name)`` is called just before each layer: weights may be on the way."""

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
    ) -> None:
        self.index = index
        self.num_stages = num_stages
        self.layers = layers
        self.input_spec = input_spec
        """None: this is the first stage, fed with token ids."""
        self.output_spec = output_spec
        """None: this is the last stage, which ends in the loss."""
        self.loss = loss
        self.loss_scale = loss_scale
        """Gradients are those of ``loss_sum * loss_scale``: 1 / (tokens of the global batch), known from the config."""
        self.before_layer = before_layer
        self._seen_all = False
        self._saved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def is_first(self) -> bool:
        """True when this stage takes the token ids."""
        return self.input_spec is None

    @property
    def is_last(self) -> bool:
        """True when this stage computes the loss."""
        return self.output_spec is None

    def forward(
        self, microbatch: int, inputs: list[Tensor], labels: Tensor | None, *, train: bool
    ) -> list[Tensor] | LossPart:
        """Run the layers on the leaves of the input value; keep what backward needs when training.

        Returns the leaves of the output value, detached, or the last stage's part of the loss.
        """
        assert microbatch not in self._saved, f"micro-batch {microbatch} is already in flight on stage {self.index}"
        with torch.set_grad_enabled(train):
            if self.input_spec is None:
                value: Any = inputs[0]
            else:
                leaves = zip(inputs, self.input_spec.leaves, strict=True)
                inputs = [tensor.detach().requires_grad_(train and spec.needs_gradient) for tensor, spec in leaves]
                value = tree_unflatten(inputs, self.input_spec.tree)
            for name, layer in self.layers.named_children():
                self.before_layer(name)
                value = self._watched(name, layer, value) if train and not self._seen_all else layer(value)
            self._seen_all = self._seen_all or train
            if self.output_spec is not None:
                outputs, _ = tree_flatten(value)
                if train:
                    self._saved[microbatch] = (inputs, outputs)
                return [output.detach().contiguous() for output in outputs]
            assert labels is not None
            loss_sum = self.loss(value, labels).sum()
            if train:
                self._saved[microbatch] = (inputs, [loss_sum * self.loss_scale])
            return LossPart(loss_sum.detach(), (labels != IGNORED_LABEL).sum())

    def _watched(self, name: str, layer: nn.Module, value: Any) -> Any:
        """Run a layer for the first time, and see that it keeps nothing and draws nothing by itself.

        Raises:
            ModelError: it changes a buffer (a running mean), or draws from torch's generator (``F.dropout``): what it
                gives would depend on the layout, and on whether the run was resumed.
        """
        buffers = {key: buffer._version for key, buffer in layer.named_buffers()}
        drawn = torch.default_generator.get_state()
        value = layer(value)
        changed = [key for key, buffer in layer.named_buffers() if buffer._version != buffers.get(key)]
        if changed:
            raise ModelError(
                f"layer {name} changes its buffer {changed[0]} in forward: that would depend on the order of "
                f"micro-batches and on the replica, and is not in checkpoints. Use a layer without running state "
                f"(LayerNorm, RMSNorm, GroupNorm), or BatchNorm with track_running_stats=False"
            )
        if not torch.equal(drawn, torch.default_generator.get_state()):
            raise ModelError(
                f"layer {name} draws from torch's random generator in forward: the draw would differ between layouts "
                f"and after a resume. Use the module nn.Dropout itself (no subclass, no F.dropout): it is drawn by name"
            )
        return value

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Backward of one micro-batch; weight gradients accumulate where they lie.

        Args:
            gradients: of the output leaves that need one; None on the last stage, which starts from its loss.

        Returns the gradients of the input leaves that need one (nothing on the first stage).
        """
        inputs, outputs = self._saved.pop(microbatch)
        if self.output_spec is None:
            roots = outputs
        else:
            roots = [out for out, spec in zip(outputs, self.output_spec.leaves, strict=True) if spec.needs_gradient]
        torch.autograd.backward(roots, gradients)
        if self.input_spec is None:
            return []
        found = []
        for tensor, spec in zip(inputs, self.input_spec.leaves, strict=True):
            if spec.needs_gradient:
                found.append(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
        return [gradient.contiguous() for gradient in found]

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._saved)
