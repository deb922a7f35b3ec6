"""A Slurm that binds tasks to CPUs (task/affinity): a job's ranks get what it asked for,
and a run says when not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from tests.cluster import hosts, slurm
from tests.end_to_end.driving import changed, layout, run_config
from tests.end_to_end.shell import written

pytestmark = pytest.mark.slurm(row="ranks of a job that are bound to CPUs")
ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
BINDING = "task/affinity\nTaskPluginParam=autobind=cores"
"""Each task is bound to its cores, as on clusters with ConstrainCores."""


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """A Slurm of two nodes with two CPUs each, beside the one of the other tests."""
    reason = (
        hosts.why_not()
        or slurm.why_not()
        or ("needs two CPUs" if (os.cpu_count() or 1) < 2 else None)
    )
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("binding")
    with (
        hosts.Hosts(root, 2, prefix="mwb-", network="10.79.0") as up,
        slurm.Slurm(up, devices=2, task_plugin=BINDING) as running,
    ):
        yield running


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> RunConfig:
    """A short run of a rank on each node."""
    return changed(
        run_config(corpus, tmp_path),
        parallel=layout("dp2"),
        train={"steps": 2},
        tracking={"console": True},
    )


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def output(config: RunConfig) -> str:
    """Return all logs of the run's jobs."""
    return "".join(
        path.read_text() for path in sorted((run_directory(config.run) / "slurm").glob("*.log"))
    )


def allowed(text: str) -> set[str]:
    """Return the CPUs that the ranks printed."""
    return {
        line.rpartition("CPUs ")[2]
        for line in text.splitlines()
        if "CPUs " in line and "warning" not in line
    }


PROLOGUE = "import os\nprint('CPUs', sorted(os.sched_getaffinity(0)), flush=True)\n"
"""``sitecustomize.py``: each Python of the job prints its CPUs when it starts."""


@pytest.mark.parametrize(
    "words", [("--cpus-per-task=2",), ("--exclusive",), ("--torchrun", "--cpus-per-task=2")]
)
def test_the_ranks_of_a_job_have_its_cpus(
    words: tuple[str, ...], binding: slurm.Slurm, config: RunConfig, tmp_path: Path
) -> None:
    """Without ``srun --cpus-per-task`` each was bound to one core of the two."""
    (tmp_path / "sitecustomize.py").write_text(PROLOGUE)
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "slurm",
        written(config, tmp_path),
        "--submit",
        *words,
    ]
    submitted = binding.command(
        *command,
        "--nodes=2",
        "--devices-per-node=1",
        env=ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    assert submitted.returncode == 0, submitted.stderr
    number = next(iter(binding.command("squeue", "-h", "-o", "%i").stdout.split()))
    assert binding.wait(number, ["COMPLETED", "FAILED", "TIMEOUT"], LIMIT_S) == "COMPLETED", output(
        config
    )
    said = output(config)
    assert allowed(said) == {"[0, 1]"}, said
    assert "may use CPU" not in said and "share CPU" not in said


def test_a_rank_with_fewer_cpus_than_its_job_gives_is_named(
    binding: slurm.Slurm, config: RunConfig, tmp_path: Path
) -> None:
    """A script of one's own, whose srun does not repeat the option of sbatch."""
    script = tmp_path / "own.sh"
    train = f"{sys.executable} -m meshwright_launch train {written(config, tmp_path)}"
    script.write_text(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --cpus-per-task=2\n#SBATCH -o"
        f" {tmp_path}/own.log\nsrun {train}\n"
    )
    done = binding.command("sbatch", "--parsable", str(script), env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert binding.wait(done.stdout.strip(), ["COMPLETED", "FAILED"], LIMIT_S) == "COMPLETED"
    said = (tmp_path / "own.log").read_text()
    assert said.count("warning: rank 0 on h1 may use CPU 0 of 2") == 1, said
    assert "a job that gives each task 2 (SLURM_CPUS_PER_TASK), and 1 more rank alike" in said
    assert "--cpus-per-task" in said
