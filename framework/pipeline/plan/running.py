"""Check of layouts for models with running buffers (BatchNorm's statistics), which depend on the order of samples.

Each stage runs all micro-batches in one order, so with one replica a pipeline gives the same buffers as one process.
Two replicas would each keep their own. A layer with activation checkpointing (recompute) would count its micro-batches
twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.model.running_buffers import INSTEAD, keeps_statistics
from meshwright.schedule.action import Kind, Schedule


def check_running(
    config: RunConfig, model: PlainModel, running: Iterable[str], schedule: Schedule, recomputed: Iterable[str]
) -> None:
    """Raise :class:`ModelError` where running buffers would differ from those of one process.

    ``recomputed``: names of the layers, and of parts of layers, with activation checkpointing (recompute).
    """
    layers, parallel, dtype = model.layers, config.parallel, config.train.dtype
    for name in running:
        layer_name, _, inside = name.partition(".")
        layer = f"layer {layer_name} ({type(layers.get_submodule(layer_name)).__name__})"
        what = f"{layer} changes its buffer {inside} in forward"
        if parallel.num_replicas > 1:
            raise ModelError(
                "MW-PIPELINE-009",
                f"{what}, and with parallel.dp = {parallel.dp} each replica would keep its own, of its own samples: "
                f"set parallel.dp = 1 (pipelines of any length do), or {INSTEAD}. There is no SyncBatchNorm",
            )
        if parallel.sequence:
            raise ModelError(
                "MW-PIPELINE-010",
                f"{what}, and under sequence parallelism each rank sees a part of the sequence: set parallel.sequence "
                f"= false, or {INSTEAD}",
            )
        parts = [part for part, _ in layers.named_modules() if part.partition(".")[0] == layer_name]
        split = [part for part in parts if any(fnmatchcase(part, pattern) for pattern in model.plan)]
        if parallel.tp > 1 and split:
            raise ModelError(
                "MW-PIPELINE-011",
                f"{what}, and {split[0]} of the same layer is split over parallel.tp = {parallel.tp}: each rank would "
                f"keep another. Put what is split into a layer of its own, or {INSTEAD}",
            )
        inner = next((part for part in recomputed if f"{name}.".startswith(f"{part}.")), None)
        if inner is not None:
            raise ModelError(
                "MW-PIPELINE-012",
                f"{what}, and pipeline.recompute computes {inner} again in backward: each micro-batch would count "
                f'twice. Leave it out of pipeline.recompute_layers, set pipeline.recompute = "none", or {INSTEAD}',
            )
        if dtype in ("bfloat16", "float16") and keeps_statistics(layers.get_submodule(name.rpartition(".")[0])):
            raise ModelError(
                "MW-PIPELINE-013",
                f"{what}: its statistics stay float32, since sums of thousands of steps do, and torch's kernels do not "
                f'take them beside parameters in {dtype}: set train.dtype = "float32", or '
                f"{INSTEAD}",
            )
        _check_order(schedule, what)


def _check_order(schedule: Schedule, what: str) -> None:
    """Raise :class:`ModelError` unless each stage's forwards are in the order of the micro-batches."""
    for rank in range(schedule.pp):
        last: dict[int, int] = {}
        for _, action in schedule.actions(rank):
            if action.kind is not Kind.F:
                continue
            assert action.stage is not None and action.microbatch is not None
            if action.microbatch < last.get(action.stage, -1):
                raise ModelError(
                    "MW-PIPELINE-014",
                    f"{what}, which depends on the order of the micro-batches, and this schedule has stage "
                    f"{action.stage} do {action} after micro-batch {last[action.stage]}: put its forwards in order, "
                    f"or {INSTEAD}",
                )
            last[action.stage] = action.microbatch
