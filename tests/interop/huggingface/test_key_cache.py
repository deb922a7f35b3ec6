"""Generation with a key-value cache, by models of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_launch.pool import RankPool
from tests.end_to_end.conftest import corpus
from tests.end_to_end.test_key_cache import check_equal, trained
from tests.interop.huggingface.architectures import directory
from tests.support.marks import long_row

__all__ = ["corpus"]


@pytest.mark.parametrize(
    "kind",
    ["qwen2", *map(long_row, ("llama", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3"))],
)
def test_logits_are_those_of_the_whole_row(
    corpus: Path, tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Windows, sinks, latent attention and experts, as transformers computes them."""
    model = {"builder": f"hf:{directory(kind, tmp_path)}", "options": {"vocab_size": 301}}
    check_equal(trained(pool, corpus, tmp_path, model=model), monkeypatch)
