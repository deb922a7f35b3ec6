"""The job script: what it asks for, what it does when the ranks have ended,
and what is refused before.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import StepRecord, to_json
from meshwright_launch.cli import main
from meshwright_launch.slurm import SLURM_EARLY_S, UNKNOWN_LEAD_S, job_name, measure_lead
from meshwright_launch.slurm_values import read_prologue, seconds_of
from tests.support.errors import has_code

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.toml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory to write into, and no Slurm to ask."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what `meshwright slurm` prints; the same is written, and bash reads it."""
    assert main(["slurm", DEMO, "--nodes", "2", "--devices-per-node", "4", *words]) == 0
    told = capsys.readouterr()
    assert "written to runs/demo/slurm/job.sbatch" in told.err
    assert Path("runs/demo/slurm/job.sbatch").read_text() == told.out
    subprocess.run(["/bin/bash", "-n", "runs/demo/slurm/job.sbatch"], check=True)
    return told.out


def asked(text: str) -> dict[str, str]:
    """Return the #SBATCH lines: option -> value."""
    options = [line.removeprefix("#SBATCH --").split("#")[0].strip() for line in text.splitlines()]
    found = [
        option.partition("=")
        for option, line in zip(options, text.splitlines(), strict=True)
        if "#SBATCH" in line
    ]
    return {name: value for name, _, value in found}


def test_what_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = script(
        capsys, "--time", "4:00:00", "--partition", "main", "--account", "us", "--train.steps=90"
    )
    assert asked(text) == {
        "job-name": "demo",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "time": "4:00:00",
        "partition": "main",
        "account": "us",
        "chdir": str(tmp_path),
        "output": f"{tmp_path}/runs/demo/slurm/%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR2@{UNKNOWN_LEAD_S}",
    }
    assert f"-m meshwright_launch train {DEMO} --train.steps=90\n" in text
    assert "printenv" not in text and "env |" not in text


def test_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    plain = script(
        capsys, "--train.device=cpu", "--no-requeue", "--cpus-per-task", "3", "--exclude", "n[3-4]"
    )
    found = asked(plain)
    assert "gpus-per-node" not in found and "requeue" not in found and "no-requeue" in found
    assert (found["cpus-per-task"], found["exclude"]) == ("3", "n[3-4]")
    assert "scontrol requeue" not in plain.split("case $CODE")[1]
    chained = script(capsys, "--chain", "3")
    assert asked(chained)["dependency"] == "singleton" and "scancel --name" in chained
    torchrun = script(capsys, "--torchrun")
    assert asked(torchrun)["ntasks-per-node"] == "1" and "--nproc-per-node=4" in torchrun
    seen = script(capsys, "--doctor")
    assert (
        seen.index("-m meshwright_launch doctor") < seen.index("-m meshwright_launch train")
        and "ExcNodeList" in seen
    )
    boxed = script(capsys, "--container", "docker://torch:2")
    assert (
        "\n  --container-image=docker://torch:2 " in boxed
        and " python3 -m meshwright_launch train" in boxed
    )


