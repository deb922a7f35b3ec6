"""Cost of each layer for one micro-batch, loss included,
counted by running the real modules on the meta device.

    layer on meta, train mode, training dtype
      forward   ops -> FLOPs, bytes read and written     time of an op = max(FLOPs / F, bytes / B)   of a Reference
      backward  ops -> FLOPs, bytes                      time of a layer = sum over its ops
      + gradient accumulation over micro-batches

Meta tensors hold no data and take no memory, so 405B parameters are counted in a second. The times
serve to compare layers with each other, not to predict seconds. All layers use the same F and B,
and only F / B affects the cut.

Full (unsharded) layers are counted. Tensor parallelism divides all of them alike, except parts that
it replicates (a norm). The cost leaves out tensor-parallel collectives, messages between stages and
the optimizer step. Each operation is counted by itself: torch.compile fuses operations, and saves
bytes that are counted here. For the error of the times see docs/balance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.config import Train
from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel, copy_module
from meshwright.model.meter import (
    FusedAttentionMode,
    Meter,
    OperationCost,
    ReferenceDevice,
    reference,
)
from meshwright.parameters import DTYPES
from meshwright.pipeline.plan.outline import outline_of, outline_of_value
from meshwright.pipeline.recompute import parts_of, recompute_parts
from meshwright.pipeline.values import Loss, MetaMicrobatch, cross_entropy, full_loss
from meshwright.placement.patterns import fits
from meshwright.seeding import SeededDropout


class LayerCost(NamedTuple):
    """Cost of one layer for one micro-batch; the last layer's includes the loss."""

    name: str
    num_parameters: int
    """Parameters of the layer; a tied weight counts in each layer, because each stage holds it."""
    forward: OperationCost
    backward: OperationCost
    """Cost of backward, gradient accumulation included."""
    frozen_flops: float = 0.0
    """FLOPs of the weight gradients that frozen linears do not need."""

    @property
    def model_flops(self) -> float:
        """Model FLOPs: forward once, backward twice as much without ``frozen_flops``; no recompute,
        full attention.
        """
        return 3.0 * self.forward.flops - self.frozen_flops

    @property
    def time_s(self) -> float:
        """Time of forward and backward in seconds, on the reference device."""
        return self.forward.time_s + self.backward.time_s


def count_layers(
    layers: nn.Sequential,
    inputs: Any,
    labels: Tensor | None,
    by: ReferenceDevice,
    *,
    dtype: torch.dtype = torch.float32,
    loss: Loss = cross_entropy,
    recompute: Sequence[str] = (),
) -> list[LayerCost]:
    """Count the cost of every layer, first to last.
    Equal layers with equal inputs run once per process.

    Args:
        layers: the full model, not sharded; it is copied and not changed. Parameters may be real or
            on meta.
        inputs: a tensor, or a tuple or dict of tensors, in the shapes of one micro-batch; values do
            not matter.
        labels: labels of that micro-batch; None leaves the loss out.
        by: the reference device, whose FLOP rate and bandwidth give times.
        dtype: training dtype of floating-point parameters and inputs.
        recompute: names, or patterns of names, of the layers and modules with activation
            checkpointing (recompute); their second forward is counted in backward.

    Raises:
        ModelError: a layer, or the loss, fails on meta in this dtype.
    """
    value = tree_map(lambda leaf: _on_meta(leaf, dtype), inputs)
    current = CurrentMicrobatch(
        torch.empty(len(tree_leaves(value)[0]), dtype=torch.int64, device="meta"), is_recompute=True
    )
    of_this_call: dict[Any, tuple[LayerCost, Any]] = {}
    costs = []
    outlines: dict[int, Any] = {}  # one module may be several layers
    for index, (name, original) in enumerate(layers._modules.items()):
        assert original is not None
        if id(original) not in outlines:
            outlines[id(original)] = outline_of(_copy(original, dtype, current))
        described = outlines[id(original)]
        ending = (loss, labels) if labels is not None and index == len(layers) - 1 else None
        mine = [pattern for pattern in recompute if fits(name, pattern.partition(".")[0])]
        suffixes = tuple(part.removeprefix(name) for part, _ in parts_of(name, original, mine))
        key = (
            described,
            outline_of_value(value),
            by,
            ending and outline_of_value(labels),
            suffixes,
        )
        own_loss = ending is not None and loss is not cross_entropy
        # the key may mean something else in a later call
        passing = described.is_passing or own_loss
        seen = of_this_call if passing else _COUNTED
        if key not in seen:
            layer, forward, backward = _copy(original, dtype, current), Meter(by), Meter(by)
            recompute_parts(name, layer, mine, partial(FusedAttentionMode, by, backward, backward))
            seen[key] = _run(name, layer, value, FusedAttentionMode(by, forward, backward), ending)
        cost, value = seen[key]
        costs.append(cost._replace(name=name))
    return costs


