"""One-line faults in rooms of all axes: default ``verify`` sees each,
and names the tensor or the rule.

Every fault changes the real code in the ranks alone. It is looked for in the trial and the layouts
that default verify has for the configuration, prepared as the command prepares it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import meshwright.data_parallel.buckets
import meshwright.optimizer.matrix
import meshwright.run.tensors
import meshwright.step
import meshwright.tensor_parallel.shared_units
import meshwright.verify.rank
from meshwright.config import Batch, LossScaling, Optimizer, batch_numbers, load
from meshwright.data_parallel.buckets import Bucket
from meshwright.mesh.turns import Turns
from meshwright.optimizer import LossScale
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.parts import Parts
from meshwright.verify import Layout, Trial, Verification, parse_layout
from meshwright.verify.rank import run_layout
from meshwright_launch.pool import RankPool
from meshwright_launch.verification import TrialPlan, plan_trials
from meshwright_models.router import Router
from tests.framework.verify import test_context as of_context
from tests.framework.verify import test_seeded_faults as seeded
from tests.framework.verify import test_shared_heads as of_heads
from tests.framework.verify import test_traps as traps
from tests.support.marks import long_row, torture_row
from tests.support.run import Break, nothing, run_broken

ROOT = Path(__file__).parents[3]
STEPS = 10

# ------------------------------------------------------------------------------------ rules: rate,
# scale, batch, cursor


def warm_up_one_step_late(patch: pytest.MonkeyPatch) -> None:
    """The first step has rate 0, the peak comes one step later."""

    def late(optimizer: Optimizer, step: int, num_steps: int) -> float:
        if step < optimizer.warmup_steps:
            return optimizer.learning_rate * step / optimizer.warmup_steps
        return learning_rate(optimizer, step, num_steps)

    patch.setattr(meshwright.step, "learning_rate", late)


def decay_one_step_early(patch: pytest.MonkeyPatch) -> None:
    """The decay begins a step too early, after the peak of the warm-up."""

    def early(optimizer: Optimizer, step: int, num_steps: int) -> float:
        return learning_rate(optimizer, step + (step >= optimizer.warmup_steps), num_steps)

    patch.setattr(meshwright.step, "learning_rate", early)


def batch_grows_one_step_late(patch: pytest.MonkeyPatch) -> None:
    """The step at the boundary of a ramp still has the smaller size."""

    def late(batch: Batch, samples_seen: int | None = None) -> Any:
        before = None if samples_seen is None else max(0, samples_seen - 1)
        return batch_numbers(batch, before)

    patch.setattr(meshwright.step, "batch_numbers", late)


def scale_falls_at_the_first_overflow(patch: pytest.MonkeyPatch) -> None:
    """The hysteresis of the loss scale has no effect."""
    next_scale = meshwright.step.next_scale

    def falling(keys: LossScaling, dtype: str, scale: LossScale, *, overflow: bool) -> LossScale:
        return next_scale(keys, dtype, scale._replace(tolerated=1), overflow=overflow)

    patch.setattr(meshwright.step, "next_scale", falling)


def cursor_of_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """A resume leaves out one batch."""
    resume = meshwright.verify.rank.resume

    def ahead(parts: Parts, *args: Any) -> None:
        resume(parts, *args)
        parts.state.samples_seen += batch_numbers(parts.config.batch).global_batch

    patch.setattr(meshwright.verify.rank, "resume", ahead)


def count_of_steps_lost(patch: pytest.MonkeyPatch) -> None:
    """A resume corrects the moments' bias as after one step less."""
    restore_states = meshwright.run.tensors.restore_states

    def fewer(optimizer: Any, index: int, states: Any, steps: int) -> None:
        restore_states(optimizer, index, states, steps - 1)

    patch.setattr(meshwright.run.tensors, "restore_states", fewer)


def second_moments_lost(patch: pytest.MonkeyPatch) -> None:
    """A resume takes the first moments for the second ones."""
    restore_states = meshwright.run.tensors.restore_states

    def mixed(optimizer: Any, index: int, states: Mapping[str, Tensor], steps: int) -> None:
        other = {**states, "exp_avg_sq": states["exp_avg"].abs()} if "exp_avg" in states else states
        restore_states(optimizer, index, other, steps)

    patch.setattr(meshwright.run.tensors, "restore_states", mixed)


# ------------------------------------------------------------------------------------------------------------
# optimizer


def muon_of_adamw_scaled(patch: pytest.MonkeyPatch) -> None:
    """Muon's factor takes the smaller side of a matrix."""
    scales = {
        **meshwright.optimizer.matrix.SCALES,
        "match_rms_adamw": lambda m, n: 0.2 * min(m, n) ** 0.5,
    }
    patch.setattr(meshwright.optimizer.matrix, "SCALES", scales)


def blocks_cut_by_shards(patch: pytest.MonkeyPatch) -> None:
    """Shards end anywhere in a block of 8-bit optimizer state."""
    patch.setattr(meshwright.data_parallel.buckets.math, "lcm", lambda aligned, block: aligned)


