"""Links of a pipeline: a process group of two ranks for each direction between two neighbours.

    ring of 4   0   1   2   3         NCCL runs the messages of one group one after the other, on one stream. On links a
    round 0     0 > 1   2 > 3         send that waits for its receive does not delay messages in the other direction.
    round 1     0 < 1   2 < 3
    round 2     0 > 3   1 > 2         All ranks of the mesh make one group per round: a link, or a group of their own.
    round 3     0 < 3   1 < 2         A round is one split of NCCL's communicator, however many pipelines there are.

NOTE [equal numbers of groups]: torch names a group by its ranks and the number of groups that this
rank has made so far. Two ranks with different numbers would wait for each other forever, so idle
ranks make a group of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.mesh.comm import Group, TransferHandle

Pair = tuple[int, int]
"""(source, destination): positions in the pipeline group."""


def link_rounds(pairs: Collection[Pair]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs, in which the links are made. A chain or an even ring of
    ranks takes at most four rounds, an odd ring six.
    """
    rounds: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: (min(pair), max(pair), pair)):
        free = (round_ for round_ in rounds if not any(set(pair) & set(other) for other in round_))
        found = next(free, None)
        if found is None:
            rounds.append(found := [])
        found.append(pair)
    return rounds


class LinkedGroup(Group):
    """Pipeline group whose messages go over links. Collectives go over the group itself."""

    def __init__(self, pp: Group, links: Mapping[Pair, Group]) -> None:
        vars(self).update(vars(pp))  # shares its traffic and activity: one group, other transport
        self.links = links
        """Group of each link that this rank is an end of."""

    def transfer(
        self, tensors: Sequence[Tensor], peer: int, sends: bool, what: Callable[[], str]
    ) -> TransferHandle | None:
        """Post messages on the link to or from ``peer``. Does not block;
        see :meth:`Group.transfer`.
        """
        link = self.links[(self.rank, peer) if sends else (peer, self.rank)]
        return link.transfer(tensors, 1 - link.rank, sends, what)


def open_links(
    pp: Group,
    pairs: Collection[Pair],
    make: Callable[[tuple[int, ...]], dist.ProcessGroup],
    device: torch.device,
) -> LinkedGroup:
    """Make the links between these pairs and send one element over each. Collective over all ranks;
    blocks.

    The element opens NCCL's connections. Otherwise the first message in a step would wait for them.

    Args:
        make: function that makes a process group of these global ranks; all ranks of the mesh call
            it together.
    """
    links: dict[Pair, Group] = {}
    for each in link_rounds(pairs):
        pair = next((pair for pair in each if pp.rank in pair), None)
        positions = sorted(pair or [pp.rank])
        ranks = tuple(pp.ranks[position] for position in positions)
        # also on ranks without a pair in this round: see NOTE [equal numbers of groups]
        process_group = make(ranks)
        if pair is not None:
            rank = positions.index(pp.rank)
            key = f"{pp.name}-{pp.ranks[pair[0]]}>{pp.ranks[pair[1]]}"
            links[pair] = Group(pp.name, ranks, rank, process_group, pp.traffic, pp.activity, key)
            links[pair].stages_messages = pp.stages_messages
            opening = Group(pp.name, ranks, rank, process_group).transfer(
                [torch.zeros(1, device=device)],
                peer=1 - rank,
                sends=pair[0] == pp.rank,
                what=lambda: "the first message of a link",
            )
            assert opening is not None
            opening.wait()
    return LinkedGroup(pp, links)
