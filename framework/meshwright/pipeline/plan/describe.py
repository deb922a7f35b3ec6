"""Description of a whole model by one forward on the meta device, before it is sharded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.model.buffers import BufferWatch
from meshwright.model.build import PlainModel, meta_copy
from meshwright.model.calls import ModuleCalls, check_calls, marks_of
from meshwright.model.metrics import Recorder, Recording
from meshwright.pipeline.plan.boundaries import run_on_meta
from meshwright.pipeline.plan.standalone import LayerWatch
from meshwright.pipeline.values import Loss, MetaMicrobatch, ValueSpec, full_loss


class ModelDescription(NamedTuple):
    """Results of one forward of the whole model on meta, before it is sharded."""

    output: ValueSpec
    """The last layer's output."""
    running: list[str]
    """Buffers that forward changes."""
    metrics: tuple[str, ...]
    """Names of the metrics that layers and the loss record."""


def describe_model(
    model: PlainModel,
    builder: str,
    shapes: MetaMicrobatch,
    *,
    recompute: str,
    document_boundaries: bool,
) -> ModelDescription:
    """Run the whole model forward on meta, unsharded, and check its output, and its own loss,
    against the labels.

    Raises:
        ModelError: a layer cannot take its predecessor's output or is not self-contained, or the
            loss cannot take it; or an adapter, a kind of the sharding plan or recompute is placed
            on a module past which the layer goes.
    """
    inputs = shapes.cast(torch.float32).inputs  # before the training dtype
    on_meta = meta_copy(model.layers)
    watch, recorder = BufferWatch(on_meta), Recorder(is_planning=True)
    recomputed = model.selective_recompute if recompute == "selective" else []
    calls = ModuleCalls(on_meta, marks_of(on_meta, model.plan, recomputed))
    try:
        watch_layers = LayerWatch(on_meta, model.layers, calls)
        with Recording(recorder):
            _, output = run_on_meta(on_meta, [range(len(on_meta))], inputs, watch_layers)
    except ModelError as error:
        if not document_boundaries:
            raise
        raise ModelError(
            "MW-RUN-001",
            f'{error.message}. With data.document_boundaries the first layer gets {{"tokens": (B,'
            ' S), "starts": (B, S) bool, where documents begin}: let it take that (docs/data.md),'
            " or set data.document_boundaries = false",
        ) from error
    check_calls(builder, calls, recomputed)
    if model.loss is None:
        check_output(
            output, shapes.labels, f"layer {list(model.layers._modules)[-1]}", len(model.loss_heads)
        )
    if model.loss is not None or model.loss_heads:
        with Recording(recorder):
            check_loss(full_loss(model), output, shapes.cast(torch.float32).labels)
    return ModelDescription(output, watch.changed(), tuple(sorted(recorder.sums)))


def check_loss(loss: Loss, last: ValueSpec, labels: Tensor) -> None:
    """Raise :class:`ModelError` unless a model's own loss returns one number for each label;
    run on meta.

    A loss that is already reduced, such as a mean, would weight samples differently with other
    micro-batch sizes.
    """
    output = last.value_of([leaf.empty(torch.device("meta")) for leaf in last.leaves])
    try:
        losses = loss(output, labels)
    except ModelError:
        raise
    except Exception:  # plan/costs.py reports failures on meta
        return
    if not isinstance(losses, Tensor) or losses.shape != labels.shape:
        what = f"a {type(losses).__name__}"
        if isinstance(losses, Tensor):
            what = f"a tensor of shape {tuple(losses.shape)}"
        raise ModelError(
            "MW-PIPELINE-033",
            f"model.loss returns {what} for labels of shape {tuple(labels.shape)}: return the loss"
            " of each label, of "
            f'the labels\' shape, zero where the label is ignored (reduction="none"); the mean over'
            f" all micro-batches "
            f"and replicas is taken here",
        )


def check_output(last: ValueSpec, labels: Tensor, name: str, num_heads: int = 0) -> None:
    """Raise :class:`ModelError` unless the last layer returns logits:
    the labels' shape and one more dim.

    ``num_heads``: logits in the tuple that a model with ``loss_heads`` returns for labels (B, S);
        0: a lone tensor.
    """
    if labels.dtype != torch.int64:
        kind = str(labels.dtype).removeprefix("torch.")
        raise ModelError(
            "MW-PIPELINE-046",
            f"the labels are {kind}, and the default loss is the cross-entropy of classes, which"
            " are integers: return labels.long() from the dataset, or give the model a `loss` of"
            " its own: (output, labels) -> loss of each label",
        )
    fits = last.is_tensor
    if num_heads:
        fits = len(last.leaves) == num_heads and labels.dim() == 2 and not last.is_tensor
    if not fits or any(leaf.shape[:-1] != tuple(labels.shape) for leaf in last.leaves):
        shapes = ", ".join(str(leaf.shape) for leaf in last.leaves)
        wanted = "logits"
        if num_heads:
            wanted = f"a tuple of the {num_heads} logits of model.loss_heads, each"
        raise ModelError(
            "MW-PIPELINE-035",
            f"{name} is the last and returns {shapes} for labels of shape {tuple(labels.shape)}: it"
            f" must return {wanted} of shape ({', '.join(map(str, labels.shape))}, classes), one"
            " row for each label, or carry a `loss` of its own: (output, labels) -> loss of each"
            " label",
        )
