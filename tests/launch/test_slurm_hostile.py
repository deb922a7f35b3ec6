"""Whatever stands in a value, a job script runs the commands that were meant,
with the words that were meant.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright_launch.cli import main

ROOT = Path(__file__).parents[2]
DEMO = (ROOT / "configs" / "demo.toml").read_text()
HOSTILE = [
    "$(touch canary)",
    "`touch canary`",
    "a\ntouch canary",
    "a; touch canary",
    "' touch canary '",
    '"',
    "\\",
]
HOSTILE += [
    "a b",
    "-x",
    "é",
    "$HOME",
    "&& touch canary #",
    "a\r\ntouch canary",
    "{{ 1 }}",
    "%j",
    "~",
    "*",
    "\u2028x",
]
LETTERS = "ab \n\t$`'\"\\;&|<>(){}[]*?!#~%=-é\x1b"
NASTY = st.one_of(st.sampled_from(HOSTILE), st.text(LETTERS, min_size=1, max_size=12)).filter(
    "--".__ne__
)
"""Without "--", which argparse itself takes out of `--container=--`."""
STUB = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$STUB_OUT"\n'


def called(capsys: pytest.CaptureFixture[str], config: Path, *words: str) -> tuple[int, str]:
    code = main(["slurm", str(config), "--nodes", "2", "--devices-per-node", "4", *words])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return code, told.err


def arguments(folder: Path, script: Path) -> list[str]:
    """Run the script with stubs on the path; the words of srun."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "scancel", "sleep"):
        (stubs / name).write_text(STUB if name == "srun" else "#!/bin/sh\n")
        (stubs / name).chmod(0o755)
    out = folder / "argv"
    out.write_bytes(b"")
    environment = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        "STUB_OUT": str(out),
        "SLURM_JOB_ID": "7",
        "HOME": str(folder),
    }
    subprocess.run(["/bin/bash", "-n", str(script)], check=True)
    done = subprocess.run(
        ["/bin/bash", str(script)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out.read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    "option",
    ["partition", "account", "qos", "constraint", "exclude", "time", "gres", "mem", "reservation"],
)
@pytest.mark.parametrize(
    "value", ["a\ntouch canary", "$(touch canary)", "a b", "", "-x", "a\n#SBATCH --x", "é'"]
)
def test_what_enters_a_line_of_sbatch_is_of_its_pattern(
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.toml").write_text(DEMO)
    code, told = called(capsys, Path("demo.toml"), f"--{option}={value}")
    assert code == 2 and f"--{option} {value!r}" in told and not Path("runs").exists()


@pytest.mark.long
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    option=st.sampled_from(
        ["container", "mounts", "image", "binds", "project", "data", "folder", "config"]
    ),
    value=NASTY,
)
def test_every_other_value_arrives_as_it_is_or_is_refused(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as made, monkeypatch.context() as patch:
        folder = Path(made)
        patch.chdir(folder)
        config = Path("demo.toml")
        if option == "config" and "/" not in value and value not in (".", ".."):
            config = Path(f"x{value}.toml")
        config.write_text(DEMO)
        words = {
            "container": [f"--container={value}"],
            "mounts": ["--container=image", f"--mounts={value}"],
            "image": [f"--container={value}", "--runtime=apptainer"],
            "binds": ["--container=image", f"--mounts={value}", "--runtime=apptainer"],
            "project": [f"--tracking.project={value}"],
            "data": [f"--data.train={value}"],
            "folder": [f"--run.directory=runs{value}"],
            "config": [],
        }[option]
        code, _ = called(capsys, config, "--no-requeue", *words)
        assert code in (0, 2)
        if code == 0:
            (script,) = folder.rglob("job.sbatch")
            found = arguments(folder, script)
            overrides = words if option in ("project", "data", "folder") else []
            assert found[found.index("train") :] == ["train", str(config), *overrides]
            if option == "container":
                assert (
                    f"--container-image={value}" in found
                    and f"--container-workdir={folder}" in found
                )
            if option in ("image", "binds"):
                inside = found[found.index("apptainer") : found.index("python3")]
                image, binds = (
                    (value, found[found.index("--bind") + 1])
                    if option == "image"
                    else ("image", value)
                )
                assert inside == [
                    "apptainer",
                    "exec",
                    *inside[2:-5],
                    "--bind",
                    binds,
                    "--pwd",
                    str(folder),
                    image,
                ]
            if option == "mounts":
                assert f"--container-mounts={value}" in found
            head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
            assert len(head) == 9
        assert not list(folder.rglob("canary"))


def test_an_option_that_trusts_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo.toml").write_text(DEMO)
    assert called(capsys, Path("demo.toml"), "--trust-code")[0] == 0
    assert arguments(tmp_path, Path("runs/demo/slurm/job.sbatch"))[-3:] == [
        "train",
        "demo.toml",
        "--trust-code",
    ]
