"""The line about balance that a run prints before its first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig
from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.order import ORDERS, documents
from meshwright.data.sources import open_sources
from meshwright.mesh.comm import Group
from meshwright_launch.balance import describe_balance
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.support.seen_keys import imbalance, keys_seen

LENGTH, CP = 32, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = write_lines(
        folder / "text.jsonl", [{"text": "x" * length} for length in (3, 70, 9, 20, 1, 14, 60)]
    )
    made(folder / "made", bytes_tokenizer(folder / "tokenizer"), lines)
    return folder / "made/train"


def parts_of(corpus: Path, cp: int, order: str, *, boundaries: bool = True) -> Any:
    config = RunConfig.model_validate(
        {
            "data": {
                "train": str(corpus),
                "sequence_length": LENGTH,
                "document_boundaries": boundaries,
            },
            "model": {"options": {"vocab_size": 257}},
            "batch": {"micro_batch_size": 1, "chunks": 1, "global_batch": 1},
        }
    )
    return SimpleNamespace(
        config=config,
        source=open_sources(config)[0],
        mesh=SimpleNamespace(at=SimpleNamespace(dp_rank=0)),
        executor=SimpleNamespace(schedule=SimpleNamespace(chunks=1)),
        blueprint=SimpleNamespace(
            cut=TokenCut(Group("cp", tuple(range(cp)), 0), order, torch.zeros(1, LENGTH)),
            is_synchronised=False,
            trim_multiple=0,
        ),
        state=SimpleNamespace(samples_seen=2),
    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_next_sample_in_all_orders(order: str, corpus: Path) -> None:
    parts = parts_of(corpus, CP, order)
    starts = parts.source.read([2])[0]["starts"][0].nonzero().flatten().tolist()
    found = {}
    for name, ranks in ORDERS.items():
        dealt = documents(LENGTH, CP, starts) if name == "documents" else ranks(LENGTH, CP)
        found[name] = imbalance(dealt, keys_seen(LENGTH, starts))
    others = ", ".join(f"{name} {found[name]:.1%}" for name in ORDERS if name != order)
    assert (
        describe_balance(parts)
        == f"context    next 1 samples, {order}: the busiest rank sees {found[order]:.1%} more keys"
        f" of their documents than the mean ({others})"
    )


def test_none_without_ranks_or_documents(corpus: Path) -> None:
    assert describe_balance(parts_of(corpus, 1, "zigzag")) == ""
    assert describe_balance(parts_of(corpus, CP, "zigzag", boundaries=False)) == ""
