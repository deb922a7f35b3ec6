"""The words of the command line: how they are read, and that they win."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshwright.config import RunConfig, load
from meshwright.errors import ConfigError
from tests.support.errors import raises

FILE = """
[data]
train = "corpus/train"
tokenizer = "corpus/tokenizer.json"
[batch]
micro_batch_size = 2
chunks = 4
[parallel]
tp = 2
[model.options]
layers = 4
width = 64
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    return file


def value(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    ("words", "key", "wanted"),
    [
        (["--parallel.tp=4"], "parallel.tp", 4),
        (["--parallel.tp", "4"], "parallel.tp", 4),
        (["--parallel.tp=4", "--parallel.tp=8"], "parallel.tp", 8),
        (["--parallel.dp", "-1"], "parallel.dp", -1),
        (["--parallel.dp=auto"], "parallel.dp", "auto"),
        (['--parallel.dp="auto"'], "parallel.dp", "auto"),
        (["--parallel.sequence"], "parallel.sequence", True),
        (["--parallel.sequence", "--train.steps=7"], "parallel.sequence", True),
        (["--parallel.sequence", "--train.steps=7"], "train.steps", 7),
        (["--parallel.sequence=true", "--parallel.sequence", "false"], "parallel.sequence", False),
        (["--optimizer.learning_rate=1e-3"], "optimizer.learning_rate", 1e-3),
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate", 1.0),
        (["--optimizer.betas=[0.8, 0.9]"], "optimizer.betas", (0.8, 0.9)),
        (["--parallel.pp=2", "--pipeline.balance=[1,2]"], "pipeline.balance", [1, 2]),
        (["--pipeline.balance=layers"], "pipeline.balance", "layers"),
        (["--run.name=2024"], "run.name", "2024"),  # a key that takes text takes digits as text
        (["--data.train=a=b"], "data.train", "a=b"),
        (["--data.train=true"], "data.train", "true"),
        (["--data.tokenizer=none"], "data.tokenizer", None),
        (['--data.tokenizer="none"'], "data.tokenizer", "none"),
        # cannot be unset, so it is a path like any other
        (["--data.train=none"], "data.train", "none"),
        (["--batch.chunks=none", "--batch.global_batch=8"], "batch.chunks", None),
        (["--model.options.layers=6"], "model.options", {"layers": 6, "width": 64}),
        (
            ["--model.options.norm.eps=1e-6"],
            "model.options",
            {"layers": 4, "width": 64, "norm": {"eps": 1e-6}},
        ),
        (
            ["--model.options.kind=swish"],
            "model.options",
            {"layers": 4, "width": 64, "kind": "swish"},
        ),
        (["--model.options={a=1}"], "model.options", {"a": 1}),
        (["--model.options.b=2", "--model.options={a=1}"], "model.options", {"a": 1}),
        (["--model.options={a=1}", "--model.options.b=2"], "model.options", {"a": 1, "b": 2}),
        (["--parallel={pp=2, tp=8}"], "parallel.tp", 8),
    ],
)
def test_how_words_are_read(path: Path, words: list[str], key: str, wanted: object) -> None:
    found = value(load(path, words), key)
    assert found == wanted and type(found) is type(wanted)


def test_what_is_not_overridden_stays(path: Path) -> None:
    assert load(path, ["--parallel.pp=2"]).parallel.tp == 2


def test_only_the_winning_value_is_judged(path: Path) -> None:
    path.write_text(FILE.replace("tp = 2", "tp = true"))
    assert load(path, ["--parallel.tp=2"]).parallel.tp == 2
    with raises("MW-CONFIG-020", "command line", "parallel.tp = 0"):
        load(path, ["--parallel.tp=0"])


KEYS = st.sampled_from(
    [
        *(
            "model.options",
            "model.options.a",
            "parallel",
            "parallel.dp",
            "data.train",
            "run.name",
            "pipeline.balance",
        ),
        *("optimizer.betas", "train.compile", "batch.chunks", ".", "x.y"),
    ]
)
VALUES = st.text(max_size=12) | st.sampled_from(
    ["nan", "[1,[2]]", "{a={}}", "1979-05-27", "none", "-1", "1e999"]
)
SIGNS = st.sampled_from(["=", " ", "", ".", ".b="])
WORDS = st.text(max_size=12) | st.builds("--{}{}{}".format, KEYS, SIGNS, VALUES)


@pytest.mark.long
@given(st.lists(WORDS, max_size=4))
@example(["--x=" + "9" * 5000])
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_words_give_a_configuration_or_one_clear_error(path: Path, words: list[str]) -> None:
    try:
        assert isinstance(load(path, words), RunConfig)
    except ConfigError as error:
        assert error.problems and all(problem.message for problem in error.problems)
