"""`watch.mirror` on several nodes: the memory of a lost node is on the next one, and the losses are those of a
run without a failure, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import LLAMA, differing, exact_losses, tensors, train
from tests.end_to_end.nodes import Nodes
from tests.end_to_end.test_recovery import mirrored, trapped

pytestmark = pytest.mark.slow


def assert_same_run(pool: RankPool, config: Any, same: Any) -> None:
    """Train ``same`` without a failure; compare every loss and tensor."""
    train(pool, same)
    assert exact_losses(config) == exact_losses(same)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(same.run)))


def test_a_lost_node_is_read_from_the_next_one(
    corpus: Path, tmp_path: Path, pool: RankPool, memory: Path
) -> None:
    """Node a is lost in step 4, with its memory. There is no checkpoint before the end."""
    trap = {"rank": 1, "at_call": 14, "killed": True, "once": str(tmp_path / "fired")}
    model = trapped(**trap, vocab_size=301)
    config = mirrored(corpus, tmp_path / "runs", "dp2,tp2", model=model)
    nodes = Nodes(pool, memory, "aabb")
    nodes.train_until_killed(config)
    nodes.lose("a")
    said = nodes.train(config)
    assert "a has no mirror of ranks 0, 1: the copies on b are read" in said
    assert f"resuming from {memory}/a/" in said
    # the mirror of step 3 may not have been complete
    assert "step 3, 24 samples" in said or "step 2, 16 samples" in said
    assert_same_run(pool, config, mirrored(corpus, tmp_path / "same", "dp2,tp2", 0, model=model))


@pytest.mark.long
@pytest.mark.parametrize("callback", ["WritesBeforeSteps", "SlowMirrors"])
def test_a_step_waits_for_its_mirror(
    callback: str, corpus: Path, tmp_path: Path, pool: RankPool, memory: Path
) -> None:
    """The update, and a callback that changes weights before a step, come after the copy."""
    environment = {"KILLED_ONCE": str(tmp_path / "fired"), "KILLED_AFTER": "4"}
    callbacks = {"train": {"callbacks": (f"tests.end_to_end.killing:{callback}",)}}
    config = mirrored(corpus, tmp_path / "runs", "dp4,zero3", **callbacks)
    nodes = Nodes(pool, memory, "aabb", environment)
    nodes.train_until_killed(config)
    pool.kill()
    nodes.lose("b")
    assert "step 3, 24 samples" in nodes.train(config)
    pool.kill()  # their mirrors are slow
    (tmp_path / "fired-4").touch()
    same = Nodes(pool, memory / "same", "aabb", environment)
    unbroken = mirrored(corpus, tmp_path / "same", "dp4,zero3", **callbacks)
    same.train(unbroken)
    pool.kill()
    assert exact_losses(config) == exact_losses(unbroken)
    assert not differing(tensors(run_directory(config.run)), tensors(run_directory(unbroken.run)))


@pytest.mark.long
def test_shard_and_copy_are_gone(
    corpus: Path, tmp_path: Path, pool: RankPool, memory: Path
) -> None:
    """Two neighbouring nodes of three are lost: the run goes back to its checkpoint."""
    environment = {"KILLED_ONCE": str(tmp_path / "fired"), "KILLED_AFTER": "5"}
    callbacks = {"train": {"steps": 8, "callbacks": ("tests.end_to_end.killing:AfterSteps",)}}
    keys: dict[str, Any] = {"checkpoint": {"every": 3}}
    config = mirrored(corpus, tmp_path / "runs", "dp4", 99, **keys, **callbacks)
    nodes = Nodes(pool, memory, "abbc", environment)
    nodes.train_until_killed(config)
    nodes.lose("a")
    nodes.lose("b")
    said = nodes.train(config)
    assert (
        "the mirror in memory is left out: of step 4, shard pp0-dp0-tp0 is on none of the nodes a, b, c"
    ) in said
    assert "step 3, 24 samples" in said
    same = mirrored(corpus, tmp_path / "same", "dp4", 0, train={"steps": 8}, **keys)
    assert_same_run(pool, config, same)


PHASES = [
    "half of its boxes are copied",
    "its own is complete",
    "it waits for sizes of a mirror",
    "it waits for the answer to a mirror",
    "it waits for a mirror",
    "its copy is not complete",
    "all is complete",
]


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lost", ["", "a", "b"])
def test_a_death_in_each_phase_of_a_mirror(
    phase: str, lost: str, corpus: Path, tmp_path: Path, pool: RankPool, memory: Path
) -> None:
    """Of rank 1, on node a: alone, or with the memory of one node. Some step is complete."""
    environment = {"KILLED_ONCE": str(tmp_path / "fired"), "KILLED_IN": phase}
    callbacks = {"train": {"callbacks": ("tests.end_to_end.killing:InTheMirror",)}}
    config = mirrored(corpus, tmp_path / "runs", "dp4,zero1", **callbacks)
    nodes = Nodes(pool, memory, "aabb", environment)
    nodes.train_until_killed(config)
    if lost:
        nodes.lose(lost)
    said = nodes.train(config)
    pool.kill()  # rank 1 has the trap in its modules
    assert f"resuming from {memory}/a/" in said
    assert "step 2, 16 samples" in said or "step 3, 24 samples" in said
    assert_same_run(pool, config, mirrored(corpus, tmp_path / "same", "dp4,zero1", 0))


EXPERTS: dict[str, Any] = {
    "model": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "moe": {"num_experts": 4, "top_k": 2, "balance": "bias"}},
    }
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "names", "sections"),
    [
        ("dp4,zero0", "aabb", {}),
        ("dp4,zero1,shard2", "aabb", {}),
        ("dp4,zero2", "abca", {"train": {"dtype": "bfloat16"}}),
        ("dp4,zero3", "abbb", {}),
        ("dp2,pp2", "aabb", {}),
        ("dp2,pp2", "abab", {}),
        ("dp2,tp2,sequence", "aabb", {"optimizer": {"name": "muon"}}),
        ("dp4,zero1,offload", "aabb", {"optimizer": {"state_dtype": "8bit"}}),
        ("dp2,pp2", "aabb", {"adapter": {"rank": 2, "targets": ["*.attention.qkv"]}}),
        ("dp4,zero3", "aabc", {"adapter": {"rank": 2, "targets": ["*.attention.qkv"]}}),
        ("dp4,ep2", "aabb", EXPERTS),
    ],
    ids=str,
)
def test_layouts(
    text: str,
    names: str,
    sections: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    memory: Path,
) -> None:
    """Nodes are lost one after the other, the second one step after a resume."""
    sections = {**sections, "train": {**sections.get("train", {}), "steps": 7}}
    same = mirrored(corpus, tmp_path / "same", text, 0, **sections)
    sections["train"] |= {"callbacks": ("tests.end_to_end.killing:AfterSteps",)}
    config = mirrored(corpus, tmp_path / "runs", text, 99, **sections)
    environment = {"KILLED_ONCE": str(tmp_path / "fired"), "KILLED_AFTER": "3 4 6"}
    nodes = Nodes(pool, memory, names, environment)
    for node in ("a", "b", "a"):
        nodes.train_until_killed(config)
        nodes.lose(node)
    said = nodes.train(config)
    assert "step 5, 40 samples" in said, said
    assert_same_run(pool, config, same)
