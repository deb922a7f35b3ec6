"""May a run go on from a checkpoint: what is refused is named with both values,
what is allowed is told.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import (
    CheckpointMetadata,
    Manifest,
    TensorKind,
    TensorPiece,
    begin,
    check_compatible,
    open_checkpoint,
    publish,
    write_shard,
)
from meshwright.checkpoint.compatible import REFUSED
from meshwright.checkpoint.files import final_directory
from meshwright.config import RunConfig
from meshwright.parameters import ParameterInfo
from tests.support.errors import raises

CONFIG = RunConfig.model_validate(
    {
        "model": {
            "builder": "meshwright_models.gpt2:build",
            "options": {"hidden": 64, "dropout": 0.1},
        },
        "data": {"train": "a/corpus", "sequence_length": 128},
        "batch": {"micro_batch_size": 2, "chunks": 4, "global_batch": 16},
        "parallel": {"dp": 2},
    }
)
PRINT = {"train": "aa", "tokenizer": "bb"}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A saved one, read back: the configuration has been through the file."""
    import torch

    head = CheckpointMetadata(7, 112, 1234, CONFIG.model_dump(mode="json"), PRINT, {})
    temporary, final = begin(tmp_path, 7, "a1"), final_directory(tmp_path, 7)
    write_shard(
        temporary,
        "only",
        [TensorPiece(TensorKind.WEIGHTS, ParameterInfo("w", (1,)), torch.ones(1))],
    )
    publish(temporary, final, head)
    return open_checkpoint(final).manifest


def changed(path: str, value: Any) -> dict[str, Any]:
    config = CONFIG.model_dump(mode="json")
    *sections, key = path.split(".")
    inner = config
    for section in sections:
        inner = inner[section]
    inner[key] = value
    return config


def test_the_same_run_goes_on_without_a_word(manifest: Manifest) -> None:
    assert check_compatible(manifest, CONFIG.model_dump(mode="json"), PRINT) == []
    # tuples for lists: the same configuration
    assert check_compatible(manifest, CONFIG.model_dump(), PRINT) == []


def test_a_run_that_did_not_know_a_key_had_its_default(manifest: Manifest) -> None:
    """A checkpoint written before there was a choice of optimizers."""
    config: dict[str, Any] = {section: dict(keys) for section, keys in manifest.config.items()}  # type: ignore[union-attr, arg-type]
    del config["optimizer"]["name"], config["parallel"]["shard_factor"]
    old = manifest.model_copy(update={"config": config})
    assert check_compatible(old, CONFIG.model_dump(mode="json"), PRINT) == []
    with raises("MW-CHECKPOINT-002", "optimizer.name", '"adamw"', '"sgd"'):
        check_compatible(old, changed("optimizer.name", "sgd"), PRINT)


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("optimizer.learning_rate", 1e-4, "optimizer.learning_rate: 0.0003 -> 0.0001"),
        ("tracking.log_every", 10, "tracking.log_every: 1 -> 10"),
        ("parallel.tp", 4, "parallel.tp: 1 -> 4"),
        ("pipeline.schedule", "gpipe", 'pipeline.schedule: "1f1b" -> "gpipe"'),
        ("batch.chunks", 2, "batch.chunks: 4 -> 2"),
        ("data.train", "b/corpus", 'data.train: "a/corpus" -> "b/corpus"'),
        ("run.new_field", True, "run.new_field: not set -> true"),
        ("model.options.mtp_loss_weight", 0.1, "model.options.mtp_loss_weight: not set -> 0.1"),
    ],
)
def test_allowed_changes_are_told(manifest: Manifest, path: str, value: Any, line: str) -> None:
    assert check_compatible(manifest, changed(path, value), PRINT) == [line]


@pytest.mark.parametrize(
    ("path", "value", "change"),
    [
        ("model.builder", "meshwright_models.llama:build", '"meshwright_models.gpt2:build"'),
        ("model.options.hidden", 128, "was 64 and is 128"),
        ("model.options.layers", 3, "was not set and is 3"),
        ("data.sequence_length", 64, "was 128 and is 64"),
        ("batch.global_batch", 32, "was 16 and is 32"),
        ("batch.ramp", (4, 4, 100), "was null and is [4, 4, 100]"),
        ("model.options.kernels", [3, {"size": 5}], "was not set and is [3, "),
        ("run.seed", 1, "was 1234 and is 1"),
        ("train.dtype", "bfloat16", 'was "float32" and is "bfloat16"'),
    ],
)
def test_refused_changes_are_named(manifest: Manifest, path: str, value: Any, change: str) -> None:
    with raises("MW-CHECKPOINT-002", path, change, "run.name", "step 7"):
        check_compatible(manifest, changed(path, value), PRINT)


def test_every_refused_field_is_one_of_the_configuration() -> None:
    config = CONFIG.model_dump()
    for field in REFUSED:
        section, key = field.split(".")
        assert key in config[section], field


def test_the_page_names_every_refused_field() -> None:
    page = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()
    (rule,) = re.findall(r"^- The run: .*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert set(REFUSED) - set(re.findall(r"`([a-z]+\.[a-z_]+)`", rule)) == set()


def test_all_problems_come_at_once(manifest: Manifest) -> None:
    config = changed("run.seed", 5)
    config["train"]["dtype"] = "float64"
    with raises("MW-CHECKPOINT-002", "run.seed", "train.dtype", "'tokenizer'", '"bb"', '"cc"'):
        check_compatible(manifest, config, PRINT | {"tokenizer": "cc"})


@pytest.mark.parametrize("now", [{"train": "zz", "tokenizer": "bb"}, {"tokenizer": "bb"}])
def test_another_corpus_is_refused(manifest: Manifest, now: dict[str, str]) -> None:
    with raises("MW-CHECKPOINT-002", "'train'", '"aa"'):
        check_compatible(manifest, CONFIG.model_dump(mode="json"), now)
