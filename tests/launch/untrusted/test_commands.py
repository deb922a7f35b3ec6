"""No command imports what a run, a checkpoint or a configuration in a run directory names,
unless the user says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from meshwright.config.keys import KEYS
from meshwright.run.trust import CODE_KEYS
from meshwright_launch.arguments import build_parser
from meshwright_launch.cli import main
from tests.launch.untrusted.planted import CANARY, MODULE, payloads, planted
from tests.support.marks import long_row

ROOT = Path(__file__).parents[3]
TOUCH = {"builder": "os:system", "options": {"command": f"touch {CANARY}"}}
BUILDERS: dict[str, dict[str, Any]] = {
    "os": TOUCH,
    "subprocess": {"builder": "subprocess:getoutput", "options": {"cmd": f"touch {CANARY}"}},
    "module": {"builder": "payload:build"},
    "package": {"builder": "theirs.payload:build"},
    "namespace": {"builder": "bare.payload:build"},
    "in-models": {"builder": "models.payload:build"},
    "in-framework": {"builder": "framework.payload:build"},
    "through-ours": {"builder": "meshwright_models.blocks:torch"},
}
READS = {
    "sample": ["sample", "{place}", "--prompt=a"],
    "eval": ["eval", "{place}"],
}
"""They build the model of a run or checkpoint."""
CONFIGS = {
    "train": ["train", "{run}/config.toml"],
    "data show": ["data", "show", "{run}/config.toml"],
    "verify": ["verify", "{run}/config.toml", "--layouts", "dp1"],
    "stages": ["stages", "{run}/config.toml"],
    "layouts": ["layouts", "{run}/config.toml"],
    "dryrun": ["dryrun", "{run}/config.toml"],
    "plan": ["plan", "{run}/config.toml", "--cluster=h100", "--nodes=1"],
    "doctor": ["doctor", "{run}/config.toml"],
    "slurm": ["slurm", "{run}/config.toml", "--nodes=1", "--devices-per-node=1"],
    "kubernetes": [
        "kubernetes",
        "{run}/config.toml",
        "--nodes=1",
        "--devices-per-node=1",
        "--image=a",
    ],
}
"""They build the model of a configuration, or have it built later."""
NOT_IMPORTING = {
    "list": ["checkpoint", "list", "{run}"],
    "checkpoint verify": ["checkpoint", "verify", "{place}"],
    "show": ["checkpoint", "show", "{place}"],
    "export": ["checkpoint", "export", "{place}", "--out=out"],
    "convert": ["convert", "{place}", "--to", "hf", "exported"],
    "report": ["report", "{run}"],
    "plot": ["plot", "{run}"],
    "status": ["status", "{run}"],
    "draw a run": ["draw", "{run}"],
    "draw": ["draw", "{run}/config.toml"],
    "mesh": ["mesh", "{run}/config.toml"],
    "config show": ["config", "show", "{run}/config.toml"],
    "config import": ["config", "import", "{run}/config.toml", "--from=torchtitan"],
}
"""They need no model."""
NO_RUN = {
    "calibrate",
    "init",
    "completion",
    "errors",
    "data prepare",
    "data verify",
    "data stdlib",
    "data files",
}
"""They read none of these."""


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with payloads in it; what they import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    payloads(tmp_path)
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if "payload" in name or name.split(".")[0] in ("theirs", "bare", "local_model"):
            del sys.modules[name]


def place_of(kind: str, run: Path) -> Path:
    """Return the run, its checkpoint, or the checkpoint copied out of it."""
    step = run / "checkpoints" / "step-00000002"
    if kind != "alone":
        return run if kind == "run" else step
    alone = run.parent / "alone"
    shutil.copytree(step, alone)
    return alone


def called(
    words: list[str], run: Path, place: Path, capfd: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    """Exit code, and what was said on stderr."""
    code = main([word.format(run=run, place=place) for word in (*words, *more)])
    told = capfd.readouterr().err
    assert "Traceback" not in told
    return code, told


@pytest.mark.parametrize("kind", ["run", "checkpoint", "alone"])
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("command", READS)
def test_a_run_or_checkpoint_names_no_code(
    command: str, name: str, kind: str, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = planted(desk / "runs" / "theirs", model=BUILDERS[name])
    code, told = called(READS[command], run, place_of(kind, run), capfd)
    assert code == 2 and not (desk / CANARY).exists() and not (desk / "out").exists()
    builder = BUILDERS[name]["builder"]
    assert (
        f"model.builder = {builder!r} would import the function {builder.partition(':')[2]} "
        in told
    )
    assert "add --trust-code" in told and f"--model.builder={builder}" in told


@pytest.mark.parametrize("command", READS)
def test_a_dataset_is_code_too(command: str, desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = planted(desk / "runs" / "theirs", data={"train": "", "builder": "payload:build"})
    code, told = called(READS[command], run, run, capfd)
    assert code == 2 and not (desk / CANARY).exists()
    assert (
        f"data.builder = 'payload:build' would import the function build from {desk}/payload.py"
        in told
    )


def test_meshwrights_own_dataset_is_no_code_of_the_run(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"train": "", "builder": "meshwright.data.huggingface:build", "sequence_length": 1024}
    run = planted(desk / "runs" / "theirs", data=own)
    for words in ["data", "show", "{run}/config.toml"], ["eval", "{run}"]:
        code, told = called(words, run, run, capfd)
        assert code == 2 and "trust-code" not in told and "path" in told


@pytest.mark.parametrize(
    "section",
    [{"train": {"callbacks": ("payload:build",)}}, {"tracking": {"sinks": ("payload:build",)}}],
)
@pytest.mark.parametrize("command", CONFIGS)
def test_callbacks_and_sinks_are_code_too(
    command: str, section: dict[str, Any], desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = planted(desk / "runs" / "theirs", **section)
    code, told = called(CONFIGS[command], run, run, capfd)
    assert code == 2 and not (desk / CANARY).exists()
    (key,) = (f"{name}.{key}" for name, keys in section.items() for key in keys)
    assert f"{key} = 'payload:build' would import the function build from {desk}/payload.py" in told
    (advice,) = re.findall(r"name it yourself: (--\S+ ?\S*?)\. Without", told.replace("\n", " "))
    if command == "slurm":  # it imports nothing itself, and writes the job
        code, told = called(CONFIGS[command], run, run, capfd, *shlex.split(advice))
        assert code == 0, told


@pytest.mark.parametrize("name", ["os", "module", "in-models"])
@pytest.mark.parametrize("command", CONFIGS)
def test_nor_does_a_configuration_in_a_run_directory(
    command: str, name: str, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = planted(desk / "runs" / "theirs", model=BUILDERS[name])
    code, told = called(CONFIGS[command], run, run, capfd)
    assert code == 2 and not (desk / CANARY).exists()
    assert f"{run}/config.toml: model.builder = " in told and "add --trust-code" in told
    for file in (run / "resolved.json", run / "checkpoints" / "step-00000002" / "manifest.json"):
        lone = desk / "lone" / file.name
        lone.mkdir(parents=True)
        shutil.copy(file, lone)
        shutil.copy(run / "config.toml", lone)
        (desk / "link.toml").unlink(missing_ok=True)
        (desk / "link.toml").symlink_to(lone / "config.toml")
        words = [word.replace("{run}/config.toml", "{place}") for word in CONFIGS[command]]
        for config in (lone / "config.toml", desk / "link.toml"):
            code, told = called(words, run, config, capfd)
            assert code == 2 and "add --trust-code" in told and not (desk / CANARY).exists()


@pytest.mark.parametrize("name", ["os", "module", "in-models"])
@pytest.mark.parametrize("command", NOT_IMPORTING)
def test_what_needs_no_model_imports_none(
    command: str, name: str, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for at, sections in enumerate(
        [{"model": BUILDERS[name]}, {"data": {"train": "", "builder": "payload:build"}}]
    ):
        run = planted(desk / f"runs{at}" / "theirs", **sections)
        code, _ = called(NOT_IMPORTING[command], run, run, capfd)
        assert code in (0, 2) and not (desk / CANARY).exists()


@pytest.mark.parametrize("command", NOT_IMPORTING)
def test_a_schedule_is_code_too(
    command: str, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``draw`` needs one: it refuses the function that a run names,
    and a report leaves the picture out.
    """
    run = planted(desk / "runs" / "theirs", pipeline={"schedule": "payload:build"})
    code, told = called(NOT_IMPORTING[command], run, run, capfd)
    assert code in (0, 2) and not (desk / CANARY).exists()
    if command == "draw":
        assert (
            code == 2
            and "pipeline.schedule = 'payload:build' would import the function build" in told
        )


