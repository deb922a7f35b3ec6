"""Training on one rank, from the environment that a launcher has set to the end of the run.

check(config, world size)   refuse an impossible configuration before any rank exists; called once by the launcher
work(config)                one rank: mesh, parts, resume, train, close
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.build import build
from meshwright.config import Launch, Parallel, Run, RunConfig, resolve, samples_after
from meshwright.data.live_files import LiveFiles
from meshwright.data.sources import (
    StreamSource,
    corpus_times,
    data_fingerprint,
    describe_source,
    live_files,
    open_sources,
    unigram_nats,
    warn_of_small_validation,
)
from meshwright.doctor.cpus import find_cpu_warnings
from meshwright.doctor.nodes import check_nodes
from meshwright.errors import DataError, Preempted, RunFilesError
from meshwright.mesh import Grid
from meshwright.mesh.mesh import Mesh, close_mesh, environment_rank, open_mesh
from meshwright.parts import Observer, Parts
from meshwright.run import RunFiles, StepCollector, lock_directory, make_directory
from meshwright.run.directory import METRICS, STATUS, run_directory
from meshwright.run.mirror_size import mirror_size
from meshwright.run.observers import (
    Checkpoints,
    EndOfRun,
    GarbageCollection,
    PeakMemory,
    RecoveryRecords,
    RunFilesCheck,
    Validation,
    set_loss_name,
    validate,
)
from meshwright.run.resume import check_added_states, prepare, record_start
from meshwright.run.start import check_start, resume_or_start
from meshwright.run.summary import WIDTH, summarise
from meshwright.system.process import GiveUp, StopRequest, end_process
from meshwright.terminal.output import print_lines, print_warning
from meshwright.tracking.observer import (
    Records,
    check_routing,
    expert_load,
    find_sinks,
    gpu_metrics,
    has_perplexity,
    loss_unit,
    open_tracker,
    routing,
)
from meshwright.tracking.tracker import Tracker
from meshwright.train import train
from meshwright.watch.hang.watchdog import GROUP_TIMEOUT_MARGIN_S, Watchdog
from meshwright.watch.observers import CorpusCheck, DriftCheck, Timing
from meshwright_launch.balance import describe_balance, describe_padding, describe_rows
from meshwright_launch.callbacks import (
    CallbackErrors,
    Callbacks,
    StreamState,
    find_callbacks,
    make_callbacks,
)
from meshwright_launch.leftovers import check_mirror_space
from meshwright_launch.recovery import Rejoin
from meshwright_launch.replicas import with_ranks


def check(
    config: RunConfig, world_size: int, ranks_per_node: int | None = None
) -> tuple[RunConfig, Blueprint]:
    """Check a configuration before any process group exists; return it resolved,
    with its blueprint. ``ranks_per_node``: None: all ranks are on this machine.

    Raises:
        UserError: all problems in one message.
    """
    config = resolve(config, world_size)
    blueprint = draw_blueprint(config)
    check_routing(blueprint)
    source, _ = open_sources(config)
    find_callbacks(config.train)
    find_sinks(config.tracking)
    prepare(
        blueprint,
        data_fingerprint(source),
        print_warning if environment_rank()[0] == 0 else _print_nothing,
    )
    check_start(blueprint, run_directory(config.run))
    if config.watch.mirror:
        per_node = ranks_per_node or world_size
        nodes = [f"node{rank // per_node}" for rank in range(world_size)]
        check_mirror_space(round(max(mirror_size(blueprint, nodes).held.values())))
    return config, blueprint


def work(
    config: RunConfig, give_up: GiveUp = end_process, observers: Sequence[Observer] = ()
) -> None:
    """Run one rank, from the environment that a launcher has set (torchrun's names)
    to the end of training.

    Args:
        give_up: ends this process when the run hangs.
        observers: the caller's own, the same on every rank; they come before those of
            ``train.callbacks``.
    """
    rejoin, num_ranks = Rejoin.from_environment(config), environment_rank()[1]
    # with a mirror, the nodes that are left may hold fewer ranks than configured
    used = resolve(config, num_ranks) if rejoin is None else with_ranks(config, num_ranks)
    while True:
        try:
            _work_once(used, give_up, observers, rejoin)
            return
        except Exception as error:
            if rejoin is None or not rejoin.is_wanted(error):
                raise
        rejoin.leave()  # outside: the error refers to all parts of the rank


def _work_once(
    config: RunConfig, give_up: GiveUp, observers: Sequence[Observer], rejoin: Rejoin | None
) -> None:
    """Run one rank until the end of training, or until a rank is lost."""
    store = None if rejoin is None else rejoin.open_store()
    mesh = open_run_mesh(config.parallel, config.launch, config.train.device, store)
    with contextlib.ExitStack() as stack:
        if rejoin is not None:
            rejoin.report("groups")
            stack.enter_context(rejoin.guarded())
        files = stack.enter_context(open_run_files(config.run, mesh, config.launch.threads))
        _train_in(files, config, mesh, give_up, observers, rejoin)


def open_run_mesh(parallel: Parallel, launch: Launch, device: str, store: object = None) -> Mesh:
    """Open the mesh of a resolved configuration. Collective over all ranks; blocks.
    ``device``: ``train.device``; ``store``: of the rendezvous, None: that of the environment.
    """
    return open_mesh(
        Grid.of(parallel.degrees),
        device,
        timeout_s=launch.timeout_s + GROUP_TIMEOUT_MARGIN_S,
        tp_across_nodes=parallel.tp_across_nodes,
        ep_across_nodes=parallel.ep_across_nodes,
        share_devices=launch.share_devices,
        store=store,
    )


@contextlib.contextmanager
def open_run_files(run: Run, mesh: Mesh, threads: int) -> Iterator[RunFiles]:
    """Make, check and lock the run's directory for the block. Collective over all ranks; blocks."""
    directory = make_directory(run) if mesh.rank == 0 else run_directory(run)
    check_nodes(mesh, directory)
    for text in find_cpu_warnings(mesh, threads):
        print_warning(text)
    with (
        lock_directory(directory, mesh) as lock,
        contextlib.closing(RunFiles(directory, lock)) as files,
    ):
        yield files


def _train_in(
    files: RunFiles,
    config: RunConfig,
    mesh: Mesh,
    give_up: GiveUp,
    observers: Sequence[Observer],
    rejoin: Rejoin | None,
) -> None:
    """Build the parts, resume, train and close the mesh; ``config`` is resolved."""
    directory = files.directory
    parts = build(config, mesh)
    corpus_files = watched_files(parts)
    check_data(parts)
    log = print_lines if mesh.rank == 0 else _print_nothing
    if rejoin is None or rejoin.is_new:
        log(summarise(parts.blueprint, mesh.nodes, shutil.get_terminal_size((WIDTH, 0)).columns))
    if corpus := describe_source(parts.source, samples_after(config.batch, config.train.steps)):
        log(corpus)
    assert config.batch.global_batch is not None, "resolve the configuration first"
    for name, source in parts.validations.items():
        if warning := warn_of_small_validation(source, config.batch.global_batch, name):
            log(warning)
    opened_request = StopRequest() if rejoin is None else rejoin.open_request()
    stream = (
        [StreamState(parts.source, mesh.rank)] if isinstance(parts.source, StreamSource) else []
    )
    callbacks = Callbacks([*observers, *make_callbacks(parts), *stream])
    callbacks.setup(parts)
    check_added_states(parts, directory)
    _resume(parts, directory, log, callbacks, rejoin)
    described = (describe_balance, describe_rows, describe_padding) if mesh.rank == 0 else ()
    for line in (describe(parts) for describe in described):
        if line:
            log(line)
    configured = None if rejoin is None else rejoin.configured
    record_start(parts, files, corpus_times(parts.source), log, configured)
    tracker = open_tracker(parts, directory / METRICS, is_ours=lambda: not files.are_lost())
    steps = config.train.steps
    limit_s, replace_status = config.launch.timeout_s, partial(files.write, STATUS)
    on_hang = give_up if rejoin is None else rejoin.after_hang(give_up)
    watchdog = Watchdog(
        mesh, directory, limit_s, steps, lambda: parts.state.step, on_hang, replace_status
    )
    # to the end: a signal after the last step, or after the first signal, changes nothing
    with opened_request as request:
        try:
            with (
                watchdog,
                mesh.activity.during("training"),
                tracker,
                StepCollector(config.train.gc_every) as collector,
            ):
                if parts.state.step < steps:
                    all_observers = observe(
                        parts, files, tracker, request, log, callbacks, corpus_files
                    )
                    mirrors = [] if rejoin is None else rejoin.observers(parts)
                    train(parts, [*all_observers, *mirrors, GarbageCollection(collector)])
                else:
                    _report_finished(parts, log)
        except Preempted:
            close_mesh(mesh)
            raise
        close_mesh(mesh)
    if tracker.lost is not None:
        raise RunFilesError(
            "MW-LAUNCH-053",
            f"{tracker.lost}. The run itself is complete and saved up to step {parts.state.step}",
        )


def _resume(
    parts: Parts,
    directory: Path,
    log: Callable[[str], None],
    callbacks: Callbacks,
    rejoin: Rejoin | None,
) -> None:
    """Resume from the mirror or a checkpoint, or start. Collective over all ranks; blocks."""
    if rejoin is None:
        resume_or_start(parts, directory, log, callbacks.names)
    else:
        rejoin.report("built")
        resume_or_start(parts, directory, log, callbacks.names, rejoin.mirror)
    callbacks.load(parts)
    if rejoin is not None:
        rejoin.report("restored")


def check_data(parts: Parts) -> None:
    """Compare the data of all ranks. One with other samples would train on inputs
    that do not match the labels.

    Collective over all ranks; blocks.

    Raises:
        DataError: on every rank; names the ranks that have other data than rank 0.
    """
    own = {
        f"validation{set_name and f' {set_name}'}: {name}": value
        for set_name, source in parts.validations.items()
        for name, value in data_fingerprint(source).items()
    }
    every: list[dict[str, str]] = parts.mesh.world.gather_objects(
        own | dict(parts.data_fingerprint)
    )
    different = [rank for rank, found in enumerate(every) if found != every[0]]
    if different:
        found = every[different[0]]
        names = sorted(
            name for name in found.keys() | every[0].keys() if found.get(name) != every[0].get(name)
        )
        raise DataError(
            "MW-LAUNCH-094",
            f"ranks {different} have other data than rank 0: rank {different[0]} has"
            f" {found.get(names[0])} for {names[0]!r}, rank 0 {every[0].get(names[0])}. Give all"
            " nodes the same files; a data.builder must return the same samples in every process,"
            " for example by a generator with a fixed seed",
        )


def watched_files(parts: Parts) -> LiveFiles:
    """Return the files of the corpora to watch: on the first rank of each node all,
    on the others none.
    """
    nodes, rank = parts.mesh.nodes, parts.mesh.rank
    return (
        live_files(parts.source, *parts.validations.values())
        if nodes.index(nodes[rank]) == rank
        else LiveFiles([])
    )


def _report_finished(parts: Parts, log: Callable[[str], None]) -> None:
    """Print the validation loss of a run that has taken all its steps."""
    steps, step = parts.config.train.steps, parts.state.step
    taken = f"its {steps} steps" if step == steps else f"{step} steps and train.steps = {steps}"
    if parts.validations:  # the same number as on the layout that trained
        with parts.mesh.activity.during("validating"):
            log(describe_validation(parts, validate(parts)))
    log(
        f"the run has taken {taken}: raise train.steps to continue, or choose another run.name to"
        " train anew"
    )


def observe(
    parts: Parts,
    files: RunFiles,
    tracker: Tracker,
    request: StopRequest,
    log: Callable[[str], None],
    callbacks: Callbacks,
    corpus_files: LiveFiles,
) -> list[Observer]:
    """Return the observers of a run; :class:`Checkpoints` among them connects ``request``
    to the step's flag STOP.

    Their order is fixed: most of them communicate, and each may use the results of those before it.
    """
    checkpoints = Checkpoints(parts, files, request, log)
    own = [callbacks] if callbacks.observers else []
    return [
        *routing(parts, files.directory),  # ends the step's recording, before a validation
        RunFilesCheck(checkpoints.saver),  # lost files of the run's directory
        Timing(parts, files.directory, log),  # the traced step, stragglers
        Validation(lambda loss: log(describe_validation(parts, loss))),
        *own,  # the user's, of train.callbacks and of a script; they may add metrics to the record
        # utilization, power, temperature and more of all GPUs, sampled in the background
        *gpu_metrics(parts),
        *expert_load(parts, files.directory),  # tokens of each expert, where a router counts them
        # recoveries in place, which the launcher logs
        *([RecoveryRecords(files.directory)] if parts.config.watch.mirror else []),
        Records(tracker),  # metrics.jsonl, console, wandb
        DriftCheck(),  # equality of replicas, also after callbacks, before they are saved
        # files of the corpus that were overwritten under the run
        CorpusCheck(corpus_files.changes),
        PeakMemory(files.directory),  # memory.json
        checkpoints,  # saves
        # ends the run after an error of a callback, signal or not
        *(CallbackErrors(callbacks) for callbacks in own),
        EndOfRun(checkpoints),  # ends the run after its last step or a signal
    ]


def describe_validation(parts: Parts, validation_loss: float) -> str:
    """Return the validation loss, that of each of several sets and, where a corpus has token
    counts, the unigram baseline beside it.
    """
    lines = [f"validation loss  {validation_loss:.4f} {loss_unit(parts.blueprint)}"]
    for name, source in parts.validations.items():
        nats = unigram_nats(source) if has_perplexity(parts.blueprint) else None
        if name:
            loss = parts.validation_metrics[set_loss_name(name)]
            beside = "" if nats is None else f", unigram baseline {nats:.4f}"
            lines.append(f"  {name}: {loss:.4f}{beside}")
        elif nats is not None:
            lines.append(
                f"unigram baseline  {nats:.4f}, by the token frequencies of the training text alone"
            )
    return "\n".join(lines)


def _print_nothing(text: str) -> None:
    """Print nothing; only rank 0 prints."""
