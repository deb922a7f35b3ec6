"""What is said before the first step: what each rank holds, and what it costs."""

from __future__ import annotations

import math

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.run.summary import rank_shares, summarise
from meshwright.terminal.format import format_size
from meshwright.verify import layout_config, parse_layout
from tests.framework.verify.cases import config_of

ELEMENTS = 64 * 16 + 3 * (16 * 16 + 16) + 16 * 64 + 64
OPTIONS = {"vocab_size": 64, "width": 16, "depth": 3}


@pytest.mark.parametrize(
    ("layout", "dtype", "gradients", "optimizer"),
    [
        ("dp4,zero0", "float32", 4.0, 8.0),
        ("dp4,zero1", "float32", 4.0, 8 / 4),
        ("dp4,zero1,shard2", "bfloat16", 4.0, 12 / 2),
        ("dp4,zero1,shard1", "bfloat16", 4.0, 12.0),
        ("dp4,zero2", "bfloat16", 4 / 4, 12 / 4),
        ("dp4,zero2,shard2", "float64", 8 / 2, 16 / 2),
        ("dp4,zero2,step", "bfloat16", 4 + 4 / 4, 12 / 4),
        ("dp4,zero2,shard1", "float32", 4.0, 8.0),
        ("dp4,zero3", "bfloat16", 4 / 4, 8 / 4),
        ("dp4,zero3,step,shard2", "float32", 4 + 4 / 2, 8 / 2),
    ],
)
def test_bytes_of_each_element(layout: str, dtype: str, gradients: float, optimizer: float) -> None:
    config = layout_config(
        config_of("tests.support.builders:plain", OPTIONS, 8), parse_layout(layout), 8, dtype
    )
    [share] = rank_shares(draw_blueprint(config))
    assert share.num_parameters == ELEMENTS
    kept = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    weights = (
        (max(kept, 4) / (config.parallel.shard_factor or 4)) if config.parallel.zero == 3 else kept
    )
    assert share.weight_bytes == pytest.approx(weights * ELEMENTS, abs=1)
    assert share.gradient_bytes == pytest.approx(gradients * ELEMENTS, abs=1)
    assert share.optimizer_bytes == pytest.approx(optimizer * ELEMENTS, abs=1)


@pytest.mark.parametrize(
    ("layout", "dtype", "weights", "gradients", "host"),
    [
        ("dp4,zero1,offload", "bfloat16", 2, 4.0, 12 / 4),
        ("dp4,zero1,offload", "float32", 4, 4.0, 12 / 4),
        ("dp4,zero2,shard2,offload", "bfloat16", 2, 4 / 2, 12 / 2),
        ("dp4,zero3,offload", "bfloat16", 0, 0, 16 / 4),
        ("dp4,zero3,step,offload", "float32", 0, 4, 16 / 4),
    ],
)
def test_bytes_of_each_element_with_offload(
    layout: str, dtype: str, weights: float, gradients: float, host: float
) -> None:
    config = layout_config(
        config_of("tests.support.builders:plain", OPTIONS, 8), parse_layout(layout), 8, dtype
    )
    [share] = rank_shares(draw_blueprint(config))
    found = (share.weight_bytes, share.gradient_bytes, share.optimizer_bytes, share.host_bytes)
    assert found == tuple(
        pytest.approx(each * ELEMENTS, abs=1) for each in (weights, gradients, 0, host)
    )


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("dp4,zero1,shard2", "float32, ZeRO-1 in 2 groups of 2"),
        (
            "dp4,zero1,offload",
            "offload    the optimizer steps on the host: 8.6 KiB of host memory per rank",
        ),
        (
            "dp4,zero2",
            (
                "gradients  summed over 4 replicas after each micro-batch: a rank sends 2 x 8.6 KiB"
                ' in a step\n           (parallel.reduce = "step": once, with 11.4 KiB per rank'
                " until then)"
            ),
        ),
        (
            "dp4,zero3",
            (
                "weights    gathered layer by layer, forward and backward: a rank sends 2 x 17.2"
                " KiB in a step\ngradients  summed over 4 replicas after each micro-batch: a rank"
                " sends 2 x 8.6 KiB in a step\n"
            ),
        ),
        ("dp4,zero2,step", "reduced once per step, and unsharded until then: 11.4 KiB per rank"),
    ],
)
def test_what_sharding_costs_is_said(layout: str, line: str) -> None:
    config = layout_config(
        config_of("tests.support.builders:plain", OPTIONS, 8), parse_layout(layout), 8, "float32"
    )
    assert line in summarise(draw_blueprint(config), ["here"] * 4)


def test_matrices_hold_half_the_states_and_are_exchanged() -> None:
    """Two of the four linears, 16 x 16, are matrices: one of dp's 4 ranks sends 3/4 of its quarter,
    twice.
    """
    config = config_of("tests.support.builders:plain", OPTIONS, 8).replace(
        optimizer={"name": "muon"}
    )
    blueprint = draw_blueprint(layout_config(config, parse_layout("dp4,zero1"), 8, "bfloat16"))
    matrices = sum(
        math.prod(info.global_shape) for info in blueprint.infos.values() if info.matrix is not None
    )
    [share] = rank_shares(blueprint)
    assert matrices == 3 * 256
    assert share.optimizer_bytes == pytest.approx((12 * ELEMENTS - 4 * matrices) / 4, abs=1)
    text = summarise(blueprint, ["here"] * 4)
    assert (
        f"Muon on 3 matrices, {matrices / ELEMENTS:.1%} of all elements, and AdamW on the others"
        in text
    )
    assert f"a rank sends 2 x {format_size(matrices // 4 * 2 * 3 // 4)} in a step" in text


def test_a_weight_that_layers_of_a_stage_share_is_gathered_once_for_both_ways() -> None:
    """The embedding of 64 x 16 is the head too: a rank sends 3/4 of two gatherings of the others,
    and of one of it.
    """
    options = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "max_sequence_length": 8,
    }
    config = config_of("meshwright_models.gpt2:build", options | {"tied": True}, 8)
    blueprint = draw_blueprint(layout_config(config, parse_layout("dp4,zero3"), 8, "float32"))
    gathered = 2 * blueprint.num_parameters - 64 * 16
    assert (
        f"a rank sends 2 x {format_size(gathered * 4 * 3 // 4)} in a step\ngradients"
        in summarise(blueprint, ["here"] * 4)
    )
