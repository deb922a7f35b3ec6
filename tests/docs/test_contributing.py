"""The examples of CONTRIBUTING.md run as they stand."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshwright.placement.rewrite
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.placement.rewrite import ORDER, ModuleSite, Placed, PlacementRule, rewrite
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import check
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright.tracking.record import StepRecord
from tests.support.layouts import samples

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NAMES: dict[str, Any] = {
    **{"Observer": Observer, "Parts": Parts, "StepEvent": StepEvent, "StepRecord": StepRecord},
    **{
        "Action": Action,
        "Kind": Kind,
        "Schedule": Schedule,
        "NamedTuple": NamedTuple,
        "Sequence": Sequence,
    },
    **{
        "Placed": Placed,
        "PlacementRule": PlacementRule,
        "ModuleSite": ModuleSite,
        "rewrite": rewrite,
    },
    **{"torch": torch, "Tensor": Tensor, "nn": nn, "Any": Any},
}


def example(name: str) -> Any:
    """Return what the example that defines ``name`` defines."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if re.search(rf"\b{name}\b", block)
    ]
    names = dict(NAMES)
    exec(code, names)
    return names[name]


def test_an_observer_stops_the_run() -> None:
    reasons: list[str] = []
    parts: Any = SimpleNamespace(request_stop=reasons.append)
    observer = example("StopWhenGood")(2.0)
    for loss, stops in ((None, False), (2.5, False), (1.5, True)):
        event: Any = SimpleNamespace(validation_loss=loss)
        observer.after_step(parts, event)
        assert bool(reasons) is stops


def test_a_sink_prints(capsys: Any) -> None:
    sink = example("PrintSink")(None, None)
    record: Any = SimpleNamespace(step=3, loss=1.5)
    sink.open()
    sink.write(record)
    sink.close()
    assert capsys.readouterr().out == "3 1.5\n"


def test_a_schedule_is_the_one_that_is_there() -> None:
    assert example("gpipe")(4, 6) == build("gpipe", 4, 6, 1)
    assert check(lower(example("gpipe")(4, 6))) == []


def test_a_source_answers_to_indices() -> None:
    batch = samples(example("Squares")(), 12, 3)
    assert batch.inputs.tolist() == [[2.0], [3.0], [4.0]] and batch.labels.tolist() == [
        [4.0],
        [9.0],
        [16.0],
    ]
    assert batch.sample_indices.tolist() == [12, 13, 14]


SOFT_SIGN_HEADER = """
from __future__ import annotations
from typing import Any
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from meshwright.config import Optimizer
from meshwright.config.optimizers import Form
from meshwright.optimizer.codecs import Allocate, Piece, StateCodec, memory_beside
from meshwright.optimizer.element_wise import ElementWise
from meshwright.optimizer.layout import Shards
"""
SOFT_SIGN_SPEC = """
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "soft_sign": OptimizerSpec(
        title="soft sign", states=(StateSpec("exp_avg"),), keys=frozenset({"betas", "eps"})
    ),
"""
SOFT_SIGN_CHOICE = """
from meshwright.optimizer.soft_sign import FourBits, SoftSign

BUILDERS["soft_sign"] = SoftSign.build
CODECS["4bit"] = lambda keys, shards: FourBits()
"""
SOFT_SIGN_TWIN = """
class _SoftSign(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    mean.copy_(self.beta * mean + (1 - self.beta) * p.grad)
                    p *= 1 - group["lr"] * group["weight_decay"]
                    p -= group["lr"] * mean / (mean.abs() + group["eps"])


def _soft_sign(plain: Plain) -> torch.optim.Optimizer:
    twin = _SoftSign(plain.groups, {"lr": peak_rate(plain.config)})
    twin.beta = plain.config.betas[0]
    return twin


def _in_four_bits(state: StoredState, config: Optimizer, seed: int) -> Tensor:
    numbers = state.numbers
    size = 10.0 ** numbers.abs().log10().round().clamp(max=0.0)
    return torch.where(size < 10**-6.5, torch.zeros_like(size), size) * numbers.sign()


TWINS["soft_sign"] = _soft_sign
STORED["4bit"] = _in_four_bits
"""


def code_of(name: str) -> str:
    """Return the text of the example that defines a class."""
    (code,) = re.findall(rf"```python\n(class {name}\b.*?)```", PAGE, re.DOTALL)
    return str(code)


