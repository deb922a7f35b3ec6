"""A run, the same run again, and the same run stopped and gone on with:
on one layout bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankError, RankPool
from tests.end_to_end.driving import (
    LATER,
    LLAMA,
    changed,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    tensors,
    train,
)
from tests.support.marks import long_row, marked_rows

STEPS, HALF = 6, 3
MATRICES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
TORTURE = pytest.mark.torture(
    row="save at k, run to 2k against resume from k, dropout on: all leaves of the state"
)
LAYOUTS = [
    f"{axes},zero{zero}{also}"
    for axes, also in (("dp2", ""), ("pp2", ""), ("tp2", ",sequence"), ("dp2,pp2,tp2", ""))
    for zero in (0, 1)
]


def stop_half_way(config: RunConfig) -> None:
    """As if the run had been killed after its last step was told,
    but before that step's checkpoint was there.
    """
    newest, half = find(run_directory(config.run))
    assert (newest.step, half.step) == (STEPS, HALF)
    shutil.rmtree(newest.path)


@marked_rows("long", "dp2,zero1-bfloat16", "dp2,pp2,tp2,zero1-float32", "dp2,pp2,zero3-bfloat16")
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (LAYOUTS[1], "bfloat16"),
        (LAYOUTS[3], "float32"),
        (LAYOUTS[7], "float32"),
        *(
            pytest.param(text, "float32", marks=TORTURE)
            for at, text in enumerate(LAYOUTS)
            if at not in (3, 7)
        ),
        pytest.param(LAYOUTS[7], "bfloat16", marks=TORTURE),
        pytest.param("dp4,zero2,shard2", "float32", marks=TORTURE),
        ("dp2,pp2,zero3", "bfloat16"),
        pytest.param("dp2,pp2,tp2,zero2", "bfloat16", marks=TORTURE),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    text: str, dtype: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Dropout on, and a learning rate whose warmup and cosine reach over the stop."""
    common: dict[str, Any] = {
        "parallel": layout(text),
        "train": {"steps": STEPS, "dtype": dtype, "validate_every": HALF},
        "batch": {"micro_batch_size": 2},
    }
    uninterrupted = run_config(corpus, tmp_path / "uninterrupted", **common)
    stopped = run_config(corpus, tmp_path / "stopped", checkpoint={"every": HALF}, **common)

    assert "resuming" not in train(pool, uninterrupted)
    train(pool, stopped)
    # the same run twice; saving half-way changes nothing
    assert exact_losses(stopped) == exact_losses(uninterrupted)
    stop_half_way(stopped)
    said = train(pool, stopped)

    assert (
        f"resuming from {run_directory(stopped.run)}/checkpoints/step-0000000{HALF}: step {HALF}, 24"
        " samples" in said
    )
    assert "changed:" not in said
    assert list(exact_losses(stopped)) == list(range(1, STEPS + 1))
    for name in (
        "train/loss_hex",
        "train/grad_norm",
        "train/lr",
        "train/tokens",
        "validation/loss",
    ):
        assert [line.get(name) for line in lines(stopped)] == [
            line.get(name) for line in lines(uninterrupted)
        ], name
    expected = tensors(run_directory(uninterrupted.run))
    assert not differing(tensors(run_directory(stopped.run)), expected)
    assert any(name.startswith("master/") for name in expected) == (dtype == "bfloat16")


