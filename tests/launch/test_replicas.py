"""Numbers of replicas on the nodes that are left, and nodes that together hold a mirror."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_table import choose_nodes
from meshwright_launch.replicas import NoReplicas, ReplicaCounts, Replicas, with_ranks
from tests.end_to_end.driving import GPT2


def config_of(**sections: dict[str, Any]) -> RunConfig:
    """Return a resolved run with a mirror."""
    keys: dict[str, dict[str, Any]] = {
        "model": {"builder": "meshwright_models.gpt2:build", "options": GPT2},
        "data": {"builder": "tests.framework.watch.hanging:samples"},
        "batch": {"micro_batch_size": 1, "global_batch": 12},
        "watch": {"mirror": True},
        "launch": {"max_restarts": 9},
    }
    for name, section in sections.items():
        keys[name] = {**keys.get(name, {}), **section}
    return resolve(RunConfig.model_validate(keys), None)


def counts_of(num_nodes: int, per_node: int, **sections: dict[str, Any]) -> ReplicaCounts:
    return ReplicaCounts(config_of(**sections), NodePlace(0, num_nodes, per_node))


def most(counts: ReplicaCounts, num_nodes: int, above: int = 0) -> tuple[int, int | None]:
    """Return dp and chunks of the largest layout."""
    found = counts.find_most(num_nodes, above)
    return found.dp, found.config.batch.chunks


def test_the_largest_dp_that_keeps_the_batch() -> None:
    """12 samples, one at a time: 6, 4, 3, 2 and 1 replicas have whole chunks, 5 have not."""
    counts = counts_of(6, 1, parallel={"dp": 6})
    assert [most(counts, nodes) for nodes in (6, 5, 4, 3, 2, 1)] == [
        (6, 2),
        (4, 3),
        (4, 3),
        (3, 4),
        (2, 6),
        (1, 12),
    ]
    assert counts.configured.describe_change(counts.find_most(5)) == "dp 6 -> 4, chunks 2 -> 3"
    with pytest.raises(NoReplicas, match=r"dp 5: batch.global_batch = 12 is not a multiple"):
        counts.find_most(5, above=4)


def test_a_builder_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's code may raise anything; the next smaller dp is tried."""
    counts, resolve_dp = counts_of(4, 1, parallel={"dp": 4}), ReplicaCounts._resolve

    def resolve_two(self: ReplicaCounts, dp: int) -> Replicas:
        if dp == 3:
            raise RuntimeError("no shape for 3\nbecause")
        return resolve_dp(self, dp)

    monkeypatch.setattr(ReplicaCounts, "_resolve", resolve_two)
    assert most(counts, 3) == (2, 6)
    with pytest.raises(NoReplicas, match=r"dp 3: RuntimeError: no shape for 3$"):
        counts.find_most(3, above=2)


def test_chunks_that_the_user_has_given() -> None:
    """The global batch follows from them once; a smaller dp has more of them."""
    counts = counts_of(4, 1, parallel={"dp": 4}, batch={"chunks": 3, "global_batch": None})
    assert most(counts, 3) == (3, 4)
    assert counts.find_most(3).config.batch.global_batch == 12


@pytest.mark.parametrize(
    ("sections", "nodes_of", "expected"),
    [
        # one node of two holds half a replica: three hold one
        ({"parallel": {"dp": 2, "pp": 4}}, {3: (1, 12)}, ""),
        # chunks must be a multiple of pp
        (
            {"parallel": {"dp": 4, "pp": 2}, "pipeline": {"interleave": 2, "schedule": "interleaved_1f1b"},
             "batch": {"global_batch": 24},
             "model": {"options": {**GPT2, "num_layers": 4}}},
            {3: (3, 8), 2: (2, 12)},
            "",
        ),
        ({"parallel": {"dp": 4, "shard_factor": 2}}, {1: (2, 6)}, ""),
        ({"parallel": {"dp": 4}, "launch": {"min_dp": 3}}, {}, "launch.min_dp = 3"),
        # a ramp whose increments three replicas do not divide
        ({"parallel": {"dp": 4}, "batch": {"ramp": (4, 4, 40)}}, {1: (2, 6)}, ""),
    ],
    ids=["half", "interleaved", "shards", "min_dp", "ramp"],
)  # fmt: skip
def test_rules_of_the_configuration_decide(
    sections: dict[str, Any], nodes_of: dict[int, tuple[int, int]], expected: str
) -> None:
    """As if the user had started with this dp."""
    counts = counts_of(4, 2, **sections)
    for num_nodes, found in nodes_of.items():
        assert most(counts, num_nodes) == found
    if expected:
        with pytest.raises(NoReplicas, match=expected):
            counts.find_most(1)


def test_a_configuration_as_it_is_loaded() -> None:
    """It is resolved; one that was resolved keeps its batch."""
    config = config_of(parallel={"dp": 4})
    assert with_ranks(config, 4) == config
    fewer = with_ranks(config, 2)
    assert (fewer.parallel.dp, fewer.launch.processes, fewer.batch.chunks) == (2, 2, 6)
    assert with_ranks(fewer, 4) == config, "grown again, it is the same"
    with pytest.raises(ConfigError):
        with_ranks(config, 5)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"launch": {"min_dp": 2}, "watch": {"mirror": False}}, "MW-CONFIG-112"),
        ({"launch": {"grow_after_s": 5.0}, "watch": {"mirror": False}}, "MW-CONFIG-112"),
    ],
)
def test_a_key_without_effect_is_refused(keys: dict[str, Any], code: str) -> None:
    from meshwright.config import load_saved

    config = config_of().model_dump(mode="json")
    for section, values in keys.items():
        config[section] |= values
    config["launch"]["processes"] = "auto"
    config["batch"]["chunks"] = None
    with pytest.raises(ConfigError, match=code):
        load_saved(config, [], "here")


def holds_all(nodes: list[int], ring: list[int | None]) -> bool:
    """Return True if each shard is on one of the nodes: that of its rank, or the next one."""
    following = [*ring[1:], *ring[:1]]
    return all({node, holder} & set(nodes) for node, holder in zip(ring, following, strict=True))


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6, 7])
def test_nodes_that_hold_the_whole_mirror(num_nodes: int) -> None:
    """Wherever some choice with the first node holds it, one is found; tried are all losses of up to two
    nodes, and all numbers of nodes.
    """
    whole = 0
    for lost in [{a, b} for a in range(1, num_nodes) for b in range(1, num_nodes)]:
        alive = [node for node in range(num_nodes) if node not in lost]
        ring = [None if node in lost else node for node in range(num_nodes)]
        for count in range(1, len(alive) + 1):
            found = choose_nodes(ring, alive, count)
            assert len(set(found)) == count and found[0] == 0 and set(found) <= set(alive)
            choices = ([0, *rest] for rest in combinations(alive[1:], count - 1))
            if any(holds_all(choice, ring) for choice in choices):
                assert holds_all(found, ring), (ring, found)
                whole += 1
    assert whole
