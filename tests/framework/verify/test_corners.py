"""Sizes at the edge, and models of users' own: each gives the numbers of one process,
or was refused before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import Checkpoint, RunConfig, parse
from meshwright.verify import default_layouts, layout_config, parse_layout, traits_of
from meshwright.verify.layouts import own_layout
from meshwright.verify.rank import merge, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    References,
    Size,
    assert_agrees,
    config_of,
    model_config,
    prove,
)
from tests.support.errors import raises
from tests.support.marks import all_layouts_row, long_row, mark_all_rows_but, marked_rows

SMALL = Size(heads=8, sequence_length=8, num_blocks=2, global_batch=4)
"""Five layers: embedding, two blocks, norm, head."""

THREADS = Path("/proc/self/task")


def agree(
    config: RunConfig, layout: str, global_batch: int, pool: RankPool, references: References
) -> None:
    """The layout passes verify, two steps, float64."""
    assert_agrees(config, layout, pool, references, global_batch=global_batch, steps=2)


@mark_all_rows_but("all_layouts", "gpt2-pp4-2", "gpt2-pp4,gpipe-3", "gpt2-pp4-1", "gpt2-pp3-3")
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
    """Of this worker, as the kernel lists them:
    gloo has three for each group that is still there.
    """
    return len(list(THREADS.iterdir()))


@pytest.mark.long
@pytest.mark.skipif(not THREADS.exists(), reason="counts threads as Linux lists them")
def test_nothing_of_a_finished_run_stays(pool: RankPool) -> None:
    """Weights, buckets and connections go with the parts:
    hundreds of layouts run in one process.
    """
    text = layout_config(
        model_config("gpt2", SMALL), parse_layout("dp2,pp2,tp2"), 4, "float64"
    ).model_dump_json()
    pool.run(run_layout, 8, text, 1, True)
    before = pool.run(num_threads, 8)
    pool.run(run_layout, 8, text, 1, True)
    assert pool.run(num_threads, 8) == before


@pytest.mark.parametrize(
    "balance",
    [all_layouts_row([1, 2, 2]), all_layouts_row([3, 1, 1]), all_layouts_row([1, 1, 3]), [2, 2, 1]],
)
def test_any_cut_is_right_also_an_uneven_last_stage(
    balance: list[int], pool: RankPool, references: References
) -> None:
    """Embedding and head count as layers wherever they come to lie; the tie spans the stages."""
    config = model_config("gpt2", SMALL)
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"balance": balance})}
    )
    text = layout_config(config, parse_layout("pp3"), 4, "float64").model_dump_json()
    assert [len(stage) for stage in draw_blueprint(parse(text)).stages] == balance
    agree(config, "pp3", 4, pool, references)


@pytest.mark.parametrize(
    "balance", [all_layouts_row("layers"), all_layouts_row("parameters"), "time"]
)
def test_whatever_the_stages_are_balanced_by(
    balance: str, pool: RankPool, references: References
) -> None:
    config = model_config("llama", SMALL)
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"balance": balance})}
    )
    agree(config, "dp2,pp2", 4, pool, references)


@pytest.mark.parametrize(
    ("model", "vocab_size", "layout"),
    [
        all_layouts_row("gpt2", 65, "tp4"),  # 17 rows each, the last rank holds 14 of them
        all_layouts_row("llama", 65, "tp4,sequence"),
        all_layouts_row("llama", 9, "tp8"),  # ranks without a single row
        all_layouts_row("gpt2", 17, "dp2,pp2,tp2"),
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


@pytest.mark.parametrize("layout", [all_layouts_row("tp8"), "pp2,tp4"])
def test_padding_is_not_exported(layout: str, pool: RankPool) -> None:
    """What leaves the ranks has the model's own shapes,
    and every element was given by one of them.
    """
    config = model_config("gpt2", SMALL._replace(num_blocks=1), vocab_size=9)
    text = layout_config(config, parse_layout(layout), 4, "float64").model_dump_json()
    findings = merge(pool.run(run_layout, 8, text, 1, True))
    for tensors in (findings.initial, findings.gradients, findings.weights):
        assert tensors["embedding.tokens.weight"].shape == (9, 32)
        assert "head.weight" not in tensors  # the tie is stored once
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


# ---------------------------------------------------------------------------------------------------
# users' own models

USERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("plain", {}, ["pp1", "dp2", "pp2", "dp2,pp2,gpipe,zero0", "pp3,mbs2"]),
    # the third stage is nn.Tanh alone: nothing to train
    ("plain", {"depth": 1}, ["pp4", "dp2,pp4"]),
    ("carrying", {}, ["dp2", "pp2", "pp3,gpipe", "pp5", "dp2,pp4,mbs2"]),
    ("tied_to_the_head", {}, ["pp1", "dp2", "pp2", "pp3", "dp2,pp3"]),
    ("frozen", {}, ["dp2", "pp2", "pp6"]),
    ("with_initialise", {}, ["dp2", "pp2", "pp3"]),
]


@marked_rows("all_layouts", "carrying-dp2,pp4,mbs2")
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
        f"tests.support.builders:{builder}",
        {"vocab_size": 17, "width": 8, **options},
        sequence_length=6,
    )
    agree(config, layout, 8, pool, references)


# --------------------------------------------------------------------------------------------------
# refused beforehand


GPT2, LLAMA = model_config("gpt2", SMALL), model_config("llama", SMALL._replace(heads=2))
UNEVEN = model_config("gpt2", SMALL._replace(sequence_length=9))
PLAIN = config_of("tests.support.builders:plain", {}, 6)
OF_INPUT = config_of("tests.support.builders:length_of_input", {}, 6)


@pytest.mark.parametrize(
    ("config", "layout", "global_batch", "code", "values"),
    [
        (GPT2, "pp6", 4, "MW-PIPELINE-002", ("5 layers", "6 stages", "parallel.pp <= 5")),
        (GPT2, "dp2,mbs2", 6, "MW-CONFIG-100", ("global_batch = 6", "micro_batch_size x dp = 4")),
        (GPT2, "dp4", 2, "MW-CONFIG-100", ("global_batch = 2", "micro_batch_size x dp = 4")),
        (GPT2, "dp4,shard3", 4, "MW-CONFIG-005", ("shard3", "dp 4 = 4", "1, 2, 4")),
        (GPT2, "dp2,cp2,shard3", 4, "MW-CONFIG-005", ("shard3", "dp 2 x cp 2 = 4", "1, 2, 4")),
        (UNEVEN, "tp2,sequence", 4, "MW-TP-001", ("data.sequence_length = 9", "8 or 10")),
        (LLAMA, "tp3", 4, "MW-TP-002", ("block0.attention.qkv", "parallel.tp = 3")),
        (PLAIN, "tp2", 4, "MW-TP-002", ("parallel.tp = 2",)),
        (OF_INPUT, "tp2,sequence", 4, "MW-PIPELINE-031", ("layer 1 (HeadsOfInput)",)),
    ],
)
def test_a_layout_is_refused(
    config: RunConfig, layout: str, global_batch: int, code: str, values: tuple[str, ...]
) -> None:
    with raises(code, *values):
        draw_blueprint(layout_config(config, parse_layout(layout), global_batch, "float64"))


def test_a_configuration_that_shards_over_cp_ranks_is_proven_so() -> None:
    config = model_config("llama", SMALL)
    parallel = config.parallel.model_copy(update={"dp": 1, "cp": 4, "zero": 1, "shard_factor": 2})
    assert own_layout(config.model_copy(update={"parallel": parallel}), 8).shard == 2


@pytest.mark.long
def test_a_shard_factor_is_left_out_where_dp_is_what_the_ranks_allow() -> None:
    """The configuration's own layout is proven with one replica."""
    config = model_config("gpt2", SMALL)
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"shard_factor": 4})}
    )
    layouts = default_layouts(config, traits_of(config), 8).layouts
    assert {layout.shard for layout in layouts if layout.dp == 1} == {0}
    assert any(layout.dp * layout.cp == 4 and layout.shard == 2 for layout in layouts)


