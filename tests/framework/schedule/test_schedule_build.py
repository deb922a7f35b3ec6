"""Built and lowered schedules: complete, safe,
and with the bubble and the memory of the formulas.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.schedule.action import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Item,
    Kind,
    Schedule,
    actions_of,
)
from meshwright.schedule.analysis import (
    Costs,
    Span,
    Timeline,
    bubble_share,
    check,
    peak_activations,
    simulate,
)
from meshwright.schedule.analysis.simulator import Channel
from meshwright.schedule.build import BUILDERS, build
from meshwright.schedule.load import parse_schedule
from meshwright.schedule.lower import lower
from meshwright.schedule.text import is_pair
from tests.framework.schedule.sizes import built, smallest
from tests.support.bubbles import own_bubble_share
from tests.support.errors import raises

degrees = st.integers(1, 8)
num_chunks = st.integers(1, 20)


@pytest.mark.long
@settings(deadline=None)
@given(built(), st.sampled_from(Channel))
def test_complete_and_safe(schedule: Schedule, channel: Channel) -> None:
    assert check(lower(schedule), channel) == []


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["gpipe", "1f1b"]),
    degrees,
    num_chunks,
    st.sampled_from(Channel),
    st.integers(1, 9),
    st.integers(1, 9),
)
@example("1f1b", 8, 3, Channel.RENDEZVOUS, 1, 2)
@example("1f1b", 4, 1, Channel.RENDEZVOUS, 1, 2)
def test_ideal(name: str, pp: int, chunks: int, channel: Channel, f: int, b: int) -> None:
    costs = Costs(f=f, b=b, reduce=7, step=3)
    assert bubble_share(simulate(lower(build(name, pp, chunks)), costs, channel)) == (pp - 1) / (
        chunks + pp - 1
    )


@settings(deadline=None, max_examples=60)
@given(built(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
def test_lowering_adds_no_bubble(schedule: Schedule, f: int, i: int, w: int, comm: int) -> None:
    """Where messages are posted is of no matter to computations that wait for what they use,
    and for nothing else.
    """
    costs = Costs(f=f, b=i + w, i=i, w=w, comm=comm)
    as_late_as_can_be = simulate(lower(schedule), costs)
    as_early_as_can_be = simulate(with_early_receives(lowered=lower(schedule)), costs)
    for each in zip(computed(as_late_as_can_be), computed(as_early_as_can_be), strict=True):
        assert each[0] == each[1]


def computed(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.action.kind in COMPUTE]


def rank_idle(timeline: Timeline) -> list[float]:
    """Of each rank, between its first and its last computation."""
    idle = []
    for rank in timeline.ranks:
        spans = [span for span in computed(timeline) if span.rank == rank]
        idle.append(
            max(s.end for s in spans) - spans[0].start - sum(s.end - s.start for s in spans)
        )
    return idle


@settings(deadline=None, max_examples=40)
@given(degrees, num_chunks, st.integers(2, 4), st.integers(1, 5), st.integers(1, 5))
def test_interleaved_has_the_bubble_over_the_interleave(
    pp: int, chunks: int, interleave: int, f: int, b: int
) -> None:
    schedule = lower(build("interleaved_1f1b", pp, chunks, interleave))
    found = bubble_share(simulate(schedule, Costs(f=f, b=b)))
    if chunks >= pp:  # for multiples of pp and for all others
        assert found == pytest.approx((pp - 1) / (interleave * chunks + pp - 1))
    else:
        # what one micro-batch needs for its way through all stages and back is never in the shadow
        # of another
        assert found == pytest.approx(1 - chunks * interleave / (interleave * pp + chunks - 1))


@settings(deadline=None, max_examples=25)
@given(degrees, num_chunks)
def test_zero_bubbles(pp: int, chunks: int) -> None:
    """In ticks, F = I = W: over all ranks pp-1 idle ticks each;
    in zb_h2 and zb_v none in a rank's own time.
    """
    ticks = Costs(f=1, i=1, w=1)
    for name, work in [("zb_h1", 3 * chunks), ("zb_h2", 3 * chunks), ("zb_v", 6 * chunks)]:
        timeline = simulate(lower(smallest(name, pp, chunks)), ticks)
        if chunks >= pp:
            assert max(span.end for span in computed(timeline)) == work + pp - 1
        if name != "zb_h1":
            assert (max(rank_idle(timeline)) == 0) == (chunks >= 2 * pp - 1)


@settings(deadline=None, max_examples=25)
@given(degrees, num_chunks)
def test_controllable_memory(pp: int, chunks: int) -> None:
    """Peak and bubble of v_half and v_min, in ticks and in half-size stages;
    the paper has these memories.
    """
    half, least = (smallest(name, pp, chunks) for name in ("v_half", "v_min"))
    assert max(peak_activations(half)) <= 2 * ((pp + 2) // 2)
    assert max(peak_activations(least)) <= 2 * ((pp + 4) // 3)
    if chunks >= 2 * pp:
        assert max(peak_activations(half)) == 2 * ((pp + 2) // 2)
        assert max(peak_activations(least)) == 2 * ((pp + 4) // 3)
        for schedule, idle in [(half, (7 * pp - 8) // 2), (least, 4 * pp - 5 + 2 * (pp % 3 == 0))]:
            timeline = simulate(lower(schedule), Costs(f=1, i=1, w=1))
            assert max(span.end for span in computed(timeline)) == 6 * chunks + (
                idle if pp > 1 else 0
            )


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 8), st.integers(0, 12), st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)
)
def test_zero_bubbles_with_unequal_times(pp: int, more: int, w: int, f: int, i: int) -> None:
    """The formulas of the paper, where W is not longer than F and I."""
    f, i, chunks = w + f, w + i, 2 * pp - 1 + more
    times = Costs(f=f, i=i, w=w)
    h1, h2 = (simulate(lower(build(name, pp, chunks)), times) for name in ("zb_h1", "zb_h2"))
    assert max(span.end for span in computed(h1)) - chunks * (f + i + w) == (pp - 1) * (f + i - w)
    assert max(span.end for span in computed(h2)) - chunks * (f + i + w) == (pp - 1) * max(
        f, f + i - 2 * w
    )
    assert max(rank_idle(h2)) == (pp - 1) * (f + i - 2 * w)
    own = (pp - 1) * (f + i - 2 * w)
    assert own_bubble_share(h2) == pytest.approx(own / (chunks * (f + i + w) + own))


@settings(deadline=None, max_examples=60)
@given(degrees, num_chunks)
def test_peak_activations(pp: int, chunks: int) -> None:
    gpipe, one_f_one_b = build("gpipe", pp, chunks), build("1f1b", pp, chunks)
    assert peak_activations(gpipe) == (chunks,) * pp
    assert peak_activations(one_f_one_b) == tuple(min(pp - rank, chunks) for rank in range(pp))
    assert peak_activations(simulate(lower(one_f_one_b), Costs())) == peak_activations(one_f_one_b)
    assert peak_activations(build("zb_h1", pp, chunks)) == (min(pp, chunks),) * pp
    assert peak_activations(build("zb_h2", pp, chunks)) == (min(2 * pp - 1, chunks),) * pp
    zb_v = peak_activations(build("zb_v", pp, chunks, 2))
    assert max(zb_v) <= min(2 * pp, 2 * chunks)
    assert chunks < 2 * pp - 1 or zb_v == (2 * pp,) * pp or chunks == 1
    until_i = [
        replace(s, rows=tuple(as_if_whole(row) for row in s.rows))
        for s in [build("zb_h1", pp, chunks)]
    ]
    assert peak_activations(until_i[0]) == peak_activations(one_f_one_b)


def as_if_whole(row: tuple[Item, ...]) -> tuple[Item, ...]:
    """What F keeps for I is free after I, if W is not looked at."""
    kinds = {Kind.F: Kind.F, Kind.I: Kind.B}
    return tuple(
        a._replace(kind=kinds[a.kind]) for item in row for a in actions_of(item) if a.kind in kinds
    )


@settings(deadline=None, max_examples=60)
@given(degrees, num_chunks, st.integers(2, 4))
def test_peak_activations_interleaved(pp: int, chunks: int, interleave: int) -> None:
    group = pp if chunks % pp == 0 else -(-chunks // max(1, chunks // pp))
    bounds = [(interleave - 1) * group + 2 * (pp - 1 - rank) + 1 for rank in range(pp)]
    peaks = peak_activations(build("interleaved_1f1b", pp, chunks, interleave))
    assert all(
        peak <= min(bound, interleave * chunks) for peak, bound in zip(peaks, bounds, strict=True)
    )
    assert chunks < 3 * pp or peaks == tuple(bounds)


@settings(deadline=None, max_examples=60)
@given(built())
def test_micro_batches_stay_in_order(schedule: Schedule) -> None:
    """Of each stage: running buffers see them in order,
    and gradients are summed in one order in every layout.
    """
    for rank in range(schedule.pp):
        for stage in schedule.stages_of(rank):
            for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}):
                found = [
                    a.microbatch
                    for _, a in schedule.actions(rank)
                    if a.kind in kinds and a.stage == stage
                ]
                assert found == list(range(schedule.chunks))


def test_interleaved_in_the_order_of_megatron() -> None:
    """Groups of pp, each through all stages of the rank; 2 (pp-1-rank) + (interleave-1)
    pp forwards first.
    """
    row = "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert " ".join(map(str, build("interleaved_1f1b", 2, 4, 2).rows[0])) == row


PICTURES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 3, 4, 1),
    ("interleaved_1f1b", 2, 5, 2),
    ("zb_h1", 3, 5, 1),
    ("zb_h2", 3, 6, 1),
    ("zb_v", 2, 4, 2),
    ("v_half", 3, 4, 2),
    ("v_min", 3, 4, 2),
    ("dualpipe_v", 2, 6, 2),
]


def test_every_schedule_has_its_picture() -> None:
    assert [name for name, *_ in PICTURES] == list(BUILDERS)


@pytest.mark.parametrize(("name", "pp", "chunks", "interleave"), PICTURES)
def test_the_pictures_in_the_docstrings_are_what_is_built(
    name: str, pp: int, chunks: int, interleave: int
) -> None:
    """A column is a tick, two letters wide;
    what comes after the first pp stages in small letters.
    """
    schedule = build(name, pp, chunks, interleave)
    timeline = simulate(lower(schedule), Costs(f=1, b=1, i=1, w=1))
    for rank in range(pp):
        cells = [". "] * int(max(span.end for span in computed(timeline)))
        for span in computed(timeline):
            if span.rank == rank:
                kind, stage, microbatch = span.action
                letter = kind.lower() if stage is not None and stage >= pp else kind
                cells[int(span.start)] = f"{letter}{microbatch}"
        assert f"        rank {rank} | {' '.join(cells).rstrip(' .')}" in (
            BUILDERS[name].__doc__ or ""
        )


def test_one_micro_batch_is_naive_model_parallelism() -> None:
    rows = lower(build("1f1b", 3, 1)).rows
    assert rows == lower(build("gpipe", 3, 1)).rows
    assert bubble_share(simulate(lower(build("1f1b", 3, 1)), Costs())) == 2 / 3


def test_one_rank_accumulates_gradients() -> None:
    (row,) = lower(build("1f1b", 1, 2)).rows
    assert " ".join(map(str, row)) == "0F0 0B0 0F1 0B1 0REDUCE STEP"


TWO_OR_MORE = "interleaved_1f1b, zb_v, v_half, v_min, dualpipe_v"


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "interleave", "code", "values"),
    [
        ("zigzag", 2, 2, 1, "MW-SCHEDULE-009", ("zigzag", "gpipe, 1f1b, interleaved_1f1b")),
        ("1f1b", 0, 1, 1, "MW-SCHEDULE-010", ()),
        ("gpipe", 1, 0, 1, "MW-SCHEDULE-010", ()),
        ("interleaved_1f1b", 1, 1, 0, "MW-SCHEDULE-010", ()),
        ("1f1b", 2, 2, 2, "MW-SCHEDULE-012", (TWO_OR_MORE,)),
        ("zb_h2", 2, 2, 3, "MW-SCHEDULE-012", ("interleave=1", "interleaved_1f1b")),
        ("interleaved_1f1b", 2, 2, 1, "MW-SCHEDULE-012", ("pipeline.interleave=2",)),
        ("zb_v", 2, 2, 1, "MW-SCHEDULE-012", ("pipeline.interleave=2",)),
        ("zb_v", 2, 2, 3, "MW-SCHEDULE-012", ("pipeline.interleave=2", "interleaved_1f1b")),
    ],
)
def test_what_cannot_be_built(
    name: str, pp: int, chunks: int, interleave: int, code: str, values: tuple[str, ...]
) -> None:
    with raises(code, *values):
        build(name, pp, chunks, interleave)


def test_lowering_twice_is_refused() -> None:
    with raises("MW-SCHEDULE-016"):
        lower(lower(build("1f1b", 2, 2)))


def test_receives_posted_ahead_hide_the_way_of_messages() -> None:
    """On links nothing starts later than if each message left as soon as it is sent; posted late,
    it does.
    """
    for name, pp, interleave in (
        ("1f1b", 4, 1),
        ("interleaved_1f1b", 4, 2),
        ("zb_h1", 4, 1),
        ("zb_v", 4, 2),
    ):
        lowered, costs = lower(build(name, pp, 8, interleave)), Costs(comm=0.2)
        free = bubble_share(simulate(lowered, costs, Channel.BUFFERED))
        assert bubble_share(simulate(lowered, costs, Channel.LINKS)) == pytest.approx(free)
        assert (
            bubble_share(simulate(with_late_receives(lowered), costs, Channel.LINKS)) > free + 0.01
        )


def with_late_receives(lowered: Schedule) -> Schedule:
    """Place each receive directly before the computation that uses it."""
    rows: list[list[Action]] = []
    for rank in range(lowered.pp):
        rows.append([])
        for _, action in lowered.actions(rank):
            receive = lowered.receive_for(action) if action.kind in COMPUTE else None
            rows[-1] += [
                each
                for each in (receive, action)
                if each is not None and action.kind not in RECEIVES
            ]
    return replace(lowered, rows=tuple(map(tuple, rows)))


def with_early_receives(lowered: Schedule) -> Schedule:
    """Place a receive where its rank was when the sender's turn came:
    the order of torch.distributed.pipelining.
    """
    opened = [
        [each for item in row for each in ([item] if is_pair(item) else actions_of(item))]
        for row in lowered.rows
    ]
    left = [[item for item in row if actions_of(item)[0].kind not in RECEIVES] for row in opened]
    rows: list[list[Item]] = [[] for _ in left]
    while any(left):
        for rank, items in enumerate(left):
            if items and all(
                lowered.receive_for(a) in (None, *rows[rank]) for a in actions_of(items[0])
            ):
                rows[rank].append(items.pop(0))
                while items and isinstance(items[0], Action) and items[0].kind in SENDS:
                    (send,) = actions_of(items.pop(0))
                    rows[rank].append(send)
                    rows[lowered.peer(send)].append(send.partner())
    return replace(lowered, rows=tuple(tuple(row) for row in rows))


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    """Two stages per rank, hand-written; reduced as soon as each is done,
    and no group is torn apart by it.
    """
    built = parse_schedule(
        "# hand pp=2 num_stages=4 chunks=1 placement=loop\n0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n"
    )
    lowered = lower(built)
    assert [" ".join(_text(item) for item in row) for row in lowered.rows] == [
        (
            "2RECV_F0 0F0 0SEND_F0+2RECV_B0 2F0 2SEND_F0+0RECV_B0 2B0 2SEND_B0 2REDUCE 0B0 0REDUCE"
            " STEP"
        ),
        (
            "1RECV_F0+3RECV_F0 1F0 1SEND_F0 3F0 1RECV_B0 3B0 3SEND_B0 3REDUCE 1B0 1SEND_B0 1REDUCE"
            " STEP"
        ),
    ]
    assert check(lowered) == []

    one_rank = lower(
        parse_schedule("# hand pp=1 num_stages=2 chunks=1 placement=loop\n0F0 1F0 1B0 0B0\n")
    )
    assert " ".join(map(str, one_rank.rows[0])) == "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE STEP"
    assert check(one_rank) == []


def test_a_split_backward_sends_after_its_first_half() -> None:
    built = parse_schedule(
        "# hand pp=2 num_stages=2 chunks=1 placement=loop\n0F0 0I0 0W0\n1F0 1I0 1W0\n"
    )
    lowered = lower(built)
    assert [" ".join(_text(item) for item in row) for row in lowered.rows] == [
        "0RECV_B0 0F0 0SEND_F0 0I0 0W0 0REDUCE STEP",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE STEP",
    ]
    assert check(lowered) == []
    assert peak_activations(lowered) == (1, 1)
    late_weights = (
        "# hand pp=1 num_stages=1 chunks=3 placement=loop\n0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2\n"
    )
    assert peak_activations(parse_schedule(late_weights)) == (2,)  # what W needs is held until W


def _text(item: Action | tuple[Action, ...]) -> str:
    return "+".join(str(action) for action in actions_of(item))
