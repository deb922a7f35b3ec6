"""Trimmed micro-batches (``batch.padding = "trim"``): models that allow them, and shapes between
their stages by the length of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils._pytree import tree_map

from meshwright.errors import ModelError
from meshwright.model.buffers.step_state import BatchNorm
from meshwright.model.build import PlainModel
from meshwright.model.functional_dropout import FunctionalDropout
from meshwright.pipeline.plan.boundaries import describe_boundaries
from meshwright.pipeline.plan.describe import ModelDescription
from meshwright.pipeline.values import MetaMicrobatch, TensorSpec, ValueSpec
from meshwright.seeding import SeededDropout

KEEP = 'set batch.padding = "keep"'


def check_trimmable(builder: str, model: PlainModel, forward: ModelDescription) -> None:
    """Check that what a model does beside its loss does not count positions. That its layers are
    causal, ``meshwright verify`` proves.

    ``forward``: of the whole model.

    Raises:
        ModelError: it declares ``impossible["trim"]``, has dropout, changes buffers, normalises by
            the batch, or records metrics.
    """
    if "trim" in model.impossible:
        raise ModelError(
            "MW-PIPELINE-059",
            f'batch.padding = "trim" with {builder}: {model.impossible["trim"]}: {KEEP}',
        )
    dropouts = [name for name, each in model.layers.named_modules() if _drops(each)]
    if dropouts:
        raise ModelError(
            "MW-PIPELINE-054",
            f'batch.padding = "trim" with {builder}: {dropouts[0]} draws its masks by positions in'
            f" whole rows, and those of attention depend on their length: turn dropout off, or {KEEP}",
        )
    if forward.running:
        raise ModelError(
            "MW-PIPELINE-055",
            f'batch.padding = "trim" with {builder}: forward changes {forward.running[0]}, which may'
            f" count positions that are trimmed: {KEEP}",
        )
    coupled = [name for name, each in model.layers.named_modules() if _counts_positions(each)]
    if coupled:
        raise ModelError(
            "MW-PIPELINE-060",
            f'batch.padding = "trim" with {builder}: {coupled[0]} takes the statistics of a'
            f" micro-batch, and may count positions that are trimmed: {KEEP}",
        )
    heads = tuple(name for name in forward.metrics if name.startswith("head_loss/"))
    if others := [name for name in forward.metrics if name not in heads]:
        raise ModelError(
            "MW-PIPELINE-056",
            f'batch.padding = "trim" with {builder}: its layers record {others[0]}, and may count'
            f" positions that are trimmed, as a router's loss does: {KEEP}",
        )


def _drops(module: nn.Module) -> bool:
    is_functional = isinstance(module, FunctionalDropout)
    return is_functional or (isinstance(module, SeededDropout) and module.p > 0)


def _counts_positions(module: nn.Module) -> bool:
    """Return whether a BatchNorm normalises by its batch, with running statistics or without."""
    return isinstance(module, BatchNorm) and (module.training or not module.track_running_stats)


def with_token_dims(
    boundaries: Sequence[ValueSpec],
    layers: nn.Sequential,
    stages: Sequence[range],
    example: MetaMicrobatch,
    multiple: int,
) -> list[ValueSpec]:
    """Return the specs between stages with the dims that follow the length of the rows, found by a
    second forward on meta, of rows that are shorter by ``multiple``.

    Raises:
        ModelError: ``multiple`` leaves no shorter rows, or a dim follows the length in another way.
    """
    length = example.labels.shape[1]
    shorter = length - multiple
    if shorter <= 0:
        raise ModelError(
            "MW-PIPELINE-057",
            f'batch.padding = "trim" with rows of {length} tokens: lengths are multiples of'
            f" {multiple}, so that none is shorter: {KEEP}",
        )
    inputs = tree_map(lambda leaf: leaf[:, :shorter].contiguous(), example.inputs)
    of_shorter, _ = describe_boundaries(layers, stages, inputs)
    return [
        whole._replace(
            leaves=tuple(
                _with_dims(leaf, other, length, shorter)
                for leaf, other in zip(whole.leaves, cut.leaves, strict=True)
            )
        )
        for whole, cut in zip(boundaries, of_shorter, strict=True)
    ]


def _with_dims(whole: TensorSpec, cut: TensorSpec, length: int, shorter: int) -> TensorSpec:
    """Return the spec of whole rows with the dims in which that of shorter rows differs."""
    dims = []
    for dim, (size, other) in enumerate(zip(whole.shape, cut.shape, strict=True)):
        if size == other:
            continue
        divisor = length // max(1, size)
        if size * divisor != length or other * divisor != shorter:
            raise ModelError(
                "MW-PIPELINE-058",
                f'batch.padding = "trim": between two stages a tensor {whole.shape} of rows of'
                f" {length} tokens is {cut.shape} for {shorter}, which is not in proportion: {KEEP}",
            )
        dims.append((dim, divisor))
    return whole._replace(token_dims=tuple(dims))