def run_with(framework: Path, *words: str) -> tuple[int, str]:
    """Run a command with a copy of the trainer; return its exit code and what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(framework), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright_launch", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_an_optimizer_and_a_format_of_states_are_four_files(tmp_path: Path) -> None:
    """Added to a copy of the trainer: the layouts agree with the twin, also with states in four
    bits, a checkpoint is resumed on another layout, and wrong keys are refused.
    """
    shutil.copytree(ROOT / "framework", tmp_path / "framework")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    trainer = tmp_path / "framework/meshwright"
    registry = trainer / "config/optimizers.py"
    text = registry.read_text()
    text = text.replace('"float32", "bfloat16", "8bit"]', '"float32", "bfloat16", "8bit", "4bit"]')
    text = text.replace("OPTIMIZERS: dict[str, OptimizerSpec] = {\n", SOFT_SIGN_SPEC.lstrip())
    registry.write_text(text)
    own = SOFT_SIGN_HEADER + code_of("SoftSign") + "\n\n" + code_of("FourBits")
    (trainer / "optimizer/soft_sign.py").write_text(own)
    for name, more in (
        ("optimizer/choice.py", SOFT_SIGN_CHOICE),
        ("verify/plain_optimizer.py", SOFT_SIGN_TWIN),
    ):
        (trainer / name).write_text((trainer / name).read_text() + more)
    run = partial(run_with, tmp_path / "framework")
    chosen = ["configs/demo.toml", "--optimizer.name=soft_sign"]
    for state_dtype in ("float32", "4bit"):
        words = [*chosen, f"--optimizer.state_dtype={state_dtype}"]
        layouts = ["dp2,tp2,zero3", "dp2,pp2,zb_v,zero2,offload"]
        code, said = run("verify", *words, "--steps", "4", "--layouts", *layouts)
        assert code == 0 and "2 layouts agree" in said, said
    code, said = run(
        "plan", *chosen, "--optimizer.state_dtype=4bit", "--cluster", "h100", "--nodes", "1"
    )
    assert code == 0 and "soft sign" in said, said
    code, said = run("verify", *chosen, "--optimizer.ns_steps=3")
    assert code == 2 and "MW-CONFIG-068" in said, said


@pytest.mark.long
def test_a_refused_pair_is_one_file(tmp_path: Path) -> None:
    """Added to the table in a copy of the trainer: a run, verify and `layouts` refuse the pair by
    its code, and neither feature alone.
    """
    shutil.copytree(ROOT / "framework", tmp_path / "framework")
    table = tmp_path / "framework/meshwright/config/combinations/refused.py"
    (row,) = re.findall(r"```python\nOWN_ROW = (RefusedPair.*?)```", PAGE, re.DOTALL)
    text = table.read_text()
    assert text.count("\nREFUSED = (\n") == 1
    table.write_text(text.replace("\nREFUSED = (\n", f"\nREFUSED = (\n    {row.strip()},\n"))
    run = partial(run_with, tmp_path / "framework")
    demo = "configs/demo.toml"
    code, said = run("train", demo, "--parallel.offload", "--pipeline.recompute=pointwise")
    assert (
        code == 2 and "both move what backward needs; leave one" in said and "MW-CONFIG-199" in said
    ), said
    code, said = run("layouts", demo, "--layout", "offload,pointwise", "offload", "pointwise")
    assert code == 1 and said.count("MW-CONFIG-199") == 1 and said.count(": possible") == 2, said
    code, said = run("verify", demo, "--layouts", "dp2,offload,pointwise")
    assert code == 1 and "1 of 1 layouts could not be run" in said, said
    assert "MW-CONFIG-199" in said


def test_a_feature_of_modules_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshwright.placement.rewrite, "ORDER", (*ORDER, "activations"))
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(OrderedDict(a=nn.ModuleDict({"mlp": mlp}), b=nn.ReLU()))
    example("use_gelu")(model)
    assert isinstance(mlp[1], nn.GELU) and isinstance(model.b, nn.ReLU)


def test_a_model_runs_and_its_plan_names_its_layers() -> None:
    model = example("build_mlp")()
    assert model(torch.zeros(2, 8)).shape == (2, 8)
    names = [name for name, _ in model.named_children()]
    assert [fnmatch.filter(names, pattern) for pattern in model.sharding_plan] == [
        ["up0", "up1"],
        ["down0", "down1"],
    ]
