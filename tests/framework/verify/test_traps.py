"""Each known way to get other numbers, built into the real code: verify must fail,
and name what is wrong.

A trap changes one thing inside the ranks, while the reference stays as it is. What it must be told
as stands beside it, and what must still be the same: a report that blames everything would help
nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor

import meshwright.build
import meshwright.model.build
import meshwright.parts.rank
import meshwright.step
import meshwright.tensor_parallel.cross_entropy
import meshwright.tensor_parallel.plan
from meshwright.config import batch_numbers
from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.replica import BucketReplica
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.mesh.holders import Holders
from meshwright.model.build import PlainModel
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.parameters import ParameterInfo
from meshwright.parts import StepFeed
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.recompute import RecomputeContext
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.values import IGNORED_LABEL, StageSpec
from meshwright.seeding import SeededDropout, seeded
from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, model_config, problems_of, size_for
from tests.support.marks import marked_rows
from tests.support.run import Break, nothing


def my_rank() -> int:
    """Return the rank of the process that is being broken."""
    return int(os.environ["RANK"])


# ----------------------------------------------------------------------------------------------------------
# the loss


def mean_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The mean over the micro-batches of their means,
    instead of the mean over all labels that count.
    """
    forward, pick_loss = Stage.forward, meshwright.build.pick_loss

    def picked(*args: Any, **more: Any) -> Any:
        loss = pick_loss(*args, **more)
        return lambda output, labels: (
            loss(output, labels) * (labels.numel() / (labels != IGNORED_LABEL).sum())
        )

    def counting_all(
        stage: Stage, microbatch: int, inputs: Any, labels: Any, **options: Any
    ) -> Any:
        found = forward(stage, microbatch, inputs, labels, **options)
        return (
            LossPart(found.loss_sum, torch.tensor(labels.numel()))
            if isinstance(found, LossPart)
            else found
        )

    patch.setattr(meshwright.build, "pick_loss", picked)
    patch.setattr(Stage, "forward", counting_all)


def scale_loss(patch: pytest.MonkeyPatch, factor: float) -> None:
    """The gradients' scale, with the reported loss as it should be."""
    init = Stage.__init__

    def scaled(stage: Stage, spec: StageSpec, *args: Any, **more: Any) -> None:
        init(stage, replace(spec, label_scale=spec.label_scale * factor), *args, **more)

    patch.setattr(Stage, "__init__", scaled)


def scaled_by_chunks_twice(patch: pytest.MonkeyPatch) -> None:
    """Divided by the 4 micro-batches once more."""
    scale_loss(patch, 1 / 4)


def not_scaled_by_chunks(patch: pytest.MonkeyPatch) -> None:
    """Summed over the 4 micro-batches instead of their mean."""
    scale_loss(patch, 4)


def padding_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    """The padded rows of the vocabulary take part in the softmax, with their logits of 0."""
    vocab_slice = meshwright.tensor_parallel.cross_entropy.vocab_slice

    def padded(vocab_size: int, rank: int, tp: int) -> Any:
        found = vocab_slice(vocab_size, rank, tp)
        return found._replace(stop=found.start + found.padded)

    patch.setattr(meshwright.tensor_parallel.cross_entropy, "vocab_slice", padded)


# -----------------------------------------------------------------------------------------------------
# gradient norm


def norm_counts_tp_times(patch: pytest.MonkeyPatch) -> None:
    """Parameters that every tp rank holds are counted by every one."""
    one_copy = Holders.is_counted.fget
    assert one_copy is not None

    def on_every_tp_rank(holders: Holders) -> bool:
        return one_copy(holders._replace(copied_over=()))

    patch.setattr(Holders, "is_counted", property(on_every_tp_rank))


