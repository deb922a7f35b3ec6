"""Reader of a mirror in host memory, whose shards may lie on several nodes.

    every node     names the marks in its memory (memory.py)
    all ranks      choose the newest step whose shards are all somewhere, and a place to read each from
    each rank      reads what is on its own node as from a checkpoint; lists the boxes that are not, and
                   gets their bytes from other ranks (run/mirror_fetch.py)

Marks of different launches of ranks are never combined: on devices whose sums vary, the same step taken
twice has different bits. A shard of one launch and step has the same bytes wherever it lies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from meshwright.checkpoint.check import check
from meshwright.checkpoint.files import shard_names
from meshwright.checkpoint.manifest import CheckpointMetadata, Dtype, Manifest, PieceEntry
from meshwright.checkpoint.memory import MARK_SUFFIX, ONE_RANK, SLOTS, StepMark, read_marks
from meshwright.checkpoint.read import CheckpointReader
from meshwright.checkpoint.save import merge
from meshwright.checkpoint.shard import REPORT_SUFFIX, ShardReport
from meshwright.errors import CheckpointError
from meshwright.mesh.grid import Grid
from meshwright.system.bounded import MAX_MANIFEST_BYTES, read_bytes


class FoundShard(NamedTuple):
    """A complete shard in a node's memory."""

    generation: int
    step: int
    shard_name: str
    degrees: tuple[int, ...] = ONE_RANK.degrees
    """Grid of the ranks that wrote it."""


class ChosenStep(NamedTuple):
    """Step of a mirror to resume from."""

    generation: int
    step: int
    nodes_of: dict[str, list[str]]
    """Nodes that have each shard."""
    grid: Grid = ONE_RANK
    """Grid of the ranks that wrote it, which may be another than that of the ranks that read it."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of its shards, in the order of the ranks that wrote them."""
        return shard_names(self.grid)

    @property
    def slot(self) -> str:
        """Name of its slot."""
        return SLOTS[self.step % 2]


def find_shards(directory: Path) -> list[FoundShard]:
    """Return the complete shards in a node's memory."""
    return [
        FoundShard(mark.generation, mark.step, name, mark.degrees)
        for slot, name, mark in read_marks(directory)
        if name in shard_names(mark.grid) and slot == SLOTS[mark.step % 2]
    ]


def choose_step(found: Mapping[str, Sequence[FoundShard]]) -> tuple[ChosenStep | None, str]:
    """Return the newest step whose shards are all in some node's memory, or the reason why there is
    none; an empty one if no node has any shard.

    A later launch of ranks counts as newer: it may have gone back to a checkpoint of an earlier step.

    ``found``: shards of each node.
    """
    nodes_of: dict[tuple[int, int, tuple[int, ...]], dict[str, list[str]]] = {}
    for node, shards in found.items():
        for generation, step, name, degrees in shards:
            places = nodes_of.setdefault((generation, step, degrees), {})
            places.setdefault(name, []).append(node)
    for key in sorted(nodes_of, reverse=True):
        generation, step, degrees = key
        grid = Grid.of(degrees)
        if len(nodes_of[key]) == grid.size:
            return ChosenStep(generation, step, nodes_of[key], grid), ""
    if not nodes_of:
        return None, ""
    newest = max(nodes_of)
    names = shard_names(Grid.of(newest[2]))
    missing = [name for name in names if name not in nodes_of[newest]]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return None, (
        f"of step {newest[1]}, shard {missing[0]}{more} is on none of the nodes {', '.join(found)}"
    )


def read_texts(directory: Path, slot: str, shard_name: str) -> tuple[str, str]:
    """Return the mark and the report of a shard in this node's memory.

    Raises:
        OSError: one cannot be read.
    """
    place = directory / slot
    mark = read_bytes(place / f"{shard_name}{MARK_SUFFIX}", MAX_MANIFEST_BYTES)
    report = read_bytes(place / f"{shard_name}{REPORT_SUFFIX}", MAX_MANIFEST_BYTES)
    return mark.decode(), report.decode()


