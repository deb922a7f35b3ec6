"""A power cut right after a checkpoint has appeared: what was fsynced is there, and nothing else;
the run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig, parse
from meshwright.expert_parallel.routing_file import RoutingFile
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.directory import run_directory
from meshwright.system.atomic import make_directory_synced, sync, sync_with_folders
from meshwright.tracking.wandb import run_id
from tests.end_to_end.driving import changed, layout, lines, run_config
from tests.end_to_end.shell import Shell, written
from tests.end_to_end.test_shared_experts import LLAMA
from tests.end_to_end.test_shared_experts import MODEL as EXPERTS

pytestmark = pytest.mark.fault(
    row="a power cut after a checkpoint has appeared: only what was fsynced is left"
)

CUT = """
import contextlib, json, os, signal, stat, sys
from pathlib import Path

after_step, out = sys.argv[1], Path(sys.argv[2])
files, folders = {}, {}  # inode -> the bytes, or the names, that the disk has for sure
fsync = os.fsync

def inode(path):
    with contextlib.suppress(OSError):
        return path.lstat().st_ino

def on_the_disk(descriptor):
    fsync(descriptor)
    found = os.fstat(descriptor)
    place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if stat.S_ISDIR(found.st_mode):
        folders[found.st_ino] = {each.name: inode(each) for each in place.iterdir()}
        if place.name == "checkpoints" and after_step in folders[found.st_ino]:
            disk = {"files": {i: data.hex() for i, data in files.items()}, "folders": folders}
            every = [path for path in Path("new").rglob("*") if path.is_file()]
            live = {str(path): path.read_bytes().hex() for path in every}
            out.write_text(json.dumps({**disk, "live": live}))
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        files[found.st_ino] = place.read_bytes()

os.fsync = on_the_disk
from meshwright_launch.cli import main
sys.exit(main(sys.argv[3:]))
"""


def rebuild(place: Path, inode: int, disk: dict[str, Any]) -> None:
    """What the disk has under this name: a directory's names, a file's bytes;
    empty where nothing was fsynced.
    """
    for name, below in disk["folders"].get(str(inode), {}).items():
        target = place / name
        if str(below) in disk["folders"]:
            target.mkdir()
            rebuild(target, below, disk)
        else:
            target.write_bytes(bytes.fromhex(disk["files"].get(str(below), "")))


LOST_IN_A_CUT = {"lock", "status.json"}
"""Files of a run that the next start does not need."""


class Notes(Observer):
    """A callback with a state, a file per step that a resume reads,
    and the id of a run in wandb.
    """

    def __init__(self, parts: Parts) -> None:
        self.directory = run_directory(parts.config.run)
        self.steps: list[int] = []

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        run_id(self.directory)
        self.steps.append(parts.state.step)
        note = self.directory / "notes" / f"{parts.state.step}.txt"
        note.parent.mkdir(exist_ok=True)
        note.write_text(f"{event.stats.loss}")
        parts.written_files.append(note)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = list(state["steps"])
        assert all(
            float((self.directory / "notes" / f"{step}.txt").read_text()) > 0 for step in self.steps
        )


def of_step(path: str) -> int:
    """Return the step in a file's name, or in that of its folder; 0: it has none."""
    found = re.search(r"step-(\d+)|notes/(\d+)", path)
    return int(found[1] or found[2]) if found else 0


