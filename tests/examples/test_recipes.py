"""Each recipe of configs/recipes takes its first steps, on a small corpus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ("pretrain", "continue", "chat", "lora", "long-context", "moe")
"""The next four begin with the weights of the first."""


def run(desk: Path, *words: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=desk,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the corpora that the recipes name."""
    folder = tmp_path_factory.mktemp("desk")
    meshwright = ("-m", "meshwright_launch", "data")
    text = [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    run(folder, *meshwright, "files", *text, "--out", "runs/data/source", "--vocab-size", "4096")
    tokenizer = ("--tokenizer", "runs/data/source/tokenizer.json")
    run(folder, *meshwright, "prepare", *text, *tokenizer, "--out", "runs/data/sympy")
    run(folder, str(ROOT / "examples" / "docstrings.py"), "runs/data/questions.jsonl")
    questions = ("runs/data/questions.jsonl", "--format", "messages")
    run(folder, *meshwright, "prepare", *questions, *tokenizer, "--out", "runs/data/questions")
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_the_first_steps_of_each_recipe(desk: Path) -> None:
    for name in RECIPES:
        config = ROOT / "configs" / "recipes" / f"{name}.toml"
        steps = ("--train.steps=2", "--train.validate_every=2", "--train.validate_steps=1")
        steps += ("--optimizer.warmup_steps=1", "--tracking.wandb=off")
        run(desk, "-m", "meshwright_launch", "train", str(config), *steps)
        lines = (desk / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["train/loss"] for line in lines]
        assert len(losses) == 2 and losses[1] < losses[0]


def test_every_recipe_is_here() -> None:
    assert {path.stem for path in (ROOT / "configs" / "recipes").glob("*.toml")} == set(RECIPES)