def only_first_bucket_summed(patch: pytest.MonkeyPatch) -> None:
    """Of several buckets of a stage the first is summed over the replicas."""
    reduce = Bucket.reduce
    first: dict[int, Bucket] = {}

    def some(bucket: Bucket, *, last: bool = True) -> None:
        kind = id(bucket.kind) if bucket.kind is None else hash(bucket.kind)
        if first.setdefault(kind, bucket) is bucket:
            reduce(bucket, last=last)
        else:
            seeded._keep_own(bucket)

    patch.setattr(Bucket, "reduce", some)


# -------------------------------------------------------------------------------------------
# experts, tokens in turns


def turns_forget_the_samples(patch: pytest.MonkeyPatch) -> None:
    """Two computations in turns read the samples' numbers of the other one."""
    run = Turns.run
    patch.setattr(
        Turns,
        "run",
        lambda turns, first, second, save: run(turns, first, second, lambda: lambda: None),
    )


def copies_of_experts_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Shard groups of experts keep the gradients of their own tokens."""
    seeded.silence(patch, "experts_replicate")


def router_bias_not_moved(patch: pytest.MonkeyPatch) -> None:
    """The bias that balances the experts keeps its first value."""
    end_step = Router.end_step

    def kept(router: Router) -> None:
        before = router.bias.clone()
        end_step(router)
        router.bias.copy_(before)

    patch.setattr(Router, "end_step", kept)


def heads_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Ranks that share key-value heads keep their part of the gradient."""
    of_heads.not_summed(patch, 0)


class Seeded(NamedTuple):
    """Fault, the configuration that uses the code, and what verify must say of it."""

    broken: Break
    config: str
    overrides: tuple[str, ...]
    trial: str
    """Start of the trial's name; "": the default settings."""
    words: tuple[str, ...]
    """Words of the layout."""
    said: str
    """Rule or tensor in the verdict."""


DEMO, MOE, LLAMA = "demo", "moe-demo", "llama3-8b"
RAMP = "without dropout, 4 samples"
FLOAT16 = ("--train.dtype=float16",)
MUON = ("--optimizer.name=muon", "--parallel.zero=2")
BLOCKS = ("--optimizer.name=adamw8bit",)
WSD = ("--optimizer.schedule=wsd", "--optimizer.decay_steps=40")
FAULTS = [
    Seeded(warm_up_one_step_late, DEMO, (), "", ("dp1,pp1,tp1",), "the learning rate"),
    Seeded(decay_one_step_early, DEMO, WSD, "", ("dp1,pp1,tp1",), "the learning rate"),
    Seeded(warm_up_one_step_late, LLAMA, (), "", ("dp1,pp1,tp1",), "the learning rate"),
    Seeded(
        batch_grows_one_step_late,
        DEMO,
        (),
        RAMP,
        ("zero3",),
        "the batch size: step 4",
    ),
    Seeded(scale_falls_at_the_first_overflow, DEMO, FLOAT16, "float16", ("tp1",), "the loss scale"),
    Seeded(cursor_of_the_next_step, DEMO, (), "", ("dp1,pp1,tp1",), "samples_seen"),
    Seeded(count_of_steps_lost, DEMO, (), "", ("dp1,pp1,tp1",), "count of steps"),
    Seeded(second_moments_lost, DEMO, (), "", ("offload", "zb_v"), "exp_avg_sq of"),
    Seeded(
        muon_of_adamw_scaled,
        DEMO,
        MUON,
        "",
        ("dp2,pp2,tp2", "zero2"),
        "the optimizer: gradients of step 1 agree",
    ),
    Seeded(blocks_cut_by_shards, DEMO, BLOCKS, "blocks of 32", ("dp2",), "the optimizer"),
    Seeded(
        only_first_bucket_summed,
        DEMO,
        (),
        "",
        ("dp2,pp2,tp1,interleaved_1f1b,zero1",),
        "sum of gradients",
    ),
    Seeded(turns_forget_the_samples, MOE, (), "", ("ep2,dualpipe_v",), "block"),
    Seeded(copies_of_experts_not_summed, MOE, (), "", ("ep2", "zero3", "shard2"), "experts"),
    Seeded(router_bias_not_moved, MOE, (), "", ("dp1,pp1,tp1",), "router"),
    Seeded(heads_not_summed, LLAMA, (), "2 key-value heads", ("zero3",), "attention.qkv"),
    Seeded(traps.everything_decays, DEMO, (), "", ("dp1,pp4,tp1",), "norm"),
    Seeded(seeded.not_clipped, DEMO, (), "", ("dp1,pp4,tp1",), "the optimizer"),
    Seeded(
        seeded.stepped_without_master_weights, LLAMA, (), "bfloat16", ("dp2",), "master weights of"
    ),
    Seeded(seeded.offload_not_copied_back, DEMO, (), "", ("zb_v", "offload"), "the optimizer"),
    Seeded(
        seeded.zero3_not_summed_over_tp,
        DEMO,
        (),
        "",
        ("tp2,interleaved_1f1b,zero3,sequence",),
        "norm",
    ),
    Seeded(
        seeded.recomputed_with_other_masks,
        DEMO,
        (),
        "",
        ("interleaved_1f1b,zero3,sequence,full",),
        "block",
    ),
    Seeded(
        of_context.keys_without_the_gradients_of_others,
        DEMO,
        (),
        "",
        ("cp2,v_half",),
        "attention.qkv",
    ),
    Seeded(traps.padding_in_the_loss, DEMO, (), "", ("dp2,pp2,tp2,1f1b",), "the loss"),
    Seeded(traps.weight_gradients_forgotten, DEMO, (), "", ("zb_h2",), "gradients"),
]


