"""Links of a pipeline: rounds of disjoint pairs,
and messages that find their way whatever groups were made before.
"""

from __future__ import annotations

import pytest
import torch

from meshwright.mesh.fake import fake_mesh
from meshwright.mesh.grid import Grid
from meshwright.mesh.links import link_rounds
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.schedule.analysis import links_of
from meshwright.schedule.build import build
from meshwright.schedule.lower import lower
from meshwright_launch.pool import RankPool


def chain(pp: int) -> set[tuple[int, int]]:
    return {pair for i in range(pp - 1) for pair in ((i, i + 1), (i + 1, i))}


def ring(pp: int) -> set[tuple[int, int]]:
    return chain(pp) | {(0, pp - 1), (pp - 1, 0)}


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8, 13])
def test_a_round_holds_each_rank_once_and_there_are_few_rounds(pp: int) -> None:
    for pairs, most in ((chain(pp), 4), (ring(pp), 4 + 2 * (pp % 2))):
        rounds = link_rounds(pairs)
        assert sorted(pair for each in rounds for pair in each) == sorted(pairs)
        assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in rounds)
        assert len(rounds) <= most


def test_only_links_that_a_schedule_uses() -> None:
    assert (
        links_of([lower(build("1f1b", 4, 2))])
        == links_of([lower(build("zb_v", 4, 2, 2))])
        == chain(4)
    )
    assert links_of([lower(build("interleaved_1f1b", 4, 2, 2))]) == ring(4)
    assert links_of([lower(build("interleaved_1f1b", 1, 2, 2))]) == set()


def received(rank: int, world_size: int) -> list[float]:
    """Open the links of three stages after a group that not all ranks are in, twice;
    send forth and back.
    """
    mesh = open_mesh(Grid(pp=3, dp=2), "cpu", timeout_s=20.0)
    mesh.stage_group([0, 2])
    mesh.open_links(chain(3))
    mesh.stage_group([0, 1])
    pp = mesh.open_links(ring(3))
    found = []
    for step in (1, 2):
        inbox = torch.zeros(2)
        to, of = (pp.rank + step) % 3, (pp.rank - step) % 3
        messages = (torch.full((2,), 10.0 * rank + step), to, True), (inbox, of, False)
        handles = [
            pp.transfer([tensor], peer, sends, lambda: "a message")
            for tensor, peer, sends in messages
        ]
        for handle in filter(None, handles):
            handle.wait()
        found.append(float(inbox[1]))
    calls = mesh.traffic.counts["pp", "send"]
    assert calls == (2, 16.0), calls
    close_mesh(mesh)
    return found


def test_messages_arrive_after_groups_of_some_ranks(pool: RankPool) -> None:
    """Rank = 2 x stage + replica. Step 1 goes to the next stage, step 2 to the one before."""
    assert pool.run(received, 6, timeout_s=60) == [
        [10.0 * ((rank - 2) % 6) + 1, 10.0 * ((rank + 2) % 6) + 2] for rank in range(6)
    ]


def test_directions_have_communicators_of_their_own() -> None:
    with fake_mesh(Grid(pp=4, dp=2), 2) as mesh:
        pp = mesh.open_links(chain(4))
        assert sorted(pp.links) == [(0, 1), (1, 0), (1, 2), (2, 1)]
        assert len({link.process_group for link in pp.links.values()}) == 4
        assert len({link.waits_in("barrier", 1).key for link in (mesh.pp, *pp.links.values())}) == 5
