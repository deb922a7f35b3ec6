"""`meshwright init`: what it writes trains at once, on every model, on any text;
what is there stays.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from meshwright.config import load
from meshwright_launch.cli import main
from meshwright_launch.init import STARTERS, run_name
from tests.support.marks import long_row, mark_all_rows_but

ROOT = Path(__file__).parents[2]
SHORT = [
    "--train.steps=2",
    "--batch.global_batch=4",
    "--train.device=cpu",
    "--optimizer.warmup_steps=1",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with some text."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for page in sorted((ROOT / "docs").glob("*.md"))[:6]:
        shutil.copy(page, "text")


@mark_all_rows_but("long", "llama")
@pytest.mark.parametrize("model", STARTERS)
def test_each_model_trains_as_written(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{model}.toml"
    assert main(["init", file, "--model", model, "--text", "text"]) == 0
    assert f"written: {file}; next: `meshwright train {file}`" in capsys.readouterr().out
    assert main(["train", file, *SHORT]) == 0
    assert Path(f"runs/{model}/checkpoints/step-00000002").is_dir()
    assert "validation" in Path(f"runs/{model}/metrics.jsonl").read_text()
    for words in (["--parallel.pp=2", "--parallel.tp=2"], ["--parallel.dp=8"]):
        assert main(["mesh", file, *words]) == 0, "the layouts that it speaks of are possible"


@pytest.mark.long
def test_without_text_it_trains_on_the_standard_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for name in ("argparse", "ast", "bisect", "cmd", "copy", "csv", "glob", "heapq"):
        shutil.copy(__import__(name).__file__, library)
    # 8 files of it, instead of 700
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    assert main(["init"]) == 0
    config = load("first.toml", [])
    assert (config.run.name, config.data.train) == ("first", "runs/data/stdlib/train")
    assert main(["train", "first.toml", *SHORT]) == 0
    before = Path("runs/data/stdlib/train.bin").stat().st_mtime_ns
    assert main(["init", "second.toml"]) == 0, "the corpus is there already, and is used"
    assert Path("runs/data/stdlib/train.bin").stat().st_mtime_ns == before


@pytest.mark.parametrize("folder", [".", long_row("books")])
def test_one_file_of_few_words(folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "book.txt").write_text(
        "".join(f"{number} is a number, and so is {number + 1}.\n" for number in range(400))
    )
    assert main(["init", "one.toml", "--text", "book.txt" if folder == "." else folder]) == 0
    config = load("one.toml", [])
    assert (
        config.data.validation == "runs/data/one/validation"
        and config.model.options["vocab_size"] % 8 == 0
    )
    assert main(["train", "one.toml", *SHORT]) == 0


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_exists_stays(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("mine.toml")
    if kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere.toml")
    assert main(["init", "mine.toml", "--text", "text"]) == 2
    told = capsys.readouterr().err
    assert (
        "mine.toml exists and stays as it is: name another file, as in `meshwright init"
        " mine-2.toml`" in told
    )
    assert not Path("runs").exists() and not Path("nowhere.toml").exists()
    assert kind != "file" or place.read_text() == "mine"


def test_no_text_leaves_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.toml", "--text", "nowhere"]) == 2
    assert (
        "there is no file or folder nowhere" in capsys.readouterr().err
        and not Path("mine.toml").exists()
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a b.toml", "a-b"),
        ('"; touch canary #.toml', "touch-canary-"),
        ("$(touch canary).toml", "touch-canary-"),
        ("{{ 1 }}.toml", "1-"),
        ("é.toml", "run"),
        ("deep/er/mine.toml", "mine"),
    ],
)
def test_any_name_of_a_file(file: str, name: str) -> None:
    assert run_name(Path(file)) == name
    assert main(["init", file, "--text", "text"]) == 0
    config = load(file, [])
    assert config.run.name == name and config.data.train == f"runs/data/{name}/train"
    assert set(tomllib.loads(Path(file).read_text())) >= {
        "run",
        "model",
        "data",
        "batch",
        "parallel",
        "train",
    }


@pytest.mark.parametrize("file", ["a\nb.toml", "a\x1b.toml", "a\udcff.toml"])
def test_a_name_that_would_end_its_comment(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", file, "--text", "text"]) == 2
    assert "is no name for a configuration" in capsys.readouterr().err and not Path("runs").exists()
