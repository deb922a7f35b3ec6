"""A run on several corpora goes on with the same samples on another layout, and not with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import CheckpointError
from meshwright.launch.pool import RankPool
from tests.end_to_end.driving import changed, layout, lines, run_config, train


def test_it_goes_on_elsewhere_and_not_with_other_weights(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    both = [{"path": str(corpus / name), "weight": weight} for name, weight in (("train", 3.0), ("validation", 1.0))]
    data = {"train": both, "document_boundaries": True}
    usual: dict[str, Any] = {"optimizer": {"schedule": "constant"}, "data": data, "parallel": layout("dp2")}
    at_once = run_config(corpus, tmp_path / "once", **usual, train={"steps": 4})
    said = train(pool, at_once)
    assert "75.0% of the samples" in said and "25.0% of the samples" in said
    first = run_config(corpus, tmp_path / "twice", **usual, train={"steps": 2})
    train(pool, first)
    other = [{**both[0], "weight": 2.0}, both[1]]
    with pytest.raises(Exception) as refused:
        train(pool, changed(first, train={"steps": 4}, data={"train": other}))
    assert isinstance(refused.value.__cause__ or refused.value, CheckpointError)
    assert "train of data.train[0] (weight 3)" in str(refused.value.__cause__ or refused.value)
    train(pool, changed(first, train={"steps": 4}, parallel=layout("pp2,tp2")))
    losses = [[line["train/loss"] for line in lines(config)] for config in (at_once, first)]
    assert losses[0][2:] == pytest.approx(losses[1][2:], rel=1e-4) and len(losses[1]) == 4
