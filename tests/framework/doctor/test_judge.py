"""What the doctor makes of figures: who is named, and who is not."""

from __future__ import annotations

import itertools

from meshwright.doctor.facts import Facts
from meshwright.doctor.findings import judge
from meshwright.doctor.links import LinkMeasurement, by_node, rounds

GBIT = 1.25e8


def facts(host: str, rank: int, **changes: object) -> Facts:
    sound = Facts(
        rank=rank,
        host=host,
        versions=(("python", "3.11"), ("torch", "2.13.0")),
        device="cpu",
        device_bytes=2**34,
        free_bytes=2**33,
        num_cpus=8,
        load=1.0,
        clock_s=0.001 * rank,
        sees_directory=True,
        write_bytes_per_s=1e8,
        disk_problem=None,
    )
    return sound._replace(**changes)  # type: ignore[arg-type]


FOUR = [facts(f"h{number}", number - 1) for number in range(1, 5)]


def links(**slow: float) -> list[LinkMeasurement]:
    """Return all pairs of four nodes at 1 Gbit/s; ``h2 = 0.1``: that node's link; ``h1_h3 = 0.1``:
    that pair's.
    """
    found = []
    for a, b in itertools.combinations([each.host for each in FOUR], 2):
        rate = min(slow.get(a, 1.0), slow.get(b, 1.0), slow.get(f"{a}_{b}", 1.0))
        found.append(LinkMeasurement((a, b), (0, 1), rate * GBIT, 1e-4))
    return found


def said(
    *, of: list[Facts] = FOUR, at: list[LinkMeasurement] | None = None, **more: float
) -> list[tuple[str, tuple[str, ...]]]:
    return [tuple(finding) for finding in judge(of, links() if at is None else at, **more)]  # type: ignore[arg-type, misc]


def test_nothing_is_wrong() -> None:
    assert said() == [] and said(expected_bytes_per_s=GBIT) == []
    assert said(of=FOUR[:1], at=[]) == []


def test_a_slow_node_is_told_from_its_partners_and_from_a_slow_pair() -> None:
    assert said(at=links(h2=0.1)) == [
        ("the link of h2 is slow: 0.1 Gbit/s, others reach 1 Gbit/s", ("h2",))
    ]
    (pair, nobody), *rest = said(at=links(h1_h3=0.1))
    assert pair.startswith("between h1 and h3 there is 0.1 Gbit/s") and not nobody and not rest
    assert by_node(links(h2=0.1)) == {"h1": GBIT, "h2": 0.1 * GBIT, "h3": GBIT, "h4": GBIT}


def test_all_alike_but_not_what_the_cluster_is_said_to_have() -> None:
    found = said(expected_bytes_per_s=10 * GBIT)
    assert [nodes for _, nodes in found] == [("h1",), ("h2",), ("h3",), ("h4",)]
    assert found[0][0] == "the link of h1 is slow: 1 Gbit/s, the cluster file has 10 Gbit/s"


def test_clocks_versions_disks() -> None:
    def one(**changes: object) -> tuple[str, tuple[str, ...]]:
        (found,) = said(of=[*FOUR[:3], facts("h4", 3, **changes)])
        return found

    assert one(clock_s=3600.0)[0].startswith("the clock of h4 is 3,600.0 s ahead of the others'")
    assert one(clock_s=-3600.0)[1] == ("h4",)
    assert one(versions=(("python", "3.11"), ("torch", "2.11.0"))) == (
        "torch is 2.13.0, but 2.11.0 on h4",
        ("h4",),
    )
    assert one(device="another")[0] == "the devices are cpu, but another on h4"
    assert one(sees_directory=False)[0].startswith(
        "h4 does not see the run's directory as rank 0 does"
    )
    assert "No space left" in one(disk_problem="No space left on device (errno 28)")[0]


def test_in_each_round_nobody_has_two_partners_and_every_pair_meets_once() -> None:
    for num in range(1, 10):
        names = [f"n{number}" for number in range(num)]
        met = []
        for pairs in rounds(names):
            nodes = [node for pair in pairs for node in pair]
            assert len(set(nodes)) == len(nodes) >= num - num % 2
            met += [frozenset(pair) for pair in pairs]
        assert sorted(map(sorted, met)) == sorted(map(sorted, itertools.combinations(names, 2)))
