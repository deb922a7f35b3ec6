"""Sizes at the edge, and models of users' own: each gives the numbers of one process, or was refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, parse
from meshwright.errors import ConfigError, ModelError
from meshwright.verify import default_layouts, layout_config, parse_layout, traits_of
from meshwright.verify.layouts import own_layout
from meshwright.verify.rank import merge, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, References, Size, config_of, model_config, prove

SMALL = Size(heads=8, sequence_length=8, num_blocks=2, global_batch=4)
"""Five layers: embedding, two blocks, norm, head."""

THREADS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by the tests of this module."""
    return References()


def agree(config: RunConfig, layout: str, global_batch: int, pool: RankPool, references: References) -> None:
    """The layout passes verify, two steps, float64."""
    row = prove(config, parse_layout(layout), pool, references, global_batch=global_batch, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)


@pytest.mark.parametrize(
    ("layout", "global_batch"),
    [
        ("dp2,pp2,tp2", 2),  # chunks = 1: naive model parallelism, and global_batch = dp
        ("dp2,pp2,mbs2", 4),  # chunks = 1
        ("dp8", 8),  # global_batch = dp
        ("dp8,zero0", 8),
        ("pp4", 2),  # chunks < pp
        ("pp4,gpipe", 3),
        ("pp4", 1),  # one sample in all
        ("pp5", 7),  # each layer a stage of its own
        ("pp4,tp2,sequence", 4),  # 5 layers over 4 stages
        ("pp3", 3),
    ],
)
@pytest.mark.parametrize("model", ["gpt2"])
def test_few_microbatches_and_uneven_stages(
    layout: str, global_batch: int, model: str, pool: RankPool, references: References
) -> None:
    agree(model_config(model, SMALL), layout, global_batch, pool, references)


def num_threads(rank: int, world_size: int) -> int:
    """Of this worker, as the kernel lists them: gloo has three for each group that is still there."""
    return len(list(THREADS.iterdir()))


@pytest.mark.skipif(not THREADS.exists(), reason="counts threads as Linux lists them")
def test_nothing_of_a_finished_run_stays(pool: RankPool) -> None:
    """Weights, buckets and connections go with the parts: hundreds of layouts run in one process."""
    text = layout_config(model_config("gpt2", SMALL), parse_layout("dp2,pp2,tp2"), 4, "float64").model_dump_json()
    pool.run(run_layout, 8, text, 1, True)
    before = pool.run(num_threads, 8)
    pool.run(run_layout, 8, text, 1, True)
    assert pool.run(num_threads, 8) == before


@pytest.mark.parametrize("balance", [[1, 2, 2], [3, 1, 1], [1, 1, 3], [2, 2, 1]])
def test_any_cut_is_right_also_an_uneven_last_stage(balance: list[int], pool: RankPool, references: References) -> None:
    """Embedding and head count as layers wherever they come to lie; the tie spans the stages."""
    config = model_config("gpt2", SMALL)
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"balance": balance})})
    text = layout_config(config, parse_layout("pp3"), 4, "float64").model_dump_json()
    assert [len(stage) for stage in draw_blueprint(parse(text)).stages] == balance
    agree(config, "pp3", 4, pool, references)


@pytest.mark.parametrize("balance", ["layers", "parameters", "time"])
def test_whatever_the_stages_are_balanced_by(balance: str, pool: RankPool, references: References) -> None:
    config = model_config("llama", SMALL)
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"balance": balance})})
    agree(config, "dp2,pp2", 4, pool, references)


@pytest.mark.parametrize(
    ("model", "vocab_size", "layout"),
    [
        ("gpt2", 65, "tp4"),  # 17 rows each, the last rank holds 14 of them
        ("llama", 65, "tp4,sequence"),
        ("llama", 9, "tp8"),  # ranks without a single row
        ("gpt2", 17, "dp2,pp2,tp2"),
        ("llama", 2, "tp2"),
        LATER("llama", 65, "tp4"),
        LATER("gpt2", 65, "tp4,sequence"),
        LATER("gpt2", 65, "pp2,tp4"),
        LATER("llama", 65, "pp2,tp4"),
        LATER("gpt2", 9, "tp8"),
        LATER("gpt2", 9, "tp8,sequence"),
        LATER("llama", 9, "tp8,sequence"),
        LATER("llama", 17, "dp2,pp2,tp2"),
        LATER("gpt2", 2, "tp2"),
    ],
)
def test_vocabularies_that_leave_a_remainder(
    model: str, vocab_size: int, layout: str, pool: RankPool, references: References
) -> None:
    size = SMALL._replace(num_blocks=1)
    agree(model_config(model, size, vocab_size=vocab_size), layout, 4, pool, references)


@pytest.mark.parametrize("layout", ["tp8", "pp2,tp4"])
def test_padding_is_not_exported(layout: str, pool: RankPool) -> None:
    """What leaves the ranks has the model's own shapes, and every element was given by one of them."""
    config = model_config("gpt2", SMALL._replace(num_blocks=1), vocab_size=9)
    text = layout_config(config, parse_layout(layout), 4, "float64").model_dump_json()
    findings = merge(pool.run(run_layout, 8, text, 1, True))
    for tensors in (findings.initial, findings.gradients, findings.weights):
        assert tensors["embedding.tokens.weight"].shape == (9, 32)
        assert "head.weight" not in tensors  # the tie is stored once
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


# --------------------------------------------------------------------------------------------------- users' own models

USERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("plain", {}, ["pp1", "dp2", "pp2", "dp2,pp2,gpipe,zero0", "pp3,mbs2"]),
    ("plain", {"depth": 1}, ["pp4", "dp2,pp4"]),  # the third stage is nn.Tanh alone: nothing to train
    ("carrying", {}, ["dp2", "pp2", "pp3,gpipe", "pp5", "dp2,pp4,mbs2"]),
    ("tied_to_the_head", {}, ["pp1", "dp2", "pp2", "pp3", "dp2,pp3"]),
    ("frozen", {}, ["dp2", "pp2", "pp6"]),
    ("with_initialise", {}, ["dp2", "pp2", "pp3"]),
]


@pytest.mark.parametrize(
    ("builder", "options", "layout"),
    [
        pytest.param(builder, options, layout, id=f"{builder}-{layout}")
        for builder, options, layouts in USERS
        for layout in layouts
    ],
)
def test_a_plain_model_that_knows_nothing_of_us(
    builder: str, options: dict[str, Any], layout: str, pool: RankPool, references: References
) -> None:
    config = config_of(
        f"tests.support.builders:{builder}", {"vocab_size": 17, "width": 8, **options}, sequence_length=6
    )
    agree(config, layout, 8, pool, references)


# -------------------------------------------------------------------------------------------------- refused beforehand


def refused(config: RunConfig, layout: str, global_batch: int) -> str:
    """The message with which a layout is refused, with no process but this one."""
    with pytest.raises((ConfigError, ModelError)) as raised:
        draw_blueprint(layout_config(config, parse_layout(layout), global_batch, "float64"))
    return str(raised.value)


def test_more_stages_than_layers() -> None:
    said = refused(model_config("gpt2", SMALL), "pp6", 4)
    assert "5 layers over 6 stages" in said and "parallel.pp <= 5" in said


def test_a_batch_that_dp_does_not_divide() -> None:
    said = refused(model_config("gpt2", SMALL), "dp2,mbs2", 6)
    assert "global_batch 6 is not a multiple of micro_batch_size 2 x dp 2" in said


@pytest.mark.parametrize("layout", ["dp4,shard3", "dp2,cp2,shard3"])
def test_shards_that_the_replicas_do_not_divide_into(layout: str) -> None:
    said = refused(model_config("gpt2", SMALL), layout, 4)
    assert "shard3 does not divide dp x cp = 4: choose one of 1, 2, 4" in said


def test_a_configuration_that_shards_over_cp_ranks_is_proven_so() -> None:
    config = model_config("llama", SMALL)
    parallel = config.parallel.model_copy(update={"dp": 1, "cp": 4, "zero": 1, "shard_factor": 2})
    assert own_layout(config.model_copy(update={"parallel": parallel}), 8).shard == 2


def test_a_shard_factor_is_left_out_where_dp_is_what_the_ranks_allow() -> None:
    """The configuration's own layout is proven with one replica."""
    config = model_config("gpt2", SMALL)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard_factor": 4})})
    layouts = default_layouts(config, traits_of(config), 8).layouts
    assert {layout.shard for layout in layouts if layout.dp == 1} == {0}
    assert any(layout.dp * layout.cp == 4 and layout.shard == 2 for layout in layouts)


def test_a_batch_smaller_than_dp() -> None:
    assert "global_batch 2 is not a multiple" in refused(model_config("gpt2", SMALL), "dp4", 2)


def test_a_sequence_that_tp_does_not_divide() -> None:
    said = refused(model_config("gpt2", SMALL._replace(sequence_length=9)), "tp2,sequence", 4)
    assert "data.sequence_length = 9 is not divisible by 2: use 8 or 10" in said


def test_key_value_heads_that_tp_neither_divides_nor_shares() -> None:
    said = refused(model_config("llama", SMALL._replace(heads=2)), "tp3", 4)
    assert "block0.attention.qkv" in said and "parallel.tp = 3 does not divide 2" in said


def test_tp_for_a_model_without_a_plan() -> None:
    said = refused(config_of("tests.support.builders:plain", {}, 6), "tp2", 4)
    assert "sharding_plan splits nothing" in said and "parallel.tp = 1" in said


def test_a_layer_that_takes_the_length_from_its_input() -> None:
    said = refused(config_of("tests.support.builders:length_of_input", {}, 6), "tp2,sequence", 4)
    assert "layer 1 (HeadsOfInput)" in said and "under parallel.sequence a column linear gets S/tp tokens" in said


# ------------------------------------------------------------------------------------------------------------ bfloat16


@pytest.mark.parametrize("layout", ["pp1", "dp2,zero0", "dp4", "pp2"])
def test_bfloat16_is_as_close_as_its_accumulation(layout: str, pool: RankPool) -> None:
    """Where no activation is summed in another order, 32 micro-batches add up in float32 to the reference's gradient.

    Added up in bfloat16, on either side, they would be a percent apart.
    """
    config = model_config("llama", SMALL._replace(num_blocks=1))
    row = prove(config, parse_layout(layout), pool, References(), global_batch=32, steps=1, dtype="bfloat16")
    assert row.passed, "\n".join(row.problems)
    assert row.gradient < 1e-6, f"{row.gradient_name}: {row.gradient:.1e}"


@pytest.mark.parametrize("layout", [LATER("tp2"), "tp2,sequence", LATER("dp2,pp2,tp2")])
def test_bfloat16_keeps_its_bar(layout: str, pool: RankPool) -> None:
    row = prove(
        model_config("llama", SMALL),
        parse_layout(layout),
        pool,
        References(),
        global_batch=8,
        steps=2,
        dtype="bfloat16",
    )
    assert row.passed, "\n".join(row.problems)
