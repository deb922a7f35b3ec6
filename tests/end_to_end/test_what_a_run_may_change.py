"""Which changes of the configuration a resume refuses, which it tells, and what it leaves alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.data import fingerprint
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.errors import CheckpointError
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankError, RankPool
from tests.end_to_end.driving import (
    GPT2,
    LLAMA,
    changed,
    exact_losses,
    layout,
    run_config,
    tensors,
    train,
)


@pytest.fixture
def begun(corpus: Path, tmp_path: Path, pool: RankPool) -> RunConfig:
    """Two steps of four are done."""
    config = run_config(
        corpus, tmp_path, parallel=layout("dp2"), train={"steps": 4}, checkpoint={"every": 2}
    )
    train(pool, config)
    shutil.rmtree(find(run_directory(config.run))[0].path)
    return config


def left_behind(config: RunConfig) -> dict[str, bytes]:
    """Return every file of the run."""
    directory = run_directory(config.run)
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def refused(pool: RankPool, config: RunConfig) -> str:
    """Return the message with which the run is refused; the run is then as it was."""
    before = left_behind(config)
    with pytest.raises(RankError) as caught:
        train(pool, config)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert left_behind(config) == before
    return str(caught.value.__cause__)


@pytest.mark.long
def test_what_is_the_run_itself_is_refused_by_name(begun: RunConfig, pool: RankPool) -> None:
    cases: list[tuple[str, dict[str, dict[str, Any]]]] = [
        (
            (
                'model.builder was "meshwright_models.gpt2:build" and is'
                ' "meshwright_models.llama:build"'
            ),
            {"model": {"options": LLAMA}},
        ),
        (
            "model.options.dropout was 0.1 and is 0.0",
            {"model": {"options": {**GPT2, "dropout": 0.0}}},
        ),
        ("data.sequence_length was 32 and is 16", {"data": {"sequence_length": 16}}),
        ("batch.global_batch was 8 and is 16", {"batch": {"global_batch": 16}}),
        ("run.seed was 1234 and is 7", {"run": {"seed": 7}}),
        ('train.dtype was "float32" and is "float64"', {"train": {"dtype": "float64"}}),
    ]
    cases[0][1]["model"]["builder"] = "meshwright_models.llama:build"
    for said, sections in cases:
        message = refused(pool, changed(begun, **sections))
        assert said in message and "choose another run.name" in message


@pytest.mark.long
def test_another_corpus_is_refused_and_another_place_is_not(
    begun: RunConfig, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(
            f"{number} quite another text of steps and ranks. " * 40
        )
    prepare_files([texts], tmp_path / "other", vocab_size=300, validation_share=0.1)
    other = {"train": str(tmp_path / "other/train"), "validation": None, "tokenizer": None}
    message = refused(pool, changed(begun, data=other))
    assert (
        "data fingerprint 'train' was" in message and "data fingerprint 'tokenizer' was" in message
    )
    assert "data.train" not in message
    (tmp_path / "other" / fingerprint.FILE_NAME).unlink()
    assert "data fingerprint 'train_tokens' was not set" in refused(
        pool, changed(begun, data=other)
    )

    shutil.copytree(corpus, tmp_path / "moved")
    said = train(pool, changed(begun, data={"train": str(tmp_path / "moved/train")}))
    assert "resuming" in said and "changed: data.train" in said
    assert list(exact_losses(begun)) == [1, 2, 3, 4]


def test_what_may_change_is_told(begun: RunConfig, pool: RankPool) -> None:
    losses = exact_losses(begun)
    said = train(
        pool, changed(begun, optimizer={"learning_rate": 1e-3}, parallel={"dp": 1, "pp": 2})
    )
    for change in (
        "optimizer.learning_rate: 0.003 -> 0.001",
        "parallel.dp: 2 -> 1",
        "parallel.pp: 1 -> 2",
        "batch.chunks: 4 -> 8",
    ):
        assert f"  changed: {change}\n" in said
    assert exact_losses(begun)[2] == losses[2] and exact_losses(begun)[4] != losses[4]


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(begun: RunConfig, pool: RankPool) -> None:
    losses = exact_losses(begun)
    train(pool, begun)
    whole = tensors(run_directory(begun.run))
    shard = next(find(run_directory(begun.run))[0].path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    said = train(pool, begun)
    assert "step-00000002: step 2" in said and exact_losses(begun) == losses
    newest = find(run_directory(begun.run))[0]
    assert newest.step == 4 and tensors(run_directory(begun.run)).keys() == whole.keys()
    for found in find(run_directory(begun.run)):
        file = next(found.path.glob("*.safetensors"))
        file.write_bytes(b"")
    assert "none of the 2 checkpoints verifies" in refused(pool, begun)
