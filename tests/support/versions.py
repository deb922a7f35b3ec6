"""Core tests on the oldest and the newest versions that pyproject.toml admits,
each in an environment of its own.

make versions                                   both, with the Python of the checkout
make versions PYTHON=python3.13                 another Python, for what the registry has for it
python3 tests/support/versions.py newest --write     one of them, and its row in docs/install.md
python3 tests/support/versions.py 2.12          a release of torch between them

The first run installs torch as the registry has it, with CUDA: some GB per environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "install.md"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
"""Name of an environment -> uv's choice among the versions that the bounds admit."""
EXTRAS = ".[hf,plot,wandb]"
FOR_TESTS = ("pytest>=8.4", "pytest-xdist>=3.6", "hypothesis>=6.120", "jsonschema>=4.23")
SHOWN = ("torch", "megatron-core", "transformers", "numpy", "pydantic")
LAYOUTS = (
    "dp2,zero3",
    "pp2,tp2,sequence",
    "dp2,tp2,zero3",
    "pp2,zb_h2,dp2",
    "cp2,tp2,sequence",
    "dp2,pp2,zero2,full",
)
TESTS = (
    "tests/framework/system/test_private_torch.py",
    *(
        f"tests/framework/{room}"
        for room in ("data_parallel", "checkpoint", "mesh", "tensor_parallel")
    ),
    "tests/framework/watch/test_hang.py",
    "tests/framework/watch/test_hang_report.py",
    "tests/plan/dryrun/test_fake_step.py",
)


class Job(NamedTuple):
    """A command that must succeed in an environment."""

    name: str
    words: tuple[str, ...]


JOBS = (
    Job(
        "verify",
        (
            "meshwright",
            "verify",
            "configs/demo.toml",
            "--steps",
            "4",
            *(f"--layouts={x}" for x in LAYOUTS),
        ),
    ),
    Job("dryrun", ("meshwright", "dryrun", "configs/demo.toml")),
    Job("tests", ("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *TESTS)),
)


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout and return what it printed."""
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )


def choice_of(name: str) -> tuple[str, ...]:
    """Return uv's words for an environment: a resolution, or a release of torch such as 2.12."""
    return ("--resolution", RESOLUTIONS[name]) if name in RESOLUTIONS else (f"torch=={name}.*",)


def environment(text: str) -> str:
    """Parse the name of an environment."""
    if text not in RESOLUTIONS and not re.fullmatch(r"2\.\d+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(RESOLUTIONS)}, or a release of torch such as 2.12"
        )
    return text


def install(name: str, place: Path) -> None:
    """Make an environment, once; uv resolves the bounds of pyproject.toml."""
    if (place / "installed").exists():
        return
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    for words in (
        (python, "-m", "pip", "install", "--quiet", "uv"),
        *(
            (python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *more)
            for more in ((*choice_of(name), "-e", EXTRAS), FOR_TESTS)
        ),
    ):
        done = run(*words)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    (place / "installed").touch()


def versions_of(place: Path) -> dict[str, str]:
    """Return the versions of Python and the main packages of an environment."""
    listed = json.loads(
        run(place / "bin" / "python", "-m", "pip", "list", "--format", "json").stdout
    )
    found = {each["name"]: each["version"] for each in listed}
    python = run(
        place / "bin" / "python", "-c", "import platform; print(platform.python_version())"
    ).stdout.strip()
    return {"Python": python, **{name: found.get(name, "-") for name in SHOWN}}


def outcome(job: Job, place: Path) -> str:
    """Run a job, and return its last line that has a number, or how it failed."""
    started = time.monotonic()
    program, *words = job.words
    done = run(place / "bin" / program, *words, OMP_NUM_THREADS="1")
    took = time.monotonic() - started
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    (place / f"{job.name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return (
            f"FAILED ({place.relative_to(ROOT)}/{job.name}.log:"
            f" {lines[-1][:80] if lines else 'no output'})"
        )
    said = {"verify": r"all \d+ layouts agree", "tests": r"\d+ passed.*(?= in )", "dryrun": ""}[
        job.name
    ]
    found = re.search(said, "\n".join(lines))
    return f"{found[0] if found and found[0] else 'ran'}, {took:.0f} s"


def row_of(name: str, place: Path) -> str:
    """Return a row of the table in docs/install.md."""
    cells = [
        f"{name}, {date.today()}",
        *versions_of(place).values(),
        *(outcome(job, place) for job in JOBS),
    ]
    return f"| {' | '.join(cells)} |"


def write(row: str) -> None:
    """Put a row in docs/install.md, in the place of the one for the same name and Python."""
    name, python = [cell.strip() for cell in row.split("|")[1:3]]
    name, minor = name.partition(",")[0], python.rpartition(".")[0]
    lines = DOCUMENT.read_text().splitlines()
    same = [
        i
        for i, line in enumerate(lines)
        if re.match(rf"\| {name}, [\d-]+ \| {re.escape(minor)}\.", line)
    ]
    heading = next(i for i, line in enumerate(lines) if line.startswith("| environment |"))
    if same:
        lines[same[0]] = row
    else:
        lines.insert(heading + 2, row)
    DOCUMENT.write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run the jobs; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        type=environment,
        help="oldest, newest (default: both), or a release of torch",
    )
    parser.add_argument("--write", action="store_true", help="write the rows into docs/install.md")
    options = parser.parse_args(arguments)
    is_right = True
    for name in options.names or RESOLUTIONS:
        place = ROOT / ".versions" / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
        install(name, place)
        row = row_of(name, place)
        print(row, flush=True)
        is_right &= "FAILED" not in row
        if options.write:
            write(row)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
