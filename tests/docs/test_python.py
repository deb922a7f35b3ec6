"""The blocks of docs/python.md run as they stand, as scripts of a user, and so does its command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright import evaluate
from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.errors import CheckpointError
from meshwright.tracking.jsonl import read_records
from meshwright_plan.report.page import page
from meshwright_plan.report.run import read_run

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
NOTEBOOK, RANKS, CALLBACKS, EXTRA, ACCURACY, STATE, OWN, SINKS, PROFILE = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)


CONFIG = """
[run]
name = "python"
directory = "runs"
[model]
builder = "meshwright_models.gpt2:build"
[model.options]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 2
max_sequence_length = 32
[data]
train = "data/train"
validation = "data/validation"
sequence_length = 32
[batch]
micro_batch_size = 2
chunks = 2
[train]
steps = 3
device = "cpu"
validate_steps = 2
"""


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 KB of words in 40 documents, a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(
            f"rank {number} sends its stage a step and waits\n" * 40
        )
    prepare_files([folder / "texts"], folder / "prepared", vocab_size=300, validation_share=0.2)
    return folder / "prepared"


@pytest.fixture
def desk(tmp_path: Path, small_corpus: Path) -> Path:
    """A folder with what the page names: data/ and run.toml."""
    (tmp_path / "data").symlink_to(small_corpus)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    (tmp_path / "profiling.py").write_text(PROFILE)
    (tmp_path / "sinks.py").write_text(SINKS)
    (tmp_path / "extra.py").write_text(EXTRA)
    (tmp_path / "accuracy.py").write_text(ACCURACY)
    return tmp_path


def run(desk: Path, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(run_directory: Path) -> list[int]:
    return sorted(each.step for each in find(run_directory))


@pytest.mark.long
@pytest.mark.slow
def test_a_notebook_trains_saves_and_resumes(desk: Path) -> None:
    (desk / "notebook.py").write_text(NOTEBOOK)
    run(desk, "notebook.py")
    assert steps_of(desk / "runs/notebook") == [3]
    assert "resuming from" in run(desk, "notebook.py")
    assert steps_of(desk / "runs/notebook") == [3, 6]


@pytest.mark.long
@pytest.mark.slow
def test_a_script_on_several_ranks(desk: Path) -> None:
    (desk / "ranks.py").write_text(RANKS)
    run(desk, "ranks.py")
    assert json.loads((desk / "runs/ranks/resolved.json").read_text())["parallel"]["dp"] == 2


@pytest.mark.long
@pytest.mark.slow
def test_callbacks_of_a_script_and_of_a_configuration(desk: Path) -> None:
    printed = run(desk, "callbacks.py")
    # the console prints beside it
    assert len(re.findall(r"[123] \d\.\d{4} \d\.\d{3}(?!\d)", printed)) == 3
    stuck = [
        "--run.name=stuck",
        "--train.steps=30",
        "--train.validate_every=1",
        "--optimizer.learning_rate=1e-30",
    ]
    printed = run(desk, "-m", "meshwright_launch", *command_with("early_stop"), *stuck)
    assert re.search(
        r"stopped after step \d+ of 30: no better validation loss than \d\.\d{4} in 2 validations",
        printed,
    )
    assert steps_of(desk / "runs/stuck")[-1] < 30


@pytest.mark.long
@pytest.mark.slow
def test_metrics_of_the_model(desk: Path) -> None:
    run(
        desk,
        "-m",
        "meshwright_launch",
        *command_with("accuracy:build"),
        '--tracking.sinks=["tensorboard"]',
    )
    records = list(read_records(desk / "runs/accuracy/metrics.jsonl"))
    assert [sorted(record.extra) for record in records] == [
        ["model/accuracy"],
        *([["model/accuracy", "model/validation/accuracy"]] * 2),
    ]
    assert all(0 <= value <= 1 for record in records for value in record.extra.values())
    events = EventAccumulator(str(desk / "runs/accuracy/tensorboard"))
    events.Reload()
    assert len(events.Scalars("model/accuracy")) == 3
    assert "model/validation/accuracy" in page([read_run(desk / "runs/accuracy")])


def command_with(text: str) -> list[str]:
    """Return the command of the page that contains ``text``, without the program."""
    (found,) = [
        line
        for line in re.findall(r"^    meshwright (train run.toml .*)$", PAGE, re.MULTILINE)
        if text in line
    ]
    return shlex.split(found)


@pytest.mark.long
@pytest.mark.slow
def test_metrics_of_a_callback(desk: Path) -> None:
    run(
        desk,
        "-m",
        "meshwright_launch",
        *command_with("smooth_loss"),
        '--tracking.sinks=["tensorboard"]',
    )
    records = list(read_records(desk / "runs/extra/metrics.jsonl"))
    means = [records[0].loss]
    for record in records[1:]:
        means.append(0.9 * means[-1] + 0.1 * record.loss)
    assert [record.extra["smooth/loss"] for record in records] == pytest.approx(means)
    assert [record.extra["smooth/fallen_share"] for record in records] == pytest.approx(
        [1 - m / means[0] for m in means]
    )
    events = EventAccumulator(str(desk / "runs/extra/tensorboard"))
    events.Reload()
    assert [each.value for each in events.Scalars("smooth/loss")] == pytest.approx(means, rel=1e-6)
    assert "smooth/fallen_share" in page([read_run(desk / "runs/extra")])


@pytest.mark.long
@pytest.mark.slow
def test_state_of_callbacks_is_resumed(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    (desk / "state.py").write_text(STATE)
    run(desk, "state.py")
    first = open_checkpoint(find(desk / "runs/ema")[0].path)
    (desk / "state.py").write_text(STATE.replace("train.steps=3", "train.steps=5"))
    run(desk, "state.py")
    second = open_checkpoint(find(desk / "runs/ema")[0].path)
    kind = TensorKind("ema")
    assert (
        second.parameters(kind) == second.parameters(TensorKind.WEIGHTS)
        and second.manifest.step == 5
    )
    best = [each.manifest.state["callbacks"]["Best"]["best"] for each in (first, second)]
    assert best[1] < best[0] < 1e9
    plain, average = (
        evaluate(desk / "runs/ema", batches=1, weights=name).loss for name in ("weights", "ema")
    )
    assert plain < average < 6.5  # the average lags behind
    with pytest.raises(CheckpointError) as caught:
        evaluate(desk / "runs/ema", weights="emma")
    assert caught.value.code == "MW-INFERENCE-017"


@pytest.mark.long
@pytest.mark.slow
def test_own_optimizer_schedule_and_groups(desk: Path) -> None:
    (desk / "own.py").write_text(OWN)
    run(desk, "-m", "meshwright_launch", *command_with("own:radam"))
    saved = open_checkpoint(find(desk / "runs/own")[0].path)
    assert {"exp_avg", "exp_avg_sq", "weights"} == set(saved.kinds())
    rates = [record.learning_rate for record in read_records(desk / "runs/own/metrics.jsonl")]
    assert rates == pytest.approx([1e-3 * step / 100 for step in (1, 2, 3)]), "RAdam's own rate"


@pytest.mark.long
@pytest.mark.slow
def test_sinks_of_a_configuration(desk: Path) -> None:
    for steps in (2, 3):  # the second start resumes
        run(desk, "-m", "meshwright_launch", *command_with("sinks"), f"--train.steps={steps}")
    records = list(read_records(desk / "runs/sinks/metrics.jsonl"))
    assert (desk / "runs/sinks/loss.csv").read_text() == "".join(
        f"{each.step},{each.loss}\n" for each in records
    )
    events = EventAccumulator(str(desk / "runs/sinks/tensorboard"))
    events.Reload()
    scalars = {each.step: each.value for each in events.Scalars("train/loss")}
    assert scalars == pytest.approx({each.step: each.loss for each in records}, rel=1e-6) and set(
        scalars
    ) == {1, 2, 3}


@pytest.mark.long
@pytest.mark.slow
def test_a_profile_is_written(desk: Path) -> None:
    run(desk, "-m", "meshwright_launch", *command_with("profiling"))
    assert json.loads((desk / "trace.json").read_text())["traceEvents"]