def open_mirror(
    directory: Path, chosen: ChosenStep, texts: Mapping[str, tuple[str, str]], node: str
) -> MirrorReader:
    """Open a step of a mirror.

    Args:
        texts: mark and report of every shard, in the order of the ranks that wrote them.
        node: name of this node, whose memory is ``directory``.

    Raises:
        CheckpointError: the mirror is damaged.
    """
    folder = directory / chosen.slot
    try:
        marks = [StepMark.model_validate_json(mark) for mark, _ in texts.values()]
        reports = [ShardReport.model_validate_json(report) for _, report in texts.values()]
    except ValidationError as error:
        raise _damaged(folder, [f"{len(error.errors())} problems in a mark or report"]) from error
    if {(mark.generation, mark.step) for mark in marks} != {(chosen.generation, chosen.step)}:
        raise _damaged(folder, ["the marks are not of one step"])
    manifest = merge(_head_of(marks), reports)
    problems = check(manifest)
    if problems:
        raise _damaged(folder, problems)
    local = {
        file
        for shard_name, report in zip(texts, reports, strict=True)
        if node in chosen.nodes_of[shard_name]
        for file in report.files
    }
    digest = hashlib.sha256("".join(mark for mark, _ in texts.values()).encode())
    return MirrorReader(folder, manifest, digest.hexdigest(), local)


def _damaged(folder: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "MW-CHECKPOINT-030",
        "\n".join(f"{folder}: {problem}" for problem in problems[:20])
        + "\nthe mirror in memory is left out; resume from the last checkpoint",
    )


def _head_of(marks: Sequence[StepMark]) -> CheckpointMetadata:
    """Return the metadata of a step: that of rank 0, and the state that a single rank has added."""
    state: dict[str, object] = {}
    for mark in reversed(marks):
        state |= mark.state
    return marks[0].head._replace(state=state)


class Box(NamedTuple):
    """A box of one piece of a shard, in the piece's own coordinates."""

    file: str
    key: str
    ranges: tuple[tuple[int, int], ...]
    """(start, stop) per dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.ranges)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Return the place of this box in a larger one."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)

    def split(self, most: int) -> Iterable[Box]:
        """Yield boxes of at most ``most`` elements that together are this one."""
        if math.prod(self.shape) <= most:
            yield self
            return
        dim = max(range(len(self.ranges)), key=lambda each: self.shape[each])
        start, stop = self.ranges[dim]
        middle = (start + stop) // 2
        for half in ((start, middle), (middle, stop)):
            ranges = (*self.ranges[:dim], half, *self.ranges[dim + 1 :])
            yield from self._replace(ranges=ranges).split(most)


class MirrorReader(CheckpointReader):
    """A step of a mirror, open for reading. Boxes on other nodes are read in two passes.

    The first pass (``is_listing``) returns zeros and lists the boxes that this node does not have;
    they come to ``fetched`` before the second pass.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, local: Iterable[str]) -> None:
        """Read the mirror in ``path``; ``local``: names of the files that are there."""
        super().__init__(path, manifest, digest)
        self._local = frozenset(local)
        self.is_listing = False
        self.fetched: dict[Box, Tensor] = {}
        """Boxes of other nodes; in the first pass, memory for them."""
        self.open_files(self._local)

    def close(self) -> None:
        """Close the shards, and free the boxes of other nodes."""
        super().close()
        self.fetched.clear()

    def read_own(self, box: Box) -> Tensor:
        """Read a box from this node's memory, for another rank.

        Raises:
            CheckpointError: the file is not here, or damaged, or has no such box.
        """
        place = f"{self.path / box.file}: {box.key!r}"
        if box.file not in self._local:
            raise CheckpointError("MW-CHECKPOINT-045", f"{place} is not on this node")
        source = tuple(slice(start, stop) for start, stop in box.ranges)
        try:
            numbers = self._file(box.file).get_slice(box.key)[source]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                "MW-CHECKPOINT-046", f"{place} cannot be read: {error}"
            ) from error
        assert isinstance(numbers, Tensor)
        return numbers

    def _numbers(self, part: PieceEntry, dtype: str, source: tuple[slice, ...]) -> Tensor:
        is_here = part.file in self._local
        if is_here and not self.is_listing:
            return super()._numbers(part, dtype, source)
        box = Box(part.file, part.key, tuple((each.start, each.stop) for each in source))
        if not self.is_listing:
            return self.fetched[box]
        zeros = torch.zeros(box.shape, dtype=Dtype(dtype).as_torch)
        if not is_here:
            self.fetched[box] = zeros
        return zeros
