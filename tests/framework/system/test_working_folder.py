"""Folders whose names meshwright chose: nothing is written, truncated or deleted through a link,
or in other users'.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.data.prepare.stdlib import prepare_files
from meshwright.doctor import facts
from meshwright.doctor.findings import Finding
from meshwright.doctor.rank import BAD_NODES, write_bad_nodes
from meshwright.errors import ConfigError
from meshwright.optimizer.offload import _mapped
from meshwright.pipeline import compiled
from meshwright.pipeline.compiled import check_cache
from meshwright.run.files import SINK_FOLDERS, check_run_files
from meshwright.system.working_folder import make_working_folder, why_not_own
from meshwright_launch import leftovers
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.support.errors import raises

CONTENTS = {
    "state.json": "state",
    "request.json": "request",
    "lock": "lock",
    "train.lengths": "lengths",
    "skipped.txt": "skipped",
    "corpus/train.bin": "tokens",
}
"""Files of somebody else, of the names that a preparation uses."""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of somebody else."""
    for name, content in CONTENTS.items():
        file = tmp_path / "theirs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "theirs"


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def in_place_of(work: Path, theirs: Path) -> None:
    work.symlink_to(theirs)


def dangling(work: Path, theirs: Path) -> None:
    work.symlink_to(theirs / "new")


def linked_corpus(work: Path, theirs: Path) -> None:
    work.mkdir()
    (work / "corpus").symlink_to(theirs / "corpus")


def linked_lengths(work: Path, theirs: Path) -> None:
    work.mkdir()
    (work / "train.lengths").symlink_to(theirs / "train.lengths")


def linked_lock(work: Path, theirs: Path) -> None:
    work.mkdir()
    (work / "lock").symlink_to(theirs / "new")


def hard_link(work: Path, theirs: Path) -> None:
    (work / "corpus").mkdir(parents=True)
    (work / "corpus" / "train.bin").hardlink_to(theirs / "corpus" / "train.bin")


def a_file(work: Path, theirs: Path) -> None:
    work.write_text("")


def a_fifo(work: Path, theirs: Path) -> None:
    work.mkdir()
    os.mkfifo(work / "lock")


PLANTED = [
    in_place_of,
    dangling,
    linked_corpus,
    linked_lengths,
    linked_lock,
    hard_link,
    a_file,
    a_fifo,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_preparation_leaves_what_links_lead_to(
    plant: Callable[[Path, Path], None], theirs: Path, tmp_path: Path
) -> None:
    tokenizer = bytes_tokenizer(tmp_path)
    lines = write_lines(
        tmp_path / "a.jsonl", [{"text": f"document {number}"} for number in range(40)]
    )
    before, work = contents(theirs), tmp_path / "out" / ".corpus.preparing"
    work.parent.mkdir()
    plant(work, theirs)
    for replace in (False, True):
        with raises("MW-SYSTEM-009", ".corpus.preparing"):
            made(work.parent / "corpus", tokenizer, lines, replace=replace)
    assert contents(theirs) == before and not (theirs / "new").exists()
    work.rename(tmp_path / "away")
    made(work.parent / "corpus", tokenizer, lines)
    assert not work.exists()

    plant(work, theirs)  # beside the finished corpus: the same command only looks for leftovers
    made(work.parent / "corpus", tokenizer, lines)
    assert contents(theirs) == before and not (theirs / "new").exists()


def test_a_corpus_replaces_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            f"some text, the {number}th of nine, and more words\n" * 20
        )
    real = prepare_files([tmp_path / "texts"], tmp_path / "real", vocab_size=280).out
    before = {path.name: path.read_bytes() for path in real.iterdir()}
    (tmp_path / "link").symlink_to(real)
    prepare_files([tmp_path / "texts"], tmp_path / "link", vocab_size=270, replace=True)
    assert {path.name: path.read_bytes() for path in real.iterdir()} == before
    assert (tmp_path / "link").is_dir() and not (tmp_path / "link").is_symlink()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_folders_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory of one's own and in a shared one;
    the owner of the directory above may own what is in it.
    """
    folder = tmp_path / "shared" / "work"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("")
    assert why_not_own(folder) is None
    os.chown(folder, 4321, -1)
    assert why_not_own(folder) == "belongs to another user (uid 4321), who may change what is in it"
    with raises("MW-SYSTEM-009", "work"):
        make_working_folder(folder, ConfigError)
    os.chown(tmp_path / "shared", 4321, -1)
    assert why_not_own(folder) is None, "squashed root: whoever owns the directory above owns this"
    make_working_folder(folder, ConfigError)
    os.chown(folder / "state.json", 4322, -1)
    with raises("MW-SYSTEM-009", "state.json"):
        make_working_folder(folder, ConfigError)

    os.chown(tmp_path / "shared", 0, -1)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled, "default_cache", lambda: folder)
    with raises("MW-PIPELINE-047", "TORCHINDUCTOR_CACHE_DIR"):
        check_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    check_cache()


def test_a_compile_cache_that_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for user in ("me", "my:name", "a/b"):
        monkeypatch.setenv("LOGNAME", user)
        assert str(compiled.default_cache()) == default_cache_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled, "default_cache", lambda: tmp_path / "cache")
    check_cache()
    (tmp_path / "cache").symlink_to(tmp_path)
    with raises("MW-PIPELINE-047"):
        check_cache()


@pytest.mark.parametrize("name", SINK_FOLDERS)
def test_folders_of_sinks_in_a_run(name: str, theirs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(theirs)
    with raises("MW-RUN-009", name):
        check_run_files(run)
    (run / name).unlink()
    (run / name).mkdir()
    (run / name / "latest-run").symlink_to("run-1")  # as wandb does
    check_run_files(run)


def test_an_offload_file_has_no_name_that_others_could_replace(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces each name in the directory as soon as it is there:
    by a link to another file.
    """
    import tempfile

    make, directory = tempfile.mkstemp, tmp_path / "offload"

    def replaced(**options: object) -> tuple[int, str]:
        handle, name = make(**options)  # type: ignore[call-overload]
        Path(name).unlink()
        Path(name).symlink_to(theirs / "state.json")
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", replaced)
    before = contents(theirs)
    tensor = _mapped(directory, 5, torch.float32)
    tensor.fill_(7.0)
    assert (
        tensor.tolist() == [7.0] * 5
        and contents(theirs) == before
        and not list(directory.iterdir())
    )


def test_leftovers_of_launchers_behind_a_link(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "YOUNG_S", -1)
    monkeypatch.setattr(leftovers, "_temporary_directory", lambda: tmp_path)
    (tmp_path / f"{leftovers.PREFIX}own").mkdir()
    (tmp_path / f"{leftovers.PREFIX}link").symlink_to(theirs)
    before = contents(theirs)
    leftovers.remove_leftovers()
    assert contents(theirs) == before and not (tmp_path / f"{leftovers.PREFIX}own").exists()


def test_the_doctor_writes_through_no_link(theirs: Path, tmp_path: Path) -> None:
    run, before = tmp_path / "run", contents(theirs)
    run.mkdir()
    for name in (BAD_NODES, f".doctor-{socket.gethostname()}-{os.getpid()}"):
        (run / name).symlink_to(theirs / "state.json")
    speed, problem = facts._write(run)
    assert speed and problem is None
    write_bad_nodes([Finding("slow", ("h1", "h2"))], run)
    assert contents(theirs) == before and contents(run) == {BAD_NODES: "h1,h2"}
