"""Mirror in memory on two nodes: its bytes, its failures, and which step is chosen."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.build import build
from meshwright.checkpoint import CheckpointMetadata, TensorKind, TensorPiece, memory
from meshwright.checkpoint.files import shard_name, shard_names
from meshwright.checkpoint.memory_read import Box, FoundShard, choose_step
from meshwright.config import RunConfig, resolve
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, leave_mesh, open_mesh
from meshwright.parameters import ParameterInfo
from meshwright.parts import NOT_MIRRORED, StepEvent
from meshwright.run.mirror import LEAVE_S, Mirror
from meshwright.run.mirror_size import MirrorSize, mirror_size
from meshwright.step import take_step
from meshwright.system.host import NODE
from meshwright_launch.leftovers import MEMORY
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import LLAMA, layout, run_config, with_own_samples

ADAPTER: dict[str, Any] = {"adapter": {"rank": 2, "targets": ["*.attention.qkv"]}}
EXPERTS: dict[str, Any] = {
    "model": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "moe": {"num_experts": 4, "top_k": 2, "balance": "bias"}},
    }
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as found:
        yield Path(found)


class Measured(NamedTuple):
    """Bytes that a rank has sent in each step, and the price before the run."""

    sent: list[float]
    flags: list[bool]
    price: MirrorSize


def mirror_steps(
    rank: int, world_size: int, config: RunConfig, nodes: str, place: str, full_on: int
) -> Measured:
    """Mirror four steps; ``full_on``: rank whose memory is full from the third step on."""
    os.environ[NODE] = nodes[rank]
    try:
        mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    finally:
        del os.environ[NODE]
    parts = build(config, mesh)
    directory = Path(place) / nodes[rank]
    directory.mkdir(exist_ok=True)
    mirror = Mirror(parts, directory, 0)
    assert mirror.exchange is not None
    sent, flags = [0.0], []
    for step in range(4):
        stats = take_step(parts)
        flags.append(NOT_MIRRORED in stats.flags)
        if step == 2 and rank == full_on:
            _fill_up(mirror)
        event = StepEvent(stats, 0.0, False, False, False, False)
        mirror.after_step(parts, event)
        mirror.join()
        sent.append(mirror.exchange.sent_bytes)
    mirror.after_training(parts)
    price = mirror_size(parts.blueprint, mesh.nodes)
    close_mesh(mesh)
    return Measured([after - before for before, after in pairwise(sent)], flags, price)


def _fill_up(mirror: Mirror) -> None:
    """Make every further copy on this node fail, as where the memory is full."""
    assert mirror.exchange is not None
    for copy in mirror.exchange._copies.values():

        def begin(*what: object, **how: object) -> list[torch.Tensor]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        copy.begin = begin  # type: ignore[method-assign]


def config_of(tmp_path: Path, text: str, **sections: Any) -> RunConfig:
    """Return a small run on its own samples, resolved."""
    config = with_own_samples(run_config(tmp_path, tmp_path, parallel=layout(text), **sections))
    return resolve(config, 4)


def file_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file without its header."""
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - header


