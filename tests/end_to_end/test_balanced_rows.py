"""``batch.balance = "work"``: the same steps up to rounding, on any layout, and exact resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig, load, parse
from meshwright.errors import UserError
from meshwright.verify import parse_layout
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import MODELS, exact_losses, layout, lines, run_config, train
from tests.framework.verify.cases import References, assert_agrees, model_config, size_for
from tests.support.errors import has_code
from tests.support.marks import long_row


def config_of(corpus: Path, runs: Path, balance: str, text: str, **sections: Any) -> RunConfig:
    return run_config(
        corpus,
        runs,
        model=MODELS["gpt2"],
        data={"document_boundaries": True, "packing": sections.pop("packing", "stream")},
        batch={"micro_batch_size": 2, "global_batch": 16, "balance": balance},
        parallel=layout(text),
        train={"steps": 4, "dtype": "float64"} | sections.pop("train", {}),
        **sections,
    )


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        long_row("dp2", "stream"),
        ("dp2,pp2", "documents"),
        ("dp4,zero3", "stream"),
        long_row("cp2,tp2", "documents"),
        ("pp2,tp2", "stream"),
    ],
)
def test_the_losses_are_those_of_the_rows_by_index(
    text: str, packing: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """With dropout, whose masks follow the samples."""
    found = {}
    for balance, where in (("index", ""), ("work", text)):
        config = config_of(corpus, tmp_path / balance, balance, where, packing=packing)
        said = train(pool, config)
        found[balance] = [(line["train/loss"], line["train/grad_norm"]) for line in lines(config)]
        assert ("rows       next 16 samples, by work" in said) == (
            balance == "work" and "dp" in text
        )
    for one, many in zip(found["index"], found["work"], strict=True):
        for expected, number in zip(one, many, strict=True):
            assert math.isclose(number, expected, rel_tol=1e-9)


def test_a_resume_is_exact(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    whole = config_of(corpus, tmp_path / "whole", "work", "dp2,pp2")
    train(pool, whole)
    cut = config_of(corpus, tmp_path / "cut", "work", "dp2,pp2", optimizer={"decay_until": 4})
    half = cut.replace(train={"steps": 2})
    train(pool, half)
    train(pool, cut)
    assert exact_losses(cut) == exact_losses(whole)


@pytest.mark.parametrize(
    "text", ["dp2,pp2", "dp2,cp2,tp2,sequence", long_row("dp2,zero3,pp2"), long_row("dp4,ep2")]
)
def test_verify_proves_it(text: str, pool: RankPool) -> None:
    laid_out = parse_layout(text)
    size = size_for(laid_out)
    experts = {"moe": {"num_experts": 4, "top_k": 2}} if "ep" in text else {}
    config = model_config("llama", size, **experts)
    tree = json.loads(config.model_dump_json())
    tree["data"]["document_boundaries"] = True
    tree["batch"]["balance"] = "work"
    assert_agrees(parse(json.dumps(tree)), laid_out, pool, References(), global_batch=8, steps=2)


def test_it_needs_documents(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    batch = 'micro_batch_size = 1\nglobal_batch = 4\nbalance = "work"\n'
    file.write_text(f'[data]\ntrain = "t"\n\n[batch]\n{batch}')
    with pytest.raises(UserError, match="document_boundaries", check=has_code("MW-CONFIG-103")):
        load(file)
