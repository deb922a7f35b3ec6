"""DualPipeV, and pairs in any schedule: as torch has it, found faulty where they are,
as long as their turns.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from meshwright.schedule.action import Kind, actions_of
from meshwright.schedule.analysis import Costs, check, peak_activations, seconds_in_turns, simulate
from meshwright.schedule.analysis.faults import Fault
from meshwright.schedule.analysis.pairs import Part, parts_of
from meshwright.schedule.build import build
from meshwright.schedule.load import format_schedule, parse_schedule
from meshwright.schedule.lower import lower
from meshwright.schedule.text import is_pair
from tests.support.errors import raises

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def of_torch(pp: int, chunks: int, rank: int) -> list[list[str]]:
    """Row of torch's schedule, each item as the texts of its actions."""
    outline = SimpleNamespace(pp_group_size=pp, _n_microbatches=chunks)
    row = ScheduleDualPipeV._calculate_single_rank_operations(outline, rank)  # type: ignore[arg-type]
    items = [item.sub_actions or (item,) for item in row if item is not None]
    return [
        [f"{a.stage_index}{KINDS[a.computation_type.name]}{a.microbatch_index}" for a in item]
        for item in items
    ]


@pytest.mark.parametrize(
    ("pp", "chunks"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (7, 14), (8, 20)]
)
def test_the_same_as_torch(pp: int, chunks: int) -> None:
    schedule = build("dualpipe_v", pp, chunks, 2)
    for rank in range(pp):
        assert [[str(a) for a in actions_of(item)] for item in schedule.rows[rank]] == of_torch(
            pp, chunks, rank
        )


@pytest.mark.long
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_pairs_and_memory(pp: int, chunks: int) -> None:
    schedule = build("dualpipe_v", pp, chunks, 2)
    pairs = [item for row in schedule.rows for item in row if is_pair(item)]
    assert parse_schedule(format_schedule(lower(schedule))) == lower(schedule)
    assert max(peak_activations(schedule)) <= 2 * pp + 1
    if chunks >= 2 * pp:
        of_ranks = [2 * (chunks - 2 * pp + rank + 1) + pp - 1 - rank for rank in range(pp)]
        assert len(pairs) == sum(of_ranks) - 1  # one at the turn is no pair


def test_what_hides_in_a_pair() -> None:
    """Two layers of experts in each half of a rank;
    messages take as long as half of what is computed between them.
    """
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.planner.fast_simulation import simulate_fast

    costs = Costs(f=3.5, b=6.5, i=4.0, w=2.5, exchanges=4, exchange_f=1.5, exchange_b=1.5)
    of_pair = seconds_in_turns(costs.parts(Kind.F), costs.parts(Kind.B))
    # all hidden: the rest of each lasts longer than a message of the other
    assert of_pair == pytest.approx(2.0 + 5.0)
    times = {}
    for name in ("zb_v", "dualpipe_v"):
        built = build(name, 4, 32, 2)
        spans = simulate(lower(built), costs).spans
        assert [s for s in spans if s.action.kind in "FBIW"] == list(
            simulate_fast(built, [costs] * 8).spans
        )
        times[name] = max(span.end for span in spans)
    assert times["dualpipe_v"] < 0.8 * times["zb_v"]
    beside = [span for span in spans if span.beside is not None]
    assert beside and all(
        span.beside == other.action and span.end == other.start
        for span, other in zip(beside[::2], beside[1::2], strict=True)
    )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 6), st.integers(0, 4), st.integers(1, 5), st.integers(0, 3), st.integers(0, 4)
)
def test_idle_time(pp: int, more: int, w: int, longer: int, message: int) -> None:
    """(p-1) (P + B - 3 W) for stages of half a rank, on the last rank,
    where F = I is not shorter than W.
    """
    f = w + longer
    costs = Costs(
        f=f + message, b=f + message + w, i=f + message, w=w, exchanges=4, exchange_f=message
    )
    costs = costs._replace(exchange_b=message)
    timeline = simulate(lower(build("dualpipe_v", pp, 2 * pp + more, 2)), costs)
    computed = [span for span in timeline.spans if span.action.kind in "FBIW"]
    busy = sum(span.end - span.start for span in computed if span.rank == pp - 1)
    pair = seconds_in_turns(costs.parts(Kind.F), costs.parts(Kind.B))
    idle = max(span.end for span in computed) - busy
    assert idle == pytest.approx((pp - 1) * (pair + costs.b - 3 * w), rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(0, 9),
)
def test_turns_by_hand(first: list[int], second: list[int], message: int) -> None:
    """No faster than all computation or all messages, no slower than one after the other."""
    both = [[*(Part(each, message) for each in parts), Part(1, 0)] for parts in (first, second)]
    seconds = seconds_in_turns(*both)
    computed, messages = (sum(part[at] for parts in both for part in parts) for at in (0, 1))
    assert max(computed, messages) <= seconds <= computed + messages


