"""What all tests share: one thread per process, and a pool of ranks that is forked once."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts: ranks are forked from this process

import gc
import importlib
import itertools
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from meshwright.system.process import SIGNALS
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References
from tests.support import durations
from tests.support.marks import mark_rows
from tests.support.object_store import ObjectStore, forget_file_systems, object_store

# a commit passes or fails always; `make torture` draws anew
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("random")
settings.load_profile("repeatable")

LONGEST = ("tests/framework/verify/", "tests/plan/dryrun/", "tests/plan/planner/")
"""Folders whose files take minutes: begun first, so that at the end no worker has one alone."""
COLLECTOR_THRESHOLDS = (50_000, 20, 20)
"""Python's 700 new objects begin thousands of collections while one test parses the sources."""
LONG_MARKS = ("all_layouts", "long", "slurm", "torture")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Eight ranks that live as long as the test session; see ``RankPool.run``.

    A library that takes a second is imported before the fork, not by each of the ranks.
    """
    if any(item.nodeid.startswith("tests/interop/") for item in request.session.items):
        importlib.import_module("transformers.modeling_utils")
    with RankPool(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectStore]:
    """A real S3 server in a process of its own, for the session."""
    pytest.importorskip("moto.server")
    with object_store() as store:
        yield store


@pytest.fixture
def s3(s3_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, empty, and the environment in which this process reaches it."""
    s3_server.reset()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    forget_file_systems()
    yield s3_server
    s3_server.thaw()
    s3_server.proxy.fault = lambda request: None


@pytest.fixture(autouse=True)
def restored_path() -> Iterator[None]:
    """The entries of ``sys.path``: commands append the working directory, as ``python -m`` has it."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def references() -> References:
    """Numbers of one plain process, shared by the tests of a file: some files patch the run."""
    return References()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        help="of what `make torture` draws: moments, ranks, signals, bits",
    )
    parser.addoption(
        "--part",
        default="1/1",
        help="K/N: one of N parts of the tests, dealt by their names or groups",
    )
    parser.addoption(
        "--soak-minutes", type=float, default=15.0, help="how long `make torture` disturbs one run"
    )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """What ``--seed`` says."""
    return int(request.config.getoption("--seed"))


def pytest_configure(config: pytest.Config) -> None:
    """Ranks that are forked and more than there are GPUs:
    everything but ``pytest -m gpu`` runs on CPU, everywhere.
    """
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # a job in the background ignores some; and a run ignores what it was started to ignore
    for each in SIGNALS:
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(
                each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without Python's garbage collector, exempt from it what exists then,
    and let it run seldom.

    Modules and tests are two million objects: each full collection would visit them, in half a
    second, and every run inside of this process makes one after its first step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long (``all_layouts`` hours)
    unless the command line names one of its marks.
    """
    unknown = mark_rows(items)
    whole_files = not any("::" in word for word in config.args)
    if unknown and whole_files and not config.getoption("lf", False):
        raise pytest.UsageError(f"marked rows that no test has: {', '.join(sorted(unknown))}")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    part, parts = map(int, config.getoption("--part").split("/"))
    named = {mark for mark in (*LONG_MARKS, "fault") if mark in config.option.markexpr}
    left_out = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        hidden = not marks.isdisjoint(LONG_MARKS) and marks.isdisjoint(named)
        group = item.get_closest_marker("xdist_group")
        name = str(group.args[0]) if group else item.nodeid
        if hidden or crc32(name.encode()) % parts != part - 1:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        apart = set(left_out)
        items[:] = [item for item in items if item not in apart]
    for item in items:
        rows = [
            mark.kwargs["row"]
            for name in ("torture", "fault", "slurm")
            for mark in item.iter_markers(name)
            if mark.kwargs
        ]
        item.user_properties += [("row", row) for row in rows[:1]]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seconds of folders and files, and the table of `make torture`: a row for each kind of trouble,
    with what its tests have noted of it.
    """
    for line in durations.table(itertools.chain(*terminalreporter.stats.values())):
        terminalreporter.write_line(line)
    cases: dict[str, list[bool]] = defaultdict(list)
    noted: dict[str, list[str]] = defaultdict(list)
    slowest: dict[str, float] = defaultdict(float)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            if "row" in properties and (report.when == "call" or outcome == "error"):
                cases[properties["row"]].append(outcome == "passed")
                noted[properties["row"]] += [properties["noted"]] if "noted" in properties else []
                slowest[properties["row"]] = max(
                    slowest[properties["row"]], properties.get("within_s", 0.0)
                )
    if not cases or not {"torture", "slurm"} & set(config.option.markexpr.split()):
        return
    terminalreporter.write_line(
        f"\n| {config.option.markexpr}, --seed {config.getoption('--seed')} | tests | failed |"
        " |\n|---|---|---|---|"
    )
    for row, passed in cases.items():
        noted[row] += [f"within {slowest[row]:.1f} s"] if slowest[row] else []
        terminalreporter.write_line(
            f"| {row} | {len(passed)} | {passed.count(False)} | {'; '.join(noted[row])} |"
        )
