"""The model that verify trains by default: small, with the structure of the configured one,
accepted by its builder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig, load
from meshwright.model.build import build_model
from meshwright.verify import make_small, shrink
from tests.support.marks import marked_rows

ROOT = Path(__file__).parents[3]
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 8,
    "ffn_size": 64,
}
MOE = {"num_experts": 64, "top_k": 4}


def small(config: RunConfig) -> tuple[dict[str, Any], int, list[str]]:
    """The options, the number of parameters and the notes of the model that verify trains."""
    prepared = make_small(config, 32)
    built = build_model(prepared.config.model.builder, prepared.config.model.options, 0)
    return (
        prepared.config.model.options,
        sum(each.numel() for each in built.layers.parameters()),
        prepared.notes,
    )


def with_options(**more: Any) -> RunConfig:
    return load(str(ROOT / "configs/demo.toml"), []).replace(
        model={"builder": "meshwright_models.llama:build", "options": LLAMA | more}
    )


@marked_rows("all_layouts", "deepseek-v3", "qwen3-30b-a3b", "t5-demo")
@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_published_configuration_becomes_small(path: Any) -> None:
    options, num_parameters, _ = small(load(str(path), []))
    assert num_parameters < 2e6
    assert options["vocab_size"] == 499


def test_deepseek_keeps_its_structure() -> None:
    """Groups of experts, a dense block before them, a shared network, latent attention,
    a further prediction.
    """
    options, _, (note,) = small(load(str(ROOT / "configs/deepseek-v3.toml"), []))
    moe, mla = options["moe"], options["mla"]
    assert (moe["num_experts"], moe["top_k"], moe["num_groups"], moe["groups_per_token"]) == (
        16,
        2,
        8,
        4,
    )
    assert moe["first_dense"] == 1 and options["num_layers"] == 4 and options["mtp_layers"] == 1
    assert 0 < moe["expert_ffn_size"] < options["ffn_size"] and moe["shared_ffn_size"] > 0
    assert (mla["nope_dim"], mla["rope_dim"], mla["v_dim"]) == (8, 4, 8)
    assert max(mla["q_rank"], mla["kv_rank"]) <= options["hidden_size"]
    assert "moe.num_experts 256 -> 16, moe.top_k 8 -> 2" in note and "moe.scaling" not in note


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        ({"num_experts": 64, "top_k": 1}, (12, 1)),
        ({"num_experts": 8, "top_k": 2}, (8, 2)),
        ({"num_experts": 64, "top_k": 32}, (12, 6)),
        ({"num_experts": 66, "top_k": 6, "num_groups": 3, "groups_per_token": 1}, (12, 2)),
        ({"num_experts": 160, "top_k": 6, "num_groups": 20, "groups_per_token": 3}, (40, 2)),
        (
            {
                "num_experts": 20,
                "top_k": 6,
                "num_groups": 20,
                "groups_per_token": 6,
                "group_score": "max",
            },
            (20, 6),
        ),
    ],
)
def test_experts_stay_a_multiple_of_their_groups(
    moe: dict[str, Any], expected: tuple[int, int]
) -> None:
    options, _, _ = small(with_options(moe=moe))
    assert (options["moe"]["num_experts"], options["moe"]["top_k"]) == expected


def test_a_table_that_is_refused_when_small_stays_as_it_is() -> None:
    """12 of 64 experts with 2 for a token leave no capacity of 12 to drop anything."""
    moe = {**MOE, "capacity_factor": 12.0}
    options, _, (note,) = small(with_options(moe=moe))
    assert options["moe"] == moe and options["hidden_size"] < 256 and "moe." not in note
    assert small(with_options(moe={**MOE, "capacity_factor": 1.5}))[0]["moe"]["num_experts"] == 12


def test_without_sizes_of_the_model_tables_stay() -> None:
    assert shrink({"moe": MOE, "num_layers": 9}) == {"moe": MOE, "num_layers": 4}
