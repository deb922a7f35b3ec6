"""A run goes on in another layout: the same bits in its ranks, the same samples,
the same losses up to rounding.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    LATER,
    MODELS,
    LoadedRank,
    differing,
    exact_losses,
    initial_weights,
    layout,
    lines,
    load_rank,
    run_config,
    size,
    tensors,
    train,
)
from tests.support.marks import long_row
from tests.support.plain import load_plain

LAYOUTS = ["", "dp4,zero0", "pp2", "tp2,sequence", "dp2,pp2,tp2"]
MORE_LAYOUTS = ["", "dp2,zero1", "pp4", "tp2", "tp4,sequence", "dp2,tp2", "pp2,tp2"]
BARS = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1e-2}
"""Relative, on each of the three losses after the change."""


@pytest.mark.parametrize(
    ("model", "before", "after", "dtype"),
    [
        LATER("gpt2", "", "dp2,pp2,tp2", "float64"),
        long_row("gpt2", "dp2,pp2,tp2", "", "float64"),
        LATER("gpt2", "dp4,zero1", "tp4,sequence", "float64"),
        long_row("llama", "cp2,zero2", "dp2,tp2", "float64"),
        LATER("gpt2", "dp2,pp2,zero3", "dp2,cp2,tp2,sequence", "float64"),
        LATER("gpt2", "cp4,zero1,shard2,contiguous", "cp2,pp2", "bfloat16"),
        LATER("gpt2", "tp4,sequence", "pp4", "float64"),
        LATER("gpt2", "pp4", "dp8,zero0", "float64"),
        ("gpt2", "dp2,zero0", "dp2,zero1", "bfloat16"),
        LATER("gpt2", "dp4,zero2,shard2", "dp2,tp2,zero1", "bfloat16"),
        LATER("gpt2", "dp2,pp2,zero2", "dp4,zero1,shard2", "float64"),
        long_row("gpt2", "dp4,zero3,shard2", "dp2,pp2,zero2", "bfloat16"),
        LATER("gpt2", "pp2,tp2", "dp4,zero3", "float64"),
        LATER("gpt2", "dp2,tp2,zero2,offload", "dp2,zero1", "bfloat16"),
        long_row("gpt2", "dp2,pp2", "dp2,zero3,offload", "float64"),
        LATER("llama", "pp2,tp2", "dp4,zero1", "float64"),
        long_row("llama", "dp2,zero1", "pp3,tp2,sequence", "float64"),
        LATER("gpt2", "pp2,tp2", "dp2,pp4", "float32"),
        LATER("gpt2", "dp2,pp2,tp2", "dp8,zero1", "bfloat16"),
        LATER("gpt2", "dp4,zero0", "pp2,tp4,sequence", "bfloat16"),
        LATER("llama", "pp4,tp2", "dp2,zero1", "bfloat16"),
        long_row("few_heads", "dp2,tp2,zero1", "pp2", "float64"),
        long_row("few_heads", "dp2,zero3", "tp4,sequence", "bfloat16"),
        LATER("few_heads", "tp4", "dp2,tp2,zero2", "float64"),
    ],
)
def test_a_run_goes_on_in_another_layout(
    model: str, before: str, after: str, dtype: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    settings: dict[str, Any] = {"train": {"steps": 3, "dtype": dtype}, "model": MODELS[model]}
    first = run_config(corpus, tmp_path, parallel=layout(before), **settings)
    train(pool, first)
    saved = run_directory(first.run)
    followed: dict[str, list[LoadedRank]] = {}
    for name, text in (("before", before), ("after", after)):
        config = run_config(corpus, tmp_path, parallel=layout(text), **settings)
        again = tmp_path / name
        followed[name] = pool.run(load_rank, size(config), config, str(saved), str(again), 3)
        # what the ranks hold, gathered, before a step is taken
        assert not differing(tensors(again), tensors(saved))
    assert any(name.startswith("master/") for name in tensors(saved)) == (dtype == "bfloat16")
    seen = {
        name: {k: v for rank in ranks for k, v in rank.seen.items()}
        for name, ranks in followed.items()
    }
    assert sorted(seen["before"]) == list(range(24, 48)) and seen["after"] == seen["before"]
    losses = {name: ranks[0].losses for name, ranks in followed.items()}
    for step in range(3):
        assert math.isclose(losses["after"][step], losses["before"][step], rel_tol=BARS[dtype]), (
            step,
            losses,
        )
    assert all(rank.losses == ranks[0].losses for ranks in followed.values() for rank in ranks)


@pytest.mark.torture
def test_a_run_may_change_its_layout_at_every_step(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Through the door that users take, each time with one step more;
    metrics.jsonl is whole at the end.
    """
    settings: dict[str, Any] = {"optimizer": {"schedule": "constant"}, "model": MODELS["gpt2"]}
    plain = run_config(
        corpus,
        tmp_path / "plain",
        parallel=layout(""),
        train={"steps": 7, "dtype": "float64"},
        **settings,
    )
    train(pool, plain)
    for steps, text in enumerate(
        [
            "dp2,pp2,tp2",
            "pp4",
            "dp4,zero2,shard2",
            "dp2,pp2,zero3",
            "tp2,sequence",
            "dp4,zero0",
            "dp2,zero1",
        ],
        start=1,
    ):
        moving = run_config(
            corpus,
            tmp_path / "moving",
            parallel=layout(text),
            train={"steps": steps, "dtype": "float64"},
            checkpoint={"keep_last": 1},
            **settings,
        )
        said = train(pool, moving)
        assert ("changed: parallel." in said) == (steps > 1)
    assert list(exact_losses(moving)) == [1, 2, 3, 4, 5, 6, 7]
    for name in ("train/loss", "train/grad_norm"):
        for line, expected in zip(lines(moving), lines(plain), strict=True):
            assert math.isclose(line[name], expected[name], rel_tol=1e-10), (name, line, expected)
    for name, tensor in tensors(run_directory(moving.run)).items():
        expected = tensors(run_directory(plain.run))[name]
        assert (tensor - expected).norm() <= 1e-9 * expected.norm(), name


