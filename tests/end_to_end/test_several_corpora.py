"""A run on several corpora goes on with the same samples on another layout,
and not with other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import CheckpointError
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import changed, layout, lines, run_config, train


@pytest.mark.long
def test_it_goes_on_elsewhere_and_not_with_other_weights(
    pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    both = [
        {"path": str(corpus / name), "weight": weight}
        for name, weight in (("train", 3.0), ("validation", 1.0))
    ]
    data = {"train": both, "document_boundaries": True}
    usual: dict[str, Any] = {
        "optimizer": {"schedule": "constant"},
        "data": data,
        "parallel": layout("dp2"),
    }
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


@pytest.mark.long
def test_stages_go_on_bit_equal_and_elsewhere(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    """A run stops before a stage and inside of it; the last part runs on another layout."""
    mixture = [{"path": str(corpus / name), "weight": 1.0} for name in ("train", "validation")]
    # in the middle of the third step of 8 samples
    stages = [{"from_samples": 20, "train": mixture}]
    usual: dict[str, Any] = {"data": {"stages": stages}, "optimizer": {"schedule": "constant"}}
    at_once = run_config(
        corpus, tmp_path / "once", **usual, parallel=layout("dp2"), train={"steps": 5}
    )
    said = train(pool, at_once)
    assert "data.stages[0].train, steps 3 to 5, 20 samples" in said
    parts = run_config(
        corpus, tmp_path / "parts", **usual, parallel=layout("dp2"), train={"steps": 2}
    )
    later = [{"from_samples": 20, "train": str(corpus / "train")}]
    train(pool, changed(parts, data={"stages": []}))  # the stage is added before it begins
    train(pool, changed(parts, train={"steps": 4}))
    with pytest.raises(Exception) as refused:
        train(pool, changed(parts, train={"steps": 5}, data={"stages": later}))
    assert "from sample 20: train of data.stages[0].train" in str(
        refused.value.__cause__ or refused.value
    )
    train(pool, changed(parts, train={"steps": 5}, parallel=layout("pp2,tp2")))
    losses = [[line["train/loss"] for line in lines(config)] for config in (at_once, parts)]
    assert losses[0][:4] == losses[1][:4] and losses[0][4] == pytest.approx(losses[1][4], rel=1e-4)
