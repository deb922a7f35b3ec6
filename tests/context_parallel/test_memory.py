"""Activations of a long sample over ranks against those of one process, as benchmarks/long_sample.py measures them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from meshwright.launch.pool import RankPool


@pytest.mark.torture
def test_a_rank_has_its_share(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = importlib.import_module("long_sample").compare(pool, 4096, 4, 512)
    assert found["problems"] == [], found