@pytest.mark.long
def test_sgd_resumes_and_another_optimizer_does_not(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Its momentum is in the checkpoint, and nothing else of AdamW's."""
    sections: dict[str, Any] = {
        "parallel": layout("dp2,zero2"),
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    uninterrupted = run_config(corpus, tmp_path / "uninterrupted", **sections)
    stopped = run_config(corpus, tmp_path / "stopped", checkpoint={"every": HALF}, **sections)
    for config in (uninterrupted, stopped):
        train(pool, config)
    stop_half_way(stopped)
    with pytest.raises(RankError, match=r"optimizer\.name was \"sgd\" and is \"adamw\""):
        train(pool, changed(stopped, optimizer={"name": "adamw"}))
    train(pool, stopped)
    found = tensors(run_directory(stopped.run))
    assert not differing(found, tensors(run_directory(uninterrupted.run)))
    assert {name.partition("/")[0] for name in found} == {"weights", "momentum"}


def stopped_and_moved(
    optimizer: dict[str, Any],
    first: dict[str, Any],
    other: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
) -> tuple[RunConfig, RunConfig]:
    """Return the run without a stop, and one that was stopped half way,
    for the other layout to go on with.

    A resume on the first layout is bit-equal to the run without a stop.
    """
    sections: dict[str, Any] = {
        "parallel": first,
        "optimizer": optimizer,
        "train": {"dtype": "float64"},
    }
    uninterrupted = run_config(corpus, tmp_path / "uninterrupted", **sections)
    stopped = run_config(corpus, tmp_path / "stopped", checkpoint={"every": HALF}, **sections)
    for config in (uninterrupted, stopped):
        train(pool, config)
    stop_half_way(stopped)
    moved = changed(stopped, run={"directory": str(tmp_path / "moved")}, parallel=other)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    train(pool, stopped)
    assert exact_losses(stopped) == exact_losses(uninterrupted)
    assert not differing(
        tensors(run_directory(stopped.run)), tensors(run_directory(uninterrupted.run))
    )
    return uninterrupted, moved


@pytest.mark.parametrize(
    ("name", "kinds", "text", "other"),
    [
        long_row("lion", {"exp_avg"}, "dp2,zero2", "pp2"),
        long_row("adafactor", {"row_var", "col_var", "exp_avg_sq"}, "dp2,tp2,zero2", "pp2"),
        LATER("adafactor", {"row_var", "col_var", "exp_avg_sq"}, "dp2,zero3", "dp2,tp2,zero1"),
        long_row("bfloat16 states", {"exp_avg", "exp_avg_sq"}, "dp2,zero1", "tp2"),
        long_row("schedule_free_adamw", {"z", "y", "exp_avg_sq"}, "dp2,tp2,zero1", "pp2"),
        LATER(
            "schedule_free_adamw", {"z", "y", "exp_avg_sq"}, "dp2,zero3", "dp2,pp2,zero2,offload"
        ),
    ],
)
def test_an_optimizer_resumes_and_goes_on_in_another_layout(
    name: str, kinds: set[str], text: str, other: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Bit for bit what was never stopped; elsewhere the same but for rounding."""
    own = {"name": name} if name != "bfloat16 states" else {"state_dtype": "bfloat16"}
    optimizer = {"learning_rate": 0.01, "schedule": "constant", **own}
    uninterrupted, moved = stopped_and_moved(
        optimizer, layout(text), layout(other), corpus, tmp_path, pool
    )
    found = tensors(run_directory(uninterrupted.run))
    assert {each.partition("/")[0] for each in found} == {"weights"} | kinds
    # weights are the average
    for each in (each.removeprefix("y/") for each in found if each.startswith("y/")):
        average = torch.lerp(
            found[f"y/{each}"], found[f"z/{each}"], 1 - 1 / uninterrupted.optimizer.betas[0]
        )
        torch.testing.assert_close(found[f"weights/{each}"], average, rtol=1e-12, atol=1e-14)
    train(pool, moved)
    elsewhere = tensors(run_directory(moved.run))
    for each, tensor in found.items():
        torch.testing.assert_close(elsewhere[each], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("text", "other"), [long_row("dp2,tp2,zero1", "pp2"), LATER("dp2,pp2,zero3", "dp2,tp2,zero0")]
)
def test_muon_resumes_and_goes_on_in_another_layout(
    text: str, other: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Bit for bit what was never stopped; elsewhere the homes are others,
    and the losses the same but for rounding.
    """
    optimizer = {"name": "muon", "learning_rate": 0.01}
    uninterrupted, moved = stopped_and_moved(
        optimizer, layout(text), layout(other), corpus, tmp_path, pool
    )
    found = tensors(run_directory(uninterrupted.run))
    of_matrices = {name.partition("/")[2] for name in found if name.startswith("momentum/")}
    assert of_matrices == {f"block{i}.{name}.weight" for i in (0, 1) for name in MATRICES}
    assert not [
        name
        for name in found
        if name.startswith("exp_avg") and name.partition("/")[2] in of_matrices
    ]

    train(pool, moved)
    losses, others = (
        [float.fromhex(each) for each in exact_losses(c).values()] for c in (uninterrupted, moved)
    )
    assert others == pytest.approx(losses, rel=1e-12)
    elsewhere = tensors(run_directory(moved.run))
    for name, tensor in tensors(run_directory(uninterrupted.run)).items():
        torch.testing.assert_close(elsewhere[name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("text", [long_row("dp2,zero1"), LATER("dp2,pp2,zero3,offload")])
def test_moments_in_8_bits_resume_and_are_adamw_s(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Bit for bit what was never stopped; and the run goes on as AdamW, and back."""
    sections: dict[str, Any] = {
        "parallel": layout(text),
        "optimizer": {"name": "adamw8bit", "block_size": 8},
    }
    uninterrupted = run_config(corpus, tmp_path / "uninterrupted", **sections)
    stopped = run_config(corpus, tmp_path / "stopped", checkpoint={"every": HALF}, **sections)
    for config in (uninterrupted, stopped):
        train(pool, config)
    stop_half_way(stopped)
    train(pool, stopped)
    assert exact_losses(stopped) == exact_losses(uninterrupted)
    found = tensors(run_directory(stopped.run))
    assert not differing(found, tensors(run_directory(uninterrupted.run)))
    assert {name.partition("/")[0] for name in found} == {"weights", "exp_avg", "exp_avg_sq"}
    for name, steps in (("adamw", STEPS + 1), ("adamw8bit", STEPS + 2)):
        stopped = changed(stopped, optimizer={"name": name}, train={"steps": steps})
        assert f'-> "{name}"' in train(pool, stopped)


@pytest.mark.torture
def test_llama_resumes_too(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """Another model, uneven stages by hand, gpipe; and three stops instead of one."""
    sections: dict[str, Any] = {
        "model": {"builder": "meshwright_models.llama:build", "options": LLAMA},
        "parallel": layout("dp2,pp2"),
        "pipeline": {"schedule": "gpipe", "balance": [2, 4]},
    }
    uninterrupted = run_config(corpus, tmp_path / "uninterrupted", **sections)
    stopped = run_config(corpus, tmp_path / "stopped", checkpoint={"every": 1}, **sections)
    train(pool, uninterrupted)
    for _ in range(4):
        train(pool, stopped)
        newest, before = find(run_directory(stopped.run))
        shutil.rmtree(newest.path)
        assert exact_losses(stopped) == exact_losses(uninterrupted)
        assert before.step == STEPS - 1
    train(pool, stopped)
    assert not differing(
        tensors(run_directory(stopped.run)), tensors(run_directory(uninterrupted.run))
    )


@pytest.mark.long
def test_another_learning_rate_shows_that_the_comparison_can_fail(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    one = run_config(corpus, tmp_path / "one", parallel=layout("dp2"))
    other = run_config(
        corpus, tmp_path / "other", parallel=layout("dp2"), optimizer={"learning_rate": 3.0001e-3}
    )
    train(pool, one)
    train(pool, other)
    losses, others = exact_losses(one), exact_losses(other)
    assert losses[1] == others[1] and losses[STEPS] != others[STEPS]
    assert differing(tensors(run_directory(one.run)), tensors(run_directory(other.run)))


def test_a_finished_run_says_so_and_goes_on_with_more_steps(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(corpus, tmp_path, parallel=layout("dp2"), train={"steps": 2})
    assert "raise train.steps" not in train(pool, config)
    before = exact_losses(config)
    said = train(pool, config)
    assert "the run has taken its 2 steps: raise train.steps to continue" in said
    assert exact_losses(config) == before and [
        found.step for found in find(run_directory(config.run))
    ] == [2]
    said = train(pool, changed(config, train={"steps": 4}))
    assert "raise train.steps" not in said and "changed: train.steps: 2 -> 4" in said
    after = exact_losses(config)
    assert list(after) == [1, 2, 3, 4] and [after[1], after[2]] == [before[1], before[2]]
    said = train(pool, changed(config, train={"steps": 3}))
    assert "the run has taken 4 steps and train.steps = 3: raise train.steps to continue" in said
    assert exact_losses(config) == after
