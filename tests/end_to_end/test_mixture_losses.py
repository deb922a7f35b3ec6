"""Each corpus of a mixture has a loss of its own in the record of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.config import Data
from meshwright.data.mixture_losses import corpus_losses
from meshwright.data.sources import open_sources
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import GPT2, changed, layout, lines, run_config, train
from tests.support.marks import long_row
from tests.support.plain import load_plain

STEPS = 3


@pytest.mark.parametrize(
    "of", ["dp2,pp2", *map(long_row, ("tp2,sequence", "cp2", "dp2,zero3", "pp2,tp2"))]
)
def test_they_are_those_of_the_plain_model(
    corpus: Path, tmp_path: Path, pool: RankPool, of: str
) -> None:
    """A corpus that occurs twice has one loss, and stages add theirs."""
    train_text, other = str(corpus / "train"), str(corpus / "validation")
    mixture = [
        {"path": train_text, "weight": 2.0},
        {"path": other, "weight": 1.0},
        {"path": other, "weight": 1.0},
    ]
    stages = [{"from_step": STEPS, "train": [{"path": other, "weight": 1.0}, mixture[0]]}]
    config = run_config(
        corpus,
        tmp_path,
        model={"options": {**GPT2, "dropout": 0.0}},
        data={"train": mixture, "stages": stages},
        parallel=layout(of),
        optimizer={"schedule": "constant"},
        train={"steps": STEPS, "validate_steps": 1},
    )
    train(pool, changed(config, train={"steps": STEPS - 1}, data={"stages": []}))
    _, plain = load_plain(run_directory(config.run))
    train(pool, config)
    last = lines(config)[-1]
    source, _ = open_sources(config)
    rows = range((STEPS - 1) * 8, STEPS * 8)
    inputs, labels = source.read(rows)
    with torch.no_grad():
        losses = F.cross_entropy(plain(inputs).transpose(1, 2), labels, reduction="none")
    by_name: dict[str, list[float]] = {"prepared": [], "validation": []}
    corpora = source.corpora_of(rows)  # type: ignore[union-attr]
    for of_row, number in zip(losses, corpora, strict=True):
        by_name[["prepared", "validation"][number]] += of_row.tolist()
    found = {name: value for name, value in last.items() if name.startswith("train/loss/")}
    assert found.keys() == {"train/loss/prepared", "train/loss/validation"}
    for name, expected in by_name.items():
        mean = sum(expected) / len(expected)
        assert found[f"train/loss/{name}"] == pytest.approx(mean, rel=1e-5)
    counts = {name: len(each) for name, each in by_name.items()}
    whole = sum(found[f"train/loss/{name}"] * count for name, count in counts.items())
    assert whole / sum(counts.values()) == pytest.approx(last["train/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("train_text", "names"),
    [
        ("a/train", ()),
        ([("a/train", 1.0)], ()),
        ([("a/train", 1.0), ("b/train", 1.0)], ("a", "b")),
        ([("a/train", 1.0), ("b/a/train", 1.0), ("a/../a/train", 2.0)], ("a", "b-a")),
        ([("x/a/train", 1), ("y/a/train", 1), ("z/a-2/train", 1)], ("x-a", "y-a", "a-2")),
        (
            [("web/prepared/train", 1), ("code/prepared/train", 1)],
            ("web-prepared", "code-prepared"),
        ),
        ([("a", 1.0), ("/a", 1.0), ("a-2", 1.0)], ("a", "a-2", "a-2-2")),
        ([("数据", 1.0), ("b", 1.0)], ("corpus", "b")),
        ([("web pages.v2", 1.0), ("train", 1.0)], ("web-pages.v2", None)),
    ],
)
def test_names_are_those_of_the_paths(train_text: Any, names: tuple[str | None, ...]) -> None:
    """A path that is only ``train`` has the name of the working directory, or its own."""
    mixture = train_text
    if not isinstance(train_text, str):
        mixture = [{"path": path, "weight": weight} for path, weight in train_text]
    found = corpus_losses(Data.model_validate({"train": mixture, "sequence_length": 8}))
    assert len(found) == len(names) == len(set(found))
    for name, expected in zip(found, names, strict=True):
        assert expected is None or name == f"train/loss/{expected}"
