"""Ids and labels that the model does not have: one message on every layout,
also where tp splits the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from meshwright.build import build
from meshwright.data.sources import Source
from meshwright.errors import ModelError
from meshwright.step import take_step
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankError, RankPool
from tests.framework.verify.cases import LATER, VOCAB_SIZE
from tests.framework.watch.spoiling import LIMIT_S, config_for, opened, size_of
from tests.support.marks import long_row, marked_rows


class WithOneBad(NamedTuple):
    """Samples of which number 5 has one other id or label."""

    source: Source
    part: str
    value: int

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        tokens, labels = self.source.read(indices)
        if 5 in indices:
            (tokens if self.part == "token" else labels)[indices.index(5), -1] = self.value
        return tokens, labels


def one_step(rank: int, world_size: int, config_json: str, part: str, value: int) -> float:
    config, mesh = opened(config_json)
    parts = build(config, mesh, (WithOneBad(open_verify_source(config, True), part, value), {}))
    return take_step(parts).loss


@marked_rows("long", "token-61-tp2,sequence", "label-61-dp2,tp2,zero3", "label--1-dp1")
@marked_rows(
    "all_layouts",
    "token-61-dp2,tp2,zero3",
    "label-61-dp1",
    "label-61-tp2,sequence",
    "label--1-tp2,sequence",
    "label--1-dp2,tp2,zero3",
)
@pytest.mark.parametrize(
    "layout", ["dp1", "tp2,sequence", "dp2,tp2,zero3", LATER("pp2,tp2"), LATER("dp2,zero3")]
)
@pytest.mark.parametrize(
    ("part", "value"),
    [("token", VOCAB_SIZE), ("label", VOCAB_SIZE), ("label", -1), LATER("token", -1)],
)
def test_it_is_named_on_every_layout(pool: RankPool, layout: str, part: str, value: int) -> None:
    config = config_for(layout).model_dump_json()
    size = size_of(config_for(layout))
    where = "layer embedding" if part == "token" else "the loss"
    with pytest.raises(RankError) as caught:
        pool.run(one_step, size, config, part, value, timeout_s=LIMIT_S)
    error = caught.value.__cause__
    assert isinstance(error, ModelError) and error.code == "MW-PIPELINE-036"
    assert error.message.startswith(f"{where}, samples [5]: ") and "out of" in error.message


@pytest.mark.parametrize("layout", ["dp1", long_row("tp2")])
def test_those_at_the_ends_pass(pool: RankPool, layout: str) -> None:
    config = config_for(layout)
    cases = [
        ("token", 0),
        ("token", VOCAB_SIZE - 1),
        ("label", 0),
        ("label", VOCAB_SIZE - 1),
        ("label", -100),
    ]
    for part, value in cases:
        pool.run(
            one_step, size_of(config), config.model_dump_json(), part, value, timeout_s=LIMIT_S
        )
