"""Runs of shared experts: any ep resumes any other, bit-equal on the same one;
drift of an expert is named.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.run.tensors
from meshwright.build import build
from meshwright.checkpoint import find
from meshwright.config import RunConfig, resolve
from meshwright.errors import DriftError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.run.directory import run_directory
from meshwright.watch.drift import check_drift
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    differing,
    exact_losses,
    layout,
    load_rank,
    run_config,
    size,
    tensors,
    train,
    train_rank,
)
from tests.end_to_end.shell import Shell, written
from tests.end_to_end.test_use import evaluated
from tests.support.marks import long_row

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
}
LLAMA |= {"max_sequence_length": 32, "moe": {"num_experts": 4, "top_k": 2}}  # type: ignore[dict-item]
MODEL = {"builder": "meshwright_models.llama:build", "options": LLAMA}


def of_layout(corpus: Path, runs: Path, text: str, steps: int = 2, **optimizer: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": MODEL,
        "train": {"steps": steps, "dtype": "float64", "validate_steps": 1},
    }
    return run_config(corpus, runs, parallel=layout(text), optimizer=optimizer, **settings)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        long_row("dp4,ep4,zero2", "dp2,tp2,ep2,sequence"),
        pytest.param("dp2,pp2,ep2,zero3", "tp2", marks=pytest.mark.torture),
        pytest.param("tp2", "dp2,tp2,ep4,sequence,zero3", marks=pytest.mark.torture),
    ],
)
def test_a_run_goes_on_with_another_ep(
    before: str, after: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    first = of_layout(corpus, tmp_path, before)
    train(pool, first)
    saved, losses = run_directory(first.run), {}
    for name, text in (("before", before), ("after", after)):
        config = of_layout(corpus, tmp_path, text)
        ranks = pool.run(load_rank, size(config), config, str(saved), str(tmp_path / name), 2)
        assert not differing(tensors(tmp_path / name), tensors(saved))
        losses[name] = ranks[0].losses
    for ours, theirs in zip(losses["after"], losses["before"], strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-11), losses


@pytest.mark.long
def test_a_model_is_worth_the_same_with_any_ep(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Evaluated on layouts that it was not trained on, one process among them."""
    config = of_layout(corpus, tmp_path, "dp4,ep4,zero2")
    train(pool, config)
    losses = [
        evaluated(pool, config, tmp_path / "found.json", text)["loss"]
        for text in ("dp4,ep4", "dp1,ep1", "dp1,tp2,ep2,sequence")
    ]
    assert losses == [pytest.approx(losses[0], rel=1e-12)] * 3