def test_a_container_by_apptainer(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines as they are, by path and with a launcher of torch."""
    here = Path.cwd()
    text = script(
        capsys, "--container=/images/train.sif", "--runtime=apptainer", "--train.device=cuda"
    )
    inside = (
        f"IN=(apptainer exec --nv --bind {here}:{here},{here}/runs:{here}/runs --pwd {here}"
        " /images/train.sif)\n"
    )
    assert inside in text and "container-image" not in text
    assert f'"${{SRUN[@]}}" "${{IN[@]}}" python3 -m meshwright_launch train {DEMO}' in text
    words = [
        "--runtime=apptainer",
        "--container=docker://team/train:1",
        "--mounts=/data,/runs:/out",
        "--torchrun",
    ]
    text = script(capsys, *words, "--doctor", "--train.device=cpu")
    assert (
        f"IN=(apptainer exec --bind /data,/runs:/out --pwd {here} docker://team/train:1)\n" in text
    )
    assert '_ "${IN[@]}" python3 -m torch.distributed.run' in text
    assert '"${SRUN[@]}" "${IN[@]}" python3 -m meshwright_launch doctor' in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runtime=apptainer"], "--runtime apptainer has no effect without a container"),
        (["--mounts=/data"], "--mounts has no effect without a container"),
        (
            ["--runtime=apptainer", "--container=--fakeroot"],
            "--container '--fakeroot' is not valid for apptainer",
        ),
        (
            ["--runtime=apptainer", "--container=a b"],
            "--container 'a b' is not valid for apptainer",
        ),
        (
            ["--runtime=apptainer", "--container=i", "--mounts=-B"],
            "--mounts '-B' is not valid for apptainer",
        ),
        (
            ["--container=/images/a.sif"],
            "pyxis cannot start an apptainer image: add --runtime apptainer",
        ),
        (
            ["--runtime=apptainer", "--container=team/train:1"],
            "for an image of a registry give docker://team/train:1",
        ),
        (
            ["--nodes", "1"],
            "1 nodes x 4 devices = 4 ranks: dp 2 x pp 2 x tp 2 = 8 ranks, but 4 were started",
        ),
        (["--devices-per-node", "3"], "2 nodes x 3 devices = 6 ranks"),
        (
            ["--nodes", "8", "--devices-per-node", "1"],
            "the tensor-parallel group of ranks 0..1 straddles the nodes",
        ),
        (["--time", "soon"], "--time 'soon' is not a time limit of Slurm"),
        (
            ["--time", "5"],
            "--time 5 is 300 s, and the ranks must be signalled 300 s before it ends",
        ),
        (
            ["--submit"],
            (
                "sbatch is not installed on this machine: submit runs/demo/slurm/job.sbatch where"
                " it is"
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", DEMO, "--nodes", "2", "--devices-per-node", "4", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_lead_is_measured(tmp_path: Path) -> None:
    """The longest step and the longest save of late, half as much again, and Slurm's own minute."""
    assert measure_lead(tmp_path)[0] == UNKNOWN_LEAD_S
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 7):
        step_s, save_s = 40.0 if step == 3 else 10.0, 20.0 if step % 2 else None
        sink.write(StepRecord(step, 8, 8, 1.0, 1.0, 1e-3, step_s, 0.0, 1.0, 1, 1, save_s=save_s))
    sink.close()
    assert measure_lead(tmp_path) == (
        120 + SLURM_EARLY_S,
        "of late a step took up to 40 s (median 10) and a save 20 s",
    )
    for step, seconds in ((7, 60.0), (8, float("inf"))):  # a damaged line counts as none
        record = StepRecord(step, 8, 8, 1.0, 1.0, 1e-3, 10.0, 0.0, 1.0, 1, 1, validation_s=seconds)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(
                to_json(record).replace('"perf/step_s": 10.0', f'"perf/step_s": {seconds / 6}')
                + "\n"
            )
    assert measure_lead(tmp_path) == (
        math.ceil(1.5 * (40 + 60 + 2 * 20)) + SLURM_EARLY_S,
        "of late a step took up to 40 s (median 10), a validation 60 s and a save 20 s",
    )


def test_chains_of_runs_with_one_name_are_apart() -> None:
    """The end of a chain cancels the waiting jobs of its name."""
    assert job_name(Path("/a/demo"), 1) == job_name(Path("/b/demo"), 1) == "demo"
    first, second = job_name(Path("/a/de mo"), 3), job_name(Path("/b/de mo"), 3)
    assert first != second and first.startswith("de-mo-") and re.fullmatch(r"[\w.-]+", first)


SRUN = """#!/bin/sh
[ -z "$SAVES" ] || mkdir -p "runs/demo/checkpoints/$SAVES"
exit "$ENDS"
"""


def ended(saves: int | None, code: int = 1) -> tuple[str, int]:
    """Run the job's script, with ranks that save a step and end: its last line and exit code."""
    srun = Path("bin/srun")
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(SRUN)
    srun.chmod(0o755)
    step = f"step-{saves:08}" if saves is not None else ""
    place = {
        "PATH": f"{srun.parent.absolute()}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SAVES": step,
        "ENDS": str(code),
    }
    done = subprocess.run(
        ["/bin/bash", "runs/demo/slurm/job.sbatch"], env=place, capture_output=True, text=True
    )
    assert not done.stderr
    return done.stdout.splitlines()[-1], done.returncode


