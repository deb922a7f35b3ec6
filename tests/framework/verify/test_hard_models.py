"""Models that a pipeline could get wrong without a word: the same numbers, or a message that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.errors import ConfigError, ModelError, ScheduleError
from meshwright.schedule.build import build
from meshwright.schedule.load import format_schedule
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import run_layout
from meshwright_launch.pool import RankError, RankPool
from tests.framework.verify.cases import References, config_of, prove
from tests.support.errors import has_code

LENGTH = 6


def hard(name: str = "build", **options: str) -> RunConfig:
    return config_of(f"tests.support.hard_models:{name}", {"vocab_size": 13, **options}, LENGTH)


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by the tests of this module."""
    return References()


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"layer": "Overwriting"}, "pp2"),
        ({"layer": "Overwriting"}, "pp2,full"),
        ({"layer": "Overwriting"}, "dp2,pp2,zb_h1,full"),
        ({"how": "vmap"}, "pp2,zb_h1"),
        ({"how": "vector"}, "pp2,zb_h1"),
        ({"how": "gradient within"}, "pp2,zb_h1"),
        ({"how": "checkpoint"}, "pp2,1f1b"),
    ],
)
def test_the_numbers_of_one_process(
    options: dict[str, str], layout: str, pool: RankPool, references: References
) -> None:
    row = prove(hard(**options), parse_layout(layout), pool, references, global_batch=4, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize("layout", ["dp2,zero3", "dp2,pp2,zero3,zb_h1"])
def test_layers_that_share_a_module(layout: str, pool: RankPool, references: References) -> None:
    """Within a stage ZeRO-3 gathers it once for both."""
    config = hard("shared_submodule")
    row = prove(config, parse_layout(layout), pool, references, global_batch=4, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize("how", ["relu", "mul", "rows"])
def test_outputs_are_changed_in_place_under_a_split_backward(how: str, pool: RankPool, references: References) -> None:
    """What a linear or an embedding returns is the layer's own to write into, as in plain torch."""
    config = hard("in_place", how=how)
    row = prove(config, parse_layout("pp2,zb_h1"), pool, references, global_batch=4, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_frozen_statistics_are_constants(dtype: str, pool: RankPool, references: References) -> None:
    """Of a norm in eval mode; any number of replicas, since nothing changes them."""
    row = prove(hard("frozen_norm"), parse_layout("dp2,pp2"), pool, references, global_batch=4, steps=2, dtype=dtype)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frozen", "no parameter requires a gradient: there is nothing to train"),
        ("sparse", r"0\.table is a Embedding with sparse=True"),
        (
            "reduced_loss",
            r"model\.loss returns a tensor of shape \(\) for labels of shape \(1, 6\): return the loss of",
        ),
        ("no_forward", r"layer 1 \(Module\) has no forward"),
        ("own_tensor", r"layer 1 \(OwnTensor\) mixes a tensor on a device of its own .* register_buffer"),
    ],
)
def test_refused_before_anything_runs(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        draw_blueprint(layout_config(hard(name), parse_layout("pp2"), 4, "float64"))


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({"layer": "Fickle", "how": "dtype"}, "pp2", r"returns \(1, 6\) int64, \(1, 6, 8\) float16 in training, and "),
        ({"how": "checkpoint"}, "pp2,zb_h1", "computes itself again in backward .*choose 1f1b or interleaved_1f1b"),
    ],
)
def test_refused_in_the_first_step(options: dict[str, str], layout: str, message: str, pool: RankPool) -> None:
    text = layout_config(hard(**options), parse_layout(layout), 4, "float32").model_dump_json()
    with pytest.raises(RankError) as caught:
        pool.run(run_layout, 2, text, 1, True)
    assert isinstance(caught.value.__cause__, ModelError)
    caught.match(message)


def test_a_schedule_of_ones_own_is_proven(tmp_path: Path, pool: RankPool, references: References) -> None:
    """By the word ``file``; without one in the configuration the word says so."""
    own = tmp_path / "own.txt"
    own.write_text(format_schedule(build("zb_h1", 2, 4)))
    config = hard()
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"schedule_file": str(own)})})
    row = prove(config, parse_layout("pp2,file"), pool, references, global_batch=4, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)
    own.write_text(format_schedule(build("zb_h1", 2, 4)).replace("0F2 ", ""))
    with pytest.raises(ScheduleError, match=r"own\.txt", check=has_code("MW-SCHEDULE-014")):
        draw_blueprint(layout_config(config, parse_layout("pp2,file"), 4, "float64"))
    with pytest.raises(ConfigError, match=r"no pipeline\.schedule_file", check=has_code("MW-VERIFY-006")):
        layout_config(hard(), parse_layout("pp2,file"), 4, "float64")


def test_recompute_that_would_recompute_nothing_is_refused() -> None:
    config = layout_config(hard(), parse_layout("pp2,full"), 4, "float64")
    empty = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"recompute_layers": []})})
    with pytest.raises((ModelError, ConfigError), match=r"recompute_layers = \[\]", check=has_code("MW-PIPELINE-004")):
        draw_blueprint(empty)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hooked", {"how": "hook"}, r"parameter 1\.linear\.weight has a hook on its gradient"),
        ("hooked", {"how": "accumulated"}, r"parameter 1\.linear\.weight has a hook on its gradient"),
        ("hooked", {"how": "made with it"}, r"parameter 1\.linear\.weight has a hook on its gradient"),
        ("odd_parameter", {"dtype": "complex64"}, r"1\.odd is complex64: .* torch\.view_as_complex\(parameter\)"),
        ("odd_parameter", {"dtype": "int64"}, r"1\.odd is int64: .*register_buffer"),
        ("lazy", {}, r"1\.weight of LazyLinear has no shape until its first forward.*use the module that is not lazy"),
    ],
)
def test_parameters_that_would_lose_something(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message, check=has_code("MW-MODEL-012", "MW-MODEL-013", "MW-MODEL-016")):
        draw_blueprint(layout_config(hard(name, **options), parse_layout("pp2"), 4, "float64"))


def test_a_loss_that_counts_ignored_labels(pool: RankPool) -> None:
    text = layout_config(hard("careless_loss"), parse_layout("pp1"), 4, "float32").model_dump_json()
    with pytest.raises(RankError, match=r"for a label of -100: such a label is ignored.*ignore_index=-100"):
        pool.run(run_layout, 1, text, 1, True)
