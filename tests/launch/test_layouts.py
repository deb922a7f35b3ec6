"""Command ``meshwright layouts``."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_launch.cli import main

ROOT = Path(__file__).parents[2]
DEMO, EXPERTS = str(ROOT / "configs/demo.toml"), str(ROOT / "configs/moe-demo.toml")


def lines_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    """Return the lines that the command prints."""
    assert main(["layouts", *words]) == code
    return capsys.readouterr().out.splitlines()


def test_degrees_and_words_that_the_demo_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Seven layers and four heads: pp and tp of 8 are refused as a launch refuses them."""
    lines = lines_of(capsys, DEMO)
    degrees = {words[0]: words[1:-3] for words in map(str.split, lines) if "splits" in words}
    assert {
        axis: [each for each in found if each.isdigit()] for axis, found in degrees.items()
    } == {
        "dp": ["1", "2", "4", "8"],
        "pp": ["1", "2", "4"],
        "tp": ["1", "2", "4"],
        "cp": ["1", "2", "4", "8"],
        "ep": ["1"],
    }
    text = "\n".join(lines)
    assert "not 8: 7 layers over 8 stages" in text and "[MW-PIPELINE-002]" in text
    assert "not 2 4 8:" in text and "[MW-EP-001]" in text
    assert "not documents:" in text and "[MW-CONFIG-089]" in text
    assert "  dp2,pp2,tp2" in lines and "  dp8" in lines and "  pp8" not in lines


def test_combinations_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, EXPERTS, "--ranks", "4")
    assert "  dp4  ep 1 2 4" in lines and "  dp2,tp2  ep 1 2 4" in lines
    assert "  pp4" in lines


def test_layouts_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, DEMO, "--layout", "dp2,pp2,tp2,sequence,zb_v", "cp2,heads")
    assert [line.endswith(": possible") for line in lines[1:]] == [True, True]
    lines = lines_of(capsys, DEMO, "--layout", "dp3", "cp2,documents", "dp2", code=1)
    assert [line.rpartition("[")[2] for line in lines[1:3]] == ["MW-CONFIG-100]", "MW-CONFIG-089]"]
    assert lines[3].endswith(": possible")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--layout", "dp2,xyz"], "MW-VERIFY-003"),
        (["--layout", "zero7"], "MW-VERIFY-002"),
        (["--layout", "pp2,file"], "MW-VERIFY-006"),
        (["--parallel.tp=1", "--parallel.sequence"], "MW-CONFIG-040"),
    ],
)
def test_what_is_no_question(
    words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt word, and a configuration that is refused as it is."""
    found = main(["layouts", DEMO, *words])
    captured = capsys.readouterr()
    assert f"[{code}]" in captured.out + captured.err
    assert found == (1 if code == "MW-VERIFY-006" else 2)


def test_the_batch_is_that_of_the_ranks_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """dp "auto": micro_batch_size x chunks x dp samples on as many ranks."""
    words = ("--parallel.dp=auto", "--parallel.pp=1", "--parallel.tp=1", "--pipeline.schedule=1f1b")
    batch = ("--batch.global_batch=none", "--batch.micro_batch_size=2", "--batch.chunks=2")
    lines = lines_of(capsys, DEMO, "--ranks", "8", *words, *batch)
    assert "32 samples in a step" in lines[0] and "  dp8" in lines


def test_what_only_ranks_find_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that is a single number, under ZeRO-3."""
    model = ("--model.builder=tests.framework.config.combined:with_scalar", "--model.options={}")
    words = (*model, "--layout", "dp2,zero3", "dp2,zero2")
    lines = lines_of(capsys, DEMO, *words, code=1)
    assert "[MW-DP-001]" in lines[1] and lines[2].endswith(": possible")