# ------------------------------------------------------------------------------------------------------------
# bfloat16


@pytest.mark.parametrize(
    "layout", [all_layouts_row("pp1"), "dp2,zero0", all_layouts_row("dp4"), all_layouts_row("pp2")]
)
def test_bfloat16_is_as_close_as_its_accumulation(layout: str, pool: RankPool) -> None:
    """Where no activation is summed in another order,
    32 micro-batches add up in float32 to the reference's gradient.

    Added up in bfloat16, on either side, they would be a percent apart.
    """
    config = model_config("llama", SMALL._replace(num_blocks=1))
    row = prove(
        config, parse_layout(layout), pool, References(), global_batch=32, steps=1, dtype="bfloat16"
    )
    assert row.passed, "\n".join(row.problems)
    assert row.gradient < 1e-6, f"{row.gradient_name}: {row.gradient:.1e}"


@pytest.mark.parametrize("layout", [LATER("tp2"), long_row("tp2,sequence"), LATER("dp2,pp2,tp2")])
def test_bfloat16_keeps_its_bar(layout: str, pool: RankPool) -> None:
    assert_agrees(
        model_config("llama", SMALL),
        layout,
        pool,
        References(),
        global_batch=8,
        steps=2,
        dtype="bfloat16",
        twice=True,
    )


def test_a_check_saves_to_no_object_store() -> None:
    """Its checkpoints in the middle go to a temporary folder, and not among those of the run."""
    config = RunConfig.model_validate(
        {"checkpoint": {"directory": "s3://bucket/prefix", "upload_timeout_s": 9.0, "every": 5}}
    )
    assert layout_config(config, parse_layout("dp2"), 8, "float64").checkpoint == Checkpoint()
