"""Mirror in memory: the newest step that all ranks have written, bit for bit, or none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import TensorKind, TensorPiece
from meshwright.checkpoint.files import shard_names
from meshwright.checkpoint.memory import MirrorWriter
from meshwright.checkpoint.memory_read import (
    MirrorReader,
    choose_step,
    find_shards,
    open_mirror,
    read_texts,
)
from meshwright.errors import CheckpointError
from meshwright.mesh import Grid
from meshwright.parameters import ParameterInfo
from tests.framework.checkpoint.conftest import SHAPES, Fake, State

GRID = Grid(tp=2)
NAMES = shard_names(GRID)


@pytest.fixture
def fake() -> Fake:
    return Fake()


def write(
    fake: Fake,
    directory: Path,
    state: State,
    step: int,
    ranks: tuple[int, ...] = (0, 1),
    launch: int = 0,
) -> None:
    """Mirror a step of a model that two tp ranks share, as some of them do."""
    for rank in ranks:
        writer = MirrorWriter(directory, NAMES[rank], launch, grid=GRID)
        writer.write(fake.head(step), list(_kept(fake, state, rank)))


def _kept(fake: Fake, state: State, rank: int) -> list[TensorPiece]:
    """Return copies of a rank's pieces, which the fake gives in one buffer."""
    return [each._replace(tensor=each.tensor.clone()) for each in fake.pieces(state, 2, rank)]


def opened(directory: Path) -> MirrorReader | None:
    """Open the newest complete step in the memory of one node."""
    chosen, _ = choose_step({"node": find_shards(directory)})
    if chosen is None:
        return None
    texts = {name: read_texts(directory, chosen.slot, name) for name in chosen.shard_names}
    return open_mirror(directory, chosen, texts, "node")


def assert_holds(directory: Path, step: int, state: State) -> None:
    checkpoint = opened(directory)
    assert checkpoint is not None and checkpoint.manifest.step == step
    with checkpoint:
        for (kind, name), full in state.items():
            found = checkpoint.read(kind, ParameterInfo(name, SHAPES[name]))
            assert found is not None and torch.equal(found, full)


def test_steps_take_turns(fake: Fake, tmp_path: Path) -> None:
    """One writer of each rank writes in place; the step before stays whole."""
    writers = [MirrorWriter(tmp_path, name, grid=GRID) for name in NAMES]
    for step in range(1, 6):
        state = fake.state(seed=step)
        for rank, writer in enumerate(writers):
            writer.write(fake.head(step), _kept(fake, state, rank))
            if rank == 0 and step > 1:
                assert_holds(tmp_path, step - 1, fake.state(seed=step - 1))
        assert_holds(tmp_path, step, state)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 4


