"""Small commands: mesh, stages, plot, report. Heavy imports happen inside a function: ``mesh`` never loads torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from meshwright.errors import ConfigError, MeshError
from meshwright.system.bounded import real_path
from meshwright.terminal.output import put


def mesh(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the placement of ranks on nodes.

    Raises:
        MeshError: the nodes hold no whole number of replicas, or a tensor-parallel group would straddle nodes.
    """
    from meshwright.config import check_expert_ranks, default_world_size, load
    from meshwright.mesh import Grid, check_placement, draw_placement, nodes_of

    config, per_node = load(options.config, overrides), options.devices_per_node
    num_ranks = default_world_size(config, 0)
    parallel = config.parallel
    if options.nodes:
        nodes = nodes_of(options.nodes, per_node)
        num_replicas, rest = divmod(len(nodes), parallel.ranks_per_batch)
        if rest or not num_replicas:
            raise MeshError(
                "MW-LAUNCH-005",
                f"{options.nodes} nodes x {per_node} devices = {len(nodes)} ranks, and one replica takes "
                f"{parallel.named_ranks} = {parallel.ranks_per_batch}: no whole number of replicas fits. "
                f"Change a degree or the number of nodes",
            )
    else:
        nodes = nodes_of(math.ceil(num_ranks / per_node), per_node)[:num_ranks]
        num_replicas = num_ranks // parallel.ranks_per_batch
    check_expert_ranks(parallel, num_replicas)
    grid = Grid(parallel.pp, num_replicas, parallel.tp, parallel.cp, parallel.ep)
    check_placement(grid, nodes, tp_across_nodes=parallel.tp_across_nodes, ep_across_nodes=parallel.ep_across_nodes)
    if parallel.known_dp not in (None, grid.dp):
        put(
            f"{options.config} has parallel.dp = {parallel.dp}, which is {num_ranks} ranks; these {len(nodes)} hold "
            f"dp = {grid.dp}, drawn here (to train so: --parallel.dp={grid.dp})\n"
        )
    put(draw_placement(grid, nodes))
    return 0


def stages(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the cost of each layer and the balance of the stages."""
    from meshwright.config import load, resolve

    config = resolve(load(options.config, overrides))  # refused before seconds of imports
    from meshwright.blueprint import draw_blueprint
    from meshwright.tools.planner.balance import describe

    put(describe(draw_blueprint(config)))
    return 0


def plot(options: argparse.Namespace, _: list[str]) -> int:
    """Draw the loss curve of a run, with the unigram baseline of its validation corpus."""
    from meshwright.config import read_resolved
    from meshwright.data.fingerprint import read
    from meshwright.run.directory import METRICS, RESOLVED
    from meshwright.system.atomic import check_inside, check_place
    from meshwright.tools.report.loss_curve import loss_curve

    resolved = options.directory / RESOLVED
    unigram_entropy = None
    if resolved.is_file():
        data = read_resolved(resolved).data
        corpus = Path(data.validation or (data.train if isinstance(data.train, str) else ""))
        fingerprint = read(corpus.parent) if data.task == "causal" and data.builder is None else None
        split = fingerprint.splits.get(corpus.name) if fingerprint else None
        unigram_entropy = split.unigram_entropy_nats if split else None
    picture = options.out or options.directory / "loss.png"
    if not options.out:
        check_place(picture, folder=False, example="loss.png")
        check_inside(picture, options.directory)
    loss_curve(options.directory / METRICS, picture, unigram_entropy)
    put(picture)
    return 0


def report(options: argparse.Namespace, _: list[str]) -> int:
    """Write the HTML page of one run, or of several side by side.

    Raises:
        UserError: a run is named twice or cannot be read, or the page cannot be written.
    """
    from meshwright.system.atomic import check_inside, check_place, write_out
    from meshwright.tools.report.page import page
    from meshwright.tools.report.run import read_run

    runs = [read_run(directory) for directory in options.runs]
    if len({real_path(run.directory) for run in runs}) < len(runs):
        raise ConfigError("MW-LAUNCH-006", f"{' '.join(map(str, options.runs))}: a run is named twice; name each once")
    out = options.out or (runs[0].directory / "report.html" if len(runs) == 1 else Path("report.html"))
    if not options.out:
        check_place(out, folder=False, example="report.html")
        if len(runs) == 1:
            check_inside(out, runs[0].directory)
    write_out(out, page(runs))
    put(out)
    return 0
