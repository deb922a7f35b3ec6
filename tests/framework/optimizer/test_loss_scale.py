"""float16: the dynamic loss scale, steps that all ranks skip together,
and the same scale after a resume.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.manifest import Manifest
from meshwright.config import LossScaling
from meshwright.mesh.mesh import close_mesh
from meshwright.optimizer import MAX_SCALE, LossScale, can_fall, first_scale, next_scale
from meshwright.run.resume import resume, saved_scale
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import merge, open_verify_source, run_layout
from meshwright.verify.reference import run_reference
from meshwright.verify.tolerance import tolerance_of
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import save
from tests.framework.verify.cases import LATER, config_of, model_config, size_for
from tests.framework.watch.spoiling import (
    LIMIT_S,
    Spoil,
    config_for,
    held,
    opened,
    parts_for,
    quiet,
    same_bits,
    size_of,
    spoil,
    taken,
)
from tests.support.errors import raises
from tests.support.marks import marked_rows

STEPS = 8
TOO_LARGE = {"initial": 2.0**21, "window": 2, "hysteresis": 1, "growth": 2.0, "backoff": 0.5}
"""A scale that overflows in the first steps and rises again within STEPS,
as torch's GradScaler has it.
"""


def history(keys: LossScaling, overflows: list[bool], dtype: str = "float16") -> list[float]:
    scale, values = first_scale(keys, dtype), []
    for overflow in overflows:
        scale = next_scale(keys, dtype, scale, overflow=overflow)
        values.append(scale.value)
    return values


def overflows(seed: int) -> list[bool]:
    return [random.Random(f"{seed} {step}").random() < 0.3 for step in range(200)]


@pytest.mark.parametrize("seed", range(3))
def test_without_hysteresis_the_scale_is_that_of_torch(seed: int) -> None:
    keys = LossScaling(initial=2.0**30, window=3, hysteresis=1, minimum=2.0**-60)
    scaler, expected = torch.amp.GradScaler("cpu", 2.0**30, growth_interval=3), []
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in overflows(seed):
        scaler.scale(weight.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        weight.grad = torch.full((1,), torch.inf if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert history(keys, overflows(seed)) == expected and len(set(expected)) > 10


@pytest.mark.parametrize("seed", range(3))
def test_with_hysteresis_the_scale_is_that_of_megatron(seed: int) -> None:
    """The published rule: an overflow counts down, only a rise sets the count back,
    and a minimum.
    """
    scale, sound, left, expected = 2.0**8, 0, 3, []
    for overflow in overflows(seed):
        if overflow:
            sound, left = 0, left - 1
            scale = max(scale / 2, 32.0) if left <= 0 else scale
        else:
            sound += 1
            if sound == 4:
                sound, left, scale = 0, 3, scale * 2
        expected.append(scale)
    keys = LossScaling(initial=2.0**8, window=4, hysteresis=3, minimum=32.0)
    found = history(keys, overflows(seed))
    assert found == expected and min(found) == 32.0 and max(found) > 2.0**8


def test_the_bounds_of_the_scale() -> None:
    keys = LossScaling(initial=MAX_SCALE / 1.5, window=1)
    assert history(keys, [False, False]) == [MAX_SCALE / 1.5] * 2
    assert torch.full((), MAX_SCALE).isfinite(), "in float32"
    assert can_fall(keys, "float16", LossScale(2.0))
    assert not can_fall(keys, "float16", LossScale(1.0))
    fixed = LossScaling(fixed=128.0)
    assert history(fixed, [True, False]) == [128.0, 128.0]
    assert not can_fall(fixed, "float16", first_scale(fixed, "float16"))
    assert first_scale(LossScaling(), "float32").value == 1.0
    assert history(LossScaling(), [True], "float32") == [1.0]


LAYOUTS = (
    "dp2",
    "pp2,tp2",
    LATER("dp2,zero3"),
    LATER("dp2,zero2,offload"),
    LATER("pp2,zb_h1"),
    LATER("dp2,pp2,interleaved_1f1b,interleave2"),
)


@marked_rows("long", "pp2,tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skips_and_rises_as_plain_torch_with_a_grad_scaler(pool: RankPool, layout: str) -> None:
    laid_out = parse_layout(layout)
    size = size_for(laid_out)
    base = model_config("gpt2", size)
    plain = layout_config(base, parse_layout("dp1"), size.global_batch, "float16").replace(
        loss_scale=TOO_LARGE
    )
    expected = run_reference(plain, open_verify_source(plain, True), STEPS, torch.float16)
    config = layout_config(base, laid_out, size.global_batch, "float16").replace(
        loss_scale=TOO_LARGE
    )
    ranks = pool.run(
        run_layout, size_of(config), config.model_dump_json(), STEPS, True, timeout_s=LIMIT_S
    )
    found = merge(ranks)
    finite = [norm < float("inf") for norm in expected.grad_norms]
    assert not finite[0] and sum(finite) >= 4 and not all(finite[finite.index(True) :]), finite
    assert [norm < float("inf") for norm in found.grad_norms] == finite, (
        "the same steps are skipped"
    )
    tolerance = tolerance_of("float16", laid_out)
    for one, other in zip(found.losses, expected.losses, strict=True):
        assert abs(one - other) <= tolerance.later * other
    for one, other, is_finite in zip(found.grad_norms, expected.grad_norms, finite, strict=True):
        assert not is_finite or abs(one - other) <= tolerance.later_norm * other


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_of_the_models_own_is_computed_in_float32(pool: RankPool, dtype: str) -> None:
    """With the default one's formula, its numbers; in 16 bits a sum of 65,504 would be Inf,
    and 1 / labels rounded.

    The two backward passes may round single gradients of a logit to different 16-bit numbers.
    """
    numbers = []
    for own in (True, False):
        base = config_of(
            "tests.support.recording_models:build", {"vocab_size": 61, "own_loss": own}, 8
        )
        config = layout_config(base, parse_layout("dp2,pp2"), 24, dtype)
        found = pool.run(run_layout, 4, config.model_dump_json(), 2, True, timeout_s=LIMIT_S)[0]
        numbers.append(found)
    own, default = numbers
    assert own.losses == default.losses and own.validation == default.validation
    assert own.grad_norms == pytest.approx(default.grad_norms, rel=1e-6)


def one_rank_overflows(
    rank: int, world_size: int, config_json: str, saved: str
) -> tuple[list[tuple[bool, float]], bool, LossScale]:
    """(skipped and scale of each step, whether a skipped step changed nothing,
    the scale that is saved).
    """
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    steps, unchanged = [], True
    for step in range(1, 6):
        undo = (
            spoil(parts, Spoil("gradient", 1, "block1.mlp.up.weight", value=torch.inf))
            if step in (2, 3, 5)
            else None
        )
        before = held(parts)
        stats = take_step(parts)
        steps.append((stats.skipped, stats.loss_scale))
        unchanged &= stats.skipped == same_bits(before, held(parts))
        if undo is not None:
            undo()
    save(parts, saved)
    state = parts.state
    assert (state.step, state.optimizer_steps, state.skipped_in_a_row) == (
        5,
        2,
        0,
    ) and state.samples_seen == 40
    close_mesh(mesh)
    return steps, unchanged, state.loss_scale


def resumed(
    rank: int, world_size: int, config_json: str, saved: str
) -> tuple[LossScale, list[tuple[bool, float, float]], LossScale]:
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    resume(parts, Path(saved), quiet)
    first = parts.state.loss_scale
    steps = [
        (stats.skipped, stats.loss_scale, stats.loss)
        for stats in (take_step(parts) for _ in range(3))
    ]
    close_mesh(mesh)
    return first, steps, parts.state.loss_scale


KEYS = {"initial": 1024.0, "window": 2, "hysteresis": 2, "growth": 2.0, "backoff": 0.5}


def test_an_overflow_of_one_rank_is_skipped_by_all_and_the_scale_survives_on_another_layout(
    pool: RankPool, tmp_path: Path
) -> None:
    config = config_for("dp2", dtype="float16").replace(loss_scale=KEYS)
    found = pool.run(
        one_rank_overflows, 2, config.model_dump_json(), str(tmp_path), timeout_s=LIMIT_S
    )
    assert found[0] == found[1]
    steps, unchanged, scale = found[0]
    assert unchanged
    # two overflows until the first fall; no rise in between, so that the next one halves it at once
    assert steps == [(False, 1024.0), (True, 1024.0), (True, 1024.0), (False, 512.0), (True, 512.0)]
    assert scale == LossScale(256.0, 0, 0)
    ends = []
    for layout in ("dp2", "pp2"):
        other = config_for(layout, dtype="float16").replace(loss_scale=KEYS)
        for first, later, last in pool.run(
            resumed, 2, other.model_dump_json(), str(tmp_path), timeout_s=LIMIT_S
        ):
            assert first == scale
            assert [each[:2] for each in later] == [(False, 256.0), (False, 256.0), (False, 512.0)]
            ends.append((last, [loss for *_, loss in later]))
    assert {last for last, _ in ends} == {LossScale(512.0, 1, 2)}
    for _, losses in ends:
        assert losses == pytest.approx(ends[0][1], rel=2e-3)


def at_the_minimum(rank: int, world_size: int, config_json: str) -> tuple[list[str | None], int]:
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    spoil(parts, Spoil("gradient", 1, "block1.mlp.up.weight", value=torch.nan))
    said = [taken(parts) for _ in range(3)]
    close_mesh(mesh)
    return said, parts.state.step


def test_a_nan_that_no_scale_avoids_ends_the_run_at_the_minimum_and_is_named(
    pool: RankPool,
) -> None:
    keys = {"initial": 4.0, "minimum": 1.0, "hysteresis": 1, "growth": 2.0, "backoff": 0.5}
    config = config_for("pp2", dtype="float16").replace(loss_scale=keys)
    for said, steps in pool.run(at_the_minimum, 2, config.model_dump_json(), timeout_s=LIMIT_S):
        assert said[:2] == [None, None] and steps == 2
        assert said[2] is not None and "with the loss scale 1: the step is not taken" in said[2]
        assert "block1.mlp.up.weight" in said[2] and "rank 1 (pp1 dp0 tp0)" in said[2], said[2]


def test_a_nan_loss_is_no_overflow(pool: RankPool) -> None:
    config = config_for("dp1", dtype="float16").replace(loss_scale=KEYS)
    ((said, steps),) = pool.run(nan_loss, 1, config.model_dump_json(), timeout_s=LIMIT_S)
    assert said is not None and "with the loss scale 1024" in said and steps == 0


def nan_loss(rank: int, world_size: int, config_json: str) -> tuple[str | None, int]:
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    spoil(parts, Spoil("output", 0, "block0", 3))
    said = taken(parts)
    close_mesh(mesh)
    return said, parts.state.step


def test_a_checkpoint_without_a_scale_starts_with_the_first_one() -> None:
    keys, old = LossScaling(initial=64.0), Manifest.model_construct(step=3, state={})
    assert saved_scale(old, keys, "float16") == LossScale(64.0, 0, 2)
    saved = Manifest.model_construct(
        step=3, state={"loss_scale": {"value": 8.0, "sound_steps": 1, "tolerated": 0}}
    )
    assert saved_scale(saved, keys, "float16") == LossScale(8.0, 1, 0)
    assert saved_scale(saved, LossScaling(fixed=128.0), "float16") == LossScale(128.0), (
        "the configuration has fixed it since"
    )


@pytest.mark.parametrize(
    "state",
    [
        7,
        {},
        {"value": "8", "sound_steps": 0, "tolerated": 0},
        {"value": float("nan"), "sound_steps": 0, "tolerated": 0},
        {"value": -1.0, "sound_steps": 0, "tolerated": 0},
        {"value": 8.0, "sound_steps": -1, "tolerated": 0},
        {"value": 8.0, "sound_steps": True, "tolerated": 0},
        {"value": 8.0, "sound_steps": 0, "tolerated": 0, "more": 1},
    ],
)
def test_what_is_no_scale_is_refused(state: object) -> None:
    with raises("MW-RUN-033") as refused:
        manifest = Manifest.model_construct(step=3, state={"loss_scale": state})
        saved_scale(manifest, LossScaling(), "float16")
    assert refused.value.code == "MW-RUN-033"
