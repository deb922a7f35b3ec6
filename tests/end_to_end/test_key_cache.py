"""Generation with a key-value cache: the logits of each next token are those of the whole row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import meshwright.inference.rows
from meshwright.config import RunConfig
from meshwright.inference.generation import NewTokens, continue_rows
from meshwright.inference.load import config_for, locate
from meshwright.inference.rows import RowForward, open_rows
from meshwright.inference.sample import SAME_TEXT
from meshwright.inference.sample import check as check_sampling
from meshwright.inference.scoring import ScoredText, score_texts
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from meshwright_models.attention import Attention, AttentionShape
from tests.end_to_end.driving import GPT2, LLAMA, layout, run_config, train
from tests.support.plain import load_plain

MLA = {"q_rank": 12, "kv_rank": 10, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"builder": "meshwright_models.gpt2:build", "options": {**GPT2, "vocab_size": 301}},
    "llama": {"builder": "meshwright_models.llama:build", "options": LLAMA},
    "window": {
        "builder": "meshwright_models.decoder:build",
        "options": {**LLAMA, "sliding_window": 5, "qk_norm": True},
    },
    "latent": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "num_kv_heads": 4, "mla": MLA},
    },
    "mixture": {
        "builder": "meshwright_models.llama:build",
        "options": {
            **LLAMA,
            "moe": {"num_experts": 4, "top_k": 2, "balance": "bias", "capacity_factor": 1.0},
        },
    },
    "several heads": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "mtp_layers": 1},
    },
}
ROWS = ([5, 6, 7, 8, 9], [70], list(range(100, 119)), [200, 11])
"""Prompts of several lengths; the third needs a longer window than the others."""
NEW = 18
"""Tokens to generate: the third row outgrows the longest window of 32."""


def trained(pool: RankPool, corpus: Path, runs: Path, **sections: dict[str, Any]) -> RunConfig:
    config = run_config(
        corpus,
        runs,
        parallel=layout(""),
        train={"steps": 1, "validate_steps": 1},
        **sections,
    )
    train(pool, config)
    return config


def open_run(config: RunConfig) -> RowForward:
    place = locate(run_directory(config.run), None)
    words = ["--train.dtype=float64"]
    asked = config_for(place, words, "sample", defaults=SAME_TEXT, trust_code=True)
    checked = check_sampling(asked, 1, len(ROWS))
    tokenizer = Tokenizer.from_file(str(checked.data.tokenizer))
    mesh = open_mesh(Grid(), "cpu")
    return open_rows(checked, mesh, place, tokenizer, None, {0})[0]


def generated(forward: RowForward) -> tuple[list[NewTokens], list[Tensor]]:
    """Extend the rows greedily; return the new tokens, and each row's logits in order."""
    logits: dict[int, list[Tensor]] = {row: [] for row in range(len(ROWS))}

    def choose(due: Sequence[int], found: Tensor) -> Tensor:
        for row, of_row in zip(due, found, strict=True):
            logits[row].append(of_row)
        return found.argmax(-1)

    found = continue_rows(forward, ROWS, [NEW] * len(ROWS), (), choose, 300)
    return found, [torch.stack(of_row) for of_row in logits.values()]


