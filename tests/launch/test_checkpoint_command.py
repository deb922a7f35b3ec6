"""`meshwright checkpoint`: what it tells of sound and damaged checkpoints,
and with which exit code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshwright_launch.cli import main
from tests.framework.checkpoint.conftest import KINDS, Fake
from tests.framework.checkpoint.test_checkpoint_hostile import forge


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 100 and 200."""
    directory = tmp_path / "run"
    for step in (100, 200):
        Fake().save(directory, step, tp=2)
    return directory


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def cut_short(run: Path, step: int) -> Path:
    shard = sorted((run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    return shard


def flipped(run: Path, step: int) -> Path:
    shard = sorted((run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "list", run)
    lines = out.splitlines()
    assert code == 0 and [line.split()[:2] for line in lines[1:]] == [
        ["100", "800"],
        ["200", "1,600"],
    ]
    assert said(capsys, "list", run / "checkpoints" / "step-00000100")[:2] == (0, out)
    shard = cut_short(run, 200)
    (run / "checkpoints" / ".tmp-step-00000300-a1").mkdir()
    code, out, _ = said(capsys, "list", run)
    assert code == 0 and "DAMAGED" in out.splitlines()[2] and shard.name in out.splitlines()[2]
    assert out.splitlines()[3].endswith(
        ".tmp-step-00000300-a1: a save in progress, or one that died"
    )


def test_verify_reads_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", run)[0] == 0
    shard = flipped(run, 200)
    code, out, _ = said(capsys, "verify", run)
    assert code == 1
    assert "step-00000100: sound" in out and "step-00000200: DAMAGED" in out and shard.name in out
    assert said(capsys, "verify", run, "--step=100")[0] == 0
    assert said(capsys, "verify", run, "--step=200")[0] == 1
    assert said(capsys, "verify", run / "checkpoints" / "step-00000100")[0] == 0
    assert said(capsys, "verify", run / "checkpoints" / "step-00000200")[0] == 1


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "show", run)
    assert code == 0 and "step          200" in out and "weights/block0.mlp.up.weight" in out
    line = next(
        line for line in out.splitlines() if line.startswith("weights/block0.mlp.up.weight")
    )
    assert line.split() == ["weights/block0.mlp.up.weight", "BF16", "(24,", "6)", "2", "pieces"]
    code, out, _ = said(capsys, "show", run, "--step", "100", "--tensor", "block0.mlp.down.weight")
    assert code == 0 and len(out.splitlines()) == len(KINDS) * 3, "every kind, each with two pieces"
    assert "[0:6, 12:24]  pp0-tp1-" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("show", "RUN", "--step", "7"),
            "has no checkpoint of step 7; it has those of steps 100, 200",
        ),
        (
            ("show", "RUN", "--tensor", "lost"),
            "has no tensor 'lost'; it has those of block0.mlp.down.weight",
        ),
        (("list", "RUN/nowhere"), "is no directory: give a run directory"),
        (("verify", "RUN/checkpoints"), "has no checkpoint yet: give a run directory"),
        (
            ("verify", "RUN/checkpoints/step-00000100", "--step", "9"),
            "is the checkpoint of step 100, not of --step",
        ),
    ],
)
def test_bad_input(
    words: tuple[str, ...], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, *(word.replace("RUN", str(run)) for word in words))
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("section", "value"), [("model", 5), ("parallel", 5), ("pipeline", "1f1b"), ("adapter", [1])]
)
def test_a_section_that_is_no_table(
    section: str, value: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = run / "checkpoints" / "step-00000200"
    forge(damaged, lambda manifest: manifest["config"].update({section: value}))
    message = f"config.{section} = {value!r}, which must be a table"
    code, out, _ = said(capsys, "list", run)
    assert code == 0 and "DAMAGED" in out.splitlines()[2] and message in out.splitlines()[2]
    assert said(capsys, "show", run, "--step", "100")[0] == 0
    out_directory = str(tmp_path / "out")
    for words in (
        ["checkpoint", "show", str(run)],
        ["checkpoint", "export", str(run), "--out", out_directory],
        ["convert", str(run), "--to", "hf", out_directory],
    ):
        assert main(words) == 2, words
        out, err = capsys.readouterr()
        assert err.startswith("meshwright: error: ") and message in err
    assert not (tmp_path / "out").exists()


def test_it_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in (("list",), ("verify",), ("show",)):
        said(capsys, *words, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
