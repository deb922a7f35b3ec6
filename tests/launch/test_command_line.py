"""The command line: quick where it should be quick, and plain where a user erred."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.config import given_keys
from meshwright_launch.arguments.common import size
from meshwright_launch.cli import main, split_overrides
from tests.framework.data.corpora import bytes_tokenizer

ROOT = Path(__file__).parents[2]

SMALL = """
[data]
train = "corpus/train"
[batch]
micro_batch_size = 1
chunks = 2
[parallel]
dp = 2
pp = 2
tp = 2
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A configuration of 8 ranks."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return str(file)


@pytest.mark.parametrize(
    ("argv", "words", "overrides"),
    [
        (["train", "c", "--a.b=1"], ["train", "c"], ["--a.b=1"]),
        (["train", "--a.b", "4", "c"], ["train", "c"], ["--a.b", "4"]),
        (["train", "c", "--a.b", "-1", "--c.d"], ["train", "c"], ["--a.b", "-1", "--c.d"]),
        (["train", "--a.b", "c.toml"], ["train", "c.toml"], ["--a.b"]),
        (["mesh", "c", "--nodes", "2", "--a.b"], ["mesh", "c", "--nodes", "2"], ["--a.b"]),
        (["train", "c", "--a.b.c=x=y z\nw"], ["train", "c"], ["--a.b.c=x=y z\nw"]),
        (["sample", "runs/a.b", "--prompt=--x"], ["sample", "runs/a.b", "--prompt=--x"], []),
        (["sample", "r", "--prompt", "--", "--a.b=1"], ["sample", "r", "--prompt", "--a.b=1"], []),
    ],
)
def test_keys_of_the_configuration_are_told_from_options(
    argv: list[str], words: list[str], overrides: list[str]
) -> None:
    assert split_overrides(argv) == (words, overrides)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["mesh"],
        ["stages"],
        ["verify"],
        ["data"],
        ["data", "files"],
        ["sample"],
        ["eval"],
        ["report"],
        ["plot"],
        ["draw"],
    ],
)
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert not command or f"example:\n  meshwright {' '.join(command)}" in shown


def test_the_mesh_is_drawn_without_torch(small: str) -> None:
    script = f"""
import sys
from meshwright_launch.cli import main
code = main(["mesh", {small!r}, "--nodes", "2", "--devices-per-node", "4"])
heavy = {{"torch", "numpy", "matplotlib", "wandb"}} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "│ pp1 dp0  tp  4 5 │" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["mesh", "nowhere.toml"], "nowhere.toml"),
        (["mesh", "{small}", "--parallel.tpp=2"], "parallel.tp"),
        (
            ["mesh", "{small}", "--nodes", "3", "--devices-per-node", "3"],
            "3 nodes x 3 devices = 9 ranks",
        ),
        (
            ["mesh", "{small}", "--parallel.tp=4", "--nodes=8", "--devices-per-node=2"],
            "straddles the nodes node0, node1",
        ),
        (["stages", "nowhere.toml"], "nowhere.toml"),
        (["stages", "{small}", "--parallel.pp=20"], "15 layers over 20 stages"),
        (
            ["stages", "{small}", "--pipeline.balance=[7,9]"],
            "7 + 9 = 16, but the model has 15 layers",
        ),
        (["stages", "{small}", "--pipeline.balance=speed"], "pipeline.balance"),
        (["stages", "{small}", "--model.options.heads=3"], "model.options.heads"),
        (["plot", "{directory}"], "metrics.jsonl"),
        (["train", "{small}", "--launch.threads=0"], "launch.threads"),
        (["train", "{small}", "--fast"], "fast"),
        (["train", "{small}", "--tensor_model_parallel_size=4"], "parallel.tp"),
    ],
)
def test_errors_are_one_message(
    argv: list[str], said: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(small=small, directory=tmp_path) for word in argv]) == 2
    shown = capsys.readouterr()
    assert (
        said in shown.err
        and shown.err.startswith("meshwright: error: ")
        and "Traceback" not in shown.err
    )
    assert shown.out == ""


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["mesh"],
        ["mesh", "{small}", "--nodes=0"],
        ["sample", "x", "--fast"],
        ["plot", "x", "--a.b=1"],
    ],
)
def test_words_that_are_none_are_refused(
    argv: list[str], small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(small=small) for word in argv]) == 2
    assert "usage: " in capsys.readouterr().err


def test_stages_of_a_model_that_no_laptop_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Without data, GPU, memory or processes."""
    layers = ["--model.options.num_layers=8", "--parallel.pp=2"]
    assert main(["stages", str(ROOT / "configs/llama3-405b.toml"), *layers]) == 0
    shown = capsys.readouterr().out
    assert (
        "as on an H100 in bfloat16" in shown
        and "3,187,703,808" in shown
        and "time (chosen)" in shown
    )


