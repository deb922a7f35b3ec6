"""Initial weights that the ranks of a stage draw together are those that each would draw alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.build import build
from meshwright.config import RunConfig, parse, resolve
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.model import shared_draw
from meshwright.model.build import PlainModel
from meshwright.model.shared_draw import assign_draws
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.support.marks import long_row

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
}


def config(dtype: str, model: dict[str, Any], **parallel: Any) -> RunConfig:
    found = RunConfig.model_validate(
        {
            "model": model,
            "data": {"train": "random", "sequence_length": 16},
            "batch": {"micro_batch_size": 1, "global_batch": 4},
            "parallel": parallel,
            "train": {"device": "cpu", "dtype": dtype},
        }
    )
    return resolve(found, 4)


def drawn(
    rank: int, world_size: int, text: str, shared_from: int
) -> tuple[dict[str, Any], list[str]]:
    """This rank's full weights as lists, and the names that it drew, in order."""
    found, names = parse(text), []
    initial = PlainModel.initial

    def counted(model: PlainModel, name: str) -> torch.Tensor:
        names.append(name)
        return initial(model, name)

    mesh = open_mesh(Grid.of(found.parallel.degrees), "cpu")
    with (
        mock.patch.object(PlainModel, "initial", counted),
        mock.patch.object(shared_draw, "SHARED_FROM", shared_from),
    ):
        parts = build(found, mesh, (open_verify_source(found, random_tokens=True), {}))
    weights = {}
    for stage in parts.executor.stages.values():
        for name, parameter in stage.layers.named_parameters():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            weights[name] = full.detach().double().tolist()
    close_mesh(mesh)
    return weights, names


LLAMA = {
    "builder": "meshwright_models.llama:build",
    "options": {**SIZES, "max_sequence_length": 16},
}
TIED = {
    "builder": "meshwright_models.gpt2:build",
    "options": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_sequence_length": 16,
    },
}


@pytest.mark.parametrize(
    ("dtype", "model", "parallel"),
    [
        long_row("float32", LLAMA, {"dp": 2, "tp": 2, "sequence": True}),
        ("float64", TIED, {"tp": 2, "pp": 2}),
        long_row("bfloat16", LLAMA, {"dp": 4, "zero": 3}),
    ],
    ids=["dp2-tp2", "tied-tp2-pp2", "zero3"],
)
def test_weights_drawn_together_are_those_drawn_alone(
    pool: RankPool, dtype: str, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    text = config(dtype, model, **parallel).model_dump_json()
    alone, together = (pool.run(drawn, 4, text, shared_from) for shared_from in (2**62, 1))
    assert [weights for weights, _ in together] == [weights for weights, _ in alone]
    pp = parallel.get("pp", 1)
    for stage in range(pp):
        ranks = range(stage * 4 // pp, (stage + 1) * 4 // pp)
        once = sorted(alone[ranks[0]][1])
        assert all(sorted(alone[rank][1]) == once for rank in ranks)
        assert sorted(name for rank in ranks for name in together[rank][1]) == once, (
            "each is drawn on one rank"
        )
        assert all(together[rank][1] for rank in ranks)


def test_the_largest_is_drawn_first_and_loads_are_even() -> None:
    found = assign_draws({"embedding": 100, "a": 60, "b": 50, "c": 40, "d": 10}, 2)
    assert found == {"embedding": 0, "a": 1, "b": 1, "c": 0, "d": 1}
    assert assign_draws({"a": 1, "b": 1}, 3) == {"a": 0, "b": 1}
