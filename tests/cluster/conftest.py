"""A cluster of four nodes for the tests of this folder: emulated hosts,
and a real Slurm on them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import hosts, slurm
from tests.end_to_end.conftest import corpus

__all__ = ["cluster", "corpus"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """Up, and all nodes idle. Skips, with the reason, where there can be none."""
    reason = hosts.why_not() or slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("cluster")
    with hosts.Hosts(root, 4) as up, slurm.Slurm(up) as running:
        yield running