def test_no_command_is_left_out() -> None:
    def names(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            for inner in (
                action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
            ):
                yield from list(names(inner)) or [inner.prog.removeprefix("meshwright ")]

    covered = {
        tuple(words[:2]) for table in (READS, CONFIGS, NOT_IMPORTING) for words in table.values()
    }
    wanted = set(names(build_parser())) - NO_RUN
    missing = {
        name for name in wanted if not any(" ".join(words).startswith(name) for words in covered)
    }
    assert not missing, f"{missing} may read a run: add them to one of the tables above"


def test_every_key_that_names_a_function_is_known() -> None:
    """A new key whose value is imported must be judged as the others are."""

    def patterns(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
        """Yield the patterns of a value and, for a list, of each of its values."""
        for each in metadata:
            yield str(getattr(each, "pattern", ""))
            yield from patterns(None, getattr(each, "metadata", ()))
        for inner in get_args(annotation):
            yield from patterns(inner, getattr(inner, "__metadata__", ()))

    naming = {
        key
        for key, field in KEYS.items()
        if any(
            ":" in each.replace("://", "") for each in patterns(field.annotation, field.metadata)
        )
    }
    assert naming == set(CODE_KEYS)


@pytest.mark.parametrize("source", ["config.json", "import"])
def test_what_is_imported_from_elsewhere_names_no_code(
    source: str, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A foreign configuration becomes one of ours with our builders,
    whatever keys of ours stand in it.
    """
    file = desk / "theirs.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\nbuilder ='
        ' "payload:build"\n[training]\n[parallelism]\n'
    )
    main(["config", "import", str(file), "--from=torchtitan", "--ranks=8"])
    assert "payload:build" not in capfd.readouterr().out and not (desk / CANARY).exists()


LOCAL = """
from collections import OrderedDict
from torch import nn, ones

def build(width=4):
    return nn.Sequential(OrderedDict(a=nn.Linear(width, width), b=nn.Linear(width, 3)))

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, number):
        return ones(4) * number, number % 3

def rows(split):
    return Rows()
"""


def test_trusted_code_is_named_and_used(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A user's own model and samples in the working directory: trained by their file,
    used again when named again.
    """
    (desk / "local_model.py").write_text(LOCAL)
    (desk / "mine.toml").write_text(
        '[run]\nname = "mine"\n[model]\nbuilder = "local_model:build"\n[data]\nbuilder ='
        ' "local_model:rows"\n[batch]\nmicro_batch_size = 2\nglobal_batch = 4\n[train]\nsteps ='
        ' 2\ndevice = "cpu"\n'
    )
    assert main(["train", "mine.toml"]) == 0
    assert str(desk) == sys.path[-1]
    capfd.readouterr()
    run = Path("runs/mine")
    out = ["eval", str(run), "--out=found.json"]
    code, told = called(out, run, run, capfd)
    assert code == 2 and told.count(f" from {desk}/local_model.py") == 2
    code, told = called(out, run, run, capfd, "--model.builder=local_model:build")
    assert (
        code == 2
        and "model.builder" not in told.partition(", or name it")[0]
        and "data.builder" in told
    )
    code, told = called(out, run, run, capfd, "--model.builder=local_model:rows")
    assert code == 2 and "model.builder: eval uses the run's own configuration" in told
    named = ["--model.builder=local_model:build", "--data.builder=local_model:rows"]
    code, told = called(out, run, run, capfd, *named)
    assert code == 0 and "trust" not in told
    code, told = called(out, run, run, capfd, "--trust-code")
    assert (
        code == 0
        and f"model.builder = 'local_model:build' imports build from {desk}/local_model.py" in told
    )
    assert f"data.builder = 'local_model:rows' imports rows from {desk}/local_model.py" in told
    assert main(["stages", "runs/mine/config.toml"]) == 2
    assert main(["stages", "runs/mine/config.toml", "--trust-code"]) == 0
    assert main(["stages", "runs/mine/config.toml", *named]) == 0
    assert main(["stages", "mine.toml"]) == 0


SMALL = """
[model]
builder = "meshwright_models.gpt2:build"
options = {vocab_size = 8, hidden_size = 8, num_layers = 1, num_heads = 1, max_sequence_length = 8}
[data]
train = "x"
sequence_length = 8
[batch]
micro_batch_size = 1
global_batch = 1
[train]
device = "cpu"
"""
STARTS = {
    "-m": ["-m", "meshwright_launch"],
    "script": [
        "-c",
        "import sys; del sys.path[0]; from meshwright_launch.cli import main; sys.exit(main())",
    ],
}
"""As `python -m meshwright_launch`, and as pip's script `meshwright` does it."""


@pytest.mark.parametrize(
    "start", [pytest.param("-m", marks=pytest.mark.torture), long_row("script")]
)
def test_nothing_in_the_working_directory_hides_ours(start: str, desk: Path) -> None:
    """Processes of their own among folders and files with our names, and those of libraries,
    installed and not.
    """
    if start == "-m":
        # `python -m meshwright_launch` takes that one, as `python -m` does with any
        shutil.rmtree(desk / "meshwright")
    for name in ("random", "torch", "pydantic", "kernels"):
        (desk / f"{name}.py").write_text(MODULE)
    (desk / "small.toml").write_text(SMALL)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def stages(*more: str) -> tuple[int, str]:
        words = [sys.executable, *STARTS[start], "stages", "small.toml", *more]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert not (desk / CANARY).exists()
        return done.returncode, done.stdout + done.stderr

    code, told = stages()
    assert code == 0, told
    code, told = stages("--model.builder=random:build")
    assert code == 2 and f"and hides {desk}/random.py: rename yours" in told
