"""``meshwright draw``: what it prints and writes, without torch, and what it says of bad words."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright_launch.cli import main
from meshwright_plan.commands.drawing import parse_costs
from tests.support.errors import has_code

ROOT = Path(__file__).parents[3]

SMALL = """
[data]
train = "corpus/train"
[batch]
micro_batch_size = 1
chunks = 4
[parallel]
pp = 3
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A configuration of three pipeline ranks."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return str(file)


def test_costs_beyond_all_bounds() -> None:
    with pytest.raises(
        ConfigError, match=r"--costs .* is not a cost", check=has_code("MW-LAUNCH-017")
    ):
        parse_costs("f=1e308,comm=1e308")


def test_the_schedule_is_printed_without_torch(small: str) -> None:
    script = f"""
import sys
from meshwright_launch.cli import main
code = main(["draw", {small!r}, "--pipeline.schedule=gpipe", "--costs", "b=1"])
heavy = {{"torch", "numpy", "matplotlib", "wandb"}} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "gpipe pp=3 chunks=4: bubble 33.3 % of total time; activations in flight 4 4 4",
        "rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        "rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        "rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
        "",
        "in ticks: f 1, b 1, comm 0, reduce 0, step 0 (change them with --costs)",
    ]


def test_every_format_is_written(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "er"
    assert main(["draw", small, "--batch.chunks=2", "--out", str(out)]) == 0
    stem = out / "1f1b-pp3-chunks2"
    files = [
        stem.with_name(stem.name + suffix) for suffix in (".txt", ".svg", ".png", ".trace.json")
    ]
    printed = capsys.readouterr().out
    assert printed.endswith("".join(f"{file}\n" for file in files))
    assert sorted(out.iterdir()) == sorted(files)
    assert printed.startswith(files[0].read_text())
    ElementTree.parse(files[1])
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[3].read_text())["traceEvents"]


def test_a_schedule_of_ones_own(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of computations alone, with two stages on a rank; its name is no path."""
    own = tmp_path / "own.txt"
    own.write_text(
        "# ../mine pp=2 num_stages=4 chunks=1 placement=loop\n0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n"
    )
    words = [
        "--parallel.pp=2",
        "--batch.chunks=1",
        f"--pipeline.schedule_file={own}",
        "--costs",
        "b=1,comm=0.5",
    ]
    assert main(["draw", small, *words, "--format", "text", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("../mine pp=2 chunks=1 interleave=2: bubble") and "3F0 3B0" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == [
        "mine-pp2-chunks1-interleave2.txt"
    ]


def test_only_the_wanted_formats_are_written(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        main(["draw", small, "--out", str(tmp_path / "out"), "--format", "trace, text,trace"]) == 0
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "1f1b-pp3-chunks4.trace.json",
        "1f1b-pp3-chunks4.txt",
    ]
    monkeypatch.chdir(tmp_path / "out")
    assert main(["draw", small, "--format", "svg"]) == 0
    assert (tmp_path / "out" / "1f1b-pp3-chunks4.svg").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["{small}", "--parallel.ppp=2"], "parallel.pp"),
        (
            ["{small}", "--out", "{directory}", "--format", "svg,gif"],
            "'gif' is not a format: choose from text, svg, png, trace",
        ),
        (["{small}", "--out", "{small}/below"], "--out"),
        (["{small}", "--costs", "f=0"], "f needs a number above 0"),
        (["{small}", "--costs", "comm=-1"], "comm needs a number from 0 up"),
        (["{small}", "--costs", "f=1,backward=2"], "choose from f, b, i, w, comm, reduce, step"),
        (["{small}", "--costs", "w=nan"], "w needs a number above 0"),
        (["{small}", "--costs", "w"], "w needs a number above 0"),
    ],
)
def test_bad_words_are_explained(
    words: list[str], said: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["draw", *(word.format(small=small, directory=tmp_path / "out") for word in words)])
        == 2
    )
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert not (tmp_path / "out").exists()
