"""Functions of the commands. Heavy imports happen inside each function: ``mesh`` never loads torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from meshwright.errors import ConfigError, MeshError
from meshwright.system.bounded import real_path
from meshwright.terminal.output import put, tell


def mesh(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.config import default_world_size, load
    from meshwright.mesh.grid import Grid, nodes_of

    config, per_node = load(options.config, overrides), options.devices_per_node
    num_ranks = default_world_size(config, 0)
    parallel = config.parallel
    if options.nodes:
        nodes = nodes_of(options.nodes, per_node)
        num_replicas, rest = divmod(len(nodes), parallel.pp * parallel.tp)
        if rest or not num_replicas:
            raise MeshError(
                "MW-LAUNCH-005",
                f"{options.nodes} nodes x {per_node} devices = {len(nodes)} ranks, and one replica takes pp "
                f"{parallel.pp} x tp {parallel.tp} = {parallel.pp * parallel.tp}: no whole number of replicas fits. "
                f"Change a degree or the number of nodes",
            )
    else:
        nodes = nodes_of(math.ceil(num_ranks / per_node), per_node)[:num_ranks]
        num_replicas = num_ranks // (parallel.pp * parallel.tp)
    grid = Grid(parallel.pp, num_replicas, parallel.tp)
    grid.check_placement(nodes, tp_across_nodes=parallel.tp_across_nodes)
    if isinstance(parallel.dp, int) and parallel.dp > 0 and parallel.dp != grid.dp:
        put(
            f"{options.config} says dp = {parallel.dp}, which is {num_ranks} ranks; these {len(nodes)} hold dp = "
            f"{grid.dp}, drawn here (to train so: --parallel.dp={grid.dp})\n"
        )
    put(grid.draw(nodes))
    return 0


def draw(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.drawing import draw

    draw(options.drawn, overrides, options.out, options.format, options.costs)
    return 0


def stages(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.config import default_world_size, load, resolve

    config = load(options.config, overrides)
    config = resolve(config, default_world_size(config, 0))
    from meshwright.blueprint import draw_blueprint
    from meshwright.tools.planner.balance import describe

    put(describe(draw_blueprint(config)))
    return 0


def plan(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.plans import PlanOptions
    from meshwright.launch.plans import plan as search

    search(options.config, overrides, PlanOptions(*(getattr(options, name) for name in PlanOptions._fields)))
    return 0


def calibrate(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.plans import calibrate as measure

    measure(options.out, options.ranks)
    return 0


def dryrun(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.dryrun import dryrun

    return dryrun(
        options.config,
        overrides,
        options.nodes,
        options.devices_per_node,
        options.seed_fault or [],
        options.out,
        options.cluster,
    )


def verify(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.verification import verify as proved

    return proved(options.config, overrides, options.layouts or [], options.steps, options.dtype, whole=options.whole)


def data_stdlib(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.data.prepare import prepare_stdlib

    return _prepared(
        prepare_stdlib(options.out, options.vocab_size, options.validation_share, replace=options.replace, say=tell)
    )


def data_files(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.data.prepare import prepare_files

    return _prepared(
        prepare_files(
            options.paths,
            options.out,
            options.vocab_size,
            options.validation_share,
            replace=options.replace,
            say=tell,
        )
    )


def _prepared(summary: object) -> int:
    put(summary)
    return 0


def checkpoint_list(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.launch import checkpoints

    put(checkpoints.table(options.place))
    return 0


def checkpoint_verify(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.launch import checkpoints

    damaged = False
    for path, problem in checkpoints.verify_checkpoints(options.place, options.step):
        damaged = damaged or bool(problem)
        lines = [f"  {line}" for line in problem.splitlines()]
        put("\n".join([f"{path}: {'DAMAGED' if problem else 'sound'}", *lines]), flush=True)
    return 1 if damaged else 0


def checkpoint_show(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.checkpoint import open_checkpoint
    from meshwright.launch import checkpoints

    put(
        checkpoints.describe_checkpoint(
            open_checkpoint(checkpoints.find_checkpoint(options.place, options.step).path), options.tensor
        )
    )
    return 0


def checkpoint_reshard(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch import checkpoints
    from meshwright.tools.reshard import reshard

    source = checkpoints.find_checkpoint(options.place, options.step).path
    put(
        checkpoints.resharded(
            source, reshard(source, options.out, overrides, trust_code=options.trust_code), options.out
        )
    )
    return 0


def convert(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch import conversion

    put(
        conversion.convert(
            options.place, options.source, options.target, overrides, options.step, options.dtype, options.shard_size
        )
    )
    return 0


def plot(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.config import read_resolved
    from meshwright.data.fingerprint import read
    from meshwright.run.directory import METRICS, RESOLVED
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
    loss_curve(options.directory / METRICS, picture, unigram_entropy)
    put(picture)
    return 0


def status(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.launch.status import describe

    put(describe(options.directory))
    return 0


def report(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.system.atomic import check_place, write_out
    from meshwright.tools.report.page import page
    from meshwright.tools.report.run import read_run

    runs = [read_run(directory) for directory in options.runs]
    if len({real_path(run.directory) for run in runs}) < len(runs):
        raise ConfigError("MW-LAUNCH-006", f"{' '.join(map(str, options.runs))}: a run is named twice; name each once")
    out = options.out or (runs[0].directory / "report.html" if len(runs) == 1 else Path("report.html"))
    check_place(out, folder=False, example="report.html")
    write_out(out, page(runs))
    put(out)
    return 0


def config_import(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.configs import import_config

    source = getattr(options, "from")
    import_config(options.file, source, overrides, options.ranks, options.out, replace=options.replace)
    return 0


def config_show(options: argparse.Namespace, overrides: list[str]) -> int:
    from meshwright.launch.configs import show

    put(show(options.config, overrides, options.ranks, everything=options.all))
    return 0


def completion(options: argparse.Namespace, _: list[str]) -> int:
    from meshwright.launch.arguments import build_parser
    from meshwright.launch.completion import script

    put(script(build_parser(), options.shell), end="")
    return 0
