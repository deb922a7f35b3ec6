"""Whoever names no run is told what there is instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.run.directory import find_run, runs_in
from tests.support.errors import raises


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in ``runs``, of which the second was started last,
    and the current directory above them.
    """
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["demo", "deep"]):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000004").mkdir(parents=True)
        resolved = tmp_path / "runs" / name / "resolved.json"
        resolved.write_text("{}")
        os.utime(resolved, (number, number))
        (resolved.parent / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    return Path("runs")


def test_a_run_is_found_from_inside_too(runs: Path) -> None:
    demo = runs / "demo"
    assert find_run(demo) == demo
    for inside in (demo / "checkpoints", demo / "checkpoints" / "step-00000004"):
        assert find_run(inside) == demo.resolve()
    assert runs_in(runs) == [runs / "deep", demo]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("runs", ("runs", "runs/deep, runs/demo")),
        ("runs/none", ("runs/none", "runs/deep, runs/demo")),
        ("elsewhere", ("elsewhere", "runs/deep, runs/demo")),
        ("here.toml", ("here.toml", "runs/demo")),
        ("new.toml", ("out/x", "meshwright train new.toml")),
        ("runs/demo/resolved.json", ("runs/demo/resolved.json",)),
        ("corpus", ("corpus", "resolved.json")),
        ("corpus/step-00000001", ("corpus/step-00000001",)),
    ],
)
def test_anything_else_is_one_message(runs: Path, name: str, values: tuple[str, ...]) -> None:
    Path("here.toml").write_text('[run]\nname = "demo"\n')
    Path("new.toml").write_text('[run]\nname = "x"\ndirectory = "out"\n')
    Path("corpus/step-00000001").mkdir(parents=True)
    Path("corpus/step-00000001/manifest.json").write_text("{}")
    with raises("MW-RUN-008", *values):
        find_run(Path(name))


def test_where_there_is_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises("MW-RUN-008", "runs/demo"):
        find_run(Path("x"))