def norm_counts_ties_twice(patch: pytest.MonkeyPatch) -> None:
    """A tied weight is counted by each stage that holds a copy."""
    one_copy = Holders.is_counted.fget
    assert one_copy is not None

    def on_every_stage(holders: Holders) -> bool:
        return one_copy(holders._replace(tied=None))

    patch.setattr(Holders, "is_counted", property(on_every_stage))


def norm_counts_every_replica(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-0: every replica counts the gradient that all of them have."""
    patch.setattr(OptimizerShard, "is_counted", True)


def norm_misses_a_stage(patch: pytest.MonkeyPatch) -> None:
    """The first stage's gradients are not counted."""
    square_norm = FlatOptimizer.square_norm
    patch.setattr(
        FlatOptimizer, "square_norm", lambda optimizer: square_norm(optimizer) * (my_rank() > 0)
    )


# ------------------------------------------------------------------------------------------------
# sums over the axes


def never_sum_over_tp(patch: pytest.MonkeyPatch, wanted: Callable[[str], bool]) -> None:
    """Forget that a parameter saw only its part of the sequence."""
    apply = meshwright.tensor_parallel.plan.apply

    def forgetful(*args: Any, **more: Any) -> dict[str, ParameterInfo]:
        infos = apply(*args, **more)
        return {
            name: info._replace(is_partial=False) if wanted(name) else info
            for name, info in infos.items()
        }

    patch.setattr(meshwright.tensor_parallel.plan, "apply", forgetful)


def norms_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """Sequence parallelism: each tp rank keeps the norms' gradients of its own tokens."""
    never_sum_over_tp(patch, lambda name: "norm" in name)


def row_biases_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """The same, for the biases of row-parallel linears."""
    never_sum_over_tp(patch, lambda name: name.endswith(("out.bias", "down.bias")))


def positions_not_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """The same, for the positions, of which each rank looks up its part."""
    never_sum_over_tp(patch, lambda name: name == "embedding.positions.weight")


def tie_not_summed(patch: pytest.MonkeyPatch) -> None:
    """First and last stage each keep their own gradient of the weight that they share."""
    all_reduce = Group.all_reduce

    def silent(group: Group, tensor: Tensor, op: str = "sum") -> CollectiveHandle:
        return CollectiveHandle() if group.name == "tied" else all_reduce(group, tensor, op)

    patch.setattr(Group, "all_reduce", silent)


def tie_lost(patch: pytest.MonkeyPatch) -> None:
    """Coming from the meta device, the head got a parameter of its own, with equal first values."""
    canonical, initial = PlainModel.canonical, PlainModel.initial

    def tied_initial(model: PlainModel, name: str) -> Tensor:
        drawn: Tensor = initial(model, canonical(model, name))
        return drawn

    patch.setattr(PlainModel, "canonical", lambda model, name: name)
    patch.setattr(PlainModel, "initial", tied_initial)


def only_the_last_microbatch(patch: pytest.MonkeyPatch) -> None:
    """What the earlier micro-batches accumulated is gone when the reduction begins."""
    begin = BucketReplica.reduce_during_backward

    def forgetful(
        replica: BucketReplica, awaited: set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        for bucket in replica.buckets:
            bucket.open_gradient().zero_()
        begin(replica, awaited, last=last)

    patch.setattr(BucketReplica, "reduce_during_backward", forgetful)


def reduced_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Each backward is taken for the last:
    what was summed over dp is summed again with the next.
    """
    reduce, backward = Bucket.reduce, Executor._backward

    def reduce_now(bucket: Bucket, *, last: bool = True) -> None:
        reduce(bucket, last=last)
        bucket.wait()

    def taken_for_the_last(executor: Executor, item: Any, *more: Any) -> None:
        executor.replicas[item.stage].reduce_during_backward()
        backward(executor, item, *more)

    patch.setattr(Executor, "_backward", taken_for_the_last)
    patch.setattr(Bucket, "reduce", reduce_now)


def not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Every replica keeps the gradients of its own samples."""
    patch.setattr(Bucket, "reduce", lambda bucket, last: None)


def accumulated_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The sum over the micro-batches is rounded to bfloat16 after each of them."""
    accumulated = BucketReplica._accumulated

    def rounding(
        reference: ref[BucketReplica], parameter: Tensor, *, index: int, number: int
    ) -> None:
        replica = reference()
        assert replica is not None
        view = replica.buckets[index].gradient_views[number]
        view.copy_(view.bfloat16())
        accumulated(reference, parameter, index=index, number=number)

    patch.setattr(BucketReplica, "_accumulated", rounding)


# ------------------------------------------------------------------------------------- weights,
# randomness, counting


def everything_decays(patch: pytest.MonkeyPatch) -> None:
    """A flat tensor knows no names: norms and biases are decayed as well."""
    patch.setattr(ParameterInfo, "decays", True)


def weights_not_gathered(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-1: each replica goes on with the shard that it has stepped itself."""
    patch.setattr(Bucket, "gather", lambda bucket: None)


def initialised_by_rank(patch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed(seed + rank), as many a script has it."""

    @contextmanager
    def by_rank(seed: int, *names: str | int) -> Iterator[None]:
        with seeded(seed + my_rank()):
            yield

    patch.setattr(meshwright.model.build, "seeded", by_rank)


def dropout_by_tp_rank(patch: pytest.MonkeyPatch) -> None:
    """Each tp rank draws masks of its own, also where all of them hold the same activation."""
    mask = SeededDropout.mask

    def by_rank(dropout: SeededDropout, shape: torch.Size, device: torch.device) -> Tensor:
        assert dropout.current.sample_indices is not None
        moved = replace(
            dropout.current, sample_indices=dropout.current.sample_indices + 1000 * my_rank()
        )
        key, dropout.current = dropout.current, moved
        try:
            return mask(dropout, shape, device)
        finally:
            dropout.current = key

    patch.setattr(SeededDropout, "mask", by_rank)


def dropout_repeats(patch: pytest.MonkeyPatch) -> None:
    """Every micro-batch gets the masks of the first: drawn by the position in the micro-batch."""
    forward = SeededDropout.forward

    def repeating(dropout: SeededDropout, x: Tensor) -> Tensor:
        dropout.current.sample_indices = torch.arange(x.shape[0])
        return forward(dropout, x)

    patch.setattr(SeededDropout, "forward", repeating)


def learning_rate_of_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """Off by one."""
    learning_rate = meshwright.step.learning_rate
    patch.setattr(
        meshwright.step,
        "learning_rate",
        lambda config, step, steps: learning_rate(config, step + 1, steps),
    )


def data_from_the_next_sample(patch: pytest.MonkeyPatch) -> None:
    """The cursor is off by one from the start."""
    feed_later(patch, lambda parts: 1)


def cursor_moves_too_far(patch: pytest.MonkeyPatch) -> None:
    """The cursor is off by one after each step."""
    feed_later(patch, lambda parts: parts.state.step)


def feed_later(patch: pytest.MonkeyPatch, by: Callable[[Any], int]) -> None:
    """Feed steps and validations with samples so much later."""
    feed = StepFeed
    for module in (meshwright.step, meshwright.parts.rank):
        patch.setattr(
            module,
            "StepFeed",
            lambda parts, source, seen, *more: feed(parts, source, seen + by(parts), *more),
        )


def replicas_see_the_same_samples(patch: pytest.MonkeyPatch) -> None:
    """The sampler does not know of dp: all replicas train on the first one's part."""
    indices = StepFeed.indices

    def of_the_first(feed: StepFeed, m: int) -> range:
        found, per_replica = (
            indices(feed, m),
            batch_numbers(feed.parts.config.batch).global_batch // feed.parts.mesh.grid.dp,
        )
        assert isinstance(found, range)
        before = feed.parts.mesh.at.dp_rank * per_replica
        return range(found.start - before, found.stop - before)

    patch.setattr(StepFeed, "indices", of_the_first)


def recomputed_with_the_masks_of_now(patch: pytest.MonkeyPatch) -> None:
    """The second forward draws dropout for the micro-batch that went forward last."""

    @contextmanager
    def as_it_is(again: RecomputeContext) -> Iterator[None]:
        with again._restored(replace(again.current, is_recompute=True)):
            yield

    patch.setattr(RecomputeContext, "__call__", as_it_is)


def weight_gradients_forgotten(patch: pytest.MonkeyPatch) -> None:
    """W of the first micro-batch does nothing."""
    weigh = Stage.backward_weight

    def forgetful(stage: Stage, microbatch: int) -> None:
        if microbatch:
            weigh(stage, microbatch)
        else:
            stage._deferred.pop(microbatch)

    patch.setattr(Stage, "backward_weight", forgetful)


# ----------------------------------------------------------------------------------------------------------
# the table

LOSS, GRADIENTS, NORM = "loss of step 1", "gradients of step 1", "gradient norm of step 1"
WEIGHTS, INITIAL, TOKENS = "weights after", "initial weights differ", "samples differ"


class Trap(NamedTuple):
    """What is broken, in which layout, what must be said of it, and what must not."""

    broken: Break
    layout: str
    said: tuple[str, ...]
    unsaid: tuple[str, ...] = ()
    model: str = "gpt2"
    steps: int = 2


TRAPS = [
    Trap(mean_per_microbatch, "dp2", (LOSS, GRADIENTS), (INITIAL, TOKENS)),
    Trap(
        scaled_by_chunks_twice,
        "pp2",
        (GRADIENTS, "it is 0.25 times the reference's", NORM),
        (LOSS,),
    ),
    Trap(
        not_scaled_by_chunks,
        "pp2,gpipe",
        (GRADIENTS, "it is 4 times the reference's", NORM),
        (LOSS,),
    ),
    Trap(padding_in_the_loss, "tp4", (LOSS, GRADIENTS), (INITIAL,)),
    Trap(norm_counts_tp_times, "tp2", (NORM,), (LOSS, GRADIENTS)),
    Trap(norm_counts_ties_twice, "pp2", (NORM,), (LOSS, GRADIENTS)),
    Trap(norm_counts_every_replica, "dp2,zero0", (NORM,), (LOSS, GRADIENTS)),
    Trap(norm_misses_a_stage, "pp2", (NORM,), (LOSS, GRADIENTS)),
    Trap(
        norms_not_summed_over_tp,
        "tp2,sequence",
        ("differ in 10 of 28 parameters, first block0.attention_norm.weight", NORM),
        (LOSS,),
    ),
    Trap(
        row_biases_not_summed_over_tp,
        "dp2,tp2,sequence",
        ("differ in 4 of 28 parameters, first block0.attention.out.bias",),
        (LOSS,),
    ),
    Trap(
        positions_not_summed_over_tp,
        "tp2,sequence",
        ("differ in 1 of 28 parameters, first embedding.positions.weight",),
        (LOSS,),
    ),
    Trap(
        tie_not_summed,
        "pp2",
        ("differ in 1 of 28 parameters, first embedding.tokens.weight",),
        (LOSS, INITIAL),
    ),
    Trap(
        tie_lost,
        "pp1",
        ("has parameters that the model lacks, first head.weight", "first embedding.tokens.weight"),
        (LOSS, INITIAL),
    ),
    Trap(only_the_last_microbatch, "pp1", (GRADIENTS, NORM), (LOSS,)),
    Trap(reduced_per_microbatch, "dp2,zero0", (GRADIENTS, NORM), (LOSS,)),
    Trap(reduced_per_microbatch, "dp2,zero1", (GRADIENTS, NORM), (LOSS,)),
    Trap(not_reduced, "dp2,zero0", (GRADIENTS, NORM), (LOSS,)),
    Trap(not_reduced, "dp2,zero1", (GRADIENTS, NORM), (LOSS,)),
    Trap(accumulated_in_bfloat16, "pp1", (GRADIENTS,), (LOSS,)),
    Trap(
        everything_decays,
        "dp2",
        ("weights after 1 steps differ", "first block0.attention_norm.weight"),
        (LOSS, GRADIENTS, NORM),
        steps=1,
    ),
    Trap(
        weights_not_gathered,
        "dp2",
        ("weights after 2 steps differ", "first differs in step 2"),
        (LOSS, GRADIENTS),
    ),
    Trap(
        initialised_by_rank, "pp2", (f"{INITIAL}, first embedding.tokens.weight", LOSS), (TOKENS,)
    ),
    Trap(dropout_by_tp_rank, "tp2", (LOSS, GRADIENTS), (INITIAL, TOKENS)),
    Trap(dropout_repeats, "pp1", (LOSS, GRADIENTS), (INITIAL, TOKENS)),
    Trap(
        learning_rate_of_the_next_step,
        "dp2",
        ("weights after 3 steps differ in 28 of 28", "the loss first differs in step 2"),
        (LOSS, GRADIENTS, NORM),
        steps=3,
    ),
    Trap(data_from_the_next_sample, "dp2", (f"{TOKENS}, first in step 1", LOSS), (INITIAL,)),
    Trap(
        cursor_moves_too_far,
        "pp2",
        (f"{TOKENS}, first in validation after step 1",),
        (INITIAL, LOSS, GRADIENTS),
    ),
    Trap(
        recomputed_with_the_masks_of_now,
        "pp2,gpipe,full",
        (GRADIENTS, NORM),
        (LOSS, INITIAL, TOKENS),
    ),
    Trap(weight_gradients_forgotten, "pp2,zb_h1", (GRADIENTS, NORM), (LOSS, INITIAL, TOKENS)),
    Trap(
        replicas_see_the_same_samples, "dp2,pp2", (f"{TOKENS}, first in step 1", LOSS), (INITIAL,)
    ),
]


def problems(trap: Trap, broken: Break, pool: RankPool, references: References) -> list[str]:
    size = size_for(parse_layout(trap.layout))
    config, batch = model_config(trap.model, size), size.global_batch
    return problems_of(
        config, trap.layout, broken, pool, references, global_batch=batch, steps=trap.steps
    )


@marked_rows(
    "long",
    "padding_in_the_loss-tp4",
    "norm_counts_tp_times-tp2",
    "norm_counts_ties_twice-pp2",
    "norm_counts_every_replica-dp2,zero0",
    "norm_misses_a_stage-pp2",
    "norms_not_summed_over_tp-tp2,sequence",
    "row_biases_not_summed_over_tp-dp2,tp2,sequence",
    "positions_not_summed_over_tp-tp2,sequence",
    "reduced_per_microbatch-dp2,zero0",
    "reduced_per_microbatch-dp2,zero1",
    "not_reduced-dp2,zero1",
    "dropout_by_tp_rank-tp2",
    "learning_rate_of_the_next_step-dp2",
    "recomputed_with_the_masks_of_now-pp2,gpipe,full",
    "weight_gradients_forgotten-pp2,zb_h1",
    "replicas_see_the_same_samples-dp2,pp2",
)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.broken.__name__}-{trap.layout}")
def test_verify_sees_the_mistake_and_names_it(
    trap: Trap, pool: RankPool, references: References
) -> None:
    told = "\n".join(problems(trap, trap.broken, pool, references))
    for said in trap.said:
        assert said in told, told
    for unsaid in trap.unsaid:
        assert unsaid not in told, told


def test_the_same_layout_without_a_mistake_passes(pool: RankPool, references: References) -> None:
    """What was seen above was the mistake, and the workers have forgotten it."""
    assert problems(TRAPS[0], nothing, pool, references) == []
