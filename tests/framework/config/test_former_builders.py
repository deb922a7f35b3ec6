"""Builders by their former names, which configurations, runs and checkpoints may hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.checkpoint.compatible import check_compatible
from meshwright.checkpoint.manifest import Manifest
from meshwright.config import load
from meshwright.config.functions import OWN_BUILDERS, find_function, is_own_builder
from meshwright.errors import ModelError
from tests.support.errors import raises

FORMER = "models.gpt2:build"
NOW = "meshwright_models.gpt2:build"


def written(folder: Path, builder: str) -> Path:
    """Return a configuration that names this builder."""
    file = folder / "run.toml"
    batch = "[batch]\nchunks = 1\nmicro_batch_size = 1\n"
    file.write_text(
        f'[run]\nname = "x"\n[model]\nbuilder = "{builder}"\n[data]\ntrain = "a"\n{batch}'
    )
    return file


@pytest.mark.parametrize("former", ["models", "meshwright.models"])
@pytest.mark.parametrize("name", OWN_BUILDERS)
def test_a_former_name_is_the_present_one(
    former: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(written(tmp_path, name.replace("meshwright_models", former))).model.builder == name


def test_in_the_repository_too() -> None:
    assert load("configs/demo.toml", [f"--model.builder={FORMER}"]).model.builder == NOW


def test_a_folder_of_weights_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert load(written(tmp_path, FORMER)).model.builder == NOW


def test_a_module_of_the_users_own_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt2.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if not Path(folder, "models").is_dir()]
    )
    config = load(written(tmp_path, FORMER))
    assert config.model.builder == FORMER
    assert not is_own_builder(FORMER)
    assert load(written(tmp_path, NOW)).model.builder == NOW


def test_code_that_imports_the_former_name_is_told_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_old.py").write_text("from meshwright.models import gpt2\n")
    with raises("MW-CONFIG-008", "meshwright_models"):
        find_function("mine_of_old:build", "model.builder", "a builder", ModelError)


def test_only_meshwright_is_imported_from_our_folders() -> None:
    build = find_function(NOW, "model.builder", "a builder", ModelError)
    assert build.__module__ == "meshwright_models.gpt2"


@pytest.mark.parametrize(
    ("saved", "goes_on"),
    [
        (FORMER, True),
        (NOW, True),
        ("meshwright.models.gpt2:build", True),
        ("models.llama:build", False),
        ("meshwright.models.llama:build", False),
    ],
)
def test_a_checkpoint_with_the_former_name_goes_on(
    saved: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = load(written(tmp_path, NOW)).model_dump(mode="json")
    before = now | {"model": now["model"] | {"builder": saved}}
    manifest = Manifest(
        format="meshwright-checkpoint",
        version=1,
        step=1,
        samples_seen=1,
        seed=now["run"]["seed"],
        config=before,
        data_fingerprint={},
        versions={},
        state={},
        tensors={},
        files={},
    )
    if goes_on:
        assert check_compatible(manifest, now, {}) == []
    else:
        with raises("MW-CHECKPOINT-002"):
            check_compatible(manifest, now, {})
