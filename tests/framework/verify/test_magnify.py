"""Settings of verify under which faults show, its own learning rate and loss scale,
and the variants of a model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshwright.config import Optimizer, load
from meshwright.config.combinations.layout import parse_layout
from meshwright.optimizer import first_scale, next_scale
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.traits import traits_of
from meshwright.verify import (
    Layout,
    Report,
    Trial,
    amplify,
    clip_first,
    compress,
    layout_config,
    make_small,
    shrink,
)
from meshwright.verify.layouts import FLOAT16_SCALE
from meshwright.verify.plain_rate import plain_rate
from meshwright.verify.plain_scale import PlainScale
from meshwright.verify.smaller import get_option, turn_dropout_off, turn_dropout_on
from meshwright.verify.trials import RAMP_STEPS, further_trials, spread
from meshwright_launch import verification
from meshwright_launch.verification import plan_trials
from tests.framework.verify.cases import config_of
from tests.framework.verify.models import functional_dropout

ROOT = Path(__file__).parents[3]
STEPS = 10


def config(name: str, *overrides: str) -> Any:
    return load(str(ROOT / f"configs/{name}.toml"), list(overrides))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "until"), [(0, 0), (1, 0), (4, 17), (7, 40)])
def test_the_plain_rate_is_the_runs(schedule: Any, warmup: int, until: int) -> None:
    """Two implementations, step by step beyond every boundary."""
    numbers: dict[str, Any] = {"decay_steps": 6} if schedule == "wsd" else {}
    numbers |= {"min_learning_rate": 1e-4, "decay_until": until} if schedule != "constant" else {}
    optimizer = Optimizer(schedule=schedule, warmup_steps=warmup, learning_rate=2e-3, **numbers)
    for step in range(30):
        assert plain_rate(optimizer, step + 1, 30) == pytest.approx(
            learning_rate(optimizer, step, 30), rel=1e-13
        )


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_plain_loss_scale_is_the_runs(hysteresis: int) -> None:
    run = config("demo", "--train.dtype=float16").replace(
        loss_scale={**FLOAT16_SCALE, "hysteresis": hysteresis}
    )
    scale, plain = first_scale(run.loss_scale, run.train.dtype), PlainScale(run.loss_scale)
    for step in range(40):
        assert scale.value == plain.value, step
        overflow = scale.value > 2.0**20 or step in (11, 12, 30)
        scale = next_scale(run.loss_scale, run.train.dtype, scale, overflow=overflow)
        plain.update(found_inf=overflow)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--optimizer.schedule=wsd", "--optimizer.decay_steps=40"),
        ("--optimizer.schedule=linear", "--optimizer.decay_until=100"),
        ("--optimizer.schedule=cosine", "--optimizer.decay_until=400"),
        ("--optimizer.schedule=constant", "--optimizer.min_learning_rate=0"),
    ],
)
def test_a_compressed_schedule_is_a_legal_one_with_all_its_parts(
    overrides: tuple[str, ...],
) -> None:
    own = config("demo", *overrides)
    compressed, notes = compress(own, STEPS)
    layout_config(compressed, Layout(), 8, "float64").model_validate(compressed.model_dump())
    rates = [learning_rate(compressed.optimizer, step, STEPS) for step in range(STEPS)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(own.optimizer.learning_rate), "a warm-up"
    is_decaying = own.optimizer.schedule != "constant"
    assert (rates[-1] < rates[3]) == is_decaying and notes
    assert compress(own, 2).config == own, "too few steps for its parts"


def test_what_the_course_leaves_out_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stage = {"from_step": 5, "train": "other"}
    own = config("demo").replace(
        data={"stages": [stage]}, batch={"global_batch": 8, "ramp": (4, 4, 12)}
    )
    verification.magnify(own, STEPS, 8, 1, whole=True)
    said = capsys.readouterr().out
    assert "data.stages left out" in said and "batch.ramp left out" in said
    assert "left out" not in str(compress(config("demo"), STEPS).notes)


def normed(vocab_size: int) -> nn.Sequential:
    """Return a model whose samples depend on each other, by the labels of a micro-batch."""
    return nn.Sequential(nn.Embedding(vocab_size, 8), Centred(), nn.Linear(8, vocab_size))


class Centred(nn.Module):
    """Tokens of a micro-batch without their mean, enlarged."""

    def forward(self, x: Any) -> Any:
        return 9.0 * (x - x.mean((0, 1), keepdim=True))


def test_a_clip_norm_is_lowered_only_if_the_first_norm_does_not_reach_it() -> None:
    own = config_of("tests.framework.verify.test_magnify:normed", {"vocab_size": 17}, 2)

    def clip_norm(bound: float, size: int) -> float:
        return clip_first(
            own.replace(optimizer={"clip_norm": bound}), 8, size
        ).config.optimizer.clip_norm

    alone, of_four = clip_norm(1e3, 1), clip_norm(1e3, 4)
    assert alone != of_four, "the norm is that of the run's micro-batches"
    for lower, size in ((alone, 1), (of_four, 4)):
        norm = lower / 0.8
        assert clip_norm(0.9 * norm, size) == 0.9 * norm, "a bound that the norm exceeds stays"
        assert clip_norm(1.1 * norm, size) == lower


def test_updates_are_large_enough_to_see() -> None:
    for name in ("llama3-8b", "gpt2-124m", "deepseek-v3"):
        louder, notes = amplify(config(name))
        assert louder.optimizer.learning_rate >= 3e-3 and notes
        ratio = louder.optimizer.min_learning_rate / louder.optimizer.learning_rate
        own = config(name).optimizer
        assert ratio == pytest.approx(own.min_learning_rate / own.learning_rate)
    assert (
        amplify(config("demo", "--optimizer.weight_decay=0")).config.optimizer.weight_decay == 0.0
    )
    assert amplify(config("demo")).notes == [], "a rate that is large stays"


def test_heads_that_tp_shares_in_the_run_are_shared_in_the_small_model() -> None:
    options = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8}
    assert shrink(options)["num_kv_heads"] == 4 and shrink(options, tp=16)["num_kv_heads"] == 2
    small = make_small(config("llama3-8b", "--parallel.tp=16", "--parallel.dp=4"), 32).config
    assert get_option(small.model, "num_kv_heads") == 2


def test_dropout_is_turned_off_wherever_it_is() -> None:
    on = turn_dropout_on(make_small(config("demo"), 32).config).config
    off = turn_dropout_off(on)
    assert off is not None and off.model.options["dropout"] == 0.0
    quiet = turn_dropout_on(
        config_of("tests.framework.verify.models:quiet_dropout", {"vocab_size": 17}, 8)
    ).config
    off = turn_dropout_off(quiet)
    assert off is not None and off.model.builder == "tests.framework.verify.models:quiet_dropout"


def default_dropout(vocab_size: int, dropout: float = 0.1) -> nn.Sequential:
    """Dropout that is on without an option, and refuses to be off below 17 words."""
    if vocab_size < 17 and not dropout:
        raise ValueError("dropout must be above 0")
    return functional_dropout(vocab_size, dropout)


def test_a_default_of_dropout_is_turned_off() -> None:
    own = config_of("tests.framework.verify.test_magnify:default_dropout", {"vocab_size": 17}, 8)
    quiet = turn_dropout_off(own)
    assert quiet is not None and quiet.model.options == {"vocab_size": 17, "dropout": 0.0}
    assert turn_dropout_off(own.replace(model={"options": {"vocab_size": 11}})) is None


def test_a_model_without_a_probability_of_0_has_no_variant_without_dropout() -> None:
    own = config_of("tests.framework.verify.test_magnify:default_dropout", {"vocab_size": 11}, 8)
    assert further_trials(Trial("", own, [Layout(dp=2)], "float64"), traits_of(own), 8) == []


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_variants_do_not_use_the_routing_directory_of_the_run(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routings, steps = [], []

    class Recorder:
        def __init__(self, config: Any, *, routing: Any, **others: Any) -> None:
            routings.append(routing)
            steps.append(others["steps"])

        def report(self, rows: list[Any]) -> Report:
            return Report("", rows)

    trials = [
        Trial(name, config("demo"), [], "float64", name == "bfloat16")
        for name in ("", "a variant", "bfloat16")
    ]
    monkeypatch.setattr("meshwright.verify.Verification", Recorder)
    monkeypatch.setattr(
        verification, "plan_trials", lambda *a, **k: verification.TrialPlan(trials, 8, None)
    )
    options = argparse.Namespace(
        config=str(ROOT / "configs/demo.toml"), layouts=None, steps=2, dtype="float64"
    )
    options.whole, options.routing, options.routing_directory = False, mode, tmp_path
    assert verification.verify(options, []) == 0
    assert routings == [(mode, tmp_path), (mode, None), ("replay", None)]
    trials[1] = trials[1]._replace(max_steps=5)
    for asked, expected in ((2, [2, 2, 2]), (20, [20, 5, 20])):
        options.steps = asked
        steps.clear()
        assert verification.verify(options, []) == 0 and steps == expected


def test_layouts_are_refused_only_if_they_would_be_chosen() -> None:
    """A refusal builds the model: 0.6 s for each of 30 layouts."""
    layouts = [
        parse_layout(text)
        for text in ("dp2", "dp2,zero3", "pp2,gpipe", "dp2,pp2,zero3", "tp2", "pp2", "tp4")
    ]
    traits = traits_of(
        config_of(
            "meshwright_models.gpt2:build",
            {"vocab_size": 17, "hidden_size": 16, "num_heads": 4, "num_layers": 2},
            8,
        )
    )
    asked: list[Layout] = []

    def is_refused(layout: Layout) -> bool:
        asked.append(layout)
        return layout.zero == 3

    chosen = spread(layouts, traits, 2, is_refused)
    assert chosen == spread([layout for layout in layouts if layout.zero != 3], traits, 2)
    assert (
        len(asked)
        == len(set(asked))
        == len(chosen) + sum(layout.zero == 3 for layout in asked)
        < len(layouts)
    )
    assert spread(layouts, traits, 99, lambda _: True) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("demo", (), ["", "without dropout, 4 samples at first"]),
        (
            "demo",
            ("--train.dtype=float16",),
            ["", "without dropout, 4 samples at first", "float16"],
        ),
        (
            "demo",
            ("--optimizer.name=adamw8bit",),
            ["", "without dropout, 4 samples at first", "blocks of 32"],
        ),
        (
            "llama3-8b",
            (),
            ["", "without dropout, 4 samples at first", "2 key-value heads", "bfloat16"],
        ),
    ],
)
def test_variants_follow_from_the_configuration(
    name: str, overrides: tuple[str, ...], expected: list[str]
) -> None:
    plan = plan_trials(config(name, *overrides), [], STEPS, "float64", whole=False)
    assert [trial.name for trial in plan.trials] == expected
    ramping = plan.trials[1]
    for layout in ramping.layouts:
        assert layout_config(ramping.config, layout, plan.global_batch, "float64").batch.ramp == (
            4,
            4,
            12,
        )
    main = plan.trials[0]
    for trial in plan.trials[1:]:
        is_short = trial.dtype == main.dtype  # 16 bits need the fall of the loss scale
        assert trial.steps(STEPS) == (RAMP_STEPS + 2 if is_short else STEPS)
    assert (
        layout_config(main.config, main.layouts[0], plan.global_batch, "float64").batch.ramp is None
    )


@pytest.mark.long
def test_chosen_layouts_have_no_variants() -> None:
    plan = plan_trials(config("demo"), ["dp2", "tp2"], STEPS, "float64", whole=False)
    assert [trial.name for trial in plan.trials] == [""] and plan.repeated is None
