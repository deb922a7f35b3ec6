"""`meshwright config import` and `config show` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load
from meshwright_launch.cli import main
from tests.interop.configs import samples

ROOT = Path(__file__).parents[2]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A nanotron file."""
    file = tmp_path / "theirs.yaml"
    file.write_text(samples.NANOTRON)
    return file


def test_a_file_is_written_with_its_account(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "ours.toml"
    assert main(["config", "import", str(theirs), "--out", str(out), "--run.name=mine"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in (
        "read as a nanotron configuration: ",
        "not carried over: set by hand",
        "tokenizer.tokenizer_name_or_path",
        f"written: {out}; next: set data.train in it, then `meshwright stages {out}`",
    ):
        assert part in shown.out
    text = out.read_text()
    assert load(out, ["--data.train=x"]).run.name == "mine" and text.startswith(
        "# From theirs.yaml, read as a nanotron configuration"
    )
    assert "#   tokenizer.tokenizer_name_or_path" in text
    assert (
        main(["mesh", str(out), "--data.train=x"]) == 0
        and "pp 2 x dp 2 x tp 2 = 8 ranks" in capsys.readouterr().out
    )


def test_without_out_the_file_is_all_that_stdout_has(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "import", str(theirs), "--from", "nanotron"]) == 0
    shown = capsys.readouterr()
    again = theirs.with_name("again.toml")
    again.write_text(shown.out)
    assert (
        load(again, ["--data.train=x"]).parallel.pp == 2
        and "read as a nanotron configuration" in shown.err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["{theirs}", "--out", "{theirs}"], "exists: name another file, or add --replace"),
        (
            ["{theirs}", "--from", "torchtitan"],
            "theirs.yaml: a file of nanotron, not of torchtitan: leave --from out",
        ),
        (["{theirs}", "--parallel.tpp=2"], "did you mean parallel.tp"),
        (["{theirs}", "--ranks", "7"], "--ranks 7, but the file's dp x pp x cp x tp is 8"),
        (
            ["{theirs}", "--pipeline.schedule=zb_v", "--pipeline.interleave=3"],
            "cannot be run here: pipeline.interleave=3",
        ),
        (["{theirs}", "--out", "{theirs}/x"], "nothing can lie below it"),
    ],
)
def test_what_goes_wrong_is_one_message(
    words: list[str], said: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = theirs.read_text()
    assert main(["config", "import", *(word.format(theirs=theirs) for word in words)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == "" and theirs.read_text() == before


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.toml",
            samples.TORCHTITAN,
            "a.toml: a configuration of torchtitan: `meshwright config import {file}`",
        ),
        (
            "a.yaml",
            samples.NANOTRON,
            "a.yaml: `meshwright config import {file}` reads nanotron's YAML",
        ),
    ],
)
def test_who_trains_with_a_file_of_theirs_is_told_the_way(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert main(["mesh", str(file)]) == 2
    assert said.format(file=file) in capsys.readouterr().err


def test_show_tells_where_each_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "configs/demo.toml")
    assert (
        main(
            [
                "config",
                "show",
                file,
                "--parallel.tp=4",
                "--parallel.pp=1",
                "--model.options.dropout=0.1",
            ]
        )
        == 0
    )
    rows = dict(
        line.split("  # ") for line in capsys.readouterr().out.splitlines() if "  # " in line
    )
    found = {text.strip(): origin for text, origin in rows.items()}
    lines = Path(file).read_text().splitlines()
    assert found["tp = 4"] == found["options.dropout = 0.1"] == "command line"
    assert found["chunks = 4"] == found["processes = 8"] == "follows from the others"
    for text in ("dp = 2", 'name = "demo"', "options.hidden_size = 128"):
        place, _, line = found[text].rpartition(":")
        assert (
            place == file and text.removeprefix("options.").split(" = ")[0] in lines[int(line) - 1]
        )
    assert not any(text.startswith("offload") for text in found)


def test_show_all_has_every_key_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "configs/llama3-8b.toml")
    assert main(["config", "show", file, "--all"]) == 0
    shown = capsys.readouterr().out
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert "offload = false" in shown and "# default" in shown
    assert load(again).model_dump() | {"batch": None, "launch": None} == load(file).model_dump() | {
        "batch": None,
        "launch": None,
    }


def test_show_for_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "configs/gpt2-124m.toml")
    assert main(["config", "show", file, "--ranks", "16"]) == 0
    shown = capsys.readouterr().out
    assert "dp = 16" in shown and "chunks = 4" in shown
    assert main(["config", "show", file, "--ranks", "3"]) == 2
    assert (
        "batch.global_batch = 512 is not a multiple of micro_batch_size 8 x dp 3"
        in capsys.readouterr().err
    )
