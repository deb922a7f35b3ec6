"""From a table of heartbeats to a sentence: who keeps all the others waiting."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshwright.mesh.grid import Grid
from meshwright.run.directory import STATUS
from meshwright.watch.hang.diagnosis import MAX_LINES, Verdict, judge, lines
from meshwright.watch.hang.heartbeat import (
    Heartbeat,
    PendingWait,
    ReceivedHeartbeat,
    describe_activity,
    in_words,
)
from meshwright.watch.hang.status import read_status
from tests.support.errors import raises

LONG_S, SILENT_S = 2.5, 1.5
WORLD, DP = "world-1", "dp-1"


def beat(
    rank: int,
    what: str = "0F0",
    for_s: float = 6.0,
    waits: PendingWait | None = None,
    **posted: int,
) -> Heartbeat:
    posted_ = {name.replace("_", "-"): number for name, number in posted.items()}
    at = {"beat": 9, "step": 3, "phase": "training", "pid": 100 + rank, "host": "h", "at_s": 1.0}
    return Heartbeat(rank=rank, what=what, for_s=for_s, waits=waits, posted=posted_, **at)


def receive(of: int, operation: str = "1RECV_F3") -> PendingWait:
    return PendingWait(how="receive", ranks=(of,), operation=operation)


def send(to: int, operation: str = "0SEND_F3") -> PendingWait:
    return PendingWait(how="send", ranks=(to,), operation=operation)


def collective(
    rank: int, number: int, size: int = 4, operation: str = "all-reduce of (3,)"
) -> PendingWait:
    others = tuple(other for other in range(size) if other != rank)
    return PendingWait(
        how="collective", ranks=others, operation=operation, group="world", key=WORLD, number=number
    )


def verdict(
    *beats: Heartbeat, grid: Grid, silent: dict[int, float] | None = None
) -> tuple[str, tuple[int, ...]]:
    reason, ranks, _ = whole_verdict(*beats, grid=grid, silent=silent)
    return reason, ranks


def whole_verdict(*beats: Heartbeat, grid: Grid, silent: dict[int, float] | None = None) -> Verdict:
    found = {
        each.rank: ReceivedHeartbeat(each, (silent or {}).get(each.rank, 0.1)) for each in beats
    }
    table = {rank: found.get(rank, ReceivedHeartbeat(None, 99.0)) for rank in range(grid.size)}
    return judge(table, grid, SILENT_S, LONG_S)


def test_ranks_whose_replacement_helps() -> None:
    """One that is busy with itself or silent is stuck; in a deadlock none is."""
    waiting = beat(0, "0RECV_B0", 5.1, receive(1, "0RECV_B0+0SEND_F1"))
    reading = beat(1, "reading samples", 42.4)
    assert whole_verdict(waiting, reading, grid=Grid(pp=2)).stuck == (1,)
    assert whole_verdict(waiting, reading, grid=Grid(pp=2), silent={1: 60.0}).stuck == (1,)
    other = beat(1, "1RECV_F3", 5.1, receive(0, "1RECV_F3"))
    deadlock = whole_verdict(waiting, other, grid=Grid(pp=2))
    assert deadlock.reason.startswith("deadlock") and deadlock.stuck == ()


def test_who_reads_for_too_long() -> None:
    reason, ranks = verdict(
        beat(0, "0RECV_B0", 5.1, receive(1, "0RECV_B0+0SEND_F1")),
        beat(1, "reading samples", 42.4),
        grid=Grid(pp=2),
    )
    assert (
        reason
        == "rank 0 (pp0 dp0 tp0) waits to receive B of micro-batch 0 from rank 1 (pp1 dp0 tp0),"
        " which has been reading samples for 42 s"
    )
    assert ranks == (1,)


def test_a_chain_is_followed_to_its_end() -> None:
    """Rank 3 waits for 2 in a collective, 2 for 1 and 1 for 0."""
    reason, ranks = verdict(
        beat(0, "0F3", 6.0, world_1=4),
        beat(1, "1RECV_F3", 5.9, receive(0), world_1=4),
        beat(2, "2RECV_F3", 5.8, receive(1, "2RECV_F3"), world_1=4),
        beat(3, "STEP", 5.7, collective(3, 5), world_1=5),
        grid=Grid(pp=4),
    )
    assert ranks == (0,)
    assert reason.endswith(
        "rank 0 (pp0 dp0 tp0), which has been computing F of micro-batch 3 for 6.0 s"
    )
    assert reason.startswith("rank 1 (pp1 dp0 tp0) waits to receive F of micro-batch 3 from ")


def test_only_those_are_waited_for_that_have_not_come() -> None:
    reason, ranks = verdict(
        beat(0, "STEP", 6.0, collective(0, 5), world_1=5),
        beat(1, "STEP", 6.0, collective(1, 5), world_1=5),
        beat(2, "STEP", 6.0, None, world_1=4),
        beat(3, "STEP", 6.0, collective(3, 5), world_1=5),
        grid=Grid(dp=4),
    )
    assert ranks == (2,)
    assert (
        reason
        == "rank 0 (pp0 dp0 tp0) waits in the all-reduce of (3,) of the world ranks (number 5) for"
        " rank 2 (pp0 dp2 tp0), which has been taking the optimizer's step for 6.0 s"
    )


def test_a_sender_waits_for_who_takes_it() -> None:
    reason, ranks = verdict(beat(0, "0SEND_F3", 6.0, send(1)), beat(1, "1B0", 6.0), grid=Grid(pp=2))
    assert ranks == (1,) and reason.startswith(
        "rank 0 (pp0 dp0 tp0) waits to send F of micro-batch 3 to rank 1 "
    )


@pytest.mark.parametrize("heard", [True, False])
def test_a_rank_that_is_not_heard_of(heard: bool) -> None:
    """Although another one is long at one thing too."""
    beats = [beat(0, "0RECV_B0", 6.0, receive(1, "0RECV_B0")), beat(2, "0F0", 6.0)]
    beats += [beat(1, "1F0", 0.1)] if heard else []
    reason, ranks = verdict(*beats, grid=Grid(pp=3), silent={1: 7.0})
    assert ranks == (1,)
    if heard:
        assert (
            "from rank 1 (pp1 dp0 tp0), which has sent no heartbeat for 7.0 s: its process 101 on h"
            in reason
        )
    else:
        assert reason.endswith("from rank 1 (pp1 dp0 tp0), which has never sent a heartbeat")


def test_what_a_silent_rank_waited_for_is_long_past() -> None:
    """0 waits for 1, and the last that was heard of 1 is that it waited for 0: no deadlock."""
    reason, ranks = verdict(
        beat(0, "0RECV_B0", 6.0, receive(1, "0RECV_B0")),
        beat(1, "1RECV_F0", 0.1, receive(0, "1RECV_F0")),
        grid=Grid(pp=2),
        silent={1: 5.0},
    )
    assert ranks == (1,) and "deadlock" not in reason


def test_a_deadlock_is_named_whole() -> None:
    reason, ranks = verdict(
        beat(0, "0RECV_B0", 6.0, receive(1, "0RECV_B0")),
        beat(1, "1RECV_F1", 6.0, receive(2, "1RECV_F1")),
        beat(2, "STEP", 6.0, collective(2, 5), world_1=5),
        beat(3, "STEP", 6.0, collective(3, 5), world_1=5),
        grid=Grid(pp=4),
    )
    assert reason.startswith("deadlock: ") and sorted(ranks) in ([0, 1, 2], [1, 2])
    for rank in ranks:
        assert f"rank {rank} (pp{rank} dp0 tp0) waits " in reason


def test_different_collectives() -> None:
    reason, ranks = verdict(
        beat(0, "STEP", 6.0, collective(0, 5, 2), world_1=5),
        beat(1, "STEP", 6.0, collective(1, 5, 2, "barrier"), world_1=5),
        grid=Grid(dp=2),
    )
    assert ranks == (0, 1)
    assert reason.startswith(
        "rank 0 (pp0 dp0 tp0) is in the all-reduce of (3,) of the world ranks (number 5), and rank"
        " 1 (pp0 dp1 tp0) in the barrier in its place"
    )


def test_an_all_to_all_has_other_sizes_on_each_rank() -> None:
    """Ranks of experts receive other numbers of tokens: that is no other collective,
    and the third rank is named.
    """
    reason, ranks = verdict(
        beat(0, "0F0", 6.0, collective(0, 2, 3, "all-to-all of (36,)"), world_1=2),
        beat(1, "0F0", 6.0, collective(1, 2, 3, "all-to-all of (20,)"), world_1=2),
        beat(2, "0F0", 6.0, world_1=1),
        grid=Grid(dp=3, ep=3),
    )
    assert ranks == (2,)
    assert (
        reason
        == "rank 0 (pp0 dp0 tp0) waits in the all-to-all of (36,) of the world ranks (number 2) for"
        " rank 2 (pp0 dp2 tp0), which has been computing F of micro-batch 0 for 6.0 s"
    )
    different = [
        collective(0, 2, 3, "all-to-all of (36,)"),
        collective(1, 2, 3, "all-reduce of (36,)"),
    ]
    beats = [beat(rank, "0F0", 6.0, waits, world_1=2) for rank, waits in enumerate(different)]
    assert verdict(*beats, beat(2, "0F0", 6.0, world_1=1), grid=Grid(dp=3, ep=3))[1] == (0, 1)


def test_a_collective_to_which_all_have_come_is_no_reason_to_wait() -> None:
    """What follows a tensor-parallel region in backward is told as if the rank were still in it."""
    reason, ranks = verdict(
        beat(0, "0B0", 6.0, collective(0, 5, 2), world_1=5),
        beat(1, "0B0", 6.0, collective(1, 6, 2), world_1=6),
        grid=Grid(tp=2),
    )
    assert ranks == (0,)
    assert reason.endswith(
        "which has been computing B of micro-batch 0 (since the all-reduce of (3,) of the world"
        " ranks (number 5), which all ranks have entered) for 6.0 s"
    )


def test_on_cuda_the_rank_that_has_posted_fewer_collectives() -> None:
    """Handles do not block there: all other hosts wait for the device in STEP, and for no rank."""
    beats = [beat(rank, "STEP", 630.0, world_1=42) for rank in range(8) if rank != 5]
    reason, ranks = verdict(*beats, beat(5, "reading samples", 640.0, world_1=41), grid=Grid(dp=8))
    assert ranks == (5,)
    assert (
        reason
        == "rank 5 (pp0 dp5 tp0) has been reading samples for 640 s, and others have entered a"
        " collective that it has not"
    )


def test_on_cuda_ranks_that_wait_for_that_rank_are_not_named() -> None:
    """Hosts of an expert group wait for each layer's counts,
    so they are behind in the world's collectives too.
    """
    reason, ranks = verdict(
        *(beat(rank, "STEP", 6.0, world_1=42, ep_1=80) for rank in (0, 1)),
        beat(2, "0F3", 6.0, world_1=41, ep_2=71),
        beat(3, "0F3", 6.0, world_1=41, ep_2=70),
        grid=Grid(dp=4),
    )
    assert ranks == (3,) and reason.startswith(
        "rank 3 (pp0 dp3 tp0) has been computing F of micro-batch 3 for 6.0 s"
    )


def test_on_cuda_ranks_behind_each_other_are_all_named() -> None:
    beats = [beat(0, "0F3", 6.0, world_1=41, dp_1=7), beat(1, "0F3", 6.0, world_1=40, dp_1=8)]
    assert verdict(*beats, beat(2, "STEP", 6.0, world_1=42), grid=Grid(dp=3))[1] == (0, 1)


def test_a_rank_that_is_waited_for_is_named_although_another_one_is_behind() -> None:
    """Also on CPU, where ranks post collectives before they wait for them."""
    beats = [
        beat(0, "reading samples", 9.0),
        beat(1, "1RECV_F0", 9.0, receive(0, "1RECV_F0"), world_1=4),
    ]
    assert verdict(*beats, beat(2, "2F0", 6.0, world_1=3), grid=Grid(pp=3))[1] == (0, 2)


def test_a_rank_alone() -> None:
    assert verdict(beat(0, "saving a checkpoint", 6.0), grid=Grid()) == (
        "rank 0 (pp0 dp0 tp0) has been saving a checkpoint for 6.0 s",
        (0,),
    )


def test_nobody_is_long_at_anything() -> None:
    """It went on while it was looked at; there is still something to say."""
    reason, ranks = verdict(
        beat(0, "0F0", 0.1), beat(1, "1RECV_F0", 0.1, receive(0)), grid=Grid(pp=2)
    )
    assert ranks == (0,) and "for 0.1 s" in reason


def test_many_ranks_are_not_all_named() -> None:
    grid = Grid(dp=64)
    beats = [beat(rank, "reading samples", 6.0) for rank in range(64)]
    reason, ranks = verdict(*beats, grid=grid)
    assert ranks == (0, 1, 2) and reason.endswith("; and 61 more ranks like these")
    table = {each.rank: ReceivedHeartbeat(each, 0.1) for each in beats}
    short = lines(table, grid, SILENT_S, (40,), MAX_LINES)
    assert len(short) == 1 + MAX_LINES and any(line.split()[0] == "40" for line in short[1:])
    assert short[-1] == "... and 49 more ranks"
    assert len(lines(table, grid, SILENT_S)) == 65


@pytest.mark.parametrize("seed", range(200))
def test_there_is_always_an_answer(seed: int) -> None:
    """Any table: no exception, at least one rank, each of them named."""
    draw = random.Random(seed)
    grid = Grid(pp=draw.choice([1, 2, 4]), dp=draw.choice([1, 2]), tp=draw.choice([1, 2]))
    beats = []
    for rank in range(grid.size):
        if draw.random() < 0.1:
            continue
        peer = draw.randrange(grid.size)
        waits = draw.choice(
            [None, receive(peer), send(peer), collective(rank, draw.choice([4, 5]), grid.size)]
        )
        beats.append(
            beat(
                rank,
                draw.choice(["0F0", "STEP"]),
                draw.uniform(0, 9),
                waits,
                world_1=draw.choice([4, 5]),
            )
        )
    silent = {rank: draw.choice([0.1, 5.0]) for rank in range(grid.size)}
    reason, ranks = verdict(*beats, grid=grid, silent=silent)
    assert ranks and "\n" not in reason
    assert all(f"rank {rank} (" in reason for rank in ranks)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("0F3", "computing F of micro-batch 3"),
        ("11I0", "computing I of micro-batch 0"),
        ("2REDUCE", "reducing the gradients of stage 2"),
        ("STEP", "taking the optimizer's step"),
        ("1RECV_B2", "receiving B of micro-batch 2"),
        ("0SEND_F1+0RECV_B0", "posting 0SEND_F1+0RECV_B0"),
        ("reading samples", "reading samples"),
    ],
)
def test_actions_in_words(what: str, words: str) -> None:
    assert in_words(what) == words


def test_a_line_tells_the_half_that_is_waited_for() -> None:
    assert (
        describe_activity(beat(0, waits=send(1, "0SEND_F1+0RECV_B0")))
        == "waits to send F of micro-batch 1 to rank 1"
    )
    assert (
        describe_activity(beat(0, waits=receive(1, "0SEND_F1+0RECV_B0")))
        == "waits to receive B of micro-batch 0 from rank 1"
    )


@pytest.mark.parametrize(
    ("there", "values"),
    [
        (None, ()),
        ("", ("status.json",)),
        ("{", ()),
        ('{"format": "meshwright status 2"}', ("format",)),
        ("[]", ()),
    ],
)
def test_no_status(there: str | None, values: tuple[object, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    if there is not None:
        run.mkdir()
        if there:
            (run / STATUS).write_text(there)
    with raises(("MW-WATCH-002", "MW-WATCH-003", "MW-WATCH-004"), *values):
        read_status(run / STATUS)


def test_heartbeats_come_back_as_they_were() -> None:
    for each in (beat(3, waits=collective(3, 5), world_1=5), beat(1)):
        assert Heartbeat.model_validate_json(each.model_dump_json()) == each