@pytest.mark.parametrize(
    ("text", "nodes", "sections"),
    [
        ("dp4,zero1", "aabb", {}),
        ("dp2,pp2", "aabb", {"train": {"dtype": "bfloat16"}}),
        pytest.param("dp4,zero3", "abbb", ADAPTER, marks=pytest.mark.long),
        pytest.param("dp2,tp2", "aabb", {"optimizer": {"name": "muon"}}, marks=pytest.mark.long),
        pytest.param("dp4,ep2", "aabb", EXPERTS, marks=pytest.mark.long),
        pytest.param(
            "dp2,pp2", "abca", {"optimizer": {"name": "adafactor"}}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_price(
    text: str, nodes: str, sections: dict[str, Any], tmp_path: Path, pool: RankPool, place: Path
) -> None:
    """In the memory of all nodes, and on the wire in each step. Padding moves some bytes between
    ranks of a stage.
    """
    config = config_of(tmp_path, text, **sections)
    ranks = pool.run(mirror_steps, 4, config, nodes, str(place), -1)
    price = ranks[0].price
    # one file of frozen weights in both slots
    files = {path.stat().st_ino: path for path in place.glob("*/*/*.safetensors")}
    held = sum(map(file_bytes, files.values()))
    assert held == pytest.approx(sum(price.held.values()), abs=0.5)
    for node in set(nodes):
        of_node = [path for path in files.values() if path.is_relative_to(place / node)]
        assert sum(map(file_bytes, of_node)) == pytest.approx(price.held[node], rel=0.05)
    data = [path for path in files.values() if path.name.count(".") == 1]
    headers = sum(path.stat().st_size - file_bytes(path) for path in data) / 4
    marks = sum(len(path.read_bytes()) for path in place.glob("*/*/*.step.json")) / 4
    heads = 4 * (6 + 1) * 8  # of four ranks: sizes, answer
    in_last_step = sum(each.sent[-1] for each in ranks)
    assert in_last_step == pytest.approx(sum(price.sent) + headers + marks + heads, abs=8)


def test_a_full_memory_switches_all_ranks_off(
    tmp_path: Path, pool: RankPool, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 holds the copy of rank 0 and has no memory for it in step 3; no rank waits for it."""
    config = config_of(tmp_path, "dp4,zero1")
    ranks = pool.run(mirror_steps, 4, config, "aabb", str(place), 2)
    assert [each.flags for each in ranks] == [[False, False, False, True]] * 4
    assert not list(place.glob("*/*/*")), "all have removed their files"


def mirror_beside_others(rank: int, world_size: int, config: RunConfig, place: str) -> bool:
    """Mirror a step, the first rank of each node late; return whether files of another layout were there
    when this rank began to write.
    """
    os.environ[NODE] = "aabb"[rank]
    try:
        mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    finally:
        del os.environ[NODE]
    parts = build(config, mesh)
    directory = Path(place) / "aabb"[rank]
    mirror = Mirror(parts, directory, 1)
    write = mirror._writer.write
    found: list[Path] = []

    def look(head: CheckpointMetadata, pieces: Iterable[TensorPiece]) -> memory.MirroredShard:
        found.extend(directory.glob(f"{memory.SLOTS[head.step % 2]}/pp9-*"))
        return write(head, pieces)

    mirror._writer.write = look  # type: ignore[method-assign]
    event = StepEvent(take_step(parts), 0.0, False, False, False, False)
    if rank % 2 == 0:
        time.sleep(1.0)
    mirror.after_step(parts, event)
    mirror.after_training(parts)
    close_mesh(mesh)
    return bool(found)


def test_the_first_to_write_has_the_space(tmp_path: Path, pool: RankPool, place: Path) -> None:
    """Whichever rank of a node it is: shards of another layout are removed before."""
    for node in "ab":
        for slot in memory.SLOTS:
            (place / node / slot).mkdir(parents=True)
            (place / node / slot / "pp9-dp0-tp0.safetensors").touch()
    ranks = pool.run(mirror_beside_others, 4, config_of(tmp_path, "dp4,zero1"), str(place))
    assert ranks == [False] * 4
    assert len(list(place.glob("*/*/pp9-*"))) == 2, "of the other slot, in the next step"


def test_the_newest_step_that_is_whole_somewhere() -> None:
    """Step 5 lacks a shard; that of the launch before is not taken in its place."""
    x, y = shard_names(Grid(dp=2))
    node_a = [_found(1, 4, x), _found(1, 5, x), _found(0, 5, y)]
    node_b = [_found(1, 4, y), _found(1, 4, x)]
    chosen, problem = choose_step({"a": node_a, "b": node_b})
    assert chosen is not None and not problem
    assert chosen[:2] == (1, 4) and chosen.nodes_of == {x: ["a", "b"], y: ["b"]}
    assert chosen.slot == "even" and chosen.shard_names == (x, y)


def _found(generation: int, step: int, name: str, dp: int = 2) -> FoundShard:
    return FoundShard(generation, step, name, Grid(dp=dp).degrees)


def test_a_step_of_another_layout() -> None:
    """Shards of two layouts have the same names; they are never combined."""
    x, y, z = shard_names(Grid(dp=3))
    before = [_found(0, 4, name, dp=3) for name in (x, y, z)]
    chosen, _ = choose_step({"a": [_found(1, 5, x)], "b": before})
    assert chosen is not None and chosen[:2] == (0, 4) and chosen.shard_names == (x, y, z)
    chosen, _ = choose_step({"a": [_found(1, 5, x)], "b": [*before, _found(1, 5, y)]})
    assert chosen is not None and chosen[:2] == (1, 5) and chosen.grid == Grid(dp=2)


def test_a_later_launch_is_newer() -> None:
    """It has gone back to a checkpoint."""
    name = shard_name(Grid(), 0)
    chosen, _ = choose_step({"a": [FoundShard(0, 9, name), FoundShard(1, 4, name)]})
    assert chosen is not None and chosen[:2] == (1, 4)


def test_what_is_nowhere_is_named() -> None:
    """The run resumes from its checkpoint."""
    x, y, _ = shard_names(Grid(dp=3))
    chosen, problem = choose_step({"a": [_found(0, 3, x, dp=3)], "b": []})
    assert chosen is None
    assert problem == f"of step 3, shard {y} and 1 more is on none of the nodes a, b"
    assert choose_step({"a": [], "b": []}) == (None, "")


def test_a_box_in_pieces() -> None:
    """They are in order, and cover it once."""
    box = Box("x.safetensors", "w", ((2, 9), (1, 4)))
    counts = torch.zeros(7, 3)
    for piece in box.split(4):
        assert torch.Size(piece.shape).numel() <= 4
        counts[piece.inside(box)] += 1
    assert counts.eq(1).all()
    assert list(Box("x.safetensors", "w", ()).split(4)) == [Box("x.safetensors", "w", ())]


def test_frozen_weights_are_copied_once(tmp_path: Path) -> None:
    """Both slots have one file of them; after a change in place they are copied again."""
    frozen, weights = torch.zeros(4), torch.zeros(4)
    pieces = [
        TensorPiece(TensorKind.WEIGHTS, ParameterInfo(name, (4,)), tensor, 0)
        for name, tensor in (("frozen", frozen), ("trained", weights))
    ]
    writer = memory.MirrorWriter(tmp_path, "x", 0, frozenset({"frozen"}))

    def write(step: int) -> memory.MirroredShard:
        return writer.write(CheckpointMetadata(step, step, 0, {}, {}, {}), pieces)

    sent = [write(step).frozen is not None for step in range(1, 5)]
    assert sent == [True, False, False, False]
    files = list(tmp_path.glob("*/x.frozen.safetensors"))
    assert len(files) == 2 and files[0].samefile(files[1])
    frozen += 1
    assert [write(step).frozen is not None for step in range(5, 8)] == [True, False, False]
    assert files[0].samefile(files[1])
    assert files[0].read_bytes().endswith(torch.ones(4).numpy().tobytes())


def leave_in_between(rank: int, world_size: int, config: RunConfig, place: str) -> float:
    """Return the seconds in which an error ends a mirror that waits for rank 3, which leaves."""
    os.environ[NODE] = "aabb"[rank]
    try:
        mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    finally:
        del os.environ[NODE]
    parts = build(config, mesh)
    directory = Path(place) / "aabb"[rank]
    directory.mkdir(exist_ok=True)
    mirror = Mirror(parts, directory, 0)
    event = StepEvent(take_step(parts), 0.0, False, False, False, False)
    if rank < 3:
        mirror.after_step(parts, event)
    else:
        time.sleep(1.0)
    start_s = time.monotonic()
    mirror.on_error(parts, RuntimeError())
    seconds = time.monotonic() - start_s
    leave_mesh()
    del mesh, parts, mirror
    gc.collect()
    return seconds


def test_an_error_ends_a_mirror_that_waits(tmp_path: Path, pool: RankPool, place: Path) -> None:
    """Rank 1 waits for the answer of rank 3, which has an error before its mirror begins."""
    config = config_of(tmp_path, "dp4,zero1")
    seconds = pool.run(leave_in_between, 4, config, str(place))
    assert 0.5 < seconds[1] < LEAVE_S - 5, seconds
