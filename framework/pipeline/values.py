"""Values that layers pass on: a tensor, or a tuple, list or dict of tensors, some without gradient.

The shapes that a stage receives and sends are found once, on the meta device, as a :class:`ValueSpec`. At run time only
data travels. All tensors of a value go to the next stage. Gradients come back for those that need one. A tensor skips
layers, and stages, when the layers between pass it on unchanged.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import ModelError
from meshwright.pipeline.outline import outline_of, outline_of_value
from meshwright.pipeline.standalone import LayerWatch

Loss = Callable[[Any, Tensor], Tensor]
"""Loss function: (output of the last layer, labels) -> loss per label, in the labels' shape, zero where ignored."""

IGNORED_LABEL = -100

M = TypeVar("M", bound=nn.Module)


class TensorSpec(NamedTuple):
    """Spec of one tensor of a value: the shape is local to this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def empty(self, device: torch.device) -> Tensor:
        """Allocate a buffer to receive the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def leaves_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value in the order of its spec. A lone tensor needs no tree traversal."""
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


class ValueSpec(NamedTuple):
    """Spec of a value between two stages: its tree and its tensors."""

    tree: TreeSpec
    leaves: tuple[TensorSpec, ...]

    def value_of(self, leaves: Sequence[Tensor]) -> Any:
        """Build the value from its leaves."""
        return leaves[0] if self.is_tensor else tree_unflatten(leaves, self.tree)

    @property
    def is_tensor(self) -> bool:
        """True for a lone tensor, in no tuple or dict."""
        return len(self.leaves) == self.tree.num_nodes == 1

    @property
    def with_gradient(self) -> tuple[TensorSpec, ...]:
        """Specs of the leaves that need a gradient."""
        return tuple(leaf for leaf in self.leaves if leaf.needs_gradient)


class MetaMicrobatch(NamedTuple):
    """Micro-batch on meta, without data: the first layer's inputs and the labels of the loss."""

    inputs: Any
    """Tensor, or tuple or dict of tensors; the first dim of each is B, the samples."""
    labels: Tensor

    @property
    def labels_per_sample(self) -> int:
        """Number of labels per sample, ignored ones included."""
        return self.labels[0].numel()

    @property
    def tokens_per_sample(self) -> int:
        """Number of integer inputs per sample, without masks; number of labels for inputs without integers (images)."""
        counts = [leaf[0].numel() for leaf in tree_leaves(self.inputs) if _is_whole(leaf)]
        return sum(counts) or self.labels_per_sample

    @property
    def unit(self) -> str:
        """Unit of ``tokens_per_sample``: "tokens" or "labels"."""
        return "tokens" if any(_is_whole(leaf) for leaf in tree_leaves(self.inputs)) else "labels"

    def cast(self, dtype: torch.dtype) -> MetaMicrobatch:
        """Cast floating-point tensors to the training dtype, since images come in the precision of the weights."""
        return MetaMicrobatch(cast_floats(self.inputs, dtype), cast_floats(self.labels, dtype))


def _is_whole(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a value to ``dtype``."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss per label: logits (..., V), labels (...) -> (...), in float32, or float64 for float64 logits."""
    logits = output if output.dtype == torch.float64 else output.float()
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return flat.view(labels.shape)


def shapes_of(value: Any) -> str:
    """Return the shapes of a value's tensors, for a message: "(2, 6, 8)"."""
    return " ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


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
                f"{where} hands on a {type(leaf).__name__}: between layers go tensors, or tuples and dicts of tensors",
            )
    return ValueSpec(tree, tuple(TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves))


def meta_copy(layers: nn.Sequential) -> nn.Sequential:
    """Return a copy on the meta device, to run for its shapes; the original is unchanged."""
    return copy_module(layers, {}).to("meta")


def copy_module(module: M, twins: dict[int, Any]) -> M:
    """Return a deep copy, faster than ``copy.deepcopy``: the empty hook dicts of modules are not traversed.

    ``twins``: replacements of objects in the copy, by id of the original; it may be changed.
    """
    for each in module.modules():
        for value in vars(each).values():
            if type(value) is OrderedDict and not value:
                twins[id(value)] = OrderedDict()
    return copy.deepcopy(module, twins)


