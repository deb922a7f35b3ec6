"""Names and messages from outside reach the terminal with their control characters written out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.terminal.output import print_lines, put, tell, visible
from meshwright.tracking.console import ConsoleSink
from meshwright_launch.cli import main
from tests.plan.report.builders import make_run, record

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\r",
    "\x08",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\x7f",
    "\x00",
    "\u2028",
]


def controls(text: str) -> list[str]:
    return [each for each in text if each in "\x1b\x07\r\x08\x9b\u202e\u2066\x7f\x00\u2028"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_way_out(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    for way in (print_lines, tell, put):
        way(f"a{hostile}b\n\tc é 漢 🙂")
    said = capsys.readouterr()
    assert not controls(said.out + said.err) and said.out.count("\n\tc é 漢 🙂\n") == 2
    assert visible("\x1b\r\x9b\u202e") == r"\x1b\x0d\u009b\u202e"


def test_a_tensor_name_is_shown_visibly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a listing and in an error, as in a file's name."""
    name = "\x1b]0;owned\x07\r\u202e"
    directory = make_run(tmp_path / "demo", 20, saved=(10,))
    manifest = directory / "checkpoints" / "step-00000010" / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["tensors"] = {f"weights/{name}": each for each in tree["tensors"].values()}
    manifest.write_text(json.dumps(tree))
    for words in (
        ["checkpoint", "show", manifest.parent],
        ["report", directory],
        ["status", tmp_path / name],
    ):
        main([str(word) for word in words])
        said = capsys.readouterr()
        assert not controls(said.out + said.err), words
    assert r"\x1b]0;owned\x07\x0d\u202e" in said.err


def test_a_value_of_a_configuration_is_shown_visibly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[run]\nname = "\\u001b[31mred\\r"\n"\\u001b[2Jkey" = 1\n')
    assert main(["config", "show", str(path)]) == 2
    said = capsys.readouterr().err
    assert not controls(said) and "x1b" in said


def test_colours_of_ours_stay() -> None:
    """A terminal still gets its bar."""
    file = io.StringIO()
    sink = ConsoleSink(10, console=Console(file=file, force_terminal=True))
    sink.write(record(1))
    sink.close()
    assert "\x1b[" in file.getvalue()


TWO_THREADS = """
import sys, threading
from meshwright.terminal.output import print_lines, put, tell
sys.setswitchinterval(1e-6)
def work(letter):
    for _ in range(2000):
        print_lines(letter * 40)
        tell(letter * 40)
        put(letter * 40, flush=True)
threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_lines_of_threads_stay_whole() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.returncode == 0
    whole = {letter * 40 for letter in "abcd"}
    said = ran.stdout.splitlines() + ran.stderr.splitlines()
    assert len(said) == 4 * 3 * 2000 and set(said) == whole
