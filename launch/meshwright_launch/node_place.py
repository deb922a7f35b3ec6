"""Place of this process among the agents of a run on several nodes, one agent on each.

    started by                        number of nodes     index of this one      first node
    srun, one task on each node       SLURM_*             SLURM_NODEID           first of the step's nodes
    by hand, or another scheduler     MESHWRIGHT_NNODES   MESHWRIGHT_NODE_RANK   MASTER_ADDR, MASTER_PORT

MESHWRIGHT_NPROC_PER_NODE, the number of ranks on each node, marks an agent; MESHWRIGHT_SPARES of the
nodes hold no ranks until another node is lost. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, MeshError
from meshwright.system.numbers import MAX_PORT, MAX_RANKS, environment_number
from meshwright_launch.environment import Launcher, torch_variables

NUM_NODES, NODE_RANK = "MESHWRIGHT_NNODES", "MESHWRIGHT_NODE_RANK"
RANKS_PER_NODE, SPARES = "MESHWRIGHT_NPROC_PER_NODE", "MESHWRIGHT_SPARES"


class NodePlace(NamedTuple):
    """Index of a node among those of its run, and the address of the first one."""

    number: int
    """From 0, the first node."""
    num_nodes: int
    """Number of nodes, with spare ones."""
    ranks_per_node: int
    num_spares: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    """Port at which the first node's agent listens; 0: no other node is to reach it."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run."""
        return (self.num_nodes - self.num_spares) * self.ranks_per_node


def find_place(launcher: Launcher, env: Mapping[str, str] = os.environ) -> NodePlace | None:
    """Return the place of this agent; None: this process is none.

    Raises:
        MeshError: a variable is missing, or no number in its range.
    """
    if not env.get(RANKS_PER_NODE) or launcher in (Launcher.TORCHRUN, Launcher.MPI):
        return None
    if launcher is Launcher.SLURM:
        nodes = "SLURM_STEP_NUM_NODES" if env.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
        names, address = (nodes, "SLURM_NODEID"), torch_variables(env)
    else:
        names, address = (NUM_NODES, NODE_RANK), dict(env)
    num_nodes = environment_number(names[0], 1, 1, MAX_RANKS, env)
    needed = (*names, "MASTER_ADDR", "MASTER_PORT") if num_nodes > 1 else ()
    missing = [name for name in needed if not (env.get(name) or address.get(name))]
    if missing:
        raise MeshError(
            "MW-LAUNCH-117",
            f"the environment has {RANKS_PER_NODE} = {env[RANKS_PER_NODE]!r} without"
            f" {', '.join(missing)}: the agent of each node needs {NUM_NODES}, {NODE_RANK} (from 0),"
            " MASTER_ADDR (the host of node 0) and MASTER_PORT (a port that is free there)",
        )
    return NodePlace(
        number=environment_number(names[1], 0, 0, num_nodes - 1, env),
        num_nodes=num_nodes,
        ranks_per_node=environment_number(RANKS_PER_NODE, 1, 1, MAX_RANKS, env),
        num_spares=environment_number(SPARES, 0, 0, num_nodes - 1, env),
        host=address.get("MASTER_ADDR", "127.0.0.1") if num_nodes > 1 else "127.0.0.1",
        port=environment_number("MASTER_PORT", 0, 1, MAX_PORT, address) if num_nodes > 1 else 0,
    )


def check_agent(config: RunConfig, place: NodePlace | None) -> None:
    """Refuse an agent of a run that replaces no rank.

    Raises:
        ConfigError: the run has no mirror.
    """
    if place is not None and not config.watch.mirror:
        raise ConfigError(
            "MW-LAUNCH-118",
            f"the environment has {RANKS_PER_NODE} = {place.ranks_per_node}, for one agent on each"
            " node, which only runs with watch.mirror = true and launch.max_restarts have: set both"
            " keys, or unset the variable and start a process for each rank (srun, torchrun)",
        )