class BrokenPool(NamedTuple):
    """Pool whose ranks have a fault."""

    pool: RankPool
    broken: Break

    def run(self, function: Any, world_size: int, *args: Any, **more: Any) -> list[Any]:
        """Run a layout with the fault."""
        assert function is run_layout
        return self.pool.run(run_broken, world_size, self.broken, *args, **more)


@functools.cache
def planned(config: str, overrides: tuple[str, ...]) -> TrialPlan:
    """What default verify does for a configuration."""
    return plan_trials(
        load(str(ROOT / f"configs/{config}.toml"), list(overrides)),
        [],
        STEPS,
        "float64",
        whole=False,
    )


@functools.cache
def verification(config: str, overrides: tuple[str, ...], name: str) -> tuple[Trial, Verification]:
    """Return one of its trials, with the plain run."""
    plan = planned(config, overrides)
    trial = next(
        trial
        for trial in plan.trials
        if trial.name.startswith(name) and bool(trial.name) == bool(name)
    )
    steps = trial.steps(STEPS)
    numbers = {
        "global_batch": plan.global_batch,
        "steps": steps,
        "dtype": trial.dtype,
        "random_tokens": True,
    }
    routing = ("replay" if trial.replays else None, None)
    return trial, Verification(trial.config, **numbers, routing=routing)  # type: ignore[arg-type]


def told_of(fault: Seeded, broken: Break, pool: RankPool) -> list[str]:
    """Return the lines that verify prints of the default layout of a fault."""
    trial, comparison = verification(fault.config, fault.overrides, fault.trial)
    repeated = planned(fault.config, fault.overrides).repeated or []
    layouts = [
        layout for layout in trial.layouts if all(word in str(layout) for word in fault.words)
    ]
    assert layouts, (
        f"no default layout has {fault.words}: {[str(layout) for layout in trial.layouts]}"
    )
    layout: Layout = layouts[0]
    is_repeated = not trial.name and layout in repeated
    row = comparison.compare_layout(layout, BrokenPool(pool, broken), is_repeated=is_repeated)  # type: ignore[arg-type]
    return [*row.problems, *filter(None, [row.failure, row.suspect and f"points to {row.suspect}"])]


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    FAULTS,
    ids=lambda fault: f"{fault.broken.__name__}-{fault.config}",
)
def test_default_verify_sees_the_fault_and_names_it(fault: Seeded, pool: RankPool) -> None:
    told = told_of(fault, fault.broken, pool)
    assert told, "not seen"
    assert fault.said in "\n".join(told), "\n".join(told)


AS_BY_DEFAULT = {
    (fault.config, fault.overrides, fault.trial, fault.words): fault for fault in FAULTS
}
"""One fault of each layout. ``make torture`` tries those of the demo itself, whose layouts other
tests prove."""


@pytest.mark.parametrize(
    "fault",
    [
        (torture_row if of[:3] == (DEMO, (), "") else long_row)(fault)
        for of, fault in AS_BY_DEFAULT.items()
    ],
    ids=lambda fault: f"{fault.config}-{fault.trial}-{','.join(fault.words)}",
)
def test_the_same_layout_without_the_fault_agrees(fault: Seeded, pool: RankPool) -> None:
    assert told_of(fault, nothing, pool) == []


@pytest.mark.long
def test_the_checkpoint_of_a_wrong_layout_is_not_resumed_by_the_next(pool: RankPool) -> None:
    """The verdict of the next one would blame its resume."""
    plan = planned("demo", ())
    comparison = Verification(
        plan.trials[0].config, global_batch=plan.global_batch, steps=4, random_tokens=True
    )
    words = ("dp2", "pp2", "tp2")
    broken = (warm_up_one_step_late, nothing, nothing)
    rows = [
        comparison.compare_layout(parse_layout(word), BrokenPool(pool, name))  # type: ignore[arg-type]
        for word, name in zip(words, broken, strict=True)
    ]
    assert [row.problems == [] for row in rows] == [False, True, True], [
        row.problems for row in rows
    ]
