"""The wait-for graph against its definition, and on thousands of ranks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from meshwright.mesh.activity import Waits
from meshwright.mesh.grid import Axis, Grid
from meshwright.watch.hang.diagnosis import MAX_LINES, judge, lines
from meshwright.watch.hang.heartbeat import Heartbeat, PendingWait, ReceivedHeartbeat
from meshwright.watch.hang.wait_graph import WaitGraph

MANY = 2048
Table = dict[int, ReceivedHeartbeat]


def received(
    rank: int, waits: Waits | None = None, what: str = "0F0", **posted: int
) -> ReceivedHeartbeat:
    """Return the heartbeat of a rank that has been in its activity for 10 minutes."""
    packed = None if waits is None else PendingWait.pack(waits._asdict())
    at = {
        "beat": 9,
        "step": 3,
        "phase": "training",
        "pid": 1,
        "host": "h",
        "at_s": 1.0,
        "for_s": 600.0,
    }
    return ReceivedHeartbeat(
        Heartbeat(rank=rank, what=what, waits=packed, posted=posted, **at), 0.1
    )


def collective(rank: int, ranks: tuple[int, ...], key: str, number: int) -> Waits:
    return Waits(
        "collective",
        tuple(each for each in ranks if each != rank),
        "all-reduce of (3,)",
        key,
        key,
        number,
    )


def waited_for(table: Table, silent: set[int]) -> dict[int, set[int]]:
    """Return the definition: in a collective a rank waits for the ranks that have entered fewer."""
    edges: dict[int, set[int]] = {}
    for rank, (beat, _) in table.items():
        waits = None if beat is None or rank in silent else beat.waits
        edges[rank] = set() if waits is None else waits.others()
        if waits is not None and waits.how == "collective":
            beats = {other: table[other].beat for other in edges[rank]}
            edges[rank] = {
                other
                for other, beat in beats.items()
                if beat is None or beat.posted.get(waits.key, 0) < waits.number
            }
    return edges


def reached(rank: int, edges: dict[int, set[int]]) -> set[int]:
    found: set[int] = set()
    stack = [*edges[rank]]
    while stack:
        other = stack.pop()
        if other not in found:
            found.add(other)
            stack += edges[other]
    return found


def random_table(draw: random.Random) -> Table:
    """Ranks in messages and in collectives of two groups that overlap,
    with up to three numbers in flight.
    """
    size = draw.randrange(1, 12)
    groups = {"a": tuple(range(0, size, 2)), "b": tuple(range(size))}
    table: Table = {}
    for rank in range(size):
        posted = {key: draw.randrange(3, 7) for key, ranks in groups.items() if rank in ranks}
        key = draw.choice(sorted(posted))
        peer = (draw.randrange(size),)
        waits = draw.choice(
            [
                None,
                Waits("receive", peer, "1RECV_F3"),
                Waits("send", peer, "1SEND_F3"),
                collective(rank, groups[key], key, posted[key]),
                collective(rank, groups[key], key, posted[key]),
            ]
        )
        table[rank] = (
            ReceivedHeartbeat(None, 99.0)
            if draw.random() < 0.05
            else received(rank, waits, **posted)
        )
    return table


@pytest.mark.parametrize("seed", range(300))
def test_the_graph_is_that_of_its_definition(seed: int) -> None:
    draw = random.Random(seed)
    table = random_table(draw)
    silent = {rank for rank in table if table[rank].beat is None or draw.random() < 0.1}
    edges, graph = waited_for(table, silent), WaitGraph(table, silent)
    behind = Counter(end for rank in edges for end in reached(rank, edges) if not edges[end])
    assert graph.weights() == {rank: behind[rank] for rank in edges if not edges[rank]}
    for rank in edges:
        assert graph.first_waiting(rank) == next(
            (other for other in edges if rank in edges[other]), None
        )
    cycle = graph.cycle()
    looped = [rank for rank in edges if rank in reached(rank, edges)]
    assert cycle[:1] == looped[:1]
    assert all(
        after in edges[rank] for rank, after in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    )


def some_in_an_extra_collective(size: int) -> tuple[Table, Grid]:
    """Let every other replica enter a collective of all ranks,
    and the rest a collective of theirs.
    """
    grid, table = Grid(dp=size // 8, tp=8), Table()
    for rank in range(size):
        replicas, key = grid.replicas(rank), f"dp-{rank % 8}"
        if rank // 8 % 2 == 0:
            table[rank] = received(
                rank, collective(rank, tuple(range(size)), "world", 5), **{"world": 5, key: 9}
            )
        else:
            table[rank] = received(
                rank, collective(rank, replicas, key, 10), **{"world": 4, key: 10}
            )
    return table, grid


def all_in_other_numbers(size: int) -> tuple[Table, Grid]:
    """Put each rank into another collective of the same group."""
    ranks = tuple(range(size))
    table = {
        rank: received(rank, collective(rank, ranks, "world", rank + 1), world=rank + 1)
        for rank in ranks
    }
    return table, Grid(dp=size)


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            some_in_an_extra_collective,
            "deadlock: rank 0 (pp0 dp0 tp0) waits in the all-reduce of (3,) of the world ",
        ),
        (
            all_in_other_numbers,
            "rank 1 (pp0 dp1 tp0) waits in the all-reduce of (3,) of the world ranks (number 2) ",
        ),
    ],
)
def test_thousands_of_ranks_are_judged_sooner_than_hundreds_by_the_definition(
    make: Callable[[int], tuple[Table, Grid]], said: str
) -> None:
    """Which takes the third power of the ranks."""
    table, grid = make(MANY)
    few, _ = make(MANY // 8)
    edges = waited_for(few, set())
    verdicts = []

    def judged() -> None:
        verdicts.append(judge(table, grid, 10.0, 300.0))

    # garbage of other tests may be collected in one of them
    sooner_s = min(cpu_s(judged) for _ in range(3))
    assert sooner_s < cpu_s(lambda: [reached(rank, edges) for rank in edges])
    assert verdicts[0].reason.startswith(said)
    assert len(lines(table, grid, 10.0, verdicts[0].ranks, MAX_LINES)) == 1 + MAX_LINES


def test_a_chain_as_long_as_the_run_is_large() -> None:
    """Of messages, without recursion."""
    waits = {rank: Waits("receive", (rank - 1,), f"{rank}RECV_F0") for rank in range(1, MANY)}
    table = {rank: received(rank, waits.get(rank)) for rank in range(MANY)}
    reason, ranks, _ = judge(table, Grid(pp=MANY), 10.0, 300.0)
    assert ranks == (0,) and reason.startswith(
        "rank 1 (pp1 dp0 tp0) waits to receive F of micro-batch 0 from"
    )


def test_a_heartbeat_has_a_few_numbers_for_any_group() -> None:
    grid = Grid(pp=16, dp=64, cp=8, tp=2)
    groups = [
        tuple(range(grid.size)),
        grid.replicas(4097),
        *(grid.group(axis, 4097) for axis in Axis),
    ]
    for ranks in [*groups, (4097, 5, 8, 4098, 8191)]:
        waits = PendingWait.pack(collective(4097, ranks, "world", 5)._asdict())
        assert waits.others() == {*ranks} - {4097} and waits.ranks == ()
        assert len(waits.ranges) <= 3
        assert PendingWait.model_validate_json(waits.model_dump_json()) == waits
    assert PendingWait.pack(Waits("receive", (7,), "1RECV_F0")._asdict()).others() == {7}


def test_a_heartbeat_that_lists_a_group_is_read() -> None:
    """As older versions wrote it into status.json."""
    text = '{"how":"collective","ranks":[0,2],"operation":"barrier","group":"dp","key":"dp-1","number":3}'
    assert PendingWait.model_validate_json(text).others() == {0, 2}
