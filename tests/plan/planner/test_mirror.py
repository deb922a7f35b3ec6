"""Price of the mirror in host memory, in words: that of a node, and seconds beside a step."""

from __future__ import annotations

import pytest

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import resolve
from meshwright.mesh import nodes_of
from meshwright.run.mirror_size import mirror_size
from meshwright_plan.planner.mirror import MirrorLinks, mirror_lines
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import describe
from tests.plan.planner.small import cache, config, hardware

MIRRORED = {"watch": {"mirror": True}, "launch": {"max_restarts": 3}}


def blueprint() -> Blueprint:
    """Return a run on eight ranks: bfloat16 and AdamW, 14 bytes of each parameter in a checkpoint."""
    chosen = config().replace(parallel={"dp": 8}, batch={"chunks": 1}, **MIRRORED)
    return draw_blueprint(resolve(chosen, 8))


def test_a_node_holds_its_own_and_those_of_the_node_before() -> None:
    """Two steps, 14 bytes of each parameter."""
    drawn = blueprint()
    one, two = (mirror_size(drawn, nodes_of(number, 8 // number)) for number in (1, 2))
    assert one.held == {"node0": pytest.approx(2 * 14 * drawn.num_parameters)}
    assert list(two.held.values()) == [pytest.approx(2 * 14 * drawn.num_parameters)] * 2
    assert one.sent == [0.0] * 8 and two.sent == [pytest.approx(14 * drawn.num_parameters / 8)] * 8


def test_whether_a_step_hides_it() -> None:
    """By the links of the cluster."""
    drawn, nodes = blueprint(), nodes_of(2, 4)
    links = MirrorLinks.of(hardware())
    hidden = " ".join(mirror_lines(drawn, nodes, links, 1.0))
    assert "hidden behind a step of 1 s, on links that are free" in hidden
    slow = links._replace(cluster_bytes_per_s=1e3, node_memory_bytes=2**10)
    late = " ".join(mirror_lines(drawn, nodes, slow, 1.0))
    assert "longer than a step of 1 s, which waits for it" in late
    assert late.endswith("the memory of a node is too small for it")
    alone = " ".join(mirror_lines(drawn, nodes_of(1, 8), links, 1.0))
    assert "to the next node" not in alone and "its ranks'" in alone


def test_a_plan_has_the_lines() -> None:
    """Of its first layout; none without the key."""
    of = cache()
    assert "\nmirror " not in describe(of, search(of, hardware(), 2, best=1))
    of.config = of.config.replace(**MIRRORED)
    text = describe(of, search(of, hardware(), 2, best=1))
    assert "\nmirror     the last two steps: " in text and "those of the node before" in text
