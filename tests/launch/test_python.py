"""The Python API trains, saves and resumes as the command does,
and errors of callbacks end a run on every rank.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright
from meshwright.checkpoint import find, open_checkpoint
from meshwright.errors import CallbackError, ConfigError, DataError, LockError
from meshwright.tracking.jsonl import read_records
from meshwright_launch.failure import RankFailed
from meshwright_launch.python import OpenRun
from tests.support.errors import has_code

ROOT = Path(__file__).parents[2]
SURFACE = ROOT / "tests" / "golden" / "public.txt"
MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_sequence_length": 16,
}
STEPS = 6


def made(directory: Path, **sections: Mapping[str, Any]) -> meshwright.RunConfig:
    """Return a small GPT on random tokens of the test's dataset."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "own", "directory": str(directory)},
        "model": {"builder": "meshwright_models.gpt2:build", "options": MODEL},
        "data": {"train": "", "builder": "tests.launch.test_python:tokens"},
        "batch": {"micro_batch_size": 2, "chunks": 2},
        "train": {"steps": STEPS, "device": "cpu", "dtype": "float64", "validate_steps": 1},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    return meshwright.make_config(**tree)


def tokens(split: str, has_validation: bool = True) -> list[tuple[Tensor, Tensor]] | None:
    """64 samples of random tokens and their successors."""
    if split == "validation" and not has_validation:
        return None
    ids = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(len(split)))
    return [(row[:-1], row[1:]) for row in ids]


def losses_of(directory: Path, name: str) -> list[float]:
    return [record.loss for record in read_records(directory / name / "metrics.jsonl")]


class StopAt(meshwright.Observer):
    """Asks to end the run on the last rank alone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, parts: meshwright.Parts, event: meshwright.StepEvent) -> None:
        if parts.state.step == self.step and parts.mesh.rank == parts.mesh.grid.size - 1:
            parts.request_stop("enough")


class FailAt(meshwright.Observer):
    """Raises on the last rank alone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, parts: meshwright.Parts, event: meshwright.StepEvent) -> None:
        if parts.state.step == self.step and parts.mesh.rank == parts.mesh.grid.size - 1:
            raise ValueError("a bug of the user")


class Measure(meshwright.Observer):
    """Records one metric."""

    def __init__(self, name: Any, value: Any) -> None:
        self.name, self.value = name, value

    def after_step(self, parts: meshwright.Parts, event: meshwright.StepEvent) -> None:
        event.metrics[self.name] = self.value


class FailAfter(meshwright.Observer):
    """Raises after training."""

    def after_training(self, parts: meshwright.Parts) -> None:
        raise ValueError("too late")


def stop_at_two(parts: meshwright.Parts) -> meshwright.Observer:
    return StopAt(2)


def no_observer(parts: meshwright.Parts) -> int:
    return 3


def raises(parts: meshwright.Parts) -> meshwright.Observer:
    raise RuntimeError("not made")


def steps_by_hand(config: meshwright.RunConfig) -> None:
    with meshwright.open_run(config) as run:
        losses = [run.take_step().loss for _ in range(3)]
        run.save()
        if run.parts.mesh.rank == 0:
            (run.directory / "losses.json").write_text(json.dumps([*losses, run.validate()]))
        else:
            run.validate()


def fails_at_two(config: meshwright.RunConfig) -> None:
    meshwright.run_training(config, [FailAt(2)])


def stops_at_two(config: meshwright.RunConfig) -> None:
    meshwright.run_training(config, [StopAt(2)])


def test_metrics_of_callbacks_are_recorded_and_survive_a_resume(tmp_path: Path) -> None:
    meshwright.run_training(
        made(tmp_path, train={"steps": 2}), [Measure("ema/decay", 0.1), Measure("count", 3)]
    )
    meshwright.run_training(made(tmp_path), [Measure("ema/decay", 0.3)])
    records = list(read_records(tmp_path / "own/metrics.jsonl"))
    assert [record.extra for record in records] == [{"ema/decay": 0.1, "count": 3.0}] * 2 + [
        {"ema/decay": 0.3}
    ] * 4
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.report.page import page
    from meshwright_plan.report.run import read_run

    assert "ema/decay" in page([read_run(tmp_path / "own")])


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("train/loss", 1.0, "event.metrics['train/loss']: a name"),
        ("a b", 1.0, "event.metrics['a b']: a name"),
        (7, 1.0, "event.metrics[7]: a name"),
        ("<script>", 1.0, "event.metrics['<script>']: a name"),
        ("x", float("nan"), "event.metrics['x'] is nan"),
        ("x", 10**400, "event.metrics['x'] is 1000"),
        ("x", True, "event.metrics['x'] is True"),
        ("x", torch.ones(1), "event.metrics['x'] is tensor([1.])"),
    ],
)
def test_a_metric_that_cannot_be_recorded_ends_the_run_saved(
    tmp_path: Path, name: Any, value: Any, place: str
) -> None:
    with pytest.raises(CallbackError, check=has_code("MW-LAUNCH-058")) as error:
        meshwright.run_training(made(tmp_path, checkpoint={"every": 1}), [Measure(name, value)])
    assert error.value.code == "MW-LAUNCH-058" and place in str(error.value)
    assert "callback Measure.after_step, step 1, rank 0: " in str(error.value)
    assert [record.step for record in read_records(tmp_path / "own/metrics.jsonl")] == [1]
    assert find(tmp_path / "own")[0].step == 1


