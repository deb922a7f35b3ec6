"""Holders of copies on the next node: one for each rank, always elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.neighbours import holders_on_next_nodes


def test_nodes_of_unequal_sizes() -> None:
    """The example of the module."""
    holders = holders_on_next_nodes("aaabbc")
    assert holders == {0: 3, 1: 4, 2: 3, 3: 5, 4: 5, 5: 0}


def test_one_node_has_no_other() -> None:
    """Nothing is sent."""
    assert holders_on_next_nodes("aaaa") == {}


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12))
def test_a_copy_is_never_beside_its_original(nodes: list[str]) -> None:
    """All copies of a node are on one other node, so that the loss of a node loses no shard."""
    holders = holders_on_next_nodes(nodes)
    assert len(holders) == (len(nodes) if len(set(nodes)) > 1 else 0)
    for rank, holder in holders.items():
        assert nodes[holder] != nodes[rank]
        same_node = [holders[other] for other in holders if nodes[other] == nodes[rank]]
        assert len({nodes[each] for each in same_node}) == 1