def failed(step: int) -> tuple[str, int]:
    return f"failed with 1 at step-{step:08}", 1


def test_a_run_that_saves_below_a_damaged_checkpoint_is_not_given_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 300 has a flipped byte; starts resume from step 200,
    and save step after step before they fail.
    """
    script(capsys, "--no-requeue")
    for step in (200, 300):
        Path(f"runs/demo/checkpoints/step-{step:08}").mkdir(parents=True)
    assert ended(None) == failed(300)
    for step in (220, 240, 260, 280, 320):
        assert ended(step) == failed(step)
    assert ended(340, 85) == ("ended on request, saved step-00000340", 85)
    assert [ended(None) for _ in range(3)] == [failed(340)] * 3
    assert ended(360) == failed(360)
    assert [ended(None) for _ in range(2)] == [failed(360)] * 2
    assert ended(None) == ("given up: 3 restarts in a row never got past step-00000360", 93)


def test_a_run_that_never_saves_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    script(capsys, "--no-requeue")
    assert [ended(None) for _ in range(3)] == [("failed with 1 at the start", 1)] * 3
    assert ended(None) == ("given up: 3 restarts in a row never got past the start", 93)


def test_limits_as_slurm_reads_them() -> None:
    found = {
        text: seconds_of(text)
        for text in ("90", "90:30", "4:00:00", "2-12", "1-0:30", "1-1:1:1", "UNLIMITED")
    }
    assert found == {
        "90": 5400,
        "90:30": 5430,
        "4:00:00": 14400,
        "2-12": 216_000,
        "1-0:30": 88_200,
        "1-1:1:1": 90_061,
        "UNLIMITED": None,
    }


def test_more_options_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gres=gpu:h100:4", "--mem=0", "--reservation=ours", "--exclusive"]
    text = script(
        capsys,
        *words,
        "--sbatch=--mail-type=END",
        "--sbatch=--switches=1@1:00:00",
        "--sbatch=--hold",
    )
    found = asked(text)
    assert (
        found | {"gres": "gpu:h100:4", "mem": "0", "reservation": "ours", "exclusive": ""} == found
    )
    assert found | {"mail-type": "END", "switches": "1@1:00:00", "hold": ""} == found
    assert "gpus-per-node" not in found


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--nodes=3", "use --nodes"),
        ("--ntasks-per-node=1", "use --devices-per-node"),
        ("--job-name=x", "use run.name"),
        ("--cpus-per-task=2", "use --cpus-per-task"),
        ("--signal=USR1", "use --time"),
        ("-N3", "cannot stand"),
        ("--comment=$(touch canary)", "cannot stand"),
        ("--comment=a b", "cannot stand"),
        ("--hold\n#SBATCH --array=1-9", "cannot stand"),
    ],
)
def test_an_option_that_the_script_has_or_that_is_no_word_is_refused(
    option: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", DEMO, "--nodes=2", "--devices-per-node=4", f"--sbatch={option}"]) == 2
    assert instead in capsys.readouterr().err and not Path("runs").exists()


def test_a_prologue_runs_before_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    Path("modules.sh").write_text("module load cuda/13\nexport NCCL_DEBUG='WARN {{ 1 }}'\n")
    text = script(capsys, "--prologue=modules.sh")
    assert "module load cuda/13\nexport NCCL_DEBUG='WARN {{ 1 }}'\n" in text
    assert text.index("trap :") < text.index("module load") < text.index("\nSRUN=(")


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", b"a\x00b", b"x" * (2**16 + 1), b"echo \x1b[2J"]
)
def test_a_prologue_that_is_no_text_is_refused(
    content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("modules.sh").write_bytes(content)
    assert main(["slurm", DEMO, "--nodes=2", "--devices-per-node=4", "--prologue=modules.sh"]) == 2
    told = capsys.readouterr().err
    assert (
        re.search("MW-LAUNCH-06[37]", told)
        and "--prologue modules.sh" in told
        and "\x1b[2J" not in told
    )


def test_an_edited_script_is_never_lost(capsys: pytest.CaptureFixture[str]) -> None:
    script(capsys)
    script(capsys, "--time=4:00:00")  # as rendered: replaced
    place = Path("runs/demo/slurm/job.sbatch")
    edited = place.read_text().replace(
        "#SBATCH --nodes=2", "#SBATCH --nodes=2\n#SBATCH --comment=mine"
    )
    for text in (edited, edited.rpartition("# as rendered")[0], ""):
        place.write_text(text)
        assert main(["slurm", DEMO, "--nodes=2", "--devices-per-node=4"]) == 2
        assert "MW-LAUNCH-066" in capsys.readouterr().err and place.read_text() == text
    script(capsys, "--force")
    assert "comment" not in place.read_text()


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/proc/self/mem", "directory", "large"])
def test_a_prologue_that_is_no_text_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "prologue"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "large":
        place.touch()
        os.truncate(place, 2**40)
    else:
        place = Path(kind)
    with pytest.raises(UserError, match="--prologue", check=has_code("MW-LAUNCH-063")):
        read_prologue(str(place))


@pytest.mark.parametrize(
    "time", ["9" * 5000, "1-" + "9" * 5000, "1:1:" + "9" * 5000, "99999999999", "\u0663"]
)
def test_a_time_limit_has_bounds(time: str) -> None:
    with pytest.raises(UserError, match="--time", check=has_code("MW-LAUNCH-048")) as caught:
        seconds_of(time)
    assert len(str(caught.value)) < 400


def cpus_of(text: str, **variables: str) -> str:
    """Run the lines of the script that choose the CPUs of a task; return what srun is given."""
    lines = text[text.index("\nCPUS=") : text.index("export SRUN_CPUS_PER_TASK")]
    done = subprocess.run(
        ["/bin/bash", "-c", f'{lines}\necho "$CPUS"'],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("variables", "expected", "of_torchrun"),
    [
        ({"SLURM_CPUS_PER_TASK": "7", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, "7", "7"),  # as asked
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, "16", "64"),  # an equal share
        ({"SLURM_JOB_CPUS_PER_NODE": "128(x3),96,128"}, "24", "96"),  # of the smallest node
        ({"SLURM_JOB_CPUS_PER_NODE": "2(x2)"}, "1", "2"),
        ({}, "1", "1"),
    ],
)
def test_srun_is_given_the_cpus_of_a_task(
    variables: dict[str, str], expected: str, of_torchrun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """srun of Slurm 22.05 and later does not take them over from sbatch."""
    text = script(capsys)
    assert cpus_of(text, **variables) == expected
    assert '--cpus-per-task="$CPUS" --cpu-bind=cores --distribution=block:block' in text
    assert "export SRUN_CPUS_PER_TASK=$CPUS" in text
    assert cpus_of(script(capsys, "--torchrun"), **variables) == of_torchrun


def test_the_placement_is_shown_without_submitting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", DEMO, "--nodes", "2", "--devices-per-node", "4"]) == 0
    told = capsys.readouterr()
    assert "┌ node1: ranks 4-7 ┐" in told.err and "┌" not in told.out


def test_a_path_that_is_not_there_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not an error: the nodes of the job may have it."""
    for name in ("here.bin", "here.idx", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    words = ["slurm", DEMO, "--nodes", "2", "--devices-per-node", "4"]
    blend = '[{path = "here", weight = 1}, {path = "gone", weight = 2}]'
    there = ["--data.train=here", "--data.validation=here", "--data.tokenizer=tokenizer.json"]
    assert main([*words, *there]) == 0 and "warning" not in capsys.readouterr().err
    for key, path in {
        "data.train": "gone/train",
        "data.train.path": blend,
        "data.validation": "gone",
        "data.tokenizer": "gone.json",
        "model.builder": "hf:gone",
        "run.start": "gone@9000",
    }.items():
        assert main([*words, *there, f"--{key.removesuffix('.path')}={path}"]) == 0
        [warning] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
        ]
        assert (
            f"{key} = 'gone" in warning and "here'" not in warning and "on all its nodes" in warning
        )


def test_another_distribution_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "slurm",
        DEMO,
        "--nodes",
        "2",
        "--devices-per-node",
        "4",
        "--sbatch=--distribution=cyclic",
    ]
    assert main(words) == 2 and "places ranks in blocks" in capsys.readouterr().err