def describe_boundaries(
    layers: nn.Sequential, stages: Sequence[range], inputs: Any, watch: LayerWatch | None = None
) -> tuple[list[ValueSpec], ValueSpec]:
    """Return the spec of each stage's output to the next, and that of the last layer's output, by one forward on meta.

    Equal layers with equal inputs run once per process.

    Args:
        layers: a :func:`meta_copy` of the full model with tensor parallelism applied: shapes are this rank's. Forward
            may replace its running buffers.
        inputs: inputs of one micro-batch, on meta.
        watch: checks that each layer stands alone; None: no check.

    Raises:
        ModelError: a layer cannot take the previous layer's output (both are named), branches on values that do not
            exist yet, or overwrites its input.
    """
    value = inputs
    last_of_stage = {stage[-1] for stage in stages[:-1]}
    specs = []
    previous = "the input"
    received = tree_leaves(value)
    for index, (name, layer) in enumerate(layers.named_children()):
        where = f"layer {name} ({type(layer).__name__})"
        versions = [leaf._version for leaf in received]
        shapes = shapes_of(value)
        try:
            if watch is None or watch.has_seen(layer):
                value = _run_or_reuse(layer, value)
                if watch is not None:
                    watch.note(name, value)
            else:
                value = watch.run(name, layer, value, received)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError("MW-PIPELINE-031", _cannot_take(where, previous, shapes, error)) from error
        overwritten = [leaf for leaf, version in zip(received, versions, strict=True) if leaf._version != version]
        if overwritten:
            raise ModelError("MW-PIPELINE-032", _overwrites(where, shapes_of(overwritten)))
        previous = f"layer {name}"
        if index in last_of_stage:
            specs.append(describe_value(value, previous))
            # a leaf, as on the next stage: autograd does not let a layer overwrite it
            value = tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)
            received = tree_leaves(value)
    return specs, describe_value(value, previous)


class _LayerOutput(NamedTuple):
    """Output of a layer that overwrites none of its inputs, parameters or buffers."""

    tree: TreeSpec
    leaves: tuple[int | tuple[TensorSpec, tuple[int, ...]], ...]
    """Index of an input tensor that is passed on, or the spec and strides of a new tensor."""


_HANDED: dict[Any, _LayerOutput] = {}
"""Outputs seen so far in this process, by everything that they depend on.

A search tries hundreds of layouts of one model, and a model has hundreds of layers that are alike.
"""


def _run_or_reuse(layer: nn.Module, value: Any) -> Any:
    """Return ``layer(value)`` on meta, or a tensor like the output of an equal layer for an equal input."""
    given, outline = tree_leaves(value), outline_of(layer)
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    if has_hooks or outline.is_passing or not _are_independent(given):
        return layer(value)
    positions = {id(leaf): position for position, leaf in reversed(list(enumerate(given)))}
    same = tuple((positions[id(leaf)], leaf.is_leaf) for leaf in given)
    key = (outline, outline_of_value(value), same, torch.is_grad_enabled())
    if key in _HANDED:
        seen = _HANDED[key]
        return tree_unflatten(
            [given[leaf] if isinstance(leaf, int) else _like(*leaf) for leaf in seen.leaves], seen.tree
        )
    before = _versions(layer, given)
    handed = layer(value)
    leaves, tree = tree_flatten(handed)
    if _versions(layer, given) == before and outline_of(layer) == outline and _are_independent(leaves):
        _HANDED[key] = _LayerOutput(
            tree,
            tuple(
                positions[id(leaf)]
                if id(leaf) in positions
                else (TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad), leaf.stride())
                for leaf in leaves
            ),
        )
    return handed


def _are_independent(leaves: Sequence[Any]) -> bool:
    """Return whether all leaves are tensors, and a write into one changes no other."""
    return all(isinstance(leaf, Tensor) and not leaf._is_view() for leaf in leaves)


def _versions(layer: nn.Module, given: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return (id, write count) of every tensor that a forward could write into."""
    return [(id(tensor), tensor._version) for tensor in (*layer.buffers(), *layer.parameters(), *given)]


def _like(spec: TensorSpec, strides: tuple[int, ...]) -> Tensor:
    """Return a meta tensor like a layer's output: no autograd leaf where it needs a gradient."""
    tensor = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device="meta")
    return tensor.requires_grad_().clone() if spec.needs_gradient else tensor


def _overwrites(where: str, shapes: str) -> str:
    return (
        f"{where} overwrites, in place, a tensor {shapes} that its stage was handed: the stage before it may still be "
        f"sending it, and a layer that it skips to would see other numbers. Write into a copy (inplace=False)"
    )