def check_equal(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the same run without a cache, in which each row runs whole."""
    cached = open_run(config)
    assert cached.uses_cache
    with_cache, logits = generated(cached)
    monkeypatch.setattr(meshwright.inference.rows, "_cached", lambda *_: False)
    whole = open_run(config)
    assert not whole.uses_cache
    without, expected = generated(whole)
    assert with_cache == without and [len(new.ids) for new in without] == [NEW] * len(ROWS)
    for mine, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_whole_row(
    corpus: Path, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    check_equal(trained(pool, corpus, tmp_path, model=MODELS[model]), monkeypatch)


def test_documents(
    corpus: Path, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of a document among the new tokens hides those before it."""
    config = trained(
        pool,
        corpus,
        tmp_path,
        model=MODELS["llama"],
        data={
            "train": str(corpus / "train"),
            "validation": str(corpus / "validation"),
            "tokenizer": str(corpus / "tokenizer.json"),
            "sequence_length": 32,
            "document_boundaries": True,
        },
    )
    check_equal(config, monkeypatch)


class CausalMean(nn.Module):
    """Mean of the tokens so far: it mixes those of a sample without an attention core."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return x + x.cumsum(1) / numbers[:, None]


def without_cores() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(300, 16), CausalMean(), nn.Linear(16, 300))


class Twice(nn.Module):
    """One attention that runs twice: its two calls have keys of their own."""

    def __init__(self) -> None:
        super().__init__()
        shape = AttentionShape(16, 2, 2, 8)
        self.attention = Attention(shape, bias=True, out_bias=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.attention(x)


def with_a_core_called_twice() -> nn.Sequential:
    layers = nn.Sequential(nn.Embedding(300, 16), Twice(), nn.Linear(16, 300))
    layers.sharding_plan = {"0": "vocab", "1.attention.core": "context"}  # type: ignore[assignment]
    return layers


def test_a_model_that_mixes_tokens_elsewhere_runs_whole(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    model = {"builder": "tests.end_to_end.test_key_cache:without_cores", "options": {}}
    forward = open_run(trained(pool, corpus, tmp_path, model=model))
    assert forward.cache is None
    found, _ = generated(forward)
    layers = next(iter(forward.parts.executor.stages.values())).layers
    row = list(ROWS[0])
    for token in found[0].ids:
        assert token == int(layers(torch.tensor([row]))[0, -1].argmax())
        row.append(token)


def test_a_core_that_runs_twice(
    corpus: Path, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"builder": "tests.end_to_end.test_key_cache:with_a_core_called_twice", "options": {}}
    check_equal(trained(pool, corpus, tmp_path, model=model), monkeypatch)


class CountsByShape(nn.Module):
    """Attention whose block takes something by the length of its input, which no search sees."""

    def __init__(self, takes: str) -> None:
        super().__init__()
        shape = AttentionShape(16, 2, 2, 8)
        self.attention = Attention(shape, bias=True, out_bias=True, dropout=0.0)
        self.table = nn.Parameter(torch.empty(32, 16).normal_())
        self.takes = takes
        self.register_buffer("before", (torch.arange(32) - 1).clamp(min=0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.takes == "positions":
            x = x + self.table[:length]
        elif self.takes == "neighbours":
            x = x + 0.5 * x[:, self.before[:length]]
        elif length > 1:
            x = 2.0 * x
        return x + self.attention(x)


def counting_by_shape(takes: str) -> nn.Sequential:
    layers = nn.Sequential(nn.Embedding(300, 16), CountsByShape(takes), nn.Linear(16, 300))
    layers.sharding_plan = {"0": "vocab", "1.attention.core": "context"}  # type: ignore[assignment]
    return layers


@pytest.mark.parametrize("takes", ["positions", "neighbours", "length"])
def test_a_layer_that_counts_by_shape_runs_whole(
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    capfd: pytest.CaptureFixture[str],
    takes: str,
) -> None:
    """The cache is tried with the weights, and left out where the logits differ."""
    model = {
        "builder": "tests.end_to_end.test_key_cache:counting_by_shape",
        "options": {"takes": takes},
    }
    config = trained(pool, corpus, tmp_path, model=model)
    forward = open_run(config)
    assert not forward.uses_cache and "every new token runs the whole row" in capfd.readouterr().err
    found, _ = generated(forward)
    _, layers = load_plain(run_directory(config.run))
    row = list(ROWS[0])
    for token in found[0].ids:
        assert token == int(layers(torch.tensor([row]))[0, -1].argmax())
        row.append(token)


def test_nothing_is_kept_after_a_generation(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    forward = open_run(trained(pool, corpus, tmp_path, model=MODELS["llama"]))
    generated(forward)
    score_texts(forward, [ScoredText((1, 2), (3, 4))])
    assert forward.cache is not None and not forward.cache._kept
