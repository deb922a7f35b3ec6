"""Values at the boundaries between stages, found by one forward on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import ModelError
from meshwright.model.build import meta_copy
from meshwright.model.requirements import joined
from meshwright.pipeline.plan.outline import outline_of, outline_of_value
from meshwright.pipeline.plan.standalone import LayerWatch
from meshwright.pipeline.values import TensorSpec, ValueSpec, describe_value, shapes_of

OF_SHARDS = (
    ". The whole model runs; here its linears are split. Take lengths and numbers of heads from"
    " their outputs, q.shape[1] and .view(B, S, -1, head_dim): under parallel.sequence a column"
    " linear gets S/tp tokens and returns S"
)
"""Hint for a layer that fails only with shards:
describe_model has run the unsharded model without an error.
"""


TWO_DEVICES = (
    *(
        "expected device meta",
        "on the expected device",
        "on the same device",
        "in the same device",
        "two devices",
    ),
    "to have meta Device",
)
"""Words of torch's errors for an operation on tensors of several devices, here meta and CPU."""


def describe_boundaries(
    layers: nn.Sequential, stages: Sequence[range], inputs: Any
) -> tuple[list[ValueSpec], ValueSpec]:
    """Return the spec of each stage's output to the next, and that of the last layer's output,
    by one forward on meta.

    Args:
        layers: the full model with tensor parallelism applied: shapes are this rank's. It is copied
            and not changed.
        inputs: inputs of one micro-batch, on meta.

    Raises:
        ModelError: as :func:`run_on_meta`.
    """
    return run_on_meta(meta_copy(layers), stages, inputs, hint=OF_SHARDS)


def run_on_meta(
    layers: nn.Sequential,
    stages: Sequence[range],
    inputs: Any,
    watch: LayerWatch | None = None,
    hint: str = "",
) -> tuple[list[ValueSpec], ValueSpec]:
    """Return the specs of :func:`describe_boundaries`.
    Equal layers with equal inputs run once per process.

    Args:
        layers: a :func:`meta_copy`; forward may replace its running buffers.
        inputs: inputs of one micro-batch, on meta.
        watch: checks that each layer is self-contained; None: no check.
        hint: end of the message for a layer that fails on its input's shape.

    Raises:
        ModelError: a layer cannot take the previous layer's output (both are named), branches on
            values that do not exist yet, or overwrites its input.
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
            if watch is None or watch.has_seen(name, layer):
                value = run_or_reuse(layer, value)
                if watch is not None:
                    watch.note(name, value)
            else:
                value = watch.run(name, layer, value, received)
        except ModelError:
            raise
        except Exception as error:
            failed = ModelError(
                "MW-PIPELINE-031", _cannot_take(where, previous, shapes, error, hint)
            )
            raise joined([*(() if watch is None else watch.problems()), failed]) from error
        overwritten = [
            leaf
            for leaf, version in zip(received, versions, strict=True)
            if leaf._version != version
        ]
        if overwritten:
            raise ModelError("MW-PIPELINE-032", _overwrites(where, shapes_of(overwritten)))
        previous = f"layer {name}"
        if index in last_of_stage:
            specs.append(describe_value(value, previous))
            # an autograd leaf, as on the next stage, so that a layer that overwrites it fails
            value = tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)
            received = tree_leaves(value)
    if watch is not None and (problems := watch.problems()):
        raise joined(problems)
    return specs, describe_value(value, previous)


class _LayerOutput(NamedTuple):
    """Output of a layer that overwrites none of its inputs, parameters or buffers."""

    tree: TreeSpec
    leaves: tuple[int | tuple[TensorSpec, tuple[int, ...]], ...]
    """Index of an input tensor that is passed on, or the spec and strides of a new tensor."""


_LAYER_OUTPUTS: dict[Any, _LayerOutput] = {}
"""Cache of outputs in this process, keyed by everything that they depend on.