@pytest.mark.parametrize(
    "name", [long_row("adamw"), pytest.param("muon", marks=pytest.mark.torture)]
)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    name: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Muon's run also goes on with another ep: experts' matrices have other homes,
    and the same momentum.
    """
    for folder, stops in (("unbroken", (3,)), ("resumed", (2, 3)), ("moved", (2, 3))):
        for steps in stops if folder != "moved" or name == "muon" else ():
            text = "tp2,sequence,ep2" if (folder, steps) == ("moved", 3) else "dp4,ep2,zero2"
            train(
                pool,
                of_layout(corpus, tmp_path / folder, text, steps, schedule="constant", name=name),
            )
    unbroken, *others = [
        tensors(run_directory(of_layout(corpus, tmp_path / folder, "").run))
        for folder in ("unbroken", "resumed", "moved")[: 2 + (name == "muon")]
    ]
    assert not differing(others[0], unbroken)
    assert ("momentum/block1.mlp.experts.gate_up" in unbroken) == (name == "muon")
    for tensor, whole in unbroken.items():
        torch.testing.assert_close(others[-1][tensor], whole, rtol=1e-9, atol=1e-10)


@pytest.mark.long
def test_a_run_whose_rank_is_killed_resumes_with_any_ep(
    corpus: Path, tmp_path: Path, pool: RankPool, shell: Shell
) -> None:
    """Rank 5 is killed in step 4; with the same ep the losses are those of an unbroken run,
    bit for bit.
    """
    trap = {"rank": 5, "at_call": 14, "killed": True, "once": str(tmp_path / "fired")}
    moe = {"num_experts": 8, "top_k": 2, "router": "sigmoid", "balance": "bias", "batch_loss": 0.01}
    options = {**LLAMA, "moe": moe, **trap}
    keys: dict[str, Any] = {"train": {"steps": 6, "dtype": "float64"}, "checkpoint": {"every": 2}}
    keys["model"] = {"builder": "tests.end_to_end.builders:trapped_llama", "options": options}

    def of_ep(ep: int, runs: Path) -> RunConfig:
        return run_config(corpus, runs, parallel=layout(f"dp2,pp2,tp2,ep{ep},sequence"), **keys)

    killed = of_ep(4, tmp_path / "runs")
    done = shell.run("-m", "meshwright_launch", "train", written(killed, tmp_path), "--trust-code")
    assert done.returncode and "rank 5 was ended by SIGKILL" in done.stderr, done.stderr
    assert find(run_directory(killed.run))[0].step == 2
    for ep in (4, 2, 1):
        shutil.copytree(tmp_path / "runs", tmp_path / f"ep{ep}")
    same = of_ep(4, tmp_path / "same")
    train(pool, same)  # the trap has fired
    expected = exact_losses(same)
    for ep in (4, 2, 1):
        config = of_ep(ep, tmp_path / f"ep{ep}")
        train(pool, config)
        found = exact_losses(config)
        assert ep != 4 or found == expected
        assert ep != 4 or not differing(
            tensors(run_directory(config.run)), tensors(run_directory(same.run))
        )
        for step, loss in expected.items():
            assert math.isclose(float.fromhex(found[step]), float.fromhex(loss), rel_tol=1e-11), (
                ep,
                step,
            )


def train_as_before(rank: int, world_size: int, config: RunConfig) -> None:
    """One rank of a version that saved every running buffer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.run.tensors, "is_saved", lambda *args: True)
        train_rank(rank, world_size, config)


@pytest.mark.long
def test_checkpoints_hold_the_bias_and_no_counts(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """A checkpoint that holds counts, zeros, is resumed all the same."""
    moe = {"num_experts": 4, "top_k": 2, "balance": "bias"}
    runs = [of_layout(corpus, tmp_path / name, "tp2,ep2,sequence", 1) for name in ("before", "now")]
    runs = [run.replace(model={**MODEL, "options": LLAMA | {"moe": moe}}) for run in runs]
    runs = [run.replace(optimizer={"schedule": "constant"}) for run in runs]
    pool.run(train_as_before, 2, runs[0])
    train(pool, runs[1])
    counts = {
        f"weights/block{block}.mlp.router.{name}"
        for block in (0, 1)
        for name in ("counts", "entropy")
    }
    saved = [tensors(run_directory(run.run)) for run in runs]
    assert saved[0].keys() - saved[1].keys() == counts and not any(
        saved[0][name].any() for name in counts
    )
    assert saved[1]["weights/block0.mlp.router.bias"].any()
    for run in runs:
        train(pool, run.replace(train={"steps": 2}))
    assert not differing(*[tensors(run_directory(run.run)) for run in runs])


def drift(rank: int, world_size: int, config: RunConfig, spoilt: int | None) -> str:
    """Return the message of a check after the expert weights of one rank have changed."""
    config = resolve(config, world_size)
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    parts = build(config, mesh)
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            is_spoilt = rank == spoilt and bucket.holders.slices.name == "ep"
            if is_spoilt and bucket.flat is not None:
                bucket.flat[3] += 1e-9
    try:
        check_drift(parts)
        return ""
    except DriftError as error:
        return error.message
    finally:
        close_mesh(mesh)


def test_replicas_of_experts_are_compared_among_themselves(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = of_layout(corpus, tmp_path, "dp4,ep2")
    assert set(pool.run(drift, 4, config, None)) == {""}
    (message,) = set(pool.run(drift, 4, config, 3))
    assert (
        "mlp.experts" in message
        and "rank 1" in message
        and "rank 3" in message
        and "rank 0" not in message
    )
