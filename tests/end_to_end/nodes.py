"""Runs whose ranks are on several nodes, emulated on this machine: a name and a directory in memory each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.config import RunConfig
from meshwright.system.host import NODE
from meshwright_launch.pool import RankError, RankPool
from meshwright_launch.rank import GENERATION, MIRROR
from tests.end_to_end.driving import train_rank

LOOPBACK = "127.0.0.1"


def node_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    nodes: Sequence[str],
    memory: str,
    port: int,
    generation: int,
    environment: dict[str, str],
) -> str:
    """Train one rank as a node's launcher starts it; return its output."""
    before = dict(os.environ)
    os.environ |= environment | {
        NODE: nodes[rank],
        MIRROR: f"{memory}/{nodes[rank]}",
        GENERATION: str(generation),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "nodes",
    }
    try:
        return train_rank(rank, world_size, config)
    finally:
        os.environ.clear()
        os.environ |= before


class Nodes:
    """Launches of a run on nodes; ``nodes[rank]`` is the node of a rank."""

    def __init__(
        self, pool: RankPool, memory: Path, nodes: str, environment: dict[str, str] | None = None
    ) -> None:
        self._pool, self.memory = pool, memory
        self._environment = environment or {}
        self.nodes = list(nodes)
        self._generation = -1

    def train(self, config: RunConfig) -> str:
        """Launch the ranks; return the output of rank 0."""
        self._generation += 1
        for node in self.nodes:
            (self.memory / node).mkdir(parents=True, exist_ok=True)
        store: Any = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.PrefixStore("recovery", store).add("generation", self._generation)  # type: ignore[attr-defined]
        place = (self.nodes, str(self.memory), store.port, self._generation, self._environment)
        said = self._pool.run(node_rank, len(self.nodes), config, *place, timeout_s=120.0)
        return str(said[0])

    def train_until_killed(self, config: RunConfig) -> None:
        """Launch the ranks, one of which is killed; then all are."""
        with pytest.raises(RankError, match="SIGKILL"):
            self.train(config)

    def lose(self, node: str) -> None:
        """Remove a node's memory."""
        shutil.rmtree(self.memory / node)