def test_turns_of_unequal_parts() -> None:
    # 3 for the last message
    waits = seconds_in_turns([Part(1, 2), Part(1, 0)], [Part(5, 4), Part(1, 0)])
    assert waits == 1 + 5 + 1 + 3 + 1
    assert seconds_in_turns([Part(1, 2), Part(1, 0)], [Part(5, 0)]) == 7  # hidden in the other
    # one wire: 1, 5 + 5, 1
    assert seconds_in_turns([Part(1, 5), Part(1, 0)], [Part(1, 5), Part(1, 0)]) == 12
    assert parts_of(7.0, 2, 4.0) == [Part(1.0, 2.0), Part(1.0, 2.0), Part(1.0, 0.0)]


BY_HAND = """# mine pp=1 num_stages=2 chunks=2 placement=loop
0F0 1F0 {0F1+1B0} {1F1+0B0} 1B1 0B1
"""


def test_a_pair_by_hand() -> None:
    schedule = lower(parse_schedule(BY_HAND))
    assert check(schedule) == []
    wrong = lower(
        parse_schedule(BY_HAND.replace("1F0 {0F1+1B0} {1F1+0B0}", "{1F0+0B0} 0F1 1B0 1F1"))
    )
    assert [problem.fault for problem in check(wrong)] == [Fault.USED_TOO_EARLY]  # 0B0 needs 1B0
    own = lower(parse_schedule(BY_HAND.replace("{1F1+0B0} 1B1 0B1", "1F1 {0F1+1B1} 0B1")))
    assert Fault.REPEATED in [problem.fault for problem in check(own)]
    with pytest.raises(AssertionError):
        simulate(lower(parse_schedule(BY_HAND)), [Costs()])


@pytest.mark.parametrize(
    "word", ["{0F1+0B0}", "{1B0+0F1}", "{0F1+1W0}", "{0F1+1B0+0F0}", "{0F0+1F0}"]
)
def test_what_is_no_pair(word: str) -> None:
    with raises("MW-SCHEDULE-004", "line 2, word 3"):
        parse_schedule(BY_HAND.replace("{0F1+1B0}", word))


def test_a_pair_needs_what_comes_for_both() -> None:
    """Both receives stand before a pair, and it begins when both messages are there."""
    schedule = lower(build("dualpipe_v", 3, 8, 2))
    timeline = simulate(schedule, Costs(comm=0.25))
    started = {span.action: span.start for span in timeline.spans}
    ended = {span.action: span.end for span in timeline.spans}
    num_both = 0
    for rank in range(3):
        places = {action: position for position, action in schedule.actions(rank)}
        for item in schedule.rows[rank]:
            receives = [r for a in actions_of(item) if (r := schedule.receive_for(a)) is not None]
            for receive in receives if is_pair(item) else ():
                assert places[receive] < schedule.rows[rank].index(item)
                assert started[actions_of(item)[0]] >= ended[receive.partner()] + 0.25
            num_both += is_pair(item) and len(receives) == 2
    assert num_both > 5
