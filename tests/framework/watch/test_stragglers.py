"""Who makes the others wait: from what everyone says of itself, and in runs where somebody does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.run.directory import run_directory
from meshwright.schedule.action import Action, Kind
from meshwright.schedule.analysis import Span, Timeline, on_their_way
from meshwright.tracking.jsonl import read_records
from meshwright.watch.stragglers import NO_STRAGGLER, Straggler, StragglerReport, judge
from meshwright_launch.pool import RankPool
from meshwright_launch.status import describe
from tests.end_to_end.conftest import corpus
from tests.end_to_end.driving import GPT2, LATER, layout, run_config, train
from tests.support.marks import long_row

__all__ = ["corpus"]
HOSTS = ["h1", "h1", "h2", "h2", "h3", "h3"]


def told(
    busy_s: float,
    *reducing_s: float,
    replicas: tuple[int, ...] = (0,),
    pp_rank: int = 0,
    **ways: float,
) -> StragglerReport:
    """``_0_1=0.3``: what was on its way from rank 0 to rank 1."""
    on_their_way = {tuple(map(int, way.split("_")[1:])): seconds for way, seconds in ways.items()}
    return StragglerReport(busy_s, reducing_s, replicas, pp_rank, on_their_way)  # type: ignore[arg-type]


def test_nobody() -> None:
    assert judge([told(0.5), told(0.5, _0_1=0.01), told(0.54)], HOSTS, 1.0) is NO_STRAGGLER


def test_a_rank_that_takes_longer_for_itself() -> None:
    found = judge([told(0.2), told(0.2), told(0.6), told(0.21)], HOSTS, 0.8)
    assert found == Straggler(
        "rank 2 on h2", 2, 0.6 - 0.21, 0.8, "it is busy for 0.6 s, the next slowest for 0.21 s"
    )
    assert found.share == pytest.approx(0.4875)
    assert (
        str(found) == "rank 2 on h2 makes the others wait, 0.39 s of a step of 0.8 s: "
        "it is busy for 0.6 s, the next slowest for 0.21 s"
    )


def test_a_node_whose_ranks_are_all_late_is_named_whole() -> None:
    found = judge([told(0.2), told(0.21), told(0.6), told(0.59), told(0.25), told(0.2)], HOSTS, 1.0)
    assert (found.name, found.delay_s) == ("the node h2", 0.6 - 0.25)
    assert found.why == "it is busy for 0.6 s, the next slowest for 0.25 s"


def test_two_that_are_as_slow_as_each_other_are_no_stragglers() -> None:
    """A cut that gives most of the work to two stages on two nodes."""
    assert judge([told(0.1), told(0.6), told(0.59), told(0.1)], HOSTS, 1.0) is NO_STRAGGLER


def test_ranks_whose_kernels_wait_for_each_other_are_named_together() -> None:
    late = [told(0.2), told(0.2), told(0.59), told(0.6)]
    found = judge(late, ["h1"] * 4, 0.8, tp=2)
    assert found.name == "one of the tensor-parallel ranks 2..3 on h1"
    found = judge(late, HOSTS, 0.8, tp=2)
    assert found.delay_s == pytest.approx(0.4)
    assert judge([told(0.2), told(0.9)], HOSTS, 1.0, tp=2) is NO_STRAGGLER, (
        "nobody to compare them with"
    )


def test_ranks_that_exchange_keys_are_named_together() -> None:
    late = [told(0.2), told(0.2), told(0.59), told(0.6)]
    assert judge(late, ["h1"] * 4, 0.8, cp=2).name == "one of the context-parallel ranks 2..3 on h1"
    found = judge([*[told(0.2)] * 4, *late[2:] * 2], ["h1"] * 8, 0.8, tp=2, cp=2)
    assert found.name == "one of the tensor-parallel and context-parallel ranks 4..7 on h1"


def test_a_link() -> None:
    found = judge([told(0.2, _0_2=0.01, _2_4=0.5, _4_2=0.1), *[told(0.2)] * 5], HOSTS, 1.0)
    assert found.name == "the link between h2 and h3" and (found.rank, found.delay_s) == (2, 0.5)


def test_two_slow_links_of_one_node_are_its_own() -> None:
    found = judge(
        [told(0.2, _0_2=0.3, _2_0=0.2, _2_4=0.5, _4_2=0.1, _4_0=0.02), *[told(0.2)] * 5], HOSTS, 1.0
    )
    assert found.name == "the link of h2"


def test_two_connections_that_share_a_link_unevenly_are_still_the_link() -> None:
    """Waits of a pipeline over four nodes, measured where the link of the second has a fortieth
    of the bandwidth.
    """
    waits_s = {
        "_0_2": 1.202,
        "_2_0": 0.793,
        "_2_4": 0.228,
        "_4_2": 0.253,
        "_4_6": 0.0,
        "_6_4": 0.001,
    }
    found = judge(
        [told(0.2, **waits_s), *[told(0.2)] * 7], [f"h{rank // 2 + 1}" for rank in range(8)], 1.91
    )
    assert found.name == "the link of h2"


def test_where_all_links_are_alike_none_of_them_is_blamed() -> None:
    """A pipeline over three nodes: the one in the middle has a part in both of its links."""
    found = judge([told(0.2, _0_2=0.4, _2_4=0.5), *[told(0.2)] * 5], HOSTS, 1.0)
    assert found.name == "the network between the nodes"


def test_the_way_inside_a_node() -> None:
    found = judge([told(0.2, _0_1=0.3), told(0.2)], HOSTS, 1.0)
    assert found.name == "the link from rank 0 to rank 1 on h1"


def test_a_sum_that_even_the_last_to_come_waits_in() -> None:
    one, other = {"replicas": (0, 2)}, {"replicas": (1, 3)}
    late = [
        told(0.2, 0.5, **one),
        told(0.2, 0.1, **other),
        told(0.2, 0.4, **one),
        told(0.3, 0.0, **other),
    ]  # type: ignore[arg-type]
    found = judge(late, HOSTS, 1.0)
    assert (found.delay_s, found.rank) == (0.4, 0)
    assert found.name == "the sum of gradients over ranks 0, 2 on h1, h2"


def test_two_that_are_late_in_turns_are_no_slow_sum() -> None:
    """Each of them waits in every second step, and in each step one does not wait at all."""
    in_turns = [
        told(0.2, 0.6, 0.0, 0.6, 0.0, replicas=(0, 1)),
        told(0.2, 0.0, 0.6, 0.0, 0.6, replicas=(0, 1)),
    ]
    assert judge(in_turns, HOSTS, 1.0) is NO_STRAGGLER


def test_a_stage_with_more_to_do_may_be_the_cut() -> None:
    two_stages = [
        told(0.2, pp_rank=0),
        told(0.2, pp_rank=0),
        told(0.5, pp_rank=1),
        told(0.49, pp_rank=1),
    ]
    found = judge(two_stages, HOSTS, 1.0)
    assert found.name == "the node h2" and found.why.endswith(
        "(`meshwright stages`), then this rank"
    )
    found = judge([*two_stages[:3], told(0.21, pp_rank=1)], HOSTS, 1.0)
    assert found.name == "rank 2 on h2" and "cut" not in found.why


def test_what_was_on_its_way() -> None:
    """Rank 1 waits from 1 to 4, and the message was sent at 3; another,
    sent long before it is waited for, for 0.2.
    """
    spans = (
        Span(0, Action(Kind.SEND_F, 0, 0), 3.0, 3.1),
        Span(0, Action(Kind.SEND_F, 0, 1), 3.2, 3.3),
        Span(1, Action(Kind.RECV_F, 1, 0), 1.0, 4.0),
        Span(1, Action(Kind.RECV_F, 1, 1), 5.0, 5.2),
    )
    found = on_their_way(Timeline("", spans))
    assert found == {(0, 1): pytest.approx(1.2)}
    assert on_their_way(Timeline("", spans), at_least=0.5) == {(0, 1): pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("text", "rank", "sections"),
    [
        LATER("pp2,tp2", 3, {}),
        LATER("pp2,tp2,sequence", 0, {}),
        LATER("pp2,tp2", 2, {"pipeline": {"schedule": "zb_h1"}}),
        LATER("dp2,tp2", 1, {"pipeline": {"recompute": "full"}}),
        LATER("dp4,zero1", 2, {}),
        LATER("dp2,cp2", 1, {}),
        long_row("dp2,pp2", 2, {}),
        LATER("pp4", 1, {}),
    ],
)
@pytest.mark.slow
def test_the_rank_whose_layers_take_longer_is_named(
    text: str, rank: int, sections: dict[str, Any], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Also inside a tensor-parallel group, whose ranks wait for each other in the middle
    of a forward and backward.
    """
    config = slowed(corpus, tmp_path, text, rank, **sections)
    said = train(pool, config)
    records = list(read_records(run_directory(config.run) / "metrics.jsonl"))
    found = [record for record in records if record.straggler is not None]
    assert [record.step for record in found] == [4, 8]
    host = said.split("makes the others wait")[0].split()[-1]
    for record in found:
        assert (record.straggler, record.straggler_rank) == (f"rank {rank} on {host}", rank), said
        assert record.straggler_share is not None and 0.2 < record.straggler_share < 1
    assert said.count("makes the others wait") == 1, "once, as long as it is the same"
    assert f"\nwaits  rank {rank} on {host} makes the others wait for" in describe(
        run_directory(config.run)
    )


def slowed(corpus: Path, runs: Path, text: str, rank: int, **sections: Any) -> RunConfig:
    """GPT-2 in which one rank takes 20 ms longer for each forward and backward of each
    of its blocks.
    """
    return run_config(
        corpus,
        runs,
        model={
            "builder": "tests.end_to_end.builders:slow",
            "options": {**GPT2, "rank": rank, "pause_s": 0.02},
        },
        parallel=layout(text),
        train={"steps": 8},
        tracking={"stragglers_every": 4},
        **sections,
    )
