"""Prepared text with boundaries, and pairs of which the response alone counts:
any layout is one process's numbers.

The labels that count are few and uneven on purpose: one in a sample, dozens in the next. A loss
that is averaged per micro-batch or per replica, or that counts what is ignored, is another one
then.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.prepare.records import Form
from meshwright.data.sources import open_sources
from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.framework.verify.cases import LATER, config_of
from tests.support.layouts import samples
from tests.support.marks import marked_rows

LENGTH = 24
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 2, "max_sequence_length": LENGTH, "dropout": 0.1},
    "llama": {"num_layers": 3, "num_kv_heads": 2, "ffn_size": 24, "max_sequence_length": LENGTH},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``text`` and ``pairs``."""
    folder, rng = tmp_path_factory.mktemp("corpora"), random.Random(1)
    tokenizer = bytes_tokenizer(folder / "tokenizer")
    texts = [{"text": "w" * rng.randint(1, 19)} for _ in range(40)]
    pairs = [
        {"prompt": "p" * rng.randint(1, 22), "response": "r" * rng.choice([1, 1, 2, 19])}
        for _ in range(40)
    ]
    made(folder / "text", tokenizer, write_lines(folder / "text.jsonl", texts))
    made(folder / "pairs", tokenizer, write_lines(folder / "pairs.jsonl", pairs), form=Form.PAIRS)
    return folder


CASES = [
    ("gpt2", "pairs", "documents", "dp2,pp2,tp2"),
    LATER("llama", "pairs", "documents", "dp4,tp2,sequence,zero3"),
    ("llama", "text", "stream", "pp2,tp2,sequence,zb_h1"),
    LATER("gpt2", "text", "documents", "dp2,pp2,mbs2,full,interleaved_1f1b"),
    ("llama", "pairs", "stream", "dp2,pp2,selective,mbs2"),
]


@marked_rows(
    "all_layouts", "gpt2-pairs-documents-dp2,pp2,tp2", "llama-text-stream-pp2,tp2,sequence,zb_h1"
)
@marked_rows("long", "llama-pairs-stream-dp2,pp2,selective,mbs2")
@pytest.mark.parametrize(("model", "corpus", "packing", "layout"), CASES)
def test_layouts_agree(
    pool: RankPool, corpora: Path, model: str, corpus: str, packing: str, layout: str
) -> None:
    options = {"vocab_size": 257, "hidden_size": 16, "num_heads": 4, **SIZES[model]}
    config = config_of(f"meshwright_models.{model}:build", options, LENGTH)
    data = {
        "train": str(corpora / corpus / "train"),
        "packing": packing,
        "document_boundaries": True,
    }
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    batch = samples(open_sources(config)[0], 0, 8)
    counting = (batch.labels != -100).sum(-1).tolist()
    assert len(set(counting)) > 2 and int(batch.inputs["starts"].sum()) > 8
    report = verify(config, [parse_layout(layout)], pool, global_batch=8, steps=2)
    assert report.passed, report.table()
