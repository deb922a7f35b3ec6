"""Built and lowered schedules: complete, safe, and with the bubble and the memory of the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from framework.errors import ScheduleError
from framework.schedule.action import Action, Kind, Schedule, actions_of, parse_schedule
from framework.schedule.build import BUILDERS, build
from framework.schedule.check import Fault, check
from framework.schedule.lower import lower
from framework.schedule.simulate import Channel, Costs, bubble_share, peak_activations, play, simulate

names = st.sampled_from(sorted(BUILDERS))
degrees = st.integers(1, 8)
num_chunks = st.integers(1, 20)


def without_groups(schedule: Schedule) -> Schedule:
    """Each communication posted and waited for alone."""
    return replace(schedule, rows=tuple(tuple(a for item in row for a in actions_of(item)) for row in schedule.rows))


@settings(deadline=None)
@given(names, degrees, num_chunks, st.sampled_from(Channel), st.integers(1, 9), st.integers(1, 9))
@example("1f1b", 8, 3, Channel.RENDEZVOUS, 1, 2)
@example("1f1b", 4, 1, Channel.RENDEZVOUS, 1, 2)
def test_complete_safe_and_ideal(name: str, pp: int, chunks: int, channel: Channel, f: int, b: int) -> None:
    schedule = lower(build(name, pp, chunks))
    assert check(schedule, channel) == []
    costs = Costs(f=f, b=b, reduce=7, step=3)
    assert bubble_share(simulate(schedule, costs, channel)) == (pp - 1) / (chunks + pp - 1)


@settings(deadline=None)
@given(degrees, num_chunks)
def test_peak_activations(pp: int, chunks: int) -> None:
    gpipe, one_f_one_b = build("gpipe", pp, chunks), build("1f1b", pp, chunks)
    assert peak_activations(gpipe) == (chunks,) * pp
    assert peak_activations(one_f_one_b) == tuple(min(pp - rank, chunks) for rank in range(pp))
    assert peak_activations(simulate(lower(one_f_one_b), Costs())) == peak_activations(one_f_one_b)


@settings(deadline=None)
@given(names, degrees, num_chunks)
def test_micro_batches_stay_in_order(name: str, pp: int, chunks: int) -> None:
    """Gradients are summed in the order of the micro-batches, in every layout: floating-point sums depend on it."""
    schedule = build(name, pp, chunks)
    for row in range(pp):
        for kind in (Kind.F, Kind.B):
            assert [a.microbatch for _, a in schedule.actions(row) if a.kind is kind] == list(range(chunks))


def test_one_micro_batch_is_naive_model_parallelism() -> None:
    rows = lower(build("1f1b", 3, 1)).rows
    assert rows == lower(build("gpipe", 3, 1)).rows
    assert bubble_share(simulate(lower(build("1f1b", 3, 1)), Costs())) == 2 / 3


def test_one_rank_accumulates_gradients() -> None:
    (row,) = lower(build("1f1b", 1, 2)).rows
    assert " ".join(map(str, row)) == "0F0 0B0 0F1 0B1 0REDUCE STEP"


@pytest.mark.parametrize(("name", "pp", "chunks"), [("zigzag", 2, 2), ("1f1b", 0, 1), ("gpipe", 1, 0)])
def test_what_cannot_be_built(name: str, pp: int, chunks: int) -> None:
    with pytest.raises(ScheduleError, match=r"choose one of gpipe, 1f1b|at least one"):
        build(name, pp, chunks)


def test_lowering_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="lowered already"):
        lower(lower(build("1f1b", 2, 2)))


def test_late_receives_hang_under_rendezvous_unless_fused() -> None:
    """The three rows of the table in lower.py: 46.7 %, hangs, 27.3 %."""
    built = build("1f1b", 4, 8)
    fused = lower(built)
    assert bubble_share(simulate(fused, Costs(f=1, b=2))) == 3 / 11

    alone = without_groups(fused)
    assert bubble_share(simulate(alone, Costs(f=1, b=2), Channel.BUFFERED)) == 3 / 11
    assert {problem.fault for problem in check(alone)} == {Fault.DEADLOCK}

    timeline, blocked = play(with_early_receives(built), Costs(f=1, b=2), Channel.RENDEZVOUS)
    assert not blocked
    assert bubble_share(timeline) == 7 / 15  # 46.7 %


def with_early_receives(schedule: Schedule) -> Schedule:
    """A receive stands where its rank was when the sender's turn came: the order of torch.distributed.pipelining."""
    left = [[action for _, action in schedule.actions(rank)] for rank in range(schedule.pp)]
    rows: list[list[Action]] = [[] for _ in left]
    while any(left):
        for rank, actions in enumerate(left):
            if actions and schedule.receive_for(actions[0]) in (None, *rows[rank]):
                action = actions.pop(0)
                rows[rank].append(action)
                send = schedule.send_after(action)
                if send is not None:
                    rows[rank].append(send)
                    rows[schedule.peer(send)].append(send.partner())
    return replace(schedule, rows=tuple(tuple(row) for row in rows))


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    """Two stages per rank, hand-written; reduced as soon as each is done, and no group is torn apart by it."""
    built = parse_schedule("# hand pp=2 num_stages=4 chunks=1 placement=loop\n0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n")
    lowered = lower(built)
    assert [" ".join(_text(item) for item in row) for row in lowered.rows] == [
        "0F0 0SEND_F0+2RECV_F0 2F0 2SEND_F0+2RECV_B0 2B0 2SEND_B0+0RECV_B0 2REDUCE 0B0 0REDUCE STEP",
        "1RECV_F0 1F0 1SEND_F0+3RECV_F0 3F0 3B0 3SEND_B0+1RECV_B0 3REDUCE 1B0 1SEND_B0 1REDUCE STEP",
    ]
    assert check(lowered) == []

    one_rank = lower(parse_schedule("# hand pp=1 num_stages=2 chunks=1 placement=loop\n0F0 1F0 1B0 0B0\n"))
    assert " ".join(map(str, one_rank.rows[0])) == "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE STEP"
    assert check(one_rank) == []


def test_a_split_backward_sends_after_its_first_half() -> None:
    built = parse_schedule("# hand pp=2 num_stages=2 chunks=1 placement=loop\n0F0 0I0 0W0\n1F0 1I0 1W0\n")
    lowered = lower(built)
    assert [" ".join(_text(item) for item in row) for row in lowered.rows] == [
        "0F0 0SEND_F0+0RECV_B0 0I0 0W0 0REDUCE STEP",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE STEP",
    ]
    assert check(lowered) == []
    assert peak_activations(lowered) == (1, 1)
    late_weights = "# hand pp=1 num_stages=1 chunks=3 placement=loop\n0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2\n"
    assert peak_activations(parse_schedule(late_weights)) == (2,)  # what W needs is held until W


def _text(item: Action | tuple[Action, ...]) -> str:
    return "+".join(str(action) for action in actions_of(item))
