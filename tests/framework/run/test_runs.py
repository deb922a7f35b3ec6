"""Whoever names no run is told what there is instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.run.directory import find_run, runs_in
from tests.support.errors import has_code


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs in ``runs``, of which the second was started last, and the current directory above them."""
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
    ("name", "said"),
    [
        ("runs", "runs is not a run, but contains runs/deep, runs/demo: name one"),
        ("runs/none", "runs/none does not exist: there are runs/deep, runs/demo"),
        ("elsewhere", "elsewhere does not exist: there are runs/deep, runs/demo"),
        ("here.toml", "here.toml is a configuration, not a run: runs/demo is its run"),
        ("new.toml", "its run is out/x, which does not exist yet: `meshwright train new.toml` first"),
        ("runs/demo/resolved.json", "is a file, not a run directory"),
        ("corpus", "corpus is not a run directory, or its run was never started: resolved.json is missing; there"),
        ("corpus/step-00000001", "is a checkpoint outside of a run"),
    ],
)
def test_anything_else_is_one_message(runs: Path, name: str, said: str) -> None:
    Path("here.toml").write_text('[run]\nname = "demo"\n')
    Path("new.toml").write_text('[run]\nname = "x"\ndirectory = "out"\n')
    Path("corpus/step-00000001").mkdir(parents=True)
    Path("corpus/step-00000001/manifest.json").write_text("{}")
    with pytest.raises(ConfigError, check=has_code("MW-RUN-008")) as raised:
        find_run(Path(name))
    assert said in str(raised.value)


def test_where_there_is_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name a run directory, such as runs/demo", check=has_code("MW-RUN-008")):
        find_run(Path("x"))
