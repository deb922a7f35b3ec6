"""Faults built into the real code of the ranks, and the default layouts of the demo:
which one sees each.

`make test` runs the faults that a choice of layouts without the pair table missed, `make torture`
all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshwright.build
import meshwright.data_parallel.buckets
import meshwright.data_parallel.fully_sharded
import meshwright.data_parallel.replica
import meshwright.step
import meshwright.verify.rank
from meshwright.config import RunConfig, batch_numbers, load
from meshwright.config.combinations.features import Traits
from meshwright.current import CurrentMicrobatch
from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.fully_sharded import FullyShardedReplica
from meshwright.data_parallel.offload import OffloadedBucket
from meshwright.data_parallel.replica import BucketReplica
from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.parts import Parts, StepFeed
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.recompute import RecomputeContext
from meshwright.seeding import SeededDropout
from meshwright.verify import (
    Layout,
    compare,
    default_layouts,
    layout_config,
    make_small,
    parse_layout,
    traits_of,
    turn_dropout_on,
)
from meshwright.verify.rank import merge, open_verify_source
from meshwright.verify.reference import RunNumbers, run_reference
from meshwright.verify.run import Rounding, rounding_of
from meshwright.verify.tolerance import tolerance_of
from meshwright_launch.pool import RankPool
from tests.framework.verify import test_traps as traps
from tests.support.marks import marked_rows
from tests.support.run import nothing, run_broken

STEPS, GLOBAL_BATCH = 2, 8
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}

# ------------------------------------------------------------------------------------------------------------
# dropout


def dropout_without_the_dp_rank(patch: pytest.MonkeyPatch) -> None:
    """A stage that does not read its samples numbers them as the first replica does."""

    def sample_indices(feed: StepFeed, m: int) -> Tensor:
        size, _, _ = batch_numbers(feed.parts.config.batch)
        return torch.arange(feed.samples_seen + m * size, feed.samples_seen + (m + 1) * size)

    patch.setattr(StepFeed, "sample_indices", sample_indices)


def dropout_without_the_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Every micro-batch of a stage that does not read its samples has the numbers of the first."""
    sample_indices = StepFeed.sample_indices
    patch.setattr(StepFeed, "sample_indices", lambda feed, m: sample_indices(feed, 0))


def recomputed_with_other_masks(patch: pytest.MonkeyPatch) -> None:
    """The second forward draws dropout for other samples."""
    as_it_was = RecomputeContext._restored

    @contextmanager
    def shifted(again: RecomputeContext, then: CurrentMicrobatch) -> Iterator[None]:
        with as_it_was(again, replace(then, sample_indices=then.sample_indices + 1)):
            yield

    patch.setattr(RecomputeContext, "_restored", shifted)


def dropout_of_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    """Each tp rank draws the part of the mask that belongs to the first one."""
    mask = SeededDropout.mask

    def unsharded(dropout: SeededDropout, shape: torch.Size, device: torch.device) -> Tensor:
        shard, dropout.shard = dropout.shard, None
        try:
            return mask(dropout, shape, device)
        finally:
            dropout.shard = shard

    patch.setattr(SeededDropout, "mask", unsharded)


# -----------------------------------------------------------------------------------------------
# sums over the axes


def wait_only(buckets: Sequence[ShardedParameters]) -> None:
    """Wait for the reductions in flight, and leave out the sums over tp."""
    for bucket in buckets:
        bucket.wait()


def zero3_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-3: gradients of what tp replicates stay those of a rank's own tokens."""
    patch.setattr(meshwright.data_parallel.fully_sharded, "sum_partial", wait_only)


def replicas_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """The same for ZeRO-0 to 2."""
    patch.setattr(meshwright.data_parallel.replica, "sum_partial", wait_only)


def silence(patch: pytest.MonkeyPatch, name: str) -> None:
    """Leave out the sums over a kind of group."""
    all_reduce = Group.all_reduce

    def silent(group: Group, tensor: Tensor, op: str = "sum", **more: Any) -> CollectiveHandle:
        return CollectiveHandle() if group.name == name else all_reduce(group, tensor, op, **more)

    patch.setattr(Group, "all_reduce", silent)


