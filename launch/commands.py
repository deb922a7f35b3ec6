"""What each command does. Every import of weight is inside its command: ``mesh`` never loads torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ConfigError, MeshError, UserError
from framework.stderr import tell

if TYPE_CHECKING:
    from framework.config import RunConfig

MOST_RANKS = 8
"""Ranks that verify runs on this machine."""
SMALL_GLOBAL_BATCH, SMALL_SEQUENCE_LENGTH = 8, 32
"""What verify trains a shrunk model on."""


def mesh(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.config import default_world_size, load
    from framework.mesh.grid import Grid, check_placement, nodes_of
    from framework.mesh.view import draw

    config, per_node = load(options.config, overrides), options.devices_per_node
    num_ranks = default_world_size(config, 0)
    parallel = config.parallel
    if options.nodes:
        nodes = nodes_of(options.nodes, per_node)
        num_replicas, rest = divmod(len(nodes), parallel.pp * parallel.tp)
        if rest or not num_replicas:
            raise MeshError(
                f"{options.nodes} nodes x {per_node} devices = {len(nodes)} ranks, and one replica takes pp "
                f"{parallel.pp} x tp {parallel.tp} = {parallel.pp * parallel.tp}: no whole number of replicas fits. "
                f"Change a degree or the number of nodes"
            )
    else:
        nodes = nodes_of(math.ceil(num_ranks / per_node), per_node)[:num_ranks]
        num_replicas = num_ranks // (parallel.pp * parallel.tp)
    grid = Grid(parallel.pp, num_replicas, parallel.tp)
    check_placement(grid, nodes, tp_across_nodes=parallel.tp_across_nodes)
    if isinstance(parallel.dp, int) and parallel.dp > 0 and parallel.dp != grid.dp:
        print(
            f"{options.config} says dp = {parallel.dp}, which is {num_ranks} ranks; these {len(nodes)} hold dp = "
            f"{grid.dp}, drawn here (to train so: --parallel.dp={grid.dp})\n"
        )
    print(draw(grid, nodes))
    return 0


def draw(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.drawing import draw

    draw(options.drawn, overrides, options.out, options.format, options.costs)
    return 0


def stages(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.config import default_world_size, load, resolve

    config = load(options.config, overrides)
    config = resolve(config, default_world_size(config, 0))
    from framework.balance import describe
    from framework.blueprint import draw_blueprint

    print(describe(draw_blueprint(config)))
    return 0


def plan(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.planning import plan as planned

    planned(
        options.config,
        overrides,
        options.cluster,
        options.nodes,
        options.devices_per_node,
        options.global_batch,
        options.out,
        options.best,
    )
    return 0


def calibrate(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.planning import calibrate as measure

    measure(options.out, options.ranks)
    return 0


def dryrun(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.dryrun import dryrun

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
    from framework.config import load
    from launch.pool import RankError, RankPool

    config = load(options.config, overrides)
    with RankPool(MOST_RANKS) as pool:
        from framework.optimizer.eight_bit import SMALLEST
        from framework.verify import default_layouts, parse_layout, shrink, traits_of, verify

        layouts = [parse_layout(text) for text in options.layouts or []]
        global_batch = config.batch.global_batch if options.whole else None
        if config.data.builder is not None:
            print("the model whole, on its own samples")
        elif not options.whole:
            small = shrink(config.model.options)
            _tell_shrunk(config, small)
            config = config.model_copy(
                update={
                    "model": config.model.model_copy(update={"options": small}),
                    "data": config.data.model_copy(
                        update={"sequence_length": min(config.data.sequence_length, SMALL_SEQUENCE_LENGTH)}
                    ),
                }
            )
        if config.optimizer.name == "adamw8bit":
            print(f"optimizer.block_size = {SMALLEST}, which divides the rows of small matrices in most layouts")
            config = config.model_copy(
                update={"optimizer": config.optimizer.model_copy(update={"block_size": SMALLEST})}
            )
        global_batch = global_batch or SMALL_GLOBAL_BATCH
        if not layouts:
            traits = traits_of(config)
            layouts = default_layouts(config, traits, global_batch, MOST_RANKS)
            for reason in traits.left_out():
                print(f"left out: {reason}", flush=True)
        largest = max(layout.size for layout in layouts)
        if largest > MOST_RANKS:
            raise ConfigError(
                f"--layouts asks for {largest} ranks: verify runs all of them on this machine and has {MOST_RANKS}"
            )
        try:
            report = verify(
                config,
                layouts,
                pool,
                global_batch=global_batch,
                steps=options.steps,
                random_tokens=not options.whole,
                on_row=lambda row: print(
                    f"  {row.layout}: {'same numbers' if row.passed else 'DIFFERENT'}", flush=True
                ),
            )
        except RankError as error:
            if isinstance(error.__cause__, UserError):  # what a rank found wrong with the model, the data, ...
                raise error.__cause__ from None
            raise
    print(report.table())
    return 0 if report.passed else 1


def _tell_shrunk(config: RunConfig, small: dict[str, object]) -> None:
    changes = [
        f"{name} {value} -> {small[name]}" for name, value in config.model.options.items() if small[name] != value
    ]
    if config.data.sequence_length > SMALL_SEQUENCE_LENGTH:
        changes.append(f"sequence_length {config.data.sequence_length} -> {SMALL_SEQUENCE_LENGTH}")
    print(f"shrunk for this machine, on random tokens (--whole for all of it): {', '.join(changes) or 'nothing'}")


def data_stdlib(options: argparse.Namespace, _: list[str]) -> int:
    from framework.data.prepare import prepare_stdlib

    return _prepared(
        prepare_stdlib(options.out, options.vocab_size, options.validation_share, replace=options.replace, say=tell)
    )


def data_files(options: argparse.Namespace, _: list[str]) -> int:
    from framework.data.prepare import prepare_files

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
    print(summary)
    return 0


def checkpoint_list(options: argparse.Namespace, _: list[str]) -> int:
    from launch import checkpoints

    print(checkpoints.table(options.place))
    return 0


def checkpoint_verify(options: argparse.Namespace, _: list[str]) -> int:
    from launch import checkpoints

    damaged = False
    for path, problem in checkpoints.verdicts(options.place, options.step):
        damaged = damaged or bool(problem)
        lines = [f"  {line}" for line in problem.splitlines()]
        print("\n".join([f"{path}: {'DAMAGED' if problem else 'sound'}", *lines]), flush=True)
    return 1 if damaged else 0


def checkpoint_show(options: argparse.Namespace, _: list[str]) -> int:
    from framework.checkpoint import open_checkpoint
    from launch import checkpoints

    print(checkpoints.contents(open_checkpoint(checkpoints.pick(options.place, options.step).path), options.tensor))
    return 0


def checkpoint_reshard(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.reshard import reshard
    from launch import checkpoints

    source = checkpoints.pick(options.place, options.step).path
    print(
        checkpoints.resharded(
            source, reshard(source, options.out, overrides, trust_code=options.trust_code), options.out
        )
    )
    return 0


def convert(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch import converting

    print(
        converting.convert(
            options.place, options.source, options.target, overrides, options.step, options.dtype, options.shard_size
        )
    )
    return 0


def plot(options: argparse.Namespace, _: list[str]) -> int:
    from framework.config import parse
    from framework.data.fingerprint import read
    from framework.tracking.plot import loss_curve

    resolved = options.directory / "resolved.json"
    unigram_entropy = None
    if resolved.is_file():
        data = parse(resolved.read_text(), str(resolved)).data
        corpus = Path(data.validation or (data.train if isinstance(data.train, str) else ""))
        fingerprint = read(corpus.parent) if data.task == "causal" and data.builder is None else None
        split = fingerprint.splits.get(corpus.name) if fingerprint else None
        unigram_entropy = split.unigram_entropy_nats if split else None
    picture = options.out or options.directory / "loss.png"
    loss_curve(options.directory / "metrics.jsonl", picture, unigram_entropy)
    print(picture)
    return 0


def status(options: argparse.Namespace, _: list[str]) -> int:
    from launch.status import describe

    print(describe(options.directory))
    return 0


def report(options: argparse.Namespace, _: list[str]) -> int:
    from framework.outputs import check_place, write_out
    from framework.report.page import page
    from framework.report.run import read_run

    runs = [read_run(directory) for directory in options.runs]
    if len({run.directory.resolve() for run in runs}) < len(runs):
        raise ConfigError(f"{' '.join(map(str, options.runs))}: a run is named twice; name each once")
    out = options.out or (runs[0].directory / "report.html" if len(runs) == 1 else Path("report.html"))
    check_place(out, folder=False, example="report.html")
    write_out(out, page(runs))
    print(out)
    return 0


def config_import(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.configs import import_config

    source = getattr(options, "from")
    import_config(options.file, source, overrides, options.ranks, options.out, replace=options.replace)
    return 0


def config_show(options: argparse.Namespace, overrides: list[str]) -> int:
    from launch.configs import show

    print(show(options.config, overrides, options.ranks, everything=options.all))
    return 0


def completion(options: argparse.Namespace, _: list[str]) -> int:
    from launch.arguments import build_parser
    from launch.completion import script

    print(script(build_parser(), options.shell), end="")
    return 0
