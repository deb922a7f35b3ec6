"""Values that layers pass to each other: a tensor, or a tuple, list or dict of tensors,
some without gradient.

The shapes that a stage receives and sends are found once, on the meta device, as a
:class:`ValueSpec`. At run time only data is sent, no shapes. All tensors of a value go to the next
stage. Gradients come back for those that need one. A skip connection, also over stages, is a tensor
that the layers between return unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.model.chunked_loss import LossOptions, chunked_cross_entropy
from meshwright.model.metrics import record

Loss = Callable[[Any, Tensor], Tensor]
"""Loss function: (output of the last layer, labels) -> loss per label, in the labels' shape,
zero where ignored.
"""
Losses = tuple[Loss, Loss]
"""Loss of training, and of validation."""

IGNORED_LABEL = -100


class TensorSpec(NamedTuple):
    """Spec of one tensor of a value; the shape is local to this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    token_dims: tuple[tuple[int, int], ...] = ()
    """(dim, divisor) of each dim that has length / divisor elements, for samples of ``length``
    tokens: where rows are trimmed.
    """

    def at(self, length: int | None) -> TensorSpec:
        """Return the spec for trimmed samples of ``length`` tokens; None: samples are whole."""
        if length is None:
            return self
        shape = list(self.shape)
        for dim, divisor in self.token_dims:
            shape[dim] = length // divisor
        return self._replace(shape=tuple(shape))

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a buffer to receive the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def leaves_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value in the order of its spec.
    A lone tensor needs no tree traversal.
    """
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


class ValueSpec(NamedTuple):
    """Spec of a value between two stages: its tree and its tensors."""

    tree: TreeSpec
    leaves: tuple[TensorSpec, ...]

    def value_of(self, leaves: Sequence[Tensor]) -> Any:
        """Build the value from its leaves."""
        if self.tree.num_nodes == 1 == len(leaves):
            return leaves[0]
        return tree_unflatten(leaves, self.tree)

    def at(self, length: int | None) -> ValueSpec:
        """Return the spec for trimmed samples of ``length`` tokens; None: samples are whole."""
        if length is None:
            return self
        return self._replace(leaves=tuple(leaf.at(length) for leaf in self.leaves))

    @property
    def is_tensor(self) -> bool:
        """True for a lone tensor, in no tuple or dict."""
        return len(self.leaves) == self.tree.num_nodes == 1

    @property
    def with_gradient(self) -> tuple[TensorSpec, ...]:
        """Specs of the leaves that need a gradient."""
        return tuple(leaf for leaf in self.leaves if leaf.needs_gradient)


@dataclass(frozen=True)
class StageSpec:
    """Plan of a stage, without its layers."""

    index: int
    input: ValueSpec | None
    """Spec of the received value; None on the first stage, which takes the samples."""
    output: ValueSpec | None
    """Spec of the sent value; None on the last stage, which computes the loss."""
    label_scale: float = 1.0
    """Factor of ``loss_sum`` in backward: 1 / ``Blueprint.label_positions``."""
    splits_backward: bool = False
    recomputed: Collection[str] = ()
    """Layers, and parts of layers, with activation checkpointing (recompute)."""
    running: Collection[str] = ()
    """Buffers of the model that forward may change, by name."""
    offloaded: Collection[str] = ()
    """Layers with activation offload: their saved tensors are in host memory until backward."""
    checks_loss: bool = False
    """Check in the first training forward that the loss is zero where labels are ignored: of a
    model's own loss.
    """


class Microbatch(NamedTuple):
    """Samples of one micro-batch of a data-parallel rank, whole inputs; the same on its pp and tp
    ranks. Labels are those of this cp rank's tokens.
    """

    inputs: Any  # a tensor, or a tree of tensors, each (B, ...)
    labels: Tensor  # (B, ...), IGNORED_LABEL where it does not count
    sample_indices: Tensor  # (B,) int64, global
    tokens: Any = None  # this rank's tokens of each sample, where they differ by sample: see CurrentMicrobatch
    corpora: Tensor | None = None  # (B,) int64, the training corpus of each sample of a mixture


class Feed(Protocol):
    """Source of the micro-batches of one step of this replica."""

    def microbatch(self, m: int) -> Microbatch:
        """Read micro-batch ``m``. The first stage uses its inputs,
        and the last stage its labels.
        """

    def sample_indices(self, m: int) -> Tensor:
        """Return the (B,) int64 global sample indices of micro-batch ``m``, without reading it."""

    def length(self, m: int) -> int | None:
        """Return the tokens of the trimmed samples of micro-batch ``m``; None: they are whole."""


class MetaMicrobatch(NamedTuple):
    """Micro-batch on meta, without data: the first layer's inputs and the labels of the loss."""

    inputs: Any
    """Tensor, or tuple or dict of tensors; the first dim of each is B, the samples."""
    labels: Tensor  # (B, ...)

    @property
    def labels_per_sample(self) -> int:
        """Number of labels per sample, ignored ones included."""
        return self.labels[0].numel()

    @property
    def tokens_per_sample(self) -> int:
        """Integers per sample in the inputs (no bool masks);
        labels per sample if there are none (images).
        """
        counts = [leaf[0].numel() for leaf in tree_leaves(self.inputs) if _is_whole(leaf)]
        return sum(counts) or self.labels_per_sample

    @property
    def unit(self) -> str:
        """Unit of ``tokens_per_sample``: "tokens" or "labels"."""
        return "tokens" if any(_is_whole(leaf) for leaf in tree_leaves(self.inputs)) else "labels"

    @property
    def has_token_labels(self) -> bool:
        """True if the labels are tokens: integers, one for each integer of an input."""
        inputs = [leaf.shape for leaf in tree_leaves(self.inputs) if _is_whole(leaf)]
        return _is_whole(self.labels) and self.labels.shape in inputs

    def cast(self, dtype: torch.dtype) -> MetaMicrobatch:
        """Cast floating-point tensors to the training dtype, and labels to that of the loss:
        at least float32.
        """
        labels = cast_floats(self.labels, torch.promote_types(dtype, torch.float32))
        return MetaMicrobatch(cast_floats(self.inputs, dtype), labels)