def shard_groups_not_summed(patch: pytest.MonkeyPatch) -> None:
    """shard_factor < dp: each group of replicas keeps the gradients of its own samples."""
    silence(patch, "dp_replicate")


def ties_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Copies of a tied weight keep their own gradients."""
    patch.setattr(meshwright.step, "sum_ties", lambda buckets: list(buckets))


def one_stage_of_a_rank_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Of several stages of a rank only the first is summed over the replicas."""
    build = meshwright.verify.rank.build

    def build_one(*args: Any) -> Parts:
        parts = build(*args)
        for stage, replica in parts.replicas.items():
            if stage >= parts.mesh.grid.pp and isinstance(replica, BucketReplica):
                for bucket in replica.buckets:
                    bucket.reduce = lambda *, last=True, bucket=bucket: _keep_own(bucket)  # type: ignore[method-assign]
        return parts

    patch.setattr(meshwright.verify.rank, "build", build_one)


def _keep_own(bucket: Bucket) -> None:
    start, stop = bucket.shard_range
    if bucket.is_sharded:
        bucket.shard_gradient.copy_(bucket.open_gradient()[start:stop])


def zero2_keeps_the_last_sum(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-2: the sum of each micro-batch replaces that of the ones before."""
    reduce = Bucket.reduce

    def replacing(bucket: Bucket, *, last: bool = True) -> None:
        bucket._has_sum = bucket.keeps_gradient and bucket._has_sum
        reduce(bucket, last=last)

    patch.setattr(Bucket, "reduce", replacing)


def zero3_scaled_by_shards(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-3: torch's own mean over the shards instead of the sum."""
    finish = FullyShardedReplica.finish_reduction

    def scaled(stage: FullyShardedReplica) -> None:
        finish(stage)
        for bucket in stage.buckets:
            bucket.shard_gradient.div_(bucket.holders.shard_group.size)

    patch.setattr(FullyShardedReplica, "finish_reduction", scaled)


# --------------------------------------------------------------------------------------------
# optimizer, norm, weights


def norm_counts_every_shard_group(patch: pytest.MonkeyPatch) -> None:
    """shard_factor < dp: each group of replicas counts its copy of the shards."""
    patch.setattr(OptimizerShard, "is_counted", True)


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    """The norm is reported, and not used."""
    patch.setattr(meshwright.step, "clip_factor", lambda norm, bound: 1.0)


def offload_not_copied_back(patch: pytest.MonkeyPatch) -> None:
    """What the host has stepped does not reach the device."""
    patch.setattr(OffloadedBucket, "copy_master", lambda bucket, shard: None)


def stepped_without_master_weights(patch: pytest.MonkeyPatch) -> None:
    """bfloat16: the optimizer steps weights of 8 bits."""
    step = FlatOptimizer.step

    def rounding(optimizer: FlatOptimizer, *args: Any) -> None:
        step(optimizer, *args)
        for shard in optimizer.shards:
            shard.weights.copy_(shard.weights.bfloat16())

    patch.setattr(FlatOptimizer, "step", rounding)


def gradients_summed_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """bfloat16: replicas exchange gradients of 8 bits."""
    reduce = Bucket.reduce

    def rounded(bucket: Bucket, *, last: bool = True) -> None:
        gradient = bucket.open_gradient()
        gradient.copy_(gradient.bfloat16())
        reduce(bucket, last=last)

    patch.setattr(Bucket, "reduce", rounded)


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    """bfloat16: master weights are stepped and never rounded back."""

    def gather(bucket: Bucket) -> None:
        start, stop = bucket.shard_range
        if bucket.is_sharded:
            bucket.pending = bucket.holders.shard_group.all_gather(
                bucket.flat, bucket.flat[start:stop].clone()
            )

    patch.setattr(Bucket, "gather", gather)


# -----------------------------------------------------------------------------------------------
# validation, schedule


def validated_in_train_mode(patch: pytest.MonkeyPatch) -> None:
    """Dropout is on while validating."""
    patch.setattr(nn.Sequential, "eval", lambda layers: layers)


def left_in_eval_mode(patch: pytest.MonkeyPatch) -> None:
    """After a validation dropout stays off."""
    total_loss = meshwright.verify.rank.total_loss

    def leaving(parts: Any, *args: Any) -> Any:
        found = total_loss(parts, *args)
        for stage in parts.executor.stages.values():
            stage.layers.eval()
        return found

    patch.setattr(meshwright.verify.rank, "total_loss", leaving)


def validated_on_one_replica(patch: pytest.MonkeyPatch) -> None:
    """The loss of the other replicas' samples is left out."""
    validate = Executor.validate

    def own(executor: Executor, feed: StepFeed) -> Any:
        found = validate(executor, feed)
        return found if feed.parts.mesh.at.dp_rank == 0 else found._replace(loss_parts=[])

    patch.setattr(Executor, "validate", own)


# ---------------------------------------------------------------------------------------------------------
# the table


class Fault(NamedTuple):
    """A fault, and a default layout of the demo that must see it."""

    broken: Callable[[pytest.MonkeyPatch], None]
    layout: str
    dtype: str = "float64"
    is_quick: bool = False
    """In `make test`."""


FAULTS = [
    Fault(dropout_without_the_dp_rank, "dp2,pp2,tp1,zb_v,zero0,mbs1", is_quick=True),
    Fault(
        zero3_not_summed_over_tp,
        "dp2,pp2,tp2,interleaved_1f1b,zero3,sequence,full,mbs1",
        is_quick=True,
    ),
    Fault(recomputed_with_other_masks, "dp2,pp2,tp1,cp2,gpipe,zero2,full,step,mbs1", is_quick=True),
    Fault(traps.padding_in_the_loss, "dp2,pp2,tp2,1f1b,zero1,mbs2", is_quick=True),
    Fault(dropout_without_the_micro_batch, "dp1,pp4,tp1,1f1b,zero1,mbs2"),
    Fault(dropout_of_the_first_heads, "dp2,pp2,tp2,1f1b,zero1,mbs2"),
    Fault(replicas_not_summed_over_tp, "dp2,pp2,tp2,gpipe,zero1,sequence,mbs1"),
    Fault(shard_groups_not_summed, "dp2,pp2,tp1,cp2,v_half,zero1,full,shard2,mbs1"),
    Fault(ties_not_summed, "dp1,pp4,tp1,1f1b,zero1,mbs2"),
    Fault(one_stage_of_a_rank_not_reduced, "dp2,pp2,tp1,interleaved_1f1b,zero1,mbs1"),
    Fault(zero2_keeps_the_last_sum, "dp2,pp2,tp1,1f1b,zero2,mbs1"),
    Fault(zero3_scaled_by_shards, "dp2,pp2,tp1,zb_v,zero3,mbs1"),
    Fault(norm_counts_every_shard_group, "dp2,pp2,tp1,interleaved_1f1b,zero1,mbs1"),
    Fault(not_clipped, "dp2,pp2,tp1,v_min,zero0,offload,mbs1"),
    Fault(
        offload_not_copied_back, "dp1,pp2,tp2,cp2,zb_v,zero1,heads,sequence,selective,offload,mbs2"
    ),
    Fault(validated_in_train_mode, "dp2,pp2,tp1,v_min,zero0,offload,mbs1", is_quick=True),
    Fault(left_in_eval_mode, "dp2,pp2,tp1,gpipe,zero3,mbs1"),
    Fault(validated_on_one_replica, "dp2,pp2,tp1,v_min,zero0,offload,mbs1"),
    Fault(
        stepped_without_master_weights,
        "dp2,pp2,tp1,interleaved_1f1b,zero1,mbs1",
        "bfloat16",
        is_quick=True,
    ),
    Fault(gradients_summed_in_bfloat16, "dp2,pp2,tp1,zb_h1,zero1,mbs1", "bfloat16"),
    Fault(stale_weights, "dp2,pp2,tp1,interleaved_1f1b,zero1,mbs1", "bfloat16"),
]


class Demo(NamedTuple):
    """The demo as verify trains it, its default layouts, and the plain run."""

    config: RunConfig
    traits: Traits
    layouts: list[Layout]


@functools.cache
def demo() -> Demo:
    """Nothing in it needs ranks."""
    config = load(str(Path(__file__).parents[3] / "configs" / "demo.toml"), [])
    config = turn_dropout_on(make_small(config, 32).config).config
    traits = traits_of(config)
    return Demo(config, traits, default_layouts(config, traits, GLOBAL_BATCH).layouts)


@functools.cache
def expected(dtype: str) -> RunNumbers:
    """Return the plain run."""
    plain = layout_config(demo().config, Layout(), GLOBAL_BATCH, dtype)
    return run_reference(plain, open_verify_source(plain, True), STEPS, DTYPES[dtype])


@functools.cache
def rounding() -> Rounding:
    """The rounding of the plain run, by which tolerances are raised before a layout is reported."""
    plain = layout_config(demo().config, Layout(), GLOBAL_BATCH, "float64")
    return rounding_of(expected("float64"), plain, open_verify_source(plain, True), STEPS, (1, 2))


def told_by(fault: Fault, layout: Layout, pool: RankPool) -> list[str]:
    """Return the problems that verify finds in a layout with a fault."""
    text = layout_config(demo().config, layout, GLOBAL_BATCH, fault.dtype).model_dump_json()
    found = merge(pool.run(run_broken, layout.size, fault.broken, text, STEPS))
    own: tuple[dict[str, float] | None, dict[str, float]] = rounding().weights, rounding().noise
    if fault.dtype == "bfloat16":
        own = None, {"embedding.tokens.weight": 1.0}
    tolerance = tolerance_of(fault.dtype, layout)
    return compare(str(layout), found, None, expected(fault.dtype), tolerance, *own).problems


@pytest.mark.long
def test_each_layout_that_sees_a_fault_is_a_default() -> None:
    layouts = {str(layout) for layout in demo().layouts}
    assert {fault.layout for fault in FAULTS} <= layouts


@marked_rows(
    "all_layouts",
    "dropout_without_the_dp_rank-dp2,pp2,tp1,zb_v,zero0,mbs1-float64",
    "zero3_not_summed_over_tp-dp2,pp2,tp2,interleaved_1f1b,zero3,sequence,full,mbs1-float64",
    "recomputed_with_other_masks-dp2,pp2,tp1,cp2,gpipe,zero2,full,step,mbs1-float64",
    "padding_in_the_loss-dp2,pp2,tp2,1f1b,zero1,mbs2-float64",
    "stepped_without_master_weights-dp2,pp2,tp1,interleaved_1f1b,zero1,mbs1-bfloat16",
)
@marked_rows("long", "validated_in_train_mode-dp2,pp2,tp1,v_min,zero0,offload,mbs1-float64")
@pytest.mark.parametrize(
    "fault",
    [
        fault if fault.is_quick else pytest.param(fault, marks=pytest.mark.torture)
        for fault in FAULTS
    ],
    ids=lambda fault: f"{fault.broken.__name__}-{fault.layout}-{fault.dtype}",
)
def test_a_default_layout_sees_the_fault(fault: Fault, pool: RankPool) -> None:
    assert told_by(fault, parse_layout(fault.layout), pool)


@pytest.mark.torture
@pytest.mark.parametrize("layout", sorted({fault.layout for fault in FAULTS}))
def test_the_same_layout_without_a_fault_agrees(layout: str, pool: RankPool) -> None:
    assert told_by(Fault(nothing, layout), parse_layout(layout), pool) == []