def test_a_larger_cluster_holds_more_replicas_and_says_so(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mesh", small, "--nodes", "3", "--devices-per-node", "4"]) == 0
    shown = capsys.readouterr().out
    assert "has parallel.dp = 2, which is 8 ranks; these 12 hold dp = 3" in shown
    assert "pp 2 x dp 3 x tp 2 = 12 ranks" in shown


def test_a_mesh_of_its_own_size_without_numbers(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mesh", small]) == 0
    assert "8 ranks on 1 node of 8" in capsys.readouterr().out
    assert (
        main(
            [
                "mesh",
                small,
                "--parallel.tp",
                "4",
                "--parallel.tp_across_nodes",
                "--devices-per-node=2",
            ]
        )
        == 0
    )
    assert "ACROSS up to 2 nodes" in capsys.readouterr().out


def test_a_word_that_is_no_layout_starts_no_rank(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright_launch.pool.RankPool", None)
    assert main(["verify", small, "--layouts", "dp2", "dp2,banana"]) == 2
    assert "banana" in capsys.readouterr().err


def test_layouts_of_two_options_are_all_proven(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright_launch.pool.RankPool", None)
    assert main(["verify", small, "--layouts", "dp2,banana", "--layouts", "dp2"]) == 2
    assert "banana" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["config", "show", "x" * 5000], "MW-LAUNCH-093"),
        (["data", "show", "x" * 5000], "MW-LAUNCH-093"),
        (["train", "SMALL", f"--data.train={'x' * 5000}"], "MW-LAUNCH-093"),
        (["train", "SMALL", "--data.train=."], "MW-DATA-126"),
        (["train", "SMALL", "--data.train=/"], "MW-DATA-126"),
    ],
)
def test_a_path_that_cannot_be_is_one_message(
    small: str, words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([small if word == "SMALL" else word for word in words]) == 2
    assert f"[{code}]" in capsys.readouterr().err


NO_TEXT = "caf\udce9"
"""As Python has the argument when a terminal of Latin 1 sends an é."""


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "runs/a", "--prompt", NO_TEXT],
        ["data", "prepare", "a.jsonl", "--tokenizer", "t", "--out", "o", "--text-key", NO_TEXT],
        ["data", "prepare", "a.jsonl", "--tokenizer", "t", "--out", "o", "--eod", NO_TEXT],
        ["train", "configs/demo.toml", f"--data.train={NO_TEXT}"],
    ],
)
def test_words_that_are_no_text_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    """Where stdout is strict, as in most terminals: what has been prepared is told all the same."""
    bytes_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("a")
    words = [
        "data",
        "prepare",
        "a.txt",
        "--tokenizer",
        "tokenizer",
        "--out",
        NO_TEXT,
        "--validation-share",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright_launch", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"corpus prepared caf\\udce9" in done.stdout


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("False", False), ("true", True), ('"False"', "False")]
)
def test_options_of_a_table_take_the_words_of_python(text: str, value: object) -> None:
    """``"False"`` would be true for the function that gets it."""
    assert given_keys([f"--model.options.tied={text}", f"--optimizer.options.nesterov={text}"]) == {
        ("model", "options", "tied"): value,
        ("optimizer", "options", "nesterov"): value,
    }


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["--launch.cluster", "mine.toml", "run.toml"], ["--launch.cluster", "mine.toml"]),
        (["--train.compile", "run.toml"], ["--train.compile"]),
    ],
)
def test_a_file_after_a_key(words: list[str], overrides: list[str]) -> None:
    assert split_overrides(["train", *words]) == (["train", "run.toml"], overrides)


def test_sizes_beyond_all_bounds() -> None:
    for text in (f"{'9' * 400}GB", "1e308"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            size(text)
