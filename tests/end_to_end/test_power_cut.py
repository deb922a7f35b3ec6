"""A power cut right after a checkpoint has appeared: what was fsynced is there, and nothing else; the run goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import parse
from meshwright.run.directory import run_directory
from meshwright.system.atomic import make_directory_synced
from tests.end_to_end.driving import changed, layout, lines, run_config
from tests.end_to_end.shell import Shell, written

pytestmark = pytest.mark.fault(row="a power cut after a checkpoint has appeared: only what was fsynced is left")

CUT = """
import json, os, signal, stat, sys
from pathlib import Path

after_step, out = sys.argv[1], Path(sys.argv[2])
files, folders = {}, {}  # inode -> the bytes, or the names, that the disk has for sure
fsync = os.fsync

def on_the_disk(descriptor):
    fsync(descriptor)
    found = os.fstat(descriptor)
    place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if stat.S_ISDIR(found.st_mode):
        folders[found.st_ino] = {each.name: each.lstat().st_ino for each in place.iterdir()}
        if place.name == "checkpoints" and after_step in folders[found.st_ino]:
            out.write_text(json.dumps({"files": {i: data.hex() for i, data in files.items()}, "folders": folders}))
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        files[found.st_ino] = place.read_bytes()

os.fsync = on_the_disk
from meshwright.launch.cli import main
sys.exit(main(sys.argv[3:]))
"""


def rebuild(place: Path, inode: int, disk: dict[str, Any]) -> None:
    """What the disk has under this name: a directory's names, a file's bytes; empty where nothing was fsynced."""
    for name, below in disk["folders"].get(str(inode), {}).items():
        target = place / name
        if str(below) in disk["folders"]:
            target.mkdir()
            rebuild(target, below, disk)
        else:
            target.write_bytes(bytes.fromhex(disk["files"].get(str(below), "")))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_checkpoint_presupposes_survives(asynchronous: bool, corpus: Path, tmp_path: Path, shell: Shell) -> None:
    runs = tmp_path / "new" / "runs"
    config = run_config(
        corpus,
        runs,
        parallel=layout(""),
        train={"steps": 6},
        checkpoint={"every": 2, "asynchronous": asynchronous},
        launch={"processes": 1},
    )
    file, out = written(config, tmp_path), tmp_path / "disk.json"
    base = tmp_path.stat().st_ino
    done = shell.run("-c", CUT, "step-00000004", str(out), "train", file)
    assert done.returncode == -9, done.stderr
    disk = json.loads(out.read_text())
    assert str(base) in disk["folders"], "the name of a directory that was made for the run"
    inode = disk["folders"][str(base)]["new"]
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").mkdir()
    rebuild(tmp_path / "new", inode, disk)

    directory = run_directory(config)
    assert [candidate.step for candidate in find(directory)] == [4, 2]
    assert {line["step"] for line in lines(config)} >= {1, 2, 3, 4}
    assert parse((directory / "resolved.json").read_text()).run == config.run
    assert "validate_steps" in (directory / "config.toml").read_text() and (directory / "placement.txt").read_text()
    assert json.loads((directory / "starts.jsonl").read_text())["step"] == 0
    again = shell.run("-m", "meshwright.launch", "train", str(directory / "config.toml"))
    assert again.returncode == 0, again.stderr
    assert [line["step"] for line in lines(config)] == list(range(1, 7))
    assert len((directory / "starts.jsonl").read_text().splitlines()) == 2


def test_each_new_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    make_directory_synced(tmp_path / "a" / "b" / "c")
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def test_records_that_are_lost_for_good_have_an_exit_code(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    """A file that refuses every write; the disk itself is sound, and the checkpoint is there."""
    config = run_config(corpus, tmp_path, parallel=layout(""), train={"steps": 12}, launch={"processes": 1})
    run_directory(config).mkdir()
    (run_directory(config) / "metrics.jsonl").mkdir()
    done = shell.run("-m", "meshwright.launch", "train", written(config, tmp_path))
    place = run_directory(config) / "metrics.jsonl"
    assert done.returncode == 20, done.stderr
    assert f"{place} cannot be written: Is a directory (errno 21). The run continues; its records wait" in done.stderr
    assert f"error: 12 records of this run could not be written to {place}" in done.stderr
    assert [candidate.step for candidate in find(run_directory(config))] == [12]


@pytest.mark.torture
def test_records_wait_until_the_file_can_be_written_again(corpus: Path, tmp_path: Path, shell: Shell) -> None:
    slow = {"builder": "tests.end_to_end.builders:slow", "options": {"pause_s": 0.02, "of": "norm"}}
    config = run_config(corpus, tmp_path, parallel=layout(""), train={"steps": 20}, launch={"processes": 1})
    config = changed(config, model={**slow, "options": {**config.model.options, **slow["options"]}})  # type: ignore[dict-item]
    run_directory(config).mkdir()
    place = run_directory(config) / "metrics.jsonl"
    place.mkdir()
    with shell.start(["-m", "meshwright.launch", "train", written(config, tmp_path)], stderr=-1) as process:
        assert process.stderr is not None
        while "cannot be written" not in (line := process.stderr.readline()):
            assert line
        place.rmdir()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{place} is written again, including the records that waited" in said
    assert [line["step"] for line in lines(config)] == list(range(1, 21))
