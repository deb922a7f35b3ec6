"""Save on one layout, go on with another: all ordered pairs of eight."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    LoadedRank,
    differing,
    layout,
    load_rank,
    run_config,
    size,
    tensors,
    train,
)

LAYOUTS = [
    "",
    "dp2",
    "pp2",
    "tp2",
    "dp2,pp2,zero3",
    "dp4,tp2,zero2,shard2,offload",
    "pp4,tp2",
    "dp2,pp2,tp2",
]
STEPS = 20
BARS = {"float64": 1e-9, "float32": 1e-4}
"""Relative, of each loss: what weights may differ by after ten steps,
which the losses then follow.
"""
STEP_1 = {"float64": 1e-12, "float32": 1e-6}


@pytest.mark.torture(row="8 layouts of (dp, pp, tp), all 56 ordered pairs")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_layout_goes_on_with_what_any_other_saved(
    dtype: str,
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    record_property: Callable[[str, Any], None],
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "builder": "meshwright_models.gpt2:build",
            "options": {**GPT2, "vocab_size": 301, "num_layers": 4},
        },
        "optimizer": {"schedule": "constant"},
        "train": {"steps": 3, "dtype": dtype},
    }
    configs = {
        text: run_config(
            corpus, tmp_path / "saved" / (text or "one"), parallel=layout(text), **sections
        )
        for text in LAYOUTS
    }
    for config in configs.values():
        train(pool, config)
    pairs, worst = 0, 0.0
    for before, saved in configs.items():
        directory = run_directory(saved.run)
        held = tensors(directory)
        followed: dict[str, list[LoadedRank]] = {}
        for after in [before, *(text for text in LAYOUTS if text != before)]:
            config, again = (
                configs[after],
                tmp_path / "again" / (before or "one") / (after or "one"),
            )
            followed[after] = pool.run(
                load_rank, size(config), config, str(directory), str(again), STEPS
            )
            assert not differing(tensors(again), held), (before, after)
            if after == before:
                continue
            pairs += 1
            seen, expected = (
                {k: v for rank in followed[t] for k, v in rank.seen.items()}
                for t in (after, before)
            )
            assert seen == expected and len(seen) == 8 * STEPS, (before, after)
            for step in range(STEPS):
                one, other = followed[after][0].losses[step], followed[before][0].losses[step]
                worst = max(worst, abs(one - other) / other)
                bar = STEP_1[dtype] if step == 0 else BARS[dtype]
                assert math.isclose(one, other, rel_tol=bar), (before, after, step, one, other)
    assert pairs == 56
    record_property(
        "noted", f"{dtype}: {pairs} pairs bit-equal, token ids equal, losses within {worst:.1e}"
    )
