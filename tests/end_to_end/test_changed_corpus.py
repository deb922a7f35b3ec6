"""A corpus whose bytes have changed is noticed at the next start;
a copy of the same bytes is accepted.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.data import fingerprint
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.fingerprint import (
    FILE_NAME,
    SAMPLED_BLOCKS,
    SAMPLED_BYTES,
    sampled_offsets,
    sampled_sha256,
)
from meshwright.errors import DataError
from meshwright.mesh.grid import Grid
from meshwright.parts import Observer, Parts
from meshwright.run.directory import run_directory
from meshwright.run.starts import record_start
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import changed, layout, refused_rank, run_config, train
from tests.framework.checkpoint.test_checkpoint_hostile import forge
from tests.support.errors import has_code
from tests.support.marks import long_row


def overwrite(file: Path, content: bytes) -> None:
    """Write in place, as ``rsync --inplace``: the file is never shorter, so that a prefetching
    loader that reads at the same moment finds bytes.
    """
    with file.open("r+b") as stream:
        stream.write(content)


def flip_all(file: Path) -> None:
    """Every token id another one, with the size and the time of the last write as they were."""
    was = file.stat()
    overwrite(file, (np.fromfile(file, np.uint16) ^ 1).tobytes())
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.fixture
def copied(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "corpus"))


@pytest.mark.parametrize("origin", [long_row("ours"), long_row("ours, older"), "Megatron's"])
def test_flipped_token_ids_are_noticed_at_the_next_start(
    origin: str, copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    place = copied / FILE_NAME
    if origin == "ours, older":
        known = json.loads(place.read_text())
        del known["sampled"]
        place.write_text(json.dumps(known))
    elif origin == "Megatron's":
        place.unlink()
    config = run_config(copied, tmp_path / "runs", parallel=layout(""), train={"steps": 2})
    train(pool, config)
    further = changed(config, train={"steps": 4})
    flip_all(copied / "train.bin")
    ((said, _),) = pool.run(refused_rank, 1, further)
    assert (
        "train.bin was changed after"
        if origin == "ours"
        else "data fingerprint 'sampled bytes' was"
    ) in said
    flip_all(copied / "train.bin")
    assert "resuming from" in train(pool, further)


def test_the_same_bytes_elsewhere_and_later_are_accepted(
    copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(copied, tmp_path / "runs", parallel=layout(""), train={"steps": 2})
    train(pool, config)
    moved = copied.rename(tmp_path / "moved")
    for path in moved.iterdir():
        os.utime(path)
    data = {
        "train": str(moved / "train"),
        "validation": None,
        "tokenizer": str(moved / "tokenizer.json"),
    }
    assert "resuming from" in train(pool, changed(config, train={"steps": 4}, data=data))


def test_a_checkpoint_without_a_sampled_hash_goes_on_with_a_note(
    copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(copied, tmp_path / "runs", parallel=layout(""), train={"steps": 2})
    train(pool, config)
    forge(
        find(run_directory(config.run))[0].path,
        lambda manifest: manifest["data_fingerprint"].pop("sampled bytes"),
    )
    said = train(pool, changed(config, train={"steps": 4}))
    assert "changed: data fingerprint 'sampled bytes': the checkpoint has none" in said


def test_validation_mask_and_tokenizer_are_looked_at_too(
    copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(copied, tmp_path / "runs", parallel=layout(""), train={"steps": 2})
    train(pool, config)
    further = changed(config, train={"steps": 4})
    flip_all(copied / "validation.bin")
    assert "validation.bin was changed" in pool.run(refused_rank, 1, further)[0][0]
    flip_all(copied / "validation.bin")
    with (copied / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert "data fingerprint 'tokenizer' was" in pool.run(refused_rank, 1, further)[0][0]


def test_a_large_file_is_sampled_and_what_lies_between_is_for_data_verify(tmp_path: Path) -> None:
    size = 5 * SAMPLED_BLOCKS * SAMPLED_BYTES + 77
    places = sampled_offsets(size)
    assert (
        len(set(places)) == SAMPLED_BLOCKS
        and places == sorted(places)
        and places[-1] + SAMPLED_BYTES == size
    )
    gaps = [b - a - SAMPLED_BYTES for a, b in itertools.pairwise(places)]
    assert max(gaps) <= 2 * size / SAMPLED_BLOCKS
    file = tmp_path / "large.bin"
    data = bytearray(os.urandom(size))
    file.write_bytes(data)
    before = sampled_sha256(file)
    for start in (places[0], places[100] + 9, size - 1):
        data[start] ^= 1
        file.write_bytes(data)
        assert sampled_sha256(file) != before
        data[start] ^= 1
    between = next(a + SAMPLED_BYTES for a, gap in zip(places, gaps, strict=False) if gap > 0)
    data[between] ^= 1
    file.write_bytes(data)
    assert sampled_sha256(file) == before and fingerprint.file_sha256(file)


def test_data_verify_reads_every_byte(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(copied)]) == 0
    assert f"{copied / 'train.bin'}: unchanged" in capsys.readouterr().out
    flip_all(copied / "train.bin")
    (copied / "validation.idx").unlink()
    assert main(["data", "verify", str(copied)]) == 1
    said = capsys.readouterr().out
    assert (
        f"{copied / 'train.bin'}: differs" in said
        and f"{copied / 'validation.idx'}: differs, or is missing" in said
    )
    (copied / FILE_NAME).unlink()
    assert main(["data", "verify", str(copied)]) == 2


def test_a_corpus_that_is_cut_short_under_a_run_is_named(copied: Path) -> None:
    """No SIGBUS: what is missing is an error with the file's name."""
    open_corpus = Corpus(copied / "train", 32)
    open_corpus.open()
    last = open_corpus.num_samples - 1
    open_corpus.example(last)
    os.truncate(copied / "train.bin", 4096)
    with pytest.raises(
        DataError,
        match=r"train\.bin has 4,096 bytes, and had .* when it was opened",
        check=has_code("MW-DATA-031"),
    ):
        open_corpus.example(last)


