"""Settings of verify under which faults show, its own learning rate and loss scale, and the variants of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Optimizer, load
from meshwright.launch.verification import plan_trials
from meshwright.optimizer import first_scale, next_scale
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.tools.verify import Layout, amplify, compress, layout_config, make_small, shrink
from meshwright.tools.verify.layouts import FLOAT16_SCALE
from meshwright.tools.verify.plain_rate import plain_rate
from meshwright.tools.verify.plain_scale import PlainScale
from meshwright.tools.verify.smaller import get_option, turn_dropout_off, turn_dropout_on
from tests.tools.verify.cases import config_of

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
        assert plain_rate(optimizer, step + 1, 30) == pytest.approx(learning_rate(optimizer, step, 30), rel=1e-13)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_plain_loss_scale_is_the_runs(hysteresis: int) -> None:
    run = config("demo", "--train.dtype=float16").replace(loss_scale={**FLOAT16_SCALE, "hysteresis": hysteresis})
    scale, plain = first_scale(run), PlainScale(run.loss_scale)
    for step in range(40):
        assert scale.value == plain.value, step
        overflow = scale.value > 2.0**20 or step in (11, 12, 30)
        scale = next_scale(run, scale, overflow=overflow)
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
def test_a_compressed_schedule_is_a_legal_one_with_all_its_parts(overrides: tuple[str, ...]) -> None:
    own = config("demo", *overrides)
    compressed, notes = compress(own, STEPS)
    layout_config(compressed, Layout(), 8, "float64").model_validate(compressed.model_dump())
    rates = [learning_rate(compressed.optimizer, step, STEPS) for step in range(STEPS)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(own.optimizer.learning_rate), "a warm-up"
    is_decaying = own.optimizer.schedule != "constant"
    assert (rates[-1] < rates[3]) == is_decaying and notes
    assert compress(own, 2).config == own, "too few steps for its parts"


def test_updates_are_large_enough_to_see() -> None:
    for name in ("llama3-8b", "gpt2-124m", "deepseek-v3"):
        louder, notes = amplify(config(name))
        assert louder.optimizer.learning_rate >= 3e-3 and notes
        ratio = louder.optimizer.min_learning_rate / louder.optimizer.learning_rate
        own = config(name).optimizer
        assert ratio == pytest.approx(own.min_learning_rate / own.learning_rate)
    assert amplify(config("demo", "--optimizer.weight_decay=0")).config.optimizer.weight_decay == 0.0
    assert amplify(config("demo")).notes == [], "a rate that is large stays"


def test_heads_that_tp_shares_in_the_run_are_shared_in_the_small_model() -> None:
    options = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8}
    assert shrink(options)["num_kv_heads"] == 4 and shrink(options, tp=16)["num_kv_heads"] == 2
    small = make_small(config("llama3-8b", "--parallel.tp=16", "--parallel.dp=4"), 32).config
    assert get_option(small, "num_kv_heads") == 2


def test_dropout_is_turned_off_wherever_it_is() -> None:
    on = turn_dropout_on(make_small(config("demo"), 32).config).config
    assert turn_dropout_off(on).model.options["dropout"] == 0.0
    quiet = turn_dropout_on(config_of("tests.tools.verify.models:quiet_dropout", {"vocab_size": 17}, 8)).config
    assert turn_dropout_off(quiet).model.builder == "tests.tools.verify.models:quiet_dropout"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("demo", (), ["", "without dropout, 4 samples at first"]),
        ("demo", ("--train.dtype=float16",), ["", "without dropout, 4 samples at first", "float16"]),
        ("demo", ("--optimizer.name=adamw8bit",), ["", "without dropout, 4 samples at first", "blocks of 32"]),
        ("llama3-8b", (), ["", "without dropout, 4 samples at first", "2 key-value heads", "bfloat16"]),
    ],
)
def test_variants_follow_from_the_configuration(name: str, overrides: tuple[str, ...], expected: list[str]) -> None:
    plan = plan_trials(config(name, *overrides), [], STEPS, "float64", whole=False)
    assert [trial.name for trial in plan.trials] == expected
    ramping = plan.trials[1]
    for layout in ramping.layouts:
        assert layout_config(ramping.config, layout, plan.global_batch, "float64").batch.ramp == (4, 4, 12)
    main = plan.trials[0]
    assert layout_config(main.config, main.layouts[0], plan.global_batch, "float64").batch.ramp is None


@pytest.mark.long
def test_chosen_layouts_have_no_variants() -> None:
    plan = plan_trials(config("demo"), ["dp2", "tp2"], STEPS, "float64", whole=False)
    assert [trial.name for trial in plan.trials] == [""] and plan.repeated is None