def _cannot_take(where: str, previous: str, shapes: str, error: Exception) -> str:
    """Return the message for a layer that fails on meta."""
    text = str(error)
    if "in-place operation" in text:
        return f"{_overwrites(where, shapes)}. torch says: {text.splitlines()[0]}"
    if "expected device meta" in text or "on the same device" in text or "two devices" in text:
        return (
            f"{where} mixes a tensor of its own that lies on a device of its own choice with what it is handed: "
            f"register it with register_buffer, or make it with device=x.device, so that it goes where the layer goes. "
            f"torch says: {text.splitlines()[0]}"
        )
    if isinstance(error, NotImplementedError) and 'missing the required "forward"' in text:
        return f"{where} has no forward: write forward(self, x), or take it out of the Sequential"
    looks = ("meta tensor", "data-dependent", "numpy() on", "Cannot copy out of meta")
    if isinstance(error, NotImplementedError) or any(words in text for words in looks):
        return (
            f"{where} looks at the numbers it is handed (.item(), a Python `if` or a loop over values): what it sends "
            f"on would depend on data, and the stages must know shapes before any data comes. "
            f"{_without_looking(text)}. torch says: {type(error).__name__}: {text.splitlines()[0] if text else ''}"
        )
    return (
        f"{where} cannot take what {previous} hands on, shape {shapes} for one micro-batch: "
        f"{type(error).__name__}: {error}"
    )


def _without_looking(text: str) -> str:
    """Return what to write instead of an operation whose output's shape depends on numbers."""
    if "nonzero" in text:
        return (
            "torch.where(mask) with one argument, mask.nonzero() and x[mask] return as many elements as the mask has: "
            "use torch.where(mask, x, other), masked_fill or a product with the mask, which keep the shape"
        )
    return "Use torch.where(condition, x, y) or a product with a mask, which keep the shape"


def check_loss(loss: Loss, last: ValueSpec, labels: Tensor) -> None:
    """Raise :class:`ModelError` unless a model's own loss gives one number for each label; tried on meta.

    A loss that is already reduced, such as a mean, would weigh the samples differently when a batch is cut smaller.
    """
    output = last.value_of([leaf.empty(torch.device("meta")) for leaf in last.leaves])
    try:
        found = loss(output, labels)
    except Exception:  # meshwright.pipeline.costs reports failures on meta
        return
    if not isinstance(found, Tensor) or found.shape != labels.shape:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ModelError(
            "MW-PIPELINE-033",
            f"model.loss returns {what} for labels of shape {tuple(labels.shape)}: return the loss of each label, of "
            f'the labels\' shape, zero where the label is ignored (reduction="none"); the mean over all micro-batches '
            f"and replicas is taken here",
        )


def check_ignored(loss: Loss, output: Any, labels: Tensor) -> None:
    """Raise :class:`ModelError` unless the loss is zero where labels are ignored. Computes the loss once more.

    All labels (B, ...) are replaced by ``IGNORED_LABEL``. Labels that are not integers are not checked: they all count.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return
    with torch.no_grad():
        given = tree_map(lambda leaf: leaf.clone(), output)
        found = loss(given, torch.full_like(labels, IGNORED_LABEL))
    if torch.equal(found, torch.zeros_like(found)):
        return
    raise ModelError(
        "MW-PIPELINE-034",
        f"model.loss gives {float(found[found != 0].flatten()[0]):.6g} for a label of {IGNORED_LABEL}: such a label is "
        f"ignored, it is not counted in the mean, and its loss must be zero. Pass ignore_index={IGNORED_LABEL} to "
        f"F.cross_entropy, or end with .masked_fill(labels == {IGNORED_LABEL}, 0.0)",
    )


def check_output(last: ValueSpec, labels: Tensor, name: str) -> None:
    """Raise :class:`ModelError` unless the last layer gives logits: the labels' shape and one dim more."""
    fits = last.is_tensor and last.leaves[0].shape[:-1] == tuple(labels.shape)
    if not fits:
        found = ", ".join(str(leaf.shape) for leaf in last.leaves)
        raise ModelError(
            "MW-PIPELINE-035",
            f"{name} is the last and returns {found} for labels of shape {tuple(labels.shape)}: it must return logits "
            f"of shape ({', '.join(map(str, labels.shape))}, classes), one row for each label, or carry a `loss` of "
            f"its own: (output, labels) -> loss of each label",
        )
