"""Dropout that transformers' code calls as a function: the masks of one process in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.marks import long_row


@pytest.mark.parametrize(
    ("kind", "keys", "attention", "layouts"),
    [
        long_row("llama", {"attention_dropout": 0.2}, "sdpa", ("tp2,pp2,zb_h1",)),
        long_row(
            "llama", {"attention_dropout": 0.2}, "eager", ("tp2,sequence", "dp2,zero3,full,mbs2")
        ),
        long_row(
            "starcoder2", {"residual_dropout": 0.2}, "sdpa", ("tp2,sequence", "pp2,pointwise")
        ),
        long_row("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.1}, "sdpa", ("pp2,mbs2", "dp2,full")),
        long_row("opt", {"attention_dropout": 0.1}, "eager", ("pp2", "dp2,zero3")),
    ],
)
def test_layouts_agree(
    kind: str,
    keys: dict[str, float],
    attention: str,
    layouts: tuple[str, ...],
    tmp_path: Path,
    pool: RankPool,
) -> None:
    path = directory(kind, tmp_path, **keys)
    config = run_config(path, model={"options": {"attention": attention}})
    chosen = list(map(parse_layout, layouts))
    report = verify(config, chosen, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()
