"""What each command does. Every import of weight is inside its command: ``mesh`` never loads torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ConfigError, MeshError, Preempted, UserError
from framework.stderr import tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from framework.config import RunConfig
    from launch.environment import Launcher
    from launch.rank import Work

MOST_RANKS = 8
"""Ranks that verify runs on this machine."""
SMALL_GLOBAL_BATCH, SMALL_SEQUENCE_LENGTH = 8, 32
"""What verify trains a shrunk model on."""


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.config import default_world_size, load
    from framework.watch.lock import RunLock
    from launch import local, restarts
    from launch.environment import Launcher, launch_environment
    from launch.failure import RankFailed

    config = load(options.config, overrides)
    launcher = launch_environment()
    if launcher is not Launcher.NONE:
        return _as_rank(config, launcher, _training)
    RunLock(Path(config.run.directory) / config.run.name).look()  # before seconds of imports; rank 0 takes it
    if local.has_children(config):
        local.warm_up(config, "framework.train")
    from framework.train import check, run_directory, work

    checked, _ = check(config, default_world_size(config, local.num_devices(config)))
    num_ranks = checked.launch.processes
    with contextlib.suppress(OSError):  # nobody reads it, which is no reason not to train
        print(f"starting {num_ranks} rank{'s' * (num_ranks != 1)} on this machine", flush=True)
    try:
        restarts.keep_going(
            lambda: local.launch(work, checked),
            checked.launch.max_restarts,
            run_directory(checked),
            lambda text: _tell_progress(f"meshwright: {text}"),
        )
    except (RankFailed, local.Interrupted) as error:
        return say(error, error.exit_code)
    return 0


def _training(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """What a rank does that trains, and the configuration of so many ranks; refused here if it cannot work."""
    from framework.train import check, work

    checked, _ = check(config, world_size)
    if checked.launch.max_restarts and os.environ["RANK"] == "0":
        tell(
            "launch.max_restarts has no effect here: who starts the ranks starts them again (torchrun --max-restarts, "
            "sbatch --requeue)"
        )
    return work, checked


def _visiting(config: RunConfig, world_size: int) -> tuple[Work, RunConfig]:
    """The same for the doctor."""
    from framework.config import resolve
    from framework.doctor.visit import work

    return work, resolve(config, world_size)


def _as_rank(config: RunConfig, launcher: Launcher, prepare: Callable[[RunConfig, int], tuple[Work, RunConfig]]) -> int:
    """This process is one rank of torchrun's or srun's; a failure ends it at once, with its rank in the message."""
    from framework.process import leave
    from launch import rank
    from launch.environment import Launcher, check_meeting_place, check_port, place, torch_variables
    from launch.failure import describe

    if launcher is Launcher.SLURM:
        os.environ.update(torch_variables())
    at = place()
    if launcher is Launcher.SLURM and at.rank == 0:
        check_port(os.environ["MASTER_PORT"])
    rank.set_threads(config.launch.threads)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        check_meeting_place()
        work, checked = prepare(config, at.world_size)
    except UserError as error:
        # What one rank finds all find, and the first to leave has the others ended: one of each node says it.
        if at.local_rank != 0:
            time.sleep(rank.SILENT_S)
        return say(error, error.exit_code)

    def end(error: BaseException) -> None:
        failure = describe(error, at.rank)
        if failure.trace:
            get_error_handler().record_exception(error)  # for torchrun's own summary
        say(f"rank {at.rank}: {failure.trace or failure.message}", failure.exit_code)
        leave(failure.exit_code, rank.HOLD_S if failure.lost_peer else 0.0)

    try:
        work(checked, end)
    except KeyboardInterrupt:
        leave(130)
    except Preempted as error:
        if at.rank == 0:
            say(error, error.exit_code)
        # srun --kill-on-bad-exit ends all others when the first says 85, and tells the highest exit code of all
        leave(0 if launcher is Launcher.SLURM and at.rank != 0 else error.exit_code)
    except BaseException as error:
        end(error)
    return 0


def doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.config import default_world_size, load
    from launch import local
    from launch.environment import Launcher, launch_environment
    from launch.failure import RankFailed

    config = load(options.config, overrides)
    launcher = launch_environment()
    if launcher is not Launcher.NONE:
        return _as_rank(config, launcher, _visiting)
    local.warm_up(config, "framework.doctor.visit")
    work, resolved = _visiting(config, default_world_size(config, local.num_devices(config)))
    try:
        local.launch(work, resolved)
    except (RankFailed, local.Interrupted) as error:
        return say(error, error.exit_code)
    return 0


def slurm(options: argparse.Namespace, overrides: list[str]) -> int:
    from dataclasses import fields

    from framework.config import load
    from launch import slurm as jobs

    ask = jobs.Ask(**{field.name: getattr(options, field.name) for field in fields(jobs.Ask)})
    config, picture = jobs.placed(load(options.config, overrides), ask)
    script = jobs.render(config, options.config, overrides, ask)
    place = jobs.write(script, config)
    if not options.submit:
        print(script, end="")
        tell(f"written to {place}; `sbatch {place}` submits it, or --submit")
        return 0
    print(picture)
    numbers = jobs.submit(place, ask.chain)
    print(f"submitted {place}: job{'s' * (len(numbers) > 1)} {', '.join(numbers)}; logs in {place.parent}")
    return 0


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


def verify(options: argparse.Namespace, overrides: list[str]) -> int:
    from framework.config import load
    from launch.pool import RankError, RankPool

    config = load(options.config, overrides)
    with RankPool(MOST_RANKS) as pool:
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
        prepare_stdlib(
            options.out, options.vocab_size, options.validation_share, replace=options.replace, say=_tell_progress
        )
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
            say=_tell_progress,
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
    print(checkpoints.resharded(source, reshard(source, options.out, overrides), options.out))
    return 0


def sample(options: argparse.Namespace, _: list[str]) -> int:
    from framework.sample import sample

    print(sample(options.directory, options.prompt, options.tokens, options.temperature))
    return 0


def plot(options: argparse.Namespace, _: list[str]) -> int:
    from framework.config import parse
    from framework.data.fingerprint import read
    from framework.tracking.plot import loss_curve

    resolved = options.directory / "resolved.json"
    unigram_entropy = None
    if resolved.is_file():
        data = parse(resolved.read_text(), str(resolved)).data
        corpus = Path(data.validation or data.train)
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


def say(error: object, exit_code: int) -> int:
    word = "" if exit_code == Preempted.exit_code else "error: "  # who was asked to end has done well to
    tell(f"meshwright: {word}{error}")
    return exit_code


def _tell_progress(text: str) -> None:
    tell(text)
