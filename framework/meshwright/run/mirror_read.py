"""Resume from a mirror in memory whose shards may lie on other nodes.

    open_newest_mirror   all ranks agree on the newest step whose shards are all somewhere, and on the rank that
                         sends each shard's bytes: its own, or one of a node that has it
    OpenMirror.fetch     each rank lists the boxes that it reads and its node lacks, and gets them: of weights its
                         slice, of states its shard, and no whole shards

The step may be of another layout, with fewer or more ranks: the marks name its shards. Each rank holds what
it fetches in host memory until it has restored its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.memory_read import (
    Box,
    ChosenStep,
    FoundShard,
    MirrorReader,
    choose_step,
    find_shards,
    open_mirror,
    read_texts,
)
from meshwright.errors import CheckpointError
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.neighbours import ranks_of_nodes

PIECE_BYTES = 4 * 2**20
"""Largest part of a box that is read and sent at once."""
ROUND_BYTES = 64 * 2**20
"""Bytes that a rank sends in one round, over all ranks; a piece for each rank may exceed it."""


class OpenMirror(NamedTuple):
    """A step of a mirror, open for reading on all ranks."""

    reader: MirrorReader
    sources: dict[str, int]
    """Rank that sends the boxes of each shard."""
    is_everywhere: bool
    """True if every node has all shards; the same on every rank."""

    def fetch(self, load: Callable[[], None], mesh: Mesh) -> None:
        """Fetch what ``load`` reads and this node lacks. Collective over all ranks; blocks.

        ``load`` is called once for the list, and reads zeros.

        Raises:
            CheckpointError: on every rank; a shard cannot be read.
        """
        if self.is_everywhere:
            return
        self.reader.is_listing = True
        load()
        self.reader.is_listing = False
        _fetch_boxes(self.reader, self.sources, mesh.host)


def open_newest_mirror(
    directory: Path, mesh: Mesh, log: Callable[[str], None]
) -> OpenMirror | None:
    """Open the newest step of the mirror that is complete over all nodes; None: there is none, or
    some rank cannot open it. Collective over all ranks; blocks.

    ``directory``: memory of this node, the same for all of its ranks.
    """
    ranks_of, node = ranks_of_nodes(mesh.nodes), mesh.nodes[mesh.rank]
    is_first = ranks_of[node][0] == mesh.rank
    own = find_shards(directory) if is_first else []
    every: list[list[FoundShard]] = mesh.world.gather_objects(own, FoundShard)
    found = {name: every[ranks[0]] for name, ranks in ranks_of.items()}
    chosen, problem = choose_step(found)
    if chosen is None:
        if problem:
            log(f"the mirror in memory is left out: {problem}")
        return None
    names = chosen.shard_names
    sources = _sources(chosen, mesh.nodes)
    served = [name for name, rank in sources.items() if rank == mesh.rank]
    reader, problem = None, ""
    texts: list[tuple[str, str, str]] = []
    try:
        texts = [(name, *read_texts(directory, chosen.slot, name)) for name in served]
    except (OSError, ValueError) as error:
        problem = str(error)
    sent: list[tuple[list[tuple[str, str, str]], str]] = mesh.world.gather_objects((texts, problem))
    problems = [each for _, each in sent if each]
    if not problems:
        text_of = {name: (mark, report) for each, _ in sent for name, mark, report in each}
        in_order = {name: text_of[name] for name in names}
        try:
            reader = open_mirror(directory, chosen, in_order, node)
        except (CheckpointError, OSError, ValueError) as error:
            problem = str(error)
        problems = [each for each in mesh.world.gather_objects(problem) if each]
    for text in dict.fromkeys(problems):
        log(f"the mirror in memory is left out: {text}")
    if reader is None or problems:
        return None
    for line in _describe(sources, mesh.nodes) if chosen.grid == mesh.grid else ():
        log(line)
    is_everywhere = all(len(places) == len(ranks_of) for places in chosen.nodes_of.values())
    return OpenMirror(reader, sources, is_everywhere)


def _sources(chosen: ChosenStep, nodes: Sequence[str]) -> dict[str, int]:
    """Return the rank that sends each shard: that of its number if its node has it, else one of a node
    that does.
    """
    ranks_of, sources = ranks_of_nodes(nodes), {}
    for number, name in enumerate(chosen.shard_names):
        places = chosen.nodes_of[name]
        there = ranks_of[places[0]]
        is_here = number < len(nodes) and nodes[number] in places
        sources[name] = number if is_here else there[number % len(there)]
    return sources


def _describe(sources: dict[str, int], nodes: Sequence[str]) -> Iterator[str]:
    """Yield a line for each node that has lost its memory."""
    by_node: dict[tuple[str, str], list[int]] = {}
    for rank, source in enumerate(sources.values()):
        if source != rank:
            by_node.setdefault((nodes[rank], nodes[source]), []).append(rank)
    for (lost, holder), ranks in by_node.items():
        text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        yield (
            f"{lost} has no mirror of rank{'s' * (len(ranks) > 1)} {text}: the copies on {holder} are"
            " read"
        )


class AskedPiece(NamedTuple):
    """A piece of a box that one rank asks another for."""

    box: Box
    num_bytes: int


class _Wanted(NamedTuple):
    """A piece of a box on another node, and the memory for it."""

    piece: AskedPiece
    memory: Tensor


def _fetch_boxes(reader: MirrorReader, sources: dict[str, int], group: Group) -> None:
    """Fill the listed boxes from other ranks, in rounds of bounded size. Collective over all ranks;
    blocks. Wire: the bytes of the boxes.

    Raises:
        CheckpointError: on every rank; a shard cannot be read.
    """
    wanted = _list_wanted(reader, sources, group.size)
    requests = [[each.piece for each in of_rank] for of_rank in wanted]
    asked: list[list[AskedPiece]] = group.exchange_objects(requests, Box, AskedPiece)
    limit = ROUND_BYTES // group.size
    to_send = [_in_rounds(of_rank, limit) for of_rank in asked]
    to_take = [_in_rounds(of_rank, limit) for of_rank in requests]
    memories = [iter(of_rank) for of_rank in wanted]
    problem = ""
    for index in range(max(group.gather_objects(max(map(len, to_take))))):
        sent: list[Tensor] = []
        for rounds in to_send:
            pieces = rounds[index] if index < len(rounds) else []
            try:
                found = [_bytes_of(reader, piece) for piece in pieces]
            except CheckpointError as error:  # the other ranks wait for these bytes
                problem = error.message
                found = [torch.zeros(piece.num_bytes, dtype=torch.uint8) for piece in pieces]
            sent.append(torch.cat([torch.empty(0, dtype=torch.uint8), *found]))
        sizes = [_total(rounds[index]) if index < len(rounds) else 0 for rounds in to_take]
        out = torch.empty(sum(sizes), dtype=torch.uint8)
        group.all_to_all(out, torch.cat(sent), sizes, [each.numel() for each in sent]).wait()
        for received, memory in zip(torch.split(out, sizes), memories, strict=True):
            _store(received, memory)
    problems = [each for each in group.gather_objects(problem) if each]
    if problems:
        raise CheckpointError(
            "MW-RUN-064",
            f"{problems[0]}: a mirror in memory cannot be read. Start the run again: without this"
            " memory it resumes from its last checkpoint",
        )


def _list_wanted(
    reader: MirrorReader, sources: dict[str, int], num_ranks: int
) -> list[list[_Wanted]]:
    """Return the pieces that this rank wants from each rank."""
    wanted: list[list[_Wanted]] = [[] for _ in range(num_ranks)]
    for box, memory in reader.fetched.items():
        source = sources[box.file.partition(".")[0]]
        itemsize = memory.element_size()
        for piece in box.split(PIECE_BYTES // itemsize):
            view = memory[piece.inside(box)]
            wanted[source].append(_Wanted(AskedPiece(piece, view.numel() * itemsize), view))
    return wanted


def _in_rounds(pieces: Sequence[AskedPiece], limit: int) -> list[list[AskedPiece]]:
    """Divide pieces, in order, into rounds of at most ``limit`` bytes, or of one piece."""
    rounds: list[list[AskedPiece]] = []
    for piece in pieces:
        if not rounds or _total(rounds[-1]) + piece.num_bytes > limit:
            rounds.append([])
        rounds[-1].append(piece)
    return rounds


def _total(pieces: Sequence[AskedPiece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _bytes_of(reader: MirrorReader, piece: AskedPiece) -> Tensor:
    """Read a piece for another rank: (num_bytes,) uint8.

    Raises:
        CheckpointError: the file is not here or damaged, or the piece has another size.
    """
    numbers = reader.read_own(piece.box).contiguous().reshape(-1).view(torch.uint8)
    if numbers.numel() != piece.num_bytes:
        raise CheckpointError(
            "MW-RUN-065",
            f"{piece.box.file}: {piece.box.key!r} has {numbers.numel()} bytes where"
            f" {piece.num_bytes} are asked for",
        )
    return numbers


def _store(received: Tensor, wanted: Iterator[_Wanted]) -> None:
    """Copy the bytes of whole pieces to their memory."""
    at = 0
    while at < received.numel():
        piece, memory = next(wanted)
        numbers = torch.empty(memory.shape, dtype=memory.dtype)
        flat = numbers.reshape(-1).view(torch.uint8)
        flat.copy_(received[at : at + piece.num_bytes])
        memory.copy_(numbers)
        at += piece.num_bytes