def _is_whole(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a value to ``dtype``."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


def cross_entropy(
    output: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the loss per label: logits (..., V), labels (...) -> (...), in float32,
    or float64 for float64 logits.

    ``label_smoothing``: as in torch; ``z_loss``: factor of logsumexp(logits)^2, which is added.
    """
    return chunked_cross_entropy(
        output, labels, LossOptions(IGNORED_LABEL, label_smoothing, z_loss)
    )


def shift_labels(labels: Tensor, shift: int) -> Tensor:
    """Return at each position t the label of position t + shift of the same sample: (B, S) -> (B,
    S).

    Ignored where a label from t to t + shift is ignored, as at the end of a document, and in the
    last positions.
    """
    shifted, is_ignored = labels, labels == IGNORED_LABEL
    for _ in range(shift):
        shifted = F.pad(shifted[:, 1:], (0, 1), value=IGNORED_LABEL).masked_fill_(
            is_ignored, IGNORED_LABEL
        )
    return shifted


def with_heads(loss: Loss, heads: Sequence[tuple[int, float]], *, training: bool = True) -> Loss:
    """Return the loss of a model with ``loss_heads``: the weighted sum of ``loss`` over them;
    in validation of head 0.

    ``heads``: (shift of the labels, weight) of each logits that the last layer returns; empty:
        ``loss`` itself.
    """
    if not heads:
        return loss
    weights = [weight for _, weight in heads] if training else [1.0, *[0.0] * (len(heads) - 1)]
    return partial(_loss_of_heads, loss, [shift for shift, _ in heads], weights)


def full_loss(model: PlainModel) -> Loss:
    """Return the loss of a model's whole output,
    before it is sharded and without options of training.
    """
    return model.loss or with_heads(cross_entropy, model.loss_heads)


def _loss_of_heads(
    loss: Loss,
    shifts: Sequence[int],
    weights: Sequence[float],
    output: Sequence[Tensor],
    labels: Tensor,
) -> Tensor:
    """Return the weighted sum of the heads' losses per position: logits (B, S, V) each, labels (B,
    S) -> (B, S).

    Records the mean loss of each head over its own labels. A position whose label is ignored counts
    for no head.
    """
    total: Tensor | None = None
    for index, (shift, weight, logits) in enumerate(zip(shifts, weights, output, strict=True)):
        shifted = shift_labels(labels, shift)
        losses = loss(logits, shifted)
        record(
            f"head_loss/{index}",
            losses.detach().sum(),
            torch.count_nonzero(shifted != IGNORED_LABEL),
        )
        if weight:
            total = weight * losses if total is None else total + weight * losses
    assert total is not None, weights
    return total


def shapes_of(value: Any) -> str:
    """Return the shapes of a value's tensors, for a message: "(2, 6, 8)"."""
    return " ".join(
        str(tuple(leaf.shape)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
    )


def describe_value(value: Any, where: str) -> ValueSpec:
    """Return the spec of a layer's output.

    Raises:
        ModelError: a leaf of it is not a tensor.
    """
    leaves, tree = tree_flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ModelError(
                "MW-PIPELINE-030",
                f"{where} returns a {type(leaf).__name__}: layers pass tensors, or tuples and dicts"
                " of tensors",
            )
    return ValueSpec(
        tree,
        tuple(TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves),
    )
