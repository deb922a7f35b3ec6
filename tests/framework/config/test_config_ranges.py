"""Numbers that nothing could be built from: one message within a second,
before anything is allocated.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.checkpoint.check import coverage
from meshwright.checkpoint.manifest import Dtype, PieceEntry, TensorEntry
from meshwright.config import load
from meshwright.model.build import build_model
from meshwright.schedule.build import build
from meshwright_launch.cli import main
from meshwright_launch.local import launch
from tests.support.errors import raises

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.toml")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--batch.chunks=1000000 --batch.global_batch=none", "MW-CONFIG-035"),
        ("--pipeline.schedule=interleaved_1f1b --pipeline.interleave=1000000", "MW-CONFIG-035"),
        ("--parallel.pp=1000000 --parallel.tp=1000000", "MW-CONFIG-034"),
        ("--parallel.pp=1000000", "MW-CONFIG-034"),
        ("--model.options.num_layers=1000000000", "MW-CONFIG-036"),
        ("--batch.micro_batch_size=1000000000000", "MW-CONFIG-020"),
        ("--train.steps=1000000000000000000000", "MW-CONFIG-020"),
        ("--train.steps=-1", "MW-CONFIG-020"),
    ],
)
def test_absurd_numbers(words: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    with raises(code):
        load(DEMO, words.split())
    assert time.process_time() - began < 1
    assert main(["config", "show", DEMO, *words.split()]) == 2
    assert code in capsys.readouterr().err


def test_derived_micro_batches_are_bounded_too() -> None:
    """chunks that follow from global_batch meet the bound where the schedule is built."""
    with raises("MW-SCHEDULE-011"):
        build("1f1b", 16, 10**9)
    with raises("MW-SCHEDULE-011", 64, 65, "266,240"):
        build("interleaved_1f1b", 64, 64, 65)


@pytest.mark.long
def test_many_pieces_of_a_tensor_are_checked_in_seconds() -> None:
    """22,500 pieces cut along both dims; and the same with one that stands there twice,
    instead of another.
    """
    side = 150
    pieces = tuple(
        PieceEntry(file="a.safetensors", key=str(at), offset=(at // side, at % side), shape=(1, 1))
        for at in range(side**2)
    )
    began = time.process_time()
    assert coverage(TensorEntry(shape=(side, side), dtype=Dtype.F32, pieces=pieces)) is None
    said = coverage(
        TensorEntry(shape=(side, side), dtype=Dtype.F32, pieces=(*pieces[:-1], pieces[7]))
    )
    assert said is not None and "overlap" in said
    said = coverage(TensorEntry(shape=(side, side + 1), dtype=Dtype.F32, pieces=pieces))
    assert said is not None and "22500 of the 22650" in said and len(said) < 1000
    assert time.process_time() - began < 10


def test_absurd_shapes_are_refused() -> None:
    piece = PieceEntry(file="a.safetensors", key="a", offset=(0,) * 20, shape=(2**10,) * 20)
    said = coverage(TensorEntry(shape=(2**10,) * 20, dtype=Dtype.F32, pieces=(piece,)))
    assert said is not None and "2^60 elements" in said


def test_more_than_a_cluster_or_a_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    for nodes, message in (
        ("1000000000", "argument --nodes: 1000000000 is not a whole number from 1 to 1,048,576"),
        ("1048576", "8,388,608 devices, and at most 1,048,576"),
    ):
        assert main(["mesh", DEMO, "--nodes", nodes, "--devices-per-node", "8"]) == 2
        found = capsys.readouterr().err
        assert message in found and found.count("[MW-") == 1 and len(found) < 500
    config = load(
        DEMO, ["--launch.processes=2048", "--parallel.dp=512", "--batch.global_batch=2048"]
    )
    with raises("MW-LAUNCH-033", "2,048", "1,024"):
        launch(lambda config, give_up: None, config)


def test_a_builder_that_asks_for_too_much_is_placed_in_its_own_code() -> None:
    words = ["--model.options.hidden_size=1000000000000"]
    with raises("MW-MODEL-003"):
        build_model("meshwright_models.gpt2:build", load(DEMO, words).model.options, 0)
