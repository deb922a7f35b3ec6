"""The only training loop. ``work`` is what each rank runs; ``train`` reads aloud.

check(config, world size)   everything that can be refused before a process exists (the launcher calls it once)
work(config)                one rank: mesh, parts, resume, train, leave
train(parts, ...)           the loop
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.blueprint import Blueprint, batch_numbers, draw_blueprint
from meshwright.build import build
from meshwright.checkpoint import find
from meshwright.checkpoint.files import to_stderr
from meshwright.checkpoint.space import check_space, checkpoint_bytes
from meshwright.config import RunConfig, keep, resolve
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import Corpus, unigram_entropy
from meshwright.data.sources import corpus_times, data_fingerprint, describe_source, open_sources
from meshwright.errors import CheckpointError, ConfigError, DriftError, NonFiniteError, Preempted, RunFilesError
from meshwright.mesh.grid import Grid
from meshwright.mesh.memory import peak_memory_bytes
from meshwright.mesh.mesh import Mesh, close_mesh, environment_rank, open_mesh
from meshwright.optimizer.flat import states_of
from meshwright.parts import Parts
from meshwright.run.files import RunFiles, check_run_files
from meshwright.run.lock import alone_in
from meshwright.run.peaks import note_peaks
from meshwright.run.resume import resume
from meshwright.run.saving import Saver, check_manifest
from meshwright.run.starts import note_start
from meshwright.run.summary import WIDTH, summarise
from meshwright.run.tensors import saved_weights
from meshwright.step import StepStats, take_step, validate
from meshwright.system.durable import make_directory_synced
from meshwright.system.process import GiveUp, end_process
from meshwright.terminal.output import say as speak
from meshwright.tracking.build import build_tracker
from meshwright.tracking.record import StepRecord
from meshwright.tracking.throughput import peak_flops
from meshwright.tracking.tracker import Tracker
from meshwright.tracking.wandb import WandbMode
from meshwright.watch import trace
from meshwright.watch.drift import check_drift
from meshwright.watch.hang.watchdog import LATER_S, Watchdog
from meshwright.watch.nodes import check_nodes
from meshwright.watch.stragglers import Straggler, Stragglers


def run_directory(config: RunConfig) -> Path:
    """Where everything of this run is kept."""
    return Path(config.run.directory) / config.run.name


def check(config: RunConfig, world_size: int) -> tuple[RunConfig, Blueprint]:
    """Refuse what cannot work, before any process group exists; return the resolved config and its blueprint.

    Raises:
        UserError: one message with all that was found.
    """
    config = resolve(config, world_size)
    blueprint = draw_blueprint(config)
    source, _ = open_sources(config)
    check_manifest(blueprint, data_fingerprint(source))
    check_space(
        make_directory(config),
        checkpoint_bytes(saved_weights(blueprint), len(states_of(config.optimizer))),
        keep_last=config.checkpoint.keep_last,
        steps=config.train.steps,
        warn=to_stderr if environment_rank()[0] == 0 else _keep_quiet,
    )
    return config, blueprint


def make_directory(config: RunConfig) -> Path:
    """The run's directory, there and writable.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    directory = run_directory(config)
    problem = None
    try:
        make_directory_synced(directory)
    except OSError as error:
        problem = "is a file" if isinstance(error, FileExistsError) else f"cannot be made: {error.strerror}"
    if problem is None and not os.access(directory, os.W_OK | os.X_OK):
        problem = "cannot be written to"
    if problem is not None:
        raise ConfigError(
            f"the directory of this run, {directory}, {problem}; choose another run.directory or run.name"
        )
    check_run_files(directory)
    return directory


def work(config: RunConfig, give_up: GiveUp = end_process) -> None:
    """One rank of a run, from the environment that a launcher has set (torchrun's names) to the end of training.

    ``give_up`` ends this process when the run hangs.
    """
    _, world_size, _ = environment_rank()
    config = resolve(config, world_size)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(
        Grid(parallel.pp, parallel.dp, parallel.tp),
        config.train.device,
        timeout_s=config.launch.timeout_s + LATER_S,
        tp_across_nodes=parallel.tp_across_nodes,
    )
    directory = make_directory(config) if mesh.rank == 0 else run_directory(config)
    check_nodes(mesh, directory)
    with alone_in(directory, mesh) as lock, contextlib.closing(RunFiles(directory, lock)) as files:
        _train_in(files, config, mesh, give_up)


