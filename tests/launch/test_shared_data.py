"""Ranks with other data than rank 0 are named before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.build import build
from meshwright.config import RunConfig, resolve
from meshwright.errors import DataError
from meshwright.mesh.mesh import close_mesh
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check_data, open_run_mesh
from tests.end_to_end.driving import GPT2


def samples(split: str, differs: str) -> list[tuple[Tensor, Tensor]]:
    """Return other samples on rank 2, for the split that ``differs`` names."""
    seed = 1 if split == differs and os.environ.get("RANK") == "2" else 0
    ids = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(seed))
    return [(row[:-1], row[1:]) for row in ids]


def refusal(rank: int, world_size: int, config: RunConfig) -> str:
    """Start a run on this rank; return its error, or nothing."""
    config = resolve(config, world_size)
    mesh = open_run_mesh(config.parallel, config.launch, config.train.device)
    try:
        check_data(build(config, mesh))
    except DataError as error:
        return str(error)
    finally:
        close_mesh(mesh)
    return ""


@pytest.mark.parametrize(
    ("differs", "name"), [("train", "sample 0"), ("validation", "validation: sample 0"), ("", "")]
)
def test_a_rank_with_other_samples_is_named(
    tmp_path: Path, pool: RankPool, differs: str, name: str
) -> None:
    tree: dict[str, Any] = {
        "run": {"directory": str(tmp_path)},
        "model": {"options": {**GPT2, "dropout": 0.0}},
        "data": {
            "builder": "tests.launch.test_shared_data:samples",
            "options": {"differs": differs},
        },
        "batch": {"micro_batch_size": 1, "chunks": 2},
        "parallel": {"pp": 2, "dp": 2},
        "train": {"steps": 1, "device": "cpu"},
    }
    found = pool.run(refusal, 4, RunConfig.model_validate(tree))
    assert len(set(found)) == 1
    assert bool(found[0]) == bool(differs)
    if differs:
        assert "ranks [2] have other data than rank 0" in found[0] and f"'{name}'" in found[0]
        assert "MW-LAUNCH-094" in found[0]
