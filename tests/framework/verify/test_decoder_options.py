"""The decoder of options in any layout: the numbers of one process, in which plain torch trains its module."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, VOCAB_SIZE, References, config_of, prove, size_for

BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "neox": BIASES
    | {"norm": "layer_norm", "mlp": "gelu", "rotary_share": 0.5, "parallel_residual": True}
    | {"dropout": 0.1, "attention_dropout": 0.2},
    "nemotron": {"norm": "layer_norm", "mlp": "squared_relu", "rotary_share": 0.5, "qk_norm": True, "tied": True},
    "geglu": {"mlp": "geglu", "positions": "none", "mlp_bias": True, "sliding_window": 3, "z_loss": 0.01},
    "learned": {"positions": "learned", "mlp": "relu", "out_bias": True, "label_smoothing": 0.1, "dropout": 0.1},
}
"""Name of a setting -> its options. The second and third have two query heads to each key-value head."""
LAYOUTS = ["dp2,pp2,tp2,sequence", "dp2,tp2,zero3", "pp4,interleaved_1f1b", "dp4,zero2,mbs2"]
FIRST = {("neox", LAYOUTS[0]), ("nemotron", LAYOUTS[0]), ("geglu", LAYOUTS[1])}


@pytest.fixture(scope="module")
def references() -> References:
    """Shared by the tests of this module."""
    return References()


CASES = [
    (pytest.param if (name, layout) in FIRST else LATER)(name, layout, id=f"{name}-{layout}")
    for name in OPTIONS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_has_the_numbers_of_one_process(
    name: str, layout: str, pool: RankPool, references: References
) -> None:
    chosen = parse_layout(layout)
    size = size_for(chosen)
    grouped = name in ("nemotron", "geglu")
    sizes = {"vocab_size": VOCAB_SIZE, "num_layers": size.num_blocks, "max_sequence_length": size.sequence_length}
    heads = {"num_heads": 2 * size.heads, "num_kv_heads": size.heads} if grouped else {"num_heads": size.heads}
    sizes |= {"hidden_size": 4 * size.heads, "ffn_size": 6 * size.heads, "head_dim": 4} | heads
    config = config_of("meshwright_models.decoder:build", sizes | OPTIONS[name], size.sequence_length)
    row = prove(config, chosen, pool, references, global_batch=size.global_batch, steps=3, twice=False)
    assert row.passed, "\n".join(row.problems)
