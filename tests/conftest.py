"""What all tests share: one thread per process, and a pool of ranks that is forked once."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts: ranks are forked from this process

from collections.abc import Iterator

import pytest

from launch.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that live as long as the test session; see ``RankPool.run``."""
    with RankPool(8) as ranks:
        yield ranks


def pytest_configure(config: pytest.Config) -> None:
    """Ranks that are forked and more than there are GPUs: everything but ``pytest -m gpu`` runs on CPU, everywhere."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long (``all_layouts`` an hour) only who names its mark on the command line gets."""
    hidden = [mark for mark in ("all_layouts", "torture") if mark not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in hidden)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