def _train_in(files: RunFiles, config: RunConfig, mesh: Mesh, give_up: GiveUp) -> None:
    """Build, resume, train and leave the mesh; ``config`` is resolved."""
    directory = files.directory
    parts = build(config, mesh)
    parts.files_lost = files.are_lost
    say = speak if mesh.rank == 0 else _keep_quiet
    say(summarise(parts.blueprint, mesh.nodes, shutil.get_terminal_size((WIDTH, 0)).columns))
    if of_data := describe_source(parts.source, config.train.steps * batch_numbers(config).global_batch):
        say(of_data)
    resume(parts, directory, say)
    if mesh.rank == 0:  # only now: a run that may not go on keeps the configuration it was trained with
        keep(directory, config)
        if parts.state.step < config.train.steps:
            parts.restarts = note_start(
                directory, parts.state.step, mesh.grid, mesh.nodes, corpus_times(parts.source), say
            )
        files.remember()
    tracker = build_tracker(
        directory,
        is_writer=mesh.rank == 0,
        name=config.run.name,
        config=config.model_dump(mode="json"),
        total_steps=config.train.steps,
        resumed_step=parts.state.step,
        log_every=config.tracking.log_every,
        console=config.tracking.console,
        unit=parts.blueprint.example.unit,
        wandb=WandbMode(config.tracking.wandb if parts.state.step < config.train.steps else "off"),
        project=config.tracking.project,
        is_ours=lambda: not files.are_lost(),
    )
    watchdog = Watchdog(mesh, directory, config.launch.timeout_s, config.train.steps, lambda: parts.state.step, give_up)
    with parts.asked:  # to the end: what comes after the last step, or after the first signal, changes nothing
        try:
            with watchdog, mesh.activity.during("training"), tracker:
                train(parts, files, tracker, say)
        except Preempted:
            close_mesh(mesh)
            raise
        close_mesh(mesh)
    if tracker.lost is not None:
        raise RunFilesError(f"{tracker.lost}. The run itself is done and saved up to step {parts.state.step}")


def train(parts: Parts, files: RunFiles, tracker: Tracker, say: Callable[[str], None]) -> None:
    """Step until ``train.steps``; record, validate and save on the way.

    Raises:
        Preempted: on every rank, after the step in which one was asked to stop, and when its checkpoint is saved.
        NonFiniteError: on every rank, from a step that was not taken.
        DriftError: on every rank, before a checkpoint of copies that differ is written.
        RunFilesError: on every rank, when the run's directory is another's now, or cannot be made again.
    """
    config, state = parts.config, parts.state
    if state.step >= config.train.steps:
        steps = config.train.steps
        taken = f"its {steps} steps" if state.step == steps else f"{state.step} steps and train.steps = {steps}"
        if parts.validation is not None:  # on this layout: the same number as on the one that trained
            with parts.mesh.activity.during("validating"):
                say(_against_unigrams(parts, validate(parts)))
        say(f"the run has taken {taken}: raise train.steps to go on, or choose another run.name to train anew")
        return
    saver = Saver(parts, files.directory, say, files=files)
    try:
        _take_steps(parts, files.directory, tracker, say, saver)
    except (NonFiniteError, DriftError):  # on all ranks alike: what was sound is still written to its end
        with parts.mesh.activity.during("saving a checkpoint"), contextlib.suppress(CheckpointError):
            saver.finish()
        raise


