"""What expert parallelism refuses, before any process exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import load, resolve
from meshwright.errors import ConfigError, MeshError, ModelError
from meshwright.mesh import Grid, check_placement, draw_placement, nodes_of
from meshwright.mesh.comm import Group
from tests.tools.verify.cases import config_of

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "max_sequence_length": 8, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "ffn_size": 24}


def llama(moe: dict[str, Any] | None, **parallel: Any) -> Any:
    options = SIZES | ({} if moe is None else {"moe": moe})
    batch = {"micro_batch_size": 1, "chunks": 1}
    return config_of("meshwright.models.llama:build", options, 8, parallel=parallel, batch=batch)


def test_a_rank_has_its_experts_alone() -> None:
    config = resolve(llama({"num_experts": 6, "top_k": 2}, dp=3, ep=3), 3)
    infos = draw_blueprint(config, ep=Group("ep", (0, 1, 2), 1)).infos
    info = infos["block0.mlp.experts.down"]
    assert info.slice is not None and info.slice.ranges == ((2, 4),) and info.over == "ep" and not info.sum_over_tp
    assert info.global_shape == (6, 16, 24) and info.local_shape == (2, 16, 24)
    assert infos["block0.mlp.router.weight"].slice is None


@pytest.mark.parametrize(
    ("moe", "parallel", "words"),
    [
        ({"num_experts": 6, "top_k": 2}, {"dp": 4, "ep": 4}, "6 experts, and parallel.ep = 4 .* 1, 2, 3, 6"),
        (None, {"dp": 2, "ep": 2}, "parallel.ep = 2 shares experts, and the model's sharding_plan names none"),
    ],
)
def test_models_that_cannot_be_shared(moe: dict[str, Any] | None, parallel: dict[str, Any], words: str) -> None:
    config = resolve(llama(moe, **parallel), parallel["dp"])
    with pytest.raises(ModelError, match=words):
        draw_blueprint(config)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("tp = 2\nsequence = true\nep = 3", "ep = 3 is not a multiple of parallel.tp = 2"),
        ("tp = 2\nep = 4", "ep = 4 with parallel.tp = 2 needs parallel.sequence = true"),
        ("ep = 2\n[optimizer]\nname = 'adafactor'", "steps whole parameters, and parallel.ep = 2 cuts experts"),
        ("ep_across_nodes = true", "no effect with parallel.ep = 1"),
    ],
)
def test_degrees_that_contradict_each_other(parallel: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "run.toml"
    place.write_text(f"[parallel]\n{parallel}\n[data]\ntrain = 'x'\n")
    with pytest.raises(ConfigError, match=words):
        load(place, [])


def test_ep_divides_the_ranks_of_a_stage() -> None:
    config = llama({"num_experts": 6, "top_k": 2}, dp=4, pp=2, ep=3)
    with pytest.raises(ConfigError, match=r"ep = 3 does not divide dp 4 x tp 1 = 4.*: choose one of 1, 2, 4"):
        resolve(config, 8)


def test_a_group_stays_inside_a_node_unless_it_may_leave_it() -> None:
    grid = Grid(dp=8, ep=8)
    with pytest.raises(MeshError, match=r"ranks 0..7 straddles the nodes node0, node1"):
        check_placement(grid, nodes_of(2, 4))
    check_placement(grid, nodes_of(2, 4), ep_across_nodes=True)
    drawn = " ".join(draw_placement(grid, nodes_of(2, 4)).split())
    assert "expert parallel 1 group of 8 neighbours, 1 replica of each expert; across up to 2 nodes" in drawn