def test_a_rank_that_dies_while_it_writes(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has changed half of its boxes of step 3; step 2 is resumed."""
    write(fake, tmp_path, fake.state(seed=1), 1)
    write(fake, tmp_path, fake.state(seed=2), 2)
    writer = MirrorWriter(tmp_path, NAMES[1], grid=GRID)
    pieces = _kept(fake, fake.state(seed=3), 1)
    writer.write(fake.head(1), pieces)

    class Killed(BaseException):
        pass

    def killed(*what: object, **how: object) -> None:
        raise Killed

    monkeypatch.setattr("meshwright.checkpoint.memory.write_atomic", killed)
    with pytest.raises(Killed):
        writer.write(fake.head(3), pieces)
    monkeypatch.undo()
    write(fake, tmp_path, fake.state(seed=3), 3, ranks=(0,))
    assert_holds(tmp_path, 2, fake.state(seed=2))


def test_no_rank_or_not_all_have_written(fake: Fake, tmp_path: Path) -> None:
    assert opened(tmp_path / "none") is None
    write(fake, tmp_path, fake.state(), 1, ranks=(1,))
    assert opened(tmp_path) is None


def test_steps_of_two_launches_are_not_combined(fake: Fake, tmp_path: Path) -> None:
    """Rank 0 has taken step 3 again after a recovery, rank 1 not yet."""
    for step in (2, 3):
        write(fake, tmp_path, fake.state(seed=step), step)
    write(fake, tmp_path, fake.state(seed=3), 3, ranks=(0,), launch=1)
    assert_holds(tmp_path, 2, fake.state(seed=2))
    write(fake, tmp_path, fake.state(seed=3), 3, ranks=(1,), launch=1)
    assert_holds(tmp_path, 3, fake.state(seed=3))


def test_a_parameter_without_elements_is_there(tmp_path: Path, fake: Fake) -> None:
    info = ParameterInfo("empty", (0, 4))
    piece = TensorPiece(TensorKind.WEIGHTS, info, torch.zeros(0), 0)
    MirrorWriter(tmp_path, NAMES[0]).write(fake.head(1), [piece])
    checkpoint = opened(tmp_path)
    assert checkpoint is not None
    found = checkpoint.read(TensorKind.WEIGHTS, info)
    assert found is not None and found.shape == (0, 4)


def test_padding_of_a_bucket_is_not_in_the_file(tmp_path: Path, fake: Fake) -> None:
    """Flat elements of a slice with padding rows, as of a vocabulary that tp does not divide."""
    full = torch.randn(10, 6)
    infos = [fake.info("embedding.weight", 3, rank) for rank in range(3)]
    grid = Grid(tp=3)
    for name, info in zip(shard_names(grid), infos, strict=True):
        piece = TensorPiece(TensorKind.WEIGHTS, info, info.take(full).flatten(), 0)
        MirrorWriter(tmp_path, name, grid=grid).write(fake.head(1), [piece])
    checkpoint = opened(tmp_path)
    assert checkpoint is not None
    found = checkpoint.read(TensorKind.WEIGHTS, ParameterInfo("embedding.weight", (10, 6)))
    assert found is not None and torch.equal(found, full)


def test_a_damaged_file_is_found_before_a_tensor_is_read(fake: Fake, tmp_path: Path) -> None:
    write(fake, tmp_path, fake.state(), 1)
    file = next(tmp_path.glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="MW-CHECKPOINT-031"):
        opened(tmp_path)


def test_a_later_launch_may_be_at_an_earlier_step(fake: Fake, tmp_path: Path) -> None:
    """It has gone back to a checkpoint."""
    write(fake, tmp_path, fake.state(seed=8), 8)
    write(fake, tmp_path, fake.state(seed=5), 5, launch=1)
    assert_holds(tmp_path, 5, fake.state(seed=5))


def test_what_one_rank_alone_knows_is_kept(tmp_path: Path, fake: Fake) -> None:
    """Rank 1 has asked to end the run."""
    pieces = [_kept(fake, fake.state(), rank) for rank in (0, 1)]
    head = fake.head(1)
    MirrorWriter(tmp_path, NAMES[0], grid=GRID).write(head, pieces[0])
    asked = head._replace(state={**head.state, "stop_reason": "good enough"})
    MirrorWriter(tmp_path, NAMES[1], grid=GRID).write(asked, pieces[1])
    checkpoint = opened(tmp_path)
    assert checkpoint is not None and checkpoint.manifest.state["stop_reason"] == "good enough"


def test_boxes_that_do_not_cover_a_tensor_are_refused(fake: Fake, tmp_path: Path) -> None:
    for rank, name in enumerate(NAMES):
        pieces = _kept(fake, fake.state(), rank)[rank:]  # rank 1 leaves one out
        MirrorWriter(tmp_path, name, grid=GRID).write(fake.head(1), pieces)
    with pytest.raises(CheckpointError, match="MW-CHECKPOINT-030"):
        opened(tmp_path)


def test_a_full_memory_is_an_error_and_not_a_signal(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is reserved before it is mapped: a write beyond the space would be SIGBUS."""

    def full(*what: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(fake, tmp_path, fake.state(seed=1), 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write(fake, tmp_path, fake.state(seed=2), 2)
    assert_holds(tmp_path, 1, fake.state(seed=1))


def test_degrees_that_no_run_has(fake: Fake, tmp_path: Path) -> None:
    """A mark of more ranks than are possible is damaged: their names are never listed."""
    write(fake, tmp_path, fake.state(), 1)
    for mark in tmp_path.glob("*/*.step.json"):
        text = mark.read_text()
        assert '"degrees":[1,1,2,1,1]' in text
        mark.write_text(text.replace("[1,1,2,1,1]", "[1000,1000,2,1,1]"))
    assert opened(tmp_path) is None