def exits() -> None:
    """Ends the process, as scripts do."""
    sys.exit("no more")


class ExitsAtTwo(meshwright.Observer):
    """Calls ``sys.exit`` after the second step."""

    def after_step(self, parts: meshwright.Parts, event: meshwright.StepEvent) -> None:
        if parts.state.step == 2:
            exits()


class Shortened(list[tuple[Tensor, Tensor]]):
    """Samples, of which number 9 ends the process."""

    def __getitem__(self, index: Any) -> Any:
        return exits() if index == 9 else super().__getitem__(index)


def shortened(split: str) -> Shortened:
    return Shortened(tokens(split) or [])


def test_sys_exit_of_a_callback_or_a_dataset_is_an_error_with_its_name(tmp_path: Path) -> None:
    """Not the end of one rank without a word, while the others wait for it."""
    with pytest.raises(
        CallbackError,
        match=r"ExitsAtTwo\.after_step failed after step 2 .*: SystemExit: no more",
        check=has_code("MW-LAUNCH-058"),
    ):
        meshwright.run_training(made(tmp_path, checkpoint={"every": 2}), [ExitsAtTwo()])
    assert [each.step for each in find(tmp_path / "own")] == [2]
    config = made(
        tmp_path, run={"name": "data"}, data={"builder": "tests.launch.test_python:shortened"}
    )
    with pytest.raises(
        DataError,
        match=r"sample 9 of 64 failed at .*test_python\.py:\d+: SystemExit: no more",
        check=has_code("MW-DATA-009"),
    ):
        meshwright.run_training(config.replace(train={"steps": 40}))


class Keeps(meshwright.Observer):
    """Its state is ``value``; a function is called for it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value() if callable(self.value) else self.value}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "the state is no plain JSON object: Out of range"),
        (torch.ones(1), "the state is no plain JSON object: Object of type Tensor"),
        ("a file name of \udcff", "the state is no plain JSON object: 'utf-8' codec can't encode"),
        (
            functools.reduce(lambda inner, _: [inner], range(98), 0),
            "the state is no plain JSON object: nested more than",
        ),
        (lambda: json.loads("{"), r"at \S*test_python\.py:\d+: JSONDecodeError"),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_named_at_its_callback(
    tmp_path: Path, value: Any, text: str
) -> None:
    """Where the standard library raises, the user's line is named."""
    with pytest.raises(
        CallbackError,
        match=rf"callback Keeps\.state_dict failed .*{text}",
        check=has_code("MW-LAUNCH-058"),
    ):
        meshwright.run_training(made(tmp_path), [Keeps(value)])


def test_the_deepest_state_is_read_back(tmp_path: Path) -> None:
    deepest = functools.reduce(lambda inner, _: [inner], range(96), "an é, and \\ud800")
    meshwright.run_training(made(tmp_path), [Keeps(deepest)])
    assert open_checkpoint(find(tmp_path / "own")[0].path).manifest.state["callbacks"] == {
        "Keeps": {"value": deepest}
    }


class Other(Keeps):
    """A callback of another name."""


@pytest.mark.parametrize("between", [[], [Other(2)], None])
def test_a_state_of_a_callback_that_is_gone_is_not_saved_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], between: list[Keeps] | None
) -> None:
    """Otherwise its next start would load the state of an older step. None:
    a loop of the user's own.
    """
    config = made(tmp_path, train={"steps": 2})
    meshwright.run_training(config, [Keeps(1)])
    capfd.readouterr()
    config = made(tmp_path, train={"steps": 4})
    if between is not None:
        meshwright.run_training(config, between)
    else:
        with meshwright.open_run(config) as run:
            for _ in range(2):
                run.take_step()
            run.save()
    states = open_checkpoint(find(tmp_path / "own")[0].path).manifest.state.get("callbacks", {})
    assert states == ({"Other": {"value": 2}} if between else {})
    assert "changed: the state Keeps of a callback that does not run now" in capfd.readouterr().out


def test_steps_by_hand_are_those_of_the_command_and_resume(tmp_path: Path) -> None:
    meshwright.run_training(made(tmp_path, run={"name": "whole"}))
    whole = losses_of(tmp_path, "whole")
    assert len(whole) == STEPS
    config = made(tmp_path)
    with meshwright.open_run(config) as run:
        first = [run.take_step().loss for _ in range(4)]
        saved = run.save()
        assert run.save() == saved and open_checkpoint(saved).manifest.step == 4
        with pytest.raises(LockError, check=has_code("MW-RUN-012")), meshwright.open_run(config):
            pass
    with meshwright.open_run(config) as run:
        assert run.step == 4 and run.save() == saved
        second = [run.take_step().loss for _ in range(2)]
        last = run.save()
    assert first + second == whole
    theirs = find(tmp_path / "whole")[0].path
    files = [
        {name: file.sha256 for name, file in open_checkpoint(at).manifest.files.items()}
        for at in (last, theirs)
    ]
    assert files[0] == files[1]
    assert (
        meshwright.evaluate(tmp_path / "own", step=4, batches=1, trust_code=True).tokens == 4 * 16
    )