def _take_steps(parts: Parts, directory: Path, tracker: Tracker, say: Callable[[str], None], saver: Saver) -> None:
    """The loop."""
    config, state = parts.config, parts.state
    traced = trace.traced_step(config.tracking.trace_step, state.step, config.train.steps)
    stragglers = Stragglers(parts.mesh, config.tracking.stragglers_every)
    first_step = state.step + 1
    while state.step < config.train.steps:
        tracing, looking = state.step + 1 == traced, stragglers.due(state.step + 1)
        ticks = trace.align(parts.mesh) if tracing or looking else ()
        start_s = time.perf_counter()
        stats = take_step(parts)
        step_s = time.perf_counter() - start_s
        stragglers.note(parts.last, step_s)
        if stats.files_lost:
            saver.recover()
        pipeline = trace.gather(parts, ticks) if ticks else []
        if tracing:
            trace.keep(pipeline, parts, directory)
        straggler = stragglers.look(pipeline) if looking else None
        if straggler is not None and stragglers.is_news(straggler):
            say(str(straggler))
        last = state.step == config.train.steps
        validation_loss = None
        stopping = stats.stop and not last
        if not stopping and parts.validation is not None and _is_due(state.step, config.train.validate_every, last):
            with parts.mesh.activity.during("validating"):
                validation_loss = validate(parts)
        tracker.write(record(parts, stats, step_s, validation_loss, saver.take_save_s(), straggler))
        saver.look(stats.not_written and not stats.files_lost)
        saving = stopping or stats.files_lost or _is_due(state.step, config.checkpoint.every, last)
        if config.watch.drift_every and _is_due(state.step, config.watch.drift_every, saving):
            check_drift(parts)
        if saving or state.step == first_step:
            note_peaks(parts.mesh, directory, state.step)
        if saving:
            with parts.mesh.activity.during("saving a checkpoint"):
                saver.start()
                if stats.files_lost:
                    saver.finish(retention=False)
        if stopping:
            raise Preempted(
                f"stopped by {_signals(parts)} after step {state.step} of {config.train.steps}; {_kept(saver)}, "
                f"and the same command goes on from there"
            )
        if last:
            with parts.mesh.activity.during("saving a checkpoint"):
                saver.finish_or_fail()
        if last and validation_loss is not None:
            say(_against_unigrams(parts, validation_loss))


def record(
    parts: Parts,
    stats: StepStats,
    step_s: float,
    validation_loss: float | None,
    save_s: float | None = None,
    straggler: Straggler | None = None,
) -> StepRecord:
    """What the trackers are told of a step."""
    config, world_size = parts.config, parts.mesh.grid.size
    flops_per_s = parts.blueprint.flops_per_step / step_s / world_size
    peak = peak_flops(parts.mesh.device, config.train.dtype)
    return StepRecord(
        step=parts.state.step,
        samples_seen=parts.state.samples_seen,
        tokens=parts.state.tokens_seen,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        learning_rate=stats.learning_rate,
        step_s=step_s,
        data_s=parts.data_s,
        tokens_per_s=batch_numbers(config).global_batch * parts.blueprint.example.tokens_per_sample / step_s,
        num_devices=world_size,
        tflops_per_device=flops_per_s / 1e12,
        mfu=flops_per_s / peak if peak else None,
        bubble_share=stats.bubble_share,
        memory_bytes=peak_memory_bytes(parts.mesh.device.type),
        validation_loss=validation_loss,
        skipped=stats.skipped,
        restarts=parts.restarts,
        save_s=save_s,
        straggler=straggler.who if straggler is not None else None,
        straggler_rank=straggler.rank if straggler is not None and straggler.who else None,
        straggler_share=straggler.share if straggler is not None else None,
    )


def _signals(parts: Parts) -> str:
    """Who was asked how: ``SIGTERM``, or ``SIGUSR1 to rank 5`` when it was not all. Every rank calls it."""
    mine = parts.asked.signal.name if parts.asked.signal is not None else None
    found = parts.mesh.world.gather_objects(mine)
    rank = next(rank for rank, name in enumerate(found) if name is not None)
    return str(found[rank]) if None not in found else f"{found[rank]} to rank {rank}"


def _kept(saver: Saver) -> str:
    """Where the same command will go on from. Every rank calls it."""
    parts = saver.parts
    with parts.mesh.activity.during("saving a checkpoint"):
        saver.finish(retention=False)
    if saver.saved_step == parts.state.step:
        return "it is saved"
    if parts.mesh.world.gather_objects(bool(parts.mesh.rank == 0 and find(saver.directory)))[0]:
        return "it could not be saved, the last checkpoint stands"
    return "it could not be saved, and there is no other checkpoint"


def _against_unigrams(parts: Parts, validation_loss: float) -> str:
    """The last validation loss above what token frequencies alone would give, where the corpus knows that."""
    said = f"validation loss  {validation_loss:.4f} nats per {parts.blueprint.example.unit[:-1]}"
    feed = parts.validation
    if isinstance(feed, CorpusSource) and isinstance(feed.corpus, Corpus) and feed.corpus.known:
        nats = unigram_entropy(feed.corpus).nats
        said += f"\nunigram entropy  {nats:.4f}, of the same text: the loss of who knows token frequencies alone"
    return said


def _is_due(step: int, every: int, last: bool) -> bool:
    """Every so many steps, and after the last one."""
    return last or (every > 0 and step % every == 0)


def _keep_quiet(text: str) -> None:
    """Rank 0 speaks for all."""