@pytest.mark.parametrize("ending", ["mask", "idx"])
def test_so_is_what_lies_beside_it(ending: str, copied: Path) -> None:
    tokens = np.fromfile(copied / "train.bin", np.uint16)
    np.ones(len(tokens), np.uint8).tofile(copied / "train.mask")
    found = Corpus(copied / "train", 32, rules=DocumentRules(boundaries=True))
    found.example(found.num_samples - 1)
    os.truncate(copied / f"train.{ending}", 0)
    with pytest.raises(
        DataError,
        match=rf"train\.{ending} has 0 bytes, and had .* when it was opened",
        check=has_code("MW-DATA-031"),
    ):
        found.example(found.num_samples - 1)


def test_a_file_that_was_written_since_the_last_start_is_named(
    copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Its bytes are the same as far as they are sampled: the run goes on, and says so."""
    config = run_config(copied, tmp_path / "runs", parallel=layout(""), train={"steps": 2})
    train(pool, config)
    directory, file = run_directory(config.run), copied / "train.bin"
    noted = json.loads((directory / "starts.jsonl").read_text().splitlines()[-1])["corpus"]
    assert noted == {str(path): path.stat().st_mtime_ns for path in (file, copied / "train.idx")}
    said: list[str] = []
    record_start(directory, 2, Grid(), ["here"], noted, said.append)
    assert not said
    record_start(directory, 2, Grid(), ["here"], {**noted, str(file): 1}, said.append)
    assert len(said) == 1 and said[0].startswith(
        f"{file}: written since the last start of this run"
    )
    (directory / "starts.jsonl").write_bytes(b"[" * 100_000)
    record_start(directory, 2, Grid(), ["here"], noted, said.append)
    assert len(said) == 1
    train(pool, changed(config, train={"steps": 3}))


class Overwriting(Observer):
    """Changes a file of the corpus before a step, on the last rank."""

    def __init__(self, file: Path, how: str, step: int) -> None:
        self.file, self.how, self.step = file, how, step

    def before_step(self, parts: Parts) -> None:
        if parts.mesh.rank == parts.mesh.grid.size - 1 and parts.state.step + 1 == self.step:
            change(self.file, self.how)


def change(file: Path, how: str) -> None:
    if how == "overwritten":  # with its size and times as before, as `cp --preserve` does
        flip_all(file)
    elif how == "one token":
        with file.open("r+b") as stream:
            stream.write(b"\x07\x00")
    elif how == "replaced":
        flip_all(Path(shutil.copy2(file, f"{file}.new")))
        Path(f"{file}.new").replace(file)
    elif how == "removed":
        file.unlink()
    elif how == "touched":
        file.touch()
    elif how == "copied over itself":
        was = file.stat()
        overwrite(file, file.read_bytes())
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    else:
        file.chmod(0o600)


def changed_live(rank: int, world_size: int, config: RunConfig, file: Path, how: str) -> str:
    """Return what a rank says when a file of its corpus is changed before the fourth step."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        work(config, observers=[Overwriting(file, how, 4)])
    return said.getvalue()


@pytest.mark.parametrize(
    ("how", "name", "expected"),
    [
        (
            "overwritten",
            "train.bin",
            "was overwritten with other bytes, and the run trains on them",
        ),
        ("one token", "validation.bin", "was overwritten with other bytes"),
        (
            "replaced",
            "train.bin",
            "was replaced by another file: the run goes on with the one it opened",
        ),
        ("removed", "train.idx", "was removed, or cannot be read any more"),
        ("touched", "train.bin", "was written to; its sampled bytes are as before"),
        ("copied over itself", "train.bin", None),
        ("other mode", "train.bin", None),
    ],
)
def test_a_corpus_that_changes_under_a_run_is_named_at_the_next_save(
    how: str, name: str, expected: str | None, copied: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Once, by the first rank, whichever rank's machine has changed it; the run goes on,
    and a resume is refused.
    """
    config = run_config(
        copied,
        tmp_path / "runs",
        parallel=layout("dp2"),
        train={"steps": 6, "validate_steps": 1},
        checkpoint={"every": 3},
    )
    said = pool.run(changed_live, 2, config, copied / name, how)
    assert "corpus changed" not in said[1]
    if expected is None:
        assert "corpus changed" not in said[0]
        return
    assert said[0].count("the corpus changed under this run, up to step 6: ") == 1
    assert f"{copied / name} {expected}" in said[0]
    assert [each.step for each in find(run_directory(config.run))] == [6, 3]
    if name == "train.bin" and how != "touched":
        further = changed(config, train={"steps": 8})
        assert all(
            "sampled bytes" in text or "was changed after" in text
            for text, _ in pool.run(refused_rank, 2, further)
        )