@pytest.mark.slow
def test_ranks_that_are_spawned_compute_the_numbers_of_one(tmp_path: Path) -> None:
    steps_by_hand(made(tmp_path))
    meshwright.spawn(
        steps_by_hand, made(tmp_path, run={"name": "four"}, parallel={"pp": 2, "tp": 2})
    )
    alone, four = (
        json.loads((tmp_path / name / "losses.json").read_text()) for name in ("own", "four")
    )
    assert alone == pytest.approx(four, rel=1e-12)


@pytest.mark.slow
def test_one_rank_asks_to_stop_and_all_do_with_a_checkpoint(tmp_path: Path) -> None:
    meshwright.spawn(stops_at_two, made(tmp_path, run={"name": "stopped"}, parallel={"dp": 2}))
    assert [each.step for each in find(tmp_path / "stopped")] == [3]


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_after_the_save(tmp_path: Path) -> None:
    config = made(
        tmp_path,
        run={"name": "failed"},
        parallel={"dp": 2},
        checkpoint={"every": 2, "asynchronous": False},
    )
    with pytest.raises(
        RankFailed,
        match=r"FailAt\.after_step failed after step 2 on rank 1 at .*test_python.py:\d+: V",
    ):
        meshwright.spawn(fails_at_two, config)
    assert [each.step for each in find(tmp_path / "failed")] == [2]


def test_an_error_in_this_process(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"a bug of the user \[MW-LAUNCH-058\]"):
        meshwright.run_training(made(tmp_path), [FailAt(2)])
    with pytest.raises(
        CallbackError,
        match=r"FailAfter\.after_training failed after step 6",
        check=has_code("MW-LAUNCH-058"),
    ):
        meshwright.run_training(made(tmp_path, run={"name": "after"}), [FailAfter()])
    assert [each.step for each in find(tmp_path / "after")] == [STEPS]


def test_callbacks_of_the_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    here = "tests.launch.test_python"
    meshwright.run_training(made(tmp_path, train={"callbacks": [f"{here}:stop_at_two"]}))
    assert "stopped after step 3 of 6: enough" in capfd.readouterr().out
    for number, (name, message) in enumerate(
        [
            (
                "no_observer",
                "returned a int: return an object of a class derived from meshwright.Observer",
            ),
            ("raises", "RuntimeError: not made"),
            ("stop_at_too", "did you mean tests.launch.test_python:stop_at_two?"),
        ]
    ):
        with pytest.raises(
            ConfigError,
            match=message,
            check=has_code("MW-CONFIG-010", "MW-LAUNCH-056", "MW-LAUNCH-057"),
        ):
            meshwright.run_training(
                made(tmp_path, run={"name": str(number)}, train={"callbacks": [f"{here}:{name}"]})
            )


def test_what_a_script_gets_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean", check=has_code("MW-CONFIG-013")):
        meshwright.make_config(train={"stepps": 3})
    with pytest.raises(ConfigError, match="MW-LAUNCH-059"):
        config = made(tmp_path, data={"options": {"has_validation": False}})
        with meshwright.open_run(config) as run:
            run.validate()


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, meshwright; meshwright.UserError, meshwright.RunConfig; sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_the_names_for_type_checkers_are_those_at_run_time() -> None:
    tree = ast.parse((ROOT / "framework" / "meshwright" / "__init__.py").read_text())
    (block,) = [
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    typed = [
        (node.module, each.name, each.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    ]
    assert sorted(name for _, name, _ in typed) == meshwright.__all__
    for module, name, exported in typed:
        assert name == exported and getattr(importlib.import_module(str(module)), name) is getattr(
            meshwright, name
        )


def described(name: str) -> str:
    """Return a public name with its signature, or its public methods and fields."""
    value = getattr(meshwright, name)
    if not inspect.isclass(value):
        return f"{name}{inspect.signature(value)}"
    if issubclass(value, BaseException):
        return f"{name}({value.__bases__[0].__name__})"
    members = {
        each for each in vars(value) if not each.startswith("_") and not each.startswith("model_")
    }
    members |= {each for each in getattr(value, "__annotations__", {}) if not each.startswith("_")}
    return f"{name}: {', '.join(sorted(members))}"


def test_the_public_names_are_those_of_the_changelog() -> None:
    """A change of a name or signature needs this file rewritten (python -m
    tests.launch.test_python) and an entry.
    """
    assert SURFACE.read_text() == "".join(f"{described(name)}\n" for name in meshwright.__all__)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    page = (ROOT / "docs" / "python.md").read_text()
    assert not [
        name for name in meshwright.__all__ if f"`{name}" not in changelog or name not in page
    ]
    assert OpenRun is meshwright.OpenRun


if __name__ == "__main__":
    SURFACE.write_text("".join(f"{described(name)}\n" for name in meshwright.__all__))
