"""Command ``meshwright mesh``. It never loads torch."""

from __future__ import annotations

import argparse
import math

from meshwright.errors import ConfigError, MeshError
from meshwright.terminal.output import put


def mesh(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the placement of ranks on nodes.

    Raises:
        MeshError: the nodes hold no whole number of replicas, or a tensor-parallel group would
            straddle nodes.
    """
    from meshwright.config import default_world_size, find_rank_problems, load
    from meshwright.mesh import Grid, check_placement, draw_placement, nodes_of

    config, per_node = load(options.config, overrides), options.devices_per_node
    num_ranks = default_world_size(config.parallel, config.launch, 0)
    parallel = config.parallel
    if options.nodes:
        nodes = nodes_of(options.nodes, per_node)
        num_replicas, rest = divmod(len(nodes), parallel.ranks_per_batch)
        if rest or not num_replicas:
            raise MeshError(
                "MW-LAUNCH-005",
                f"{options.nodes} nodes x {per_node} devices = {len(nodes)} ranks, and one replica"
                f" takes {parallel.named_ranks} = {parallel.ranks_per_batch}: no whole number of"
                " replicas fits. Change a degree or the number of nodes",
            )
    else:
        nodes = nodes_of(math.ceil(num_ranks / per_node), per_node)[:num_ranks]
        num_replicas = num_ranks // parallel.ranks_per_batch
    if problems := find_rank_problems(parallel, num_replicas):
        raise ConfigError.join(problems)
    grid = Grid(pp=parallel.pp, dp=num_replicas, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep)
    check_placement(
        grid,
        nodes,
        tp_across_nodes=parallel.tp_across_nodes,
        ep_across_nodes=parallel.ep_across_nodes,
    )
    if parallel.known_dp not in (None, grid.dp):
        put(
            f"{options.config} has parallel.dp = {parallel.dp}, which is {num_ranks} ranks; these"
            f" {len(nodes)} hold dp = {grid.dp}, drawn here (to train so:"
            f" --parallel.dp={grid.dp})\n"
        )
    put(draw_placement(grid, nodes))
    return 0