A search tries hundreds of layouts of one model, and a model has hundreds of layers that are alike.
"""


def run_or_reuse(layer: nn.Module, value: Any) -> Any:
    """Return ``layer(value)`` on meta, or a tensor like the output of an equal layer
    for an equal input.
    """
    input_leaves, outline = tree_leaves(value), outline_of(layer)
    has_hooks = any(
        module._forward_hooks or module._forward_pre_hooks for module in layer.modules()
    )
    if has_hooks or outline.is_passing or not _are_independent(input_leaves):
        return layer(value)
    positions = {id(leaf): position for position, leaf in reversed(list(enumerate(input_leaves)))}
    same = tuple((positions[id(leaf)], leaf.is_leaf) for leaf in input_leaves)
    key = (outline, outline_of_value(value), same, torch.is_grad_enabled())
    if key in _LAYER_OUTPUTS:
        seen = _LAYER_OUTPUTS[key]
        return tree_unflatten(
            [input_leaves[leaf] if isinstance(leaf, int) else _like(*leaf) for leaf in seen.leaves],
            seen.tree,
        )
    before = _versions(layer, input_leaves)
    output = layer(value)
    leaves, tree = tree_flatten(output)
    if (
        _versions(layer, input_leaves) == before
        and outline_of(layer) == outline
        and _are_independent(leaves)
    ):
        _LAYER_OUTPUTS[key] = _LayerOutput(
            tree,
            tuple(
                (
                    positions[id(leaf)]
                    if id(leaf) in positions
                    else (
                        TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad),
                        leaf.stride(),
                    )
                )
                for leaf in leaves
            ),
        )
    return output


def _are_independent(leaves: Sequence[Any]) -> bool:
    """Return whether all leaves are tensors and none is a view."""
    return all(isinstance(leaf, Tensor) and not leaf._is_view() for leaf in leaves)


def _versions(layer: nn.Module, given: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return (id, write count) of every tensor that a forward could write into."""
    return [
        (id(tensor), tensor._version) for tensor in (*layer.buffers(), *layer.parameters(), *given)
    ]


def _like(spec: TensorSpec, strides: tuple[int, ...]) -> Tensor:
    """Return a meta tensor like a layer's output: not an autograd leaf if it needs a gradient."""
    tensor = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device="meta")
    return tensor.requires_grad_().clone() if spec.needs_gradient else tensor


def _overwrites(where: str, shapes: str) -> str:
    return (
        f"{where} overwrites, in place, a tensor {shapes} that its stage received: the stage before"
        " it may still be sending it, and a layer that it skips to would see other numbers. Write"
        " into a copy (inplace=False)"
    )


def _cannot_take(where: str, previous: str, shapes: str, error: Exception, hint: str) -> str:
    """Return the message for a layer that fails on meta."""
    text = str(error)
    if "in-place operation" in text:
        return f"{_overwrites(where, shapes)}. torch says: {text.splitlines()[0]}"
    if any(words in text for words in TWO_DEVICES):
        return (
            f"{where} mixes a tensor on a device of its own choice with its input: register it with"
            " register_buffer, or make it with device=x.device, so that it goes where the layer"
            f" goes. torch says: {text.splitlines()[0]}"
        )
    if isinstance(error, NotImplementedError) and 'missing the required "forward"' in text:
        return f"{where} has no forward: write forward(self, x), or take it out of the Sequential"
    looks = ("meta tensor", "data-dependent", "numpy() on", "Cannot copy out of meta")
    if isinstance(error, NotImplementedError) or any(words in text for words in looks):
        return (
            f"{where} reads values of its input (.item(), a Python `if` or a loop over values): its"
            " output would depend on data, and the stages must know shapes before any data comes."
            f" {_without_looking(text)}. torch says: {type(error).__name__}:"
            f" {text.splitlines()[0] if text else ''}"
        )
    return (
        f"{where} cannot take what {previous} returns, shape {shapes} for one micro-batch: "
        f"{type(error).__name__}: {error}{hint}"
    )


def _without_looking(text: str) -> str:
    """Return advice to replace an operation whose output's shape depends on values."""
    if "nonzero" in text:
        return (
            "torch.where(mask) with one argument, mask.nonzero() and x[mask] return as many"
            " elements as the mask has: use torch.where(mask, x, other), masked_fill or a product"
            " with the mask, which keep the shape"
        )
    return "Use torch.where(condition, x, y) or a product with a mask, which keep the shape"
