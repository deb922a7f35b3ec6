"""Ranks that a launcher has bound to too few CPUs are named;
ranks that are bound to nothing are left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.doctor.cpus import RankCpus, cpu_warnings, mask_of, own_cpus
from tests.end_to_end.shell import Shell


def rank(*cpus: int, threads: int = 1, asked: int = 0, of: int = 8, cuda: bool = False) -> RankCpus:
    return RankCpus(mask_of(cpus), threads, asked, of, cuda)


WHOLE = tuple(range(8))
SOUND = {
    "unbound": [rank(*WHOLE), rank(*WHOLE)],
    "more ranks than CPUs, unbound": [rank(0, 1, of=2) for _ in range(8)],
    "a core each": [rank(0), rank(1)],
    "as many as asked": [rank(0, 1, asked=2), rank(2, 3, asked=2)],
    "a container of four CPUs for four ranks": [rank(0, 1, 2, 3) for _ in range(4)],
    "the same core of another node": [rank(0), rank(0)],
}
FAULTS = {
    "one core for four threads": (
        [rank(0, threads=4), rank(1)],
        "rank 0 on h1 may use CPU 0 of 8, with 4 threads",
    ),
    "fewer than the job gives": (
        [rank(0, 1, asked=2), rank(2, asked=2)],
        "rank 1 on h1 may use CPU 2 of 8, with a job that gives each task 2",
    ),
    "a GPU and one core": ([rank(0, cuda=True), rank(1, cuda=True)], "and 1 more rank alike"),
    "one core for all": ([rank(3), rank(3), rank(3)], "ranks 0, 1, 2 on h1 share CPU 3 of 8"),
    "overlapping through a third": (
        [rank(0, 1, threads=2), rank(2, 3, threads=2), rank(1, 2, threads=2)],
        "ranks 0, 1, 2 on h1 share CPUs 0, 1, 2, 3 of 8",
    ),
    "a container of two CPUs for four ranks": (
        [rank(4, 5) for _ in range(4)],
        "ranks 0, 1, 2, 3 on h1 share",
    ),
}


@pytest.mark.parametrize("what", SOUND)
def test_nothing_is_said_of_sound_ranks(what: str) -> None:
    nodes = ["h1", "h2"] if "another node" in what else ["h1"] * 8
    assert cpu_warnings(nodes, dict(enumerate(SOUND[what]))) == []


@pytest.mark.parametrize("what", FAULTS)
def test_a_faulty_binding_is_named_once(what: str) -> None:
    ranks, said = FAULTS[what]
    [warning] = cpu_warnings(["h1"] * 8, dict(enumerate(ranks)))
    assert said in warning and "--cpus-per-task" in warning and len(warning) < 400


def test_thousands_of_ranks_are_one_line_each() -> None:
    nodes = [f"h{number // 8}" for number in range(8000)]
    warnings = cpu_warnings(nodes, {number: rank(0, threads=2) for number in range(8000)})
    assert len(warnings) == 2 and all(len(text) < 400 for text in warnings)
    assert (
        "and 7999 more ranks alike" in warnings[0]
        and "999 more groups of ranks alike" in warnings[1]
    )
    apart = {
        number: rank(*range(2 * (number % 8), 2 * (number % 8) + 2), threads=2)
        for number in range(8000)
    }
    assert cpu_warnings(nodes, apart) == [], (
        "each with CPUs of its own, compared within its node alone"
    )


@pytest.mark.parametrize(
    ("text", "asked"), [("4", 4), ("", 0), ("x", 0), ("9" * 5000, 0), ("-3", 0), ("²", 0)]
)
def test_what_the_job_gives_is_read_with_care(text: str, asked: int) -> None:
    found = own_cpus(3, "cpu", {"SLURM_CPUS_PER_TASK": text})
    assert found is not None and found.asked == asked and found.threads == 3
    assert set(found.cpus) == os.sched_getaffinity(0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("launcher", ["torchrun", "local"])
def test_a_run_on_one_core_warns_at_its_start(launcher: str, tmp_path: Path) -> None:
    from tests.launch.test_mpi import CONFIG

    (tmp_path / "a.toml").write_text(CONFIG)
    bound = (
        "import os, runpy, sys; os.sched_setaffinity(0, {0}); sys.argv = sys.argv[1:]; "
        "runpy.run_module(sys.argv[0], None, '__main__', True)"
    )
    words = ["meshwright_launch", "train", "a.toml"]
    if launcher == "torchrun":
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *words]
    done = Shell(tmp_path).run("-c", bound, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: ranks 0, 1 on ") == 1 and "share CPU 0 of" in done.stderr
