"""Check of layouts for models with running buffers, which a training forward changes.

step sums                  any layout: forward adds sums over tokens, and they are summed over the ranks once per step
statistics (BatchNorm)     any pipeline and number of replicas: each stage runs the micro-batches in one order, and the
                           replicas' statistics are combined in the order of their samples
SyncBatchNorm              the same; batch statistics are those of all replicas, whatever the layout
any other buffer           one replica, no recompute: nothing combines two replicas' values, and a forward that runs
                           twice would change it twice
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from meshwright.config import Parallel
from meshwright.errors import ModelError
from meshwright.model.buffers import (
    INSTEAD,
    coupling_modules,
    has_statistics,
    has_step_sums,
    is_reused,
    keeps_statistics,
    owner_of,
    step_sum_problem,
)
from meshwright.model.build import PlainModel
from meshwright.model.sync_batch_norm import synchronised
from meshwright.placement.patterns import enclosing, entries_for, matching
from meshwright.schedule.action import Kind, Schedule

WHOLE = ("router", "replicate", "experts", "places")
"""Kinds of the sharding plan that leave the features of a module's input whole;
with ep > 1 experts get other rows.
"""


def check_running(
    parallel: Parallel,
    dtype: str,
    model: PlainModel,
    running: Iterable[str],
    schedule: Schedule,
    recomputed: Iterable[str],
) -> None:
    """Raise :class:`ModelError` where running buffers would differ from those of one process.

    Args:
        dtype: ``train.dtype``.
        recomputed: names of the layers, and of parts of layers, with activation checkpointing
            (recompute).
    """
    layers = model.layers
    for name in running:
        owner = owner_of(layers, name)
        if is_reused(layers, name):
            raise ModelError(
                "MW-PIPELINE-044",
                f"{name} changes in forward, and its module is at several places of the model: each"
                f" stage would keep another. Give each place a module of its own, or {INSTEAD}",
            )
        if has_step_sums(owner):
            _check_step_sums(model, owner, name.rpartition(".")[0], parallel.ep)
            continue
        layer_name, _, inside = name.partition(".")
        layer = f"layer {layer_name} ({type(layers.get_submodule(layer_name)).__name__})"
        what = f"{layer} changes its buffer {inside} in forward"
        _check_replicas(parallel, owner, what)
        if parallel.sequence:
            raise ModelError(
                "MW-PIPELINE-010",
                f"{what}, and under sequence parallelism each rank sees a part of the sequence: set"
                f" parallel.sequence = false, or {INSTEAD}",
            )
        parts = [part for part, _ in layers.named_modules() if part.partition(".")[0] == layer_name]
        split = matching(model.plan, parts)
        if parallel.tp > 1 and split:
            raise ModelError(
                "MW-PIPELINE-011",
                f"{what}, and {split[0]} of the same layer is split over parallel.tp ="
                f" {parallel.tp}: each rank would keep another. Put what is split into a layer of"
                f" its own, or {INSTEAD}",
            )
        inner = next((part for part in recomputed if f"{name}.".startswith(f"{part}.")), None)
        if inner is not None and not has_statistics(owner):
            raise ModelError(
                "MW-PIPELINE-012",
                f"{what}, and pipeline.recompute computes {inner} again in backward: each"
                " micro-batch would count "
                "twice. Leave it out of pipeline.recompute_layers, set pipeline.recompute ="
                f' "none", or {INSTEAD}',
            )
        if dtype in ("bfloat16", "float16") and keeps_statistics(owner):
            raise ModelError(
                "MW-PIPELINE-013",
                f"{what}: its statistics stay float32, since sums of thousands of steps do, and"
                " torch's kernels do not "
                f'take them beside parameters in {dtype}: set train.dtype = "float32", or '
                f"{INSTEAD}",
            )
        _check_order(schedule, what)


def check_synchronised(
    parallel: Parallel, balance: str, model: PlainModel, running: Iterable[str]
) -> None:
    """Raise :class:`ModelError` where an ``nn.SyncBatchNorm`` cannot have the statistics of
    consecutive samples: NOTE [samples of a group].

    ``balance``: ``batch.balance``.
    """
    layers = model.layers
    found = {
        name: f"{name} ({type(module).__name__}) takes the statistics of all replicas"
        for name, module in synchronised(layers)
    }
    if not found:
        return
    what = next(iter(found.values()))
    if parallel.sequence:
        raise ModelError(
            "MW-PIPELINE-048",
            f"{what}, and under sequence parallelism the tensor-parallel ranks of a replica have"
            " parts of its tokens: set parallel.sequence = false",
        )
    if balance == "work":
        raise ModelError(
            "MW-PIPELINE-049",
            f'{what}, which must be of consecutive samples, and batch.balance = "work" deals them by'
            ' their documents: set batch.balance = "index"',
        )
    for name, inside in found.items():
        kinds = [kind for part in enclosing(name) for kind in entries_for(part, model.plan)]
        if parallel.ep > 1 and "experts" in kinds:
            raise ModelError(
                "MW-PIPELINE-051",
                f"{inside}, and with parallel.ep = {parallel.ep} these have other experts: move it"
                " out of the experts, or set parallel.ep = 1",
            )
    others = coupling_modules(layers, running)
    if (parallel.known_dp or 1) > 1 and others:
        other = f"{others[0]} ({type(layers.get_submodule(others[0])).__name__})"
        raise ModelError(
            "MW-PIPELINE-050",
            f"{what}, and {other} those of one replica's micro-batch: with parallel.dp ="
            f" {parallel.dp} no single process computes both. Make both nn.SyncBatchNorm, leave one"
            " out, or set parallel.dp = 1",
        )


def _check_replicas(parallel: Parallel, owner: nn.Module, what: str) -> None:
    """Raise :class:`ModelError` unless the buffers of a module can be combined over the replicas of
    the layout.
    """
    if isinstance(owner, nn.SyncBatchNorm):  # equal on all replicas: check_synchronised
        return
    if parallel.cp > 1 and has_statistics(owner):
        raise ModelError(
            "MW-PIPELINE-041",
            f"{what}, and with parallel.cp = {parallel.cp} each rank has the statistics of its own"
            f" tokens: set parallel.cp = 1, or {INSTEAD}",
        )
    if parallel.num_replicas > 1 and not has_statistics(owner):
        raise ModelError(
            "MW-PIPELINE-009",
            f"{what}, and with parallel.dp = {parallel.dp} each replica would keep its own, of its"
            " own samples: set parallel.dp = 1 (pipelines of any length do), let forward only add"
            f" to buffers named in step_sums (docs/models.md), or {INSTEAD}",
        )


def _check_step_sums(model: PlainModel, owner: nn.Module, name: str, ep: int) -> None:
    """Raise :class:`ModelError` for step sums that are declared wrongly,
    or inside a module that tp or ep splits.
    """
    problem = step_sum_problem(owner)
    if problem is not None:
        raise ModelError(
            "MW-PIPELINE-042",
            f"{name} ({type(owner).__name__}): {problem}. Register the sums as buffers, and let"
            " end_step() use them and set them to zero",
        )
    kinds = {
        part: kind for part in (*enclosing(name), name) for kind in entries_for(part, model.plan)
    }
    split = next(
        (
            part
            for part, kind in kinds.items()
            if kind not in WHOLE or (kind == "experts" and ep > 1)
        ),
        None,
    )
    if split is None:
        return
    if kinds[split] == "experts":
        reason = (
            f"with parallel.ep = {ep} each rank would add rows of its own experts, whose ids it"
            " counts from 0"
        )
    else:
        reason = "each rank would add its own part of the features"
    raise ModelError(
        "MW-PIPELINE-043",
        f"{name} ({type(owner).__name__}) has step_sums, and sharding_plan splits {split}: {reason}."
        " Move the sums into a module that no pattern of the plan splits",
    )


def _check_order(schedule: Schedule, what: str) -> None:
    """Raise :class:`ModelError` unless each stage's forwards are in the order
    of the micro-batches.
    """
    for rank in range(schedule.pp):
        last: dict[int, int] = {}
        for _, action in schedule.actions(rank):
            if action.kind is not Kind.F:
                continue
            assert action.stage is not None and action.microbatch is not None
            if action.microbatch < last.get(action.stage, -1):
                raise ModelError(
                    "MW-PIPELINE-014",
                    f"{what}, which depends on the order of the micro-batches, and this schedule"
                    f" has stage {action.stage} do {action} after micro-batch {last[action.stage]}:"
                    f" put its forwards in order, or {INSTEAD}",
                )
            last[action.stage] = action.microbatch