@pytest.mark.long
def test_the_same_initial_weights_in_every_layout(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    found = []
    for number, text in enumerate(["", "dp2,pp4", "tp4,sequence", "pp2,tp2", "dp8,zero0"]):
        config = run_config(corpus, tmp_path, parallel=layout(text), model=MODELS["gpt2"])
        pool.run(initial_weights, size(config), config, str(tmp_path / str(number)))
        found.append(
            {
                name: t
                for name, t in tensors(tmp_path / str(number)).items()
                if name.startswith("weights/")
            }
        )
    assert all(not differing(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("layouts", [long_row(LAYOUTS), LATER(MORE_LAYOUTS)], ids=["some", "more"])
def test_the_validation_loss_is_the_same_in_every_layout(
    layouts: list[str], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    found = {}
    for number, text in enumerate(layouts):
        config = run_config(
            corpus,
            tmp_path / str(number),
            parallel=layout(text),
            train={"steps": 1, "dtype": "float64", "validate_steps": 3},
        )
        train(pool, config)
        found[text] = lines(config)[0]["validation/loss"]
    for text, loss in found.items():
        assert math.isclose(loss, found[""], rel_tol=1e-12), (text, found)


@pytest.mark.torture
def test_frozen_parameters_are_in_the_checkpoint(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """They go through no optimizer, but the checkpoint is the whole model:
    also when the file they came from is not.
    """
    source = tmp_path / "source.txt"
    source.write_text("1.5")
    model = {
        "builder": "tests.end_to_end.builders:partly_frozen",
        "options": {**GPT2, "source": str(source)},
    }
    config = run_config(
        corpus, tmp_path, parallel=layout("dp2,pp2,tp2"), model=model, train={"steps": 2}
    )
    train(pool, config)
    whole = tensors(run_directory(config.run))
    assert {"weights/embedding.tokens.weight", "weights/block0.mlp.up.weight"} <= whole.keys()
    assert "exp_avg/block0.mlp.up.weight" not in whole and "exp_avg/block1.mlp.up.weight" in whole
    source.write_text("0")
    for number, text in enumerate(["", "pp4", "tp4,sequence", "dp2,pp2,tp2"]):
        other = run_config(corpus, tmp_path, parallel=layout(text), model=model, train={"steps": 2})
        again = tmp_path / str(number)
        pool.run(load_rank, size(other), other, str(run_directory(config.run)), str(again), 0)
        assert not differing(tensors(again), whole)
    _, layers = load_plain(run_directory(config.run))
    assert torch.equal(
        layers.get_parameter("head.weight"), whole["weights/embedding.tokens.weight"]
    )