def model_costs(
    train: Train,
    model: PlainModel,
    layers: nn.Sequential,
    shapes: MetaMicrobatch,
    recompute: Sequence[str],
) -> list[LayerCost]:
    """Count the costs of a model's layers in a run, see :func:`count_layers`. ``layers``: its own,
    or equal ones.
    """
    by, dtype = reference(train.device, train.dtype), DTYPES[train.dtype]
    return count_layers(
        layers,
        shapes.inputs,
        shapes.labels,
        by,
        dtype=dtype,
        loss=full_loss(model),
        recompute=recompute,
    )


_COUNTED: dict[Any, tuple[LayerCost, Any]] = {}
"""Cache of costs in this process, keyed by everything that they depend on.

A search tries hundreds of layouts of one model.
"""


def _on_meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor of the same shape, in the training dtype if it is floating-point."""
    floats = tensor.is_floating_point()
    return torch.empty_like(tensor, device="meta", dtype=dtype if floats else tensor.dtype)


def _copy(layer: nn.Module, dtype: torch.dtype, current: CurrentMicrobatch) -> nn.Module:
    """Return a copy of the layer on meta, in train mode;
    its dropouts have no name and read sample indices on meta.
    """
    twins: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in layer.buffers()}
    for p in layer.parameters():
        twins[id(p)] = nn.Parameter(_on_meta(p.detach(), dtype), requires_grad=p.requires_grad)
    copied = copy_module(layer, twins).train()
    for module in copied.modules():
        if isinstance(module, SeededDropout):
            module.current, module.name = current, ""
    return copied


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _run(
    name: str,
    layer: nn.Module,
    value: Any,
    attention: FusedAttentionMode,
    ending: tuple[Loss, Tensor] | None,
) -> tuple[LayerCost, Any]:
    """Return (cost of the layer, its output). ``ending``: the loss and its labels,
    after the last layer.
    """
    forward, backward = attention.forward, attention.backward
    # no leaf: may be changed in place
    cloned = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, value)
    try:
        with attention, forward:
            output = layer(cloned)
            end = output if ending is None else ending[0](output, ending[1].to("meta"))
    except Exception as error:
        what = f"layer {name} ({type(layer).__name__})" + (
            ", or the loss of what it returns," if ending else ""
        )
        raise ModelError(
            "MW-PIPELINE-001",
            f"{what} cannot be run without values, on the meta device in the training dtype, to see"
            f" what it costs: {type(error).__name__}: {error}",
        ) from error
    roots = [t for t in _tensors(end) if t.requires_grad]
    parameters = [p for p in layer.parameters() if p.requires_grad]
    leaves = [*(t for t in _tensors(value) if t.requires_grad), *parameters]
    if roots and leaves:
        try:
            with backward:
                torch.autograd.grad(
                    roots, leaves, [torch.empty_like(t) for t in roots], allow_unused=True
                )
        except Exception:  # no backward on meta: assume twice the forward
            backward.count = OperationCost(*(2.0 * number for number in forward.count))
        # read, and added to the sum over micro-batches, which is in float32 at least
        for p in parameters:
            backward.add(0.0, p.numel() * (p.itemsize + 2 * max(4, p.itemsize)))
    numel = sum(p.numel() for p in layer.parameters())
    cost = LayerCost(
        name, numel, forward.count, backward.count, _frozen_flops(layer, _tensors(value))
    )
    passed = tree_map(
        lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, output
    )
    return cost, passed


def _frozen_flops(layer: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Return the FLOPs of the weight gradients of frozen linears, for inputs (B, S, ...)."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    frozen = sum(module.weight.numel() for module in linears if not module.weight.requires_grad)
    return 2.0 * frozen * inputs[0].shape[:2].numel() if frozen and inputs else 0.0
