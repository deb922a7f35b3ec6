"""Links and settings in a run of somebody else: no way past the check of trust,
and nothing written elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import meshwright
from meshwright.errors import ConfigError
from meshwright.run.files import check_run_files
from meshwright.tracking.wandb import _child_environment
from meshwright_launch.cli import main
from tests.launch.untrusted.planted import CANARY, payloads, planted
from tests.support.errors import has_code


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the working directory whose configuration names a payload."""
    monkeypatch.chdir(tmp_path)
    payloads(tmp_path)
    run = planted(tmp_path / "runs" / "theirs", model={"builder": "payload:build"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return run


def deep(run: Path) -> Path:
    """Return the configuration far below the run."""
    file = run / "a/b/c/d/e/f/c.toml"
    file.parent.mkdir(parents=True)
    (run / "config.toml").rename(file)
    return file


def link_to_deep(run: Path) -> Path:
    """Return a link in the run to a file far below it."""
    (run / "config.toml").symlink_to(deep(run))
    return run / "config.toml"


def link_out(run: Path) -> Path:
    """Return a link in the run to a file elsewhere, which alone would be the user's own."""
    file = run.parents[1] / "elsewhere" / "c.toml"
    file.parent.mkdir()
    (run / "config.toml").rename(file)
    (run / "config.toml").symlink_to(os.path.relpath(file, run))
    return run / "config.toml"


def link_to_link(run: Path) -> Path:
    """Return a link outside to a link in the run to a file outside."""
    (run.parents[1] / "mine.toml").symlink_to(link_out(run))
    return run.parents[1] / "mine.toml"


def folder_link(run: Path) -> Path:
    """Return a file behind a linked folder of the run."""
    (run / "folder").symlink_to(link_out(run).resolve().parent)
    return run / "folder" / "c.toml"


@pytest.mark.parametrize("place", [deep, link_to_deep, link_out, link_to_link, folder_link])
def test_no_link_leads_past_the_check(
    place: Callable[[Path], Path], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place(run)
    assert main(["stages", str(file)]) == 2
    assert "[MW-RUN-030]" in capsys.readouterr().err
    with pytest.raises(ConfigError, check=has_code("MW-RUN-030")):
        meshwright.load_config(file)
    assert meshwright.load_config(file, trust_code=True).model.builder == "payload:build"
    assert not Path(CANARY).exists()


def test_a_file_of_the_users_own_is_not_checked(run: Path) -> None:
    """Beside the folder of runs, also through a path that goes into a run and out again."""
    (run / "config.toml").rename(run.parents[1] / "mine.toml")
    for path in ("mine.toml", "runs/theirs/../../mine.toml"):
        assert meshwright.load_config(path).model.builder == "payload:build"


@pytest.mark.parametrize("command", ["report", "plot"])
def test_a_picture_is_not_written_through_a_link(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = run.parents[1] / "precious.png"
    precious.write_text("as it was")
    (run / "metrics.jsonl").write_text("")
    (run / {"report": "report.html", "plot": "loss.png"}[command]).symlink_to(precious)
    assert main([command, str(run)]) == 2
    assert "[MW-SYSTEM-007]" in capsys.readouterr().err and precious.read_text() == "as it was"


@pytest.mark.parametrize(
    "name", ["logs", "logs/rank-0.log", "expert-load.jsonl", "bad-nodes", "slurm/job.sbatch"]
)
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_file_of_a_run_is_written_through_a_link(name: str, kind: str, run: Path) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if kind == "link":
        path.symlink_to(run.parents[1] / "elsewhere")
    elif name == "logs":
        return
    else:
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"{path} is a ", check=has_code("MW-RUN-009")):
        check_run_files(run)


def test_settings_of_a_working_directory_are_not_those_of_pictures(run: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    from meshwright_plan.picture.library import require_matplotlib

    matplotlib.rcParams["text.usetex"] = True  # as a matplotlibrc there has set it
    require_matplotlib()
    assert not matplotlib.rcParams["text.usetex"]


def test_wandbs_server_is_that_of_the_user(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file ``wandb/settings`` in the working directory does not name another one."""
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(run / "none"))
    assert _child_environment(run)["WANDB_BASE_URL"] == "https://api.wandb.ai"
