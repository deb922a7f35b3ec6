"""Several validation sets: a loss each, equal to that of the set alone, and their weighted mean."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig, load
from meshwright.errors import UserError
from meshwright.run.directory import run_directory
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check
from tests.end_to_end.driving import layout, lines, run_config, train
from tests.support.marks import long_row

WEIGHT = 3


@pytest.fixture(scope="module")
def other(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second validation set: half of the training text of the corpus, under its own folder."""
    folder = tmp_path_factory.mktemp("other")
    for path in corpus.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


def config_of(
    corpus: Path, runs: Path, validation: Any, text: str = "", **sections: dict[str, Any]
) -> RunConfig:
    data = {"validation": validation}
    train_keys = {"steps": 2, "validate_every": 1, "validate_steps": 3}
    return run_config(
        corpus,
        runs,
        data=data,
        parallel=layout(text),
        train=train_keys | sections.pop("train", {}),
        **sections,
    )


@pytest.mark.parametrize("text", ["", "dp2,pp2", long_row("dp2,tp2,zero3")])
def test_each_set_has_its_own_loss(
    text: str, corpus: Path, other: Path, tmp_path: Path, pool: RankPool
) -> None:
    first, second = str(corpus / "validation"), str(other / "train")
    several = {"near": first, "far-1": {"path": second, "weight": WEIGHT}}
    said = train(pool, config_of(corpus, tmp_path, several, text))
    alone = {}
    for name, path in (("near", first), ("far-1", second)):
        config = config_of(corpus, tmp_path / name, path, text)
        train(pool, config)
        alone[name] = [line["validation/loss"] for line in lines(config)]
    found = lines(config_of(corpus, tmp_path, several, text))
    assert len(found) == 2 and alone["near"] != alone["far-1"]
    for index, line in enumerate(found):
        losses = {name: values[index] for name, values in alone.items()}
        for name, loss in losses.items():
            assert line[f"validation/{name}/loss"] == loss
        mean = (losses["near"] + WEIGHT * losses["far-1"]) / (1 + WEIGHT)
        assert math.isclose(line["validation/loss"], mean, rel_tol=1e-15)
    assert f"near: {alone['near'][-1]:.4f}" in said


def test_eval_has_each_set(corpus: Path, other: Path, tmp_path: Path, pool: RankPool) -> None:
    """The whole sets, and beside them the numbers of the training."""
    several = {"near": str(corpus / "validation"), "far": str(other / "train")}
    config = config_of(corpus, tmp_path, several, "dp2")
    train(pool, config)
    out = tmp_path / "eval.json"
    place = str(run_directory(config.run))
    assert main(["eval", place, "--batches", "4", "--out", str(out), "--parallel.dp=1"]) == 0
    found = json.loads(out.read_text())
    mean = sum(each["loss"] for each in found["sets"].values()) / 2
    assert math.isclose(found["loss"], mean, rel_tol=1e-15)
    assert found["tokens"] == sum(each["tokens"] for each in found["sets"].values())
    logged = lines(config)[-1]
    for name, each in found["sets"].items():
        assert each["while_training"]["logged"] == logged[f"validation/{name}/loss"]
        assert math.isclose(
            each["while_training"]["loss"], logged[f"validation/{name}/loss"], rel_tol=1e-6
        )


@pytest.mark.parametrize("text", ["dp4", "dp2,pp2"])
def test_a_set_smaller_than_the_replicas_is_counted_once(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Three samples of 32 tokens in four replicas: the loss of one rank, and 96 labels."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import tensor

    folder = tmp_path / "few"
    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "few.bin"), dtype=np.uint16)
    ids = [(7 * n * n + 3 * n) % 250 + 1 for n in range(3 * 32 + 1)]
    builder.add_document(tensor(ids), [len(ids)])
    builder.finalize(str(folder / "few.idx"))
    several = {"few": str(folder / "few"), "near": str(corpus / "validation")}
    dtype = {"dtype": "float64", "validate_steps": 5}
    found = {}
    for name, where in (("one", ""), ("many", text)):
        config = config_of(corpus, tmp_path / name, several, where, train=dtype)
        said = train(pool, config)
        found[name] = [line["validation/few/loss"] for line in lines(config)]
        assert "validation few has 3 samples" in said
    for one, many in zip(found["one"], found["many"], strict=True):
        assert math.isclose(one, many, rel_tol=1e-12)
    out = tmp_path / "eval.json"
    place = str(run_directory(config.run))
    assert main(["eval", place, "--batches", "2", "--out", str(out), *_alone(text)]) == 0
    assert json.loads(out.read_text())["sets"]["few"]["tokens"] == 96


def _alone(text: str) -> list[str]:
    return [f"--parallel.{axis}=1" for axis in ("dp", "pp") if axis in text]


@pytest.mark.parametrize(
    "written", ["{}", '{"a/b" = "x"}', "{web = 3}", '{web = {path = "x", weight = 0}}']
)
def test_tables_that_are_none_are_refused(written: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[data]\ntrain = "t"\nvalidation = {written}\n')
    with pytest.raises(UserError) as refused:
        load(file)
    assert "data.validation" in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_missing_set_is_named(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path, {"web": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="nowhere"):
        check(config, 1)