def power_cut(config: RunConfig, tmp_path: Path, shell: Shell) -> dict[str, str]:
    """Train until the checkpoint of step 4 appears, then leave what was fsynced;
    return what processes saw, in hex.
    """
    out = tmp_path / "disk.json"
    done = shell.run("-c", CUT, "step-00000004", str(out), "train", written(config, tmp_path))
    assert done.returncode == -9, done.stderr
    disk = json.loads(out.read_text())
    assert str(tmp_path.stat().st_ino) in disk["folders"], (
        "the name of a directory that was made for the run"
    )
    inode = disk["folders"][str(tmp_path.stat().st_ino)]["new"]
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").mkdir()
    rebuild(tmp_path / "new", inode, disk)
    return dict(disk["live"])


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_checkpoint_presupposes_survives(
    asynchronous: bool, corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """Every file that exists when a checkpoint appears,
    those of later steps and a list of others left out.
    """
    routing = (
        {"routing": "record"}
        if asynchronous
        else {"routing": "record", "routing_directory": "new/deep/routing"}
    )
    config = run_config(
        corpus,
        tmp_path / "new" / "runs",
        model={
            **EXPERTS,
            "options": {**LLAMA, "moe": {"num_experts": 4, "top_k": 2, "balance": "bias"}},
        },
        parallel=layout(""),
        train={"steps": 6, "callbacks": ("tests.end_to_end.test_power_cut:Notes",), **routing},
        tracking={"trace_step": 3},
        checkpoint={"every": 2, "asynchronous": asynchronous},
        launch={"processes": 1},
    )
    live, directory = power_cut(config, tmp_path, shell), run_directory(config.run)
    needed = {
        path: bytes.fromhex(content)
        for path, content in live.items()
        if Path(path).name not in LOST_IN_A_CUT and of_step(path) <= 4 and "/logs/" not in path
    }
    assert {
        "memory.json",
        "expert-load.jsonl",
        "step-00000003.json",
        "step-00000004.safetensors",
        "4.txt",
    } < {Path(path).name for path in needed}
    for path, content in needed.items():
        left = (tmp_path / path).read_bytes() if (tmp_path / path).exists() else b""
        # replaced as a whole at each save: an asynchronous one may appear after the next
        if Path(path).name == "memory.json":
            assert json.loads(left)["step"] >= 4
            continue
        assert left and content.startswith(left), (
            f"{path} was not on the disk when the checkpoint appeared"
        )

    assert [candidate.step for candidate in find(directory)] == [4, 2]
    assert {line["step"] for line in lines(config)} >= {1, 2, 3, 4}
    assert parse((directory / "resolved.json").read_text()).run == config.run
    assert (
        "validate_steps" in (directory / "config.toml").read_text()
        and (directory / "placement.txt").read_text()
    )
    assert json.loads((directory / "starts.jsonl").read_text())["step"] == 0
    again = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in lines(config)] == list(range(1, 7))
    assert len((directory / "starts.jsonl").read_text().splitlines()) == 2
    recorded = directory / "routing" if asynchronous else tmp_path / "new" / "deep" / "routing"
    for step in range(1, 7):
        names = RoutingFile(recorded / f"step-{step:08d}.safetensors").names
        assert names == ["block0.mlp.router", "block1.mlp.router"]


def test_files_and_the_directories_above_them_are_synced(tmp_path: Path) -> None:
    """Missing ones are left out, and a failure is reported."""
    synced: list[str] = []
    (tmp_path / "made" / "before").mkdir(parents=True)
    files = [tmp_path / "made" / "before" / name for name in ("one", "two", "three")]
    files[0].write_text("1")
    files[2].write_text("3")

    def watched(path: Path) -> None:
        synced.append(str(path))
        sync(path)
        if path == files[2]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.system.atomic.sync", watched)
        problems = list(sync_with_folders(files))
    assert synced[:3] == list(map(str, files)) and len(synced) == len(set(synced))
    assert set(map(str, (files[0].parent, tmp_path / "made", tmp_path))) < set(synced)
    assert [(path, error.errno) for path, error in problems] == [(files[2], errno.EIO)]


def test_each_new_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    make_directory_synced(tmp_path / "a" / "b" / "c")
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


@pytest.mark.long
def test_records_that_are_lost_for_good_have_an_exit_code(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """A file that refuses every write; the disk itself is sound, and the checkpoint is there."""
    config = run_config(
        corpus, tmp_path, parallel=layout(""), train={"steps": 12}, launch={"processes": 1}
    )
    run_directory(config.run).mkdir()
    (run_directory(config.run) / "metrics.jsonl").mkdir()
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    place = run_directory(config.run) / "metrics.jsonl"
    assert done.returncode == 20, done.stderr
    assert (
        f"{place} cannot be written: Is a directory (errno 21). The run continues; its records wait"
        in done.stderr
    )
    assert f"error: 12 records of this run could not be written to {place}" in done.stderr
    assert [candidate.step for candidate in find(run_directory(config.run))] == [12]


@pytest.mark.torture
def test_records_wait_until_the_file_can_be_written_again(
    corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    slow = {"builder": "tests.end_to_end.builders:slow", "options": {"pause_s": 0.02, "of": "norm"}}
    config = run_config(
        corpus, tmp_path, parallel=layout(""), train={"steps": 20}, launch={"processes": 1}
    )
    config = changed(config, model={**slow, "options": {**config.model.options, **slow["options"]}})  # type: ignore[dict-item]
    run_directory(config.run).mkdir()
    place = run_directory(config.run) / "metrics.jsonl"
    place.mkdir()
    with shell.start(
        ["-m", "meshwright_launch", "train", written(config, tmp_path)], stderr=-1
    ) as process:
        assert process.stderr is not None
        while "cannot be written" not in (line := process.stderr.readline()):
            assert line
        place.rmdir()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{place} is written again, including the records that waited" in said
    assert [line["step"] for line in lines(config)] == list(range(1, 21))
