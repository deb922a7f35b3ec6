"""An encoder-decoder in a pipeline: wherever it is cut, the memory,
its mask and the decoder's ids arrive.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._pytree import tree_unflatten

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, parse
from meshwright.verify import layout_config, parse_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, Size, assert_agrees, model_config
from tests.support.errors import raises
from tests.support.marks import all_layouts_row

SMALL = Size(heads=4, sequence_length=12, num_blocks=2, global_batch=4)
"""Eight layers: embedding, block, norm; embedding, two blocks, norm, head."""


def cut(config: RunConfig, balance: list[int]) -> RunConfig:
    return config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"balance": balance})}
    )


@pytest.mark.parametrize(
    ("layout", "balance", "options"),
    [
        all_layouts_row("pp8", [1] * 8, {}),  # each layer a stage of its own
        ("pp2", [3, 5], {"gated": True, "tied": False}),  # the encoder, the decoder
        all_layouts_row(
            "dp2,pp2,tp2,gpipe", [4, 4], {}
        ),  # the decoder's embedding with the encoder
        # what stands behind the last block needs no memory
        all_layouts_row("pp2,tp2,sequence,mbs2", [6, 2], {"padding_id": 7}),
        all_layouts_row("pp4,zb_h1", [2, 2, 2, 2], {}),
        # the table is shared, with all micro-batches in flight
        all_layouts_row("dp2,pp2,gpipe,zero3", [3, 5], {}),
    ],
)
def test_wherever_it_is_cut(
    layout: str, balance: list[int], options: dict[str, Any], pool: RankPool, references: References
) -> None:
    config = cut(model_config("t5", SMALL, **options), balance)
    assert_agrees(config, layout, pool, references, global_batch=4, steps=2)


@pytest.mark.all_layouts
def test_in_float32(pool: RankPool, references: References) -> None:
    layout = parse_layout("dp2,pp2,tp2,sequence")
    assert_agrees(
        model_config("t5", SMALL),
        layout,
        pool,
        references,
        global_batch=4,
        steps=3,
        dtype="float32",
        twice=True,
    )


def boundaries(balance: list[int], layout: str) -> list[dict[str, tuple[Any, bool]]]:
    """What each stage hands on: name -> shape, and whether a gradient comes back."""
    text = layout_config(
        cut(model_config("t5", SMALL), balance), parse_layout(layout), 4, "float32"
    ).model_dump_json()
    values = [
        tree_unflatten(spec.leaves, spec.tree) for spec in draw_blueprint(parse(text)).boundaries
    ]
    return [
        {name: (leaf.shape, leaf.needs_gradient) for name, leaf in value.items()}
        for value in values
    ]


def test_what_goes_over_the_wire() -> None:
    found = [list(value) for value in boundaries([1, 1, 1, 1, 1, 1, 2], "pp7")]
    assert found[0] == found[1] == found[2] == ["encoder", "encoder_seen", "decoder_ids"]
    assert found[3] == found[4] == ["decoder", "encoder", "encoder_seen"]
    assert found[5] == ["decoder"], "nobody behind the last block reads the memory"
    assert boundaries([3, 2, 3], "pp3,tp2,sequence") == [
        {
            "encoder": ((1, 6, 16), True),
            "encoder_seen": ((1, 12), False),
            "decoder_ids": ((1, 8), False),
        },
        {
            "decoder": ((1, 4, 16), True),
            "encoder": ((1, 6, 16), True),
            "encoder_seen": ((1, 12), False),
        },
    ], "activations are cut along the sequence, masks and ids whole"


def test_a_decoder_that_tp_does_not_divide_is_refused() -> None:
    config = model_config("t5", Size(heads=3, sequence_length=12, num_blocks=2, global_batch=4))
    with raises("MW-TP-001", "inputs['decoder_ids'], 8", 3, "6 or 9"):
        draw_blueprint(layout_config(config, parse_layout("tp3,sequence"), 4, "float64"))
