"""Start of a run: checks before any rank exists, then resuming from the newest sound checkpoint,
on any layout.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright import checkpoint as checkpoints
from meshwright.blueprint import Blueprint
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.preflight import check_manifest, check_space
from meshwright.config import LossScaling, RunConfig, batch_numbers, samples_after, write_snapshot
from meshwright.errors import CheckpointError, ConfigError, StoreAwayError, UnreadableError
from meshwright.mesh.mesh import Mesh, environment_rank
from meshwright.optimizer import MAX_SCALE, LossScale, first_scale, saved_states_of
from meshwright.parts import Parts, TrainState
from meshwright.run import starts
from meshwright.run.base import check_resumed
from meshwright.run.files import RunFiles, make_directory
from meshwright.run.mirror_read import open_newest_mirror
from meshwright.run.pieces import saved_running
from meshwright.run.places import check_store, find_own, store_of
from meshwright.run.tensors import (
    STOP_REASON,
    checkpoint_metadata,
    checkpoint_size,
    restore,
    saved_tensors,
    take_states,
)
from meshwright.system.store import Place, StorePath
from meshwright.terminal.output import Warn, print_warning

_DROPPED = "the state {} of a callback that does not run now: the next checkpoint will not have it"


def prepare(
    blueprint: Blueprint, data_fingerprint: Mapping[str, str], warn: Warn = print_warning
) -> None:
    """Make the run's directory, and check that checkpoints of the run can be written there
    and read back.

    Raises:
        ConfigError: a checkpoint would not be readable or does not fit on the disk; or the
            directory is not usable.
    """
    config = blueprint.config
    samples = samples_after(config.batch, config.train.steps)
    at_end = TrainState(
        step=config.train.steps,
        optimizer_steps=config.train.steps,
        samples_seen=samples,
        tokens_seen=samples * blueprint.example.labels_per_sample,
    )
    check_manifest(checkpoint_metadata(config, at_end, data_fingerprint), saved_tensors(blueprint))
    _check_space(blueprint, make_directory(config.run), 0, warn)
    store = store_of(config)
    if store is not None and environment_rank()[0] == 0:
        check_store(store, warn)


def check_added_states(parts: Parts, directory: Path, warn: Warn = print_warning) -> None:
    """Check the disk space again with the states that callbacks have added.
    Collective over all ranks; blocks.

    Raises:
        ConfigError: on every rank, when a checkpoint with these states does not fit on the disk.
    """
    mesh = parts.mesh
    added: list[str] = max(mesh.world.gather_objects(list(parts.optimizer.added)), key=len)
    if not added:
        return
    problem: str | None = None
    if mesh.rank == 0:
        try:
            _check_space(parts.blueprint, directory, len(added), warn)
        except ConfigError as error:
            problem = error.message
    problem = mesh.world.gather_objects(problem)[0]
    if problem is not None:
        raise ConfigError(
            "MW-RUN-034", f"{problem}; states of callbacks are included: {', '.join(added)}"
        )


def _check_space(blueprint: Blueprint, directory: Path, num_added: int, warn: Warn) -> None:
    """Compare a checkpoint's size with the free space. ``num_added``:
    states per weight that callbacks have added.
    """
    config = blueprint.config
    if config.checkpoint.directory:  # in an object store
        return
    check_space(
        directory,
        checkpoint_size(blueprint, num_added),
        keep_last=config.checkpoint.keep_last,
        steps=config.train.steps,
        warn=warn,
    )


def resume(
    parts: Parts,
    directory: Path,
    log: Callable[[str], None],
    callbacks: Collection[str] = (),
    mirror: Path | None = None,
) -> bool:
    """Resume from the mirror in memory, or else from the newest checkpoint that verifies.
    Return False if there is none. Collective over all ranks.

    Args:
        callbacks: names of the callbacks of this start. The states of others are dropped.
        mirror: memory of this node with a mirror, see ``checkpoint/memory.py``: the last step of all.

    Raises:
        CheckpointError: on every rank, when there are checkpoints and none of them verifies, or the
            newest belongs to another model, corpus or seed.
    """
    mesh = parts.mesh
    mirrored = None if mirror is None else open_newest_mirror(mirror, mesh, log)
    try:
        own = _find_own(parts, directory)
    except UnreadableError as error:
        if mirrored is None or not parts.config.checkpoint.directory:
            raise
        log(f"checkpoints of the mirror's step and later are left out: {error}")
        own = []
    path: Place | None
    if mirrored is None:
        place = store_of(parts.config) or directory
        path = newest_sound(place, mesh, only=[each.path for each in own])
    else:
        step = mirrored.reader.manifest.step
        later = [each.path for each in own if each.step >= step]
        path = _checkpoint_from(later, directory, mesh, log)
    if mirrored is not None and path is None:
        with mirrored.reader as checkpoint:
            _restore_from(checkpoint, parts, log, callbacks, mirrored.fetch)
        parts.is_from_memory = True
        return True
    if path is None:
        return False
    with checkpoints.open_checkpoint(path) as checkpoint:
        _restore_from(checkpoint, parts, log, callbacks)
    return True


def _find_own(parts: Parts, directory: Path) -> list[checkpoints.Candidate]:
    """Return the checkpoints to resume from, newest first, as rank 0 finds them: a listing is a
    request of a store. Collective over all ranks; blocks.

    Raises:
        CheckpointError: on every rank; see :func:`~.places.find_own`.
    """
    found: list[checkpoints.Candidate] = []
    problem, is_unreadable, is_away = None, False, False
    if parts.mesh.rank == 0:
        try:
            found = find_own(parts.config, directory)
        except CheckpointError as error:
            problem, is_unreadable = error.message, isinstance(error, UnreadableError)
            is_away = isinstance(error, StoreAwayError)
    kinds = (checkpoints.Candidate, StorePath)
    problem, is_unreadable, is_away, found = parts.mesh.world.gather_objects(
        (problem, is_unreadable, is_away, found), *kinds
    )[0]
    if problem is not None and is_away:
        raise StoreAwayError("MW-RUN-075", problem)
    if problem is not None and is_unreadable:
        raise UnreadableError("MW-RUN-068", problem)
    if problem is not None:
        raise CheckpointError("MW-RUN-071", problem)
    return found


def _checkpoint_from(
    paths: Sequence[Place], directory: Path, mesh: Mesh, log: Callable[[str], None]
) -> Place | None:
    """Return the newest sound one of the checkpoints of the mirror's step and of later ones; None:
    there is none. Collective over all ranks; blocks.

    A rank may have died after its step was saved, and before it was mirrored. The step could not be
    saved again: a checkpoint is never overwritten. In a store that is away it is left out: there a
    save that fails does not end the run.
    """
    if not paths:
        return None
    try:
        return newest_sound(directory, mesh, only=paths)
    except UnreadableError as error:
        if not any(isinstance(path, StorePath) for path in paths):
            raise
        log(f"checkpoints of the mirror's step and later are left out: {error}")
        return None
    except CheckpointError:  # a save moves a damaged one aside
        return None


def _restore_from(
    checkpoint: checkpoints.CheckpointReader,
    parts: Parts,
    log: Callable[[str], None],
    callbacks: Collection[str],
    fetch: Callable[[Callable[[], None], Mesh], None] | None = None,
) -> None:
    """Load an open checkpoint into the parts. Collective over all ranks; see :func:`resume`.

    ``fetch``: see :meth:`~.mirror_read.OpenMirror.fetch`.
    """
    mesh, manifest, path = parts.mesh, checkpoint.manifest, checkpoint.path
    result: tuple[str | None, list[str]] = (None, [])
    if mesh.rank == 0:
        try:
            config = parts.config.model_dump(mode="json")
            result = (
                None,
                checkpoints.check_compatible(
                    manifest, config, parts.data_fingerprint, place=str(path)
                ),
            )
        except CheckpointError as error:
            result = (error.message, [])
    problem, changes = mesh.world.gather_objects(result)[0]
    if problem is not None:
        raise CheckpointError("MW-RUN-016", problem)
    optimizer_steps = saved_count(manifest, "optimizer_steps")
    if optimizer_steps:
        _check_unfrozen(checkpoint, parts)
    take_states(parts.optimizer, manifest)
    running = saved_running(parts)
    load = partial(restore, checkpoint, parts.replicas, parts.optimizer, optimizer_steps, running)
    if fetch is not None:
        fetch(load, mesh)
    load()
    changes += _describe_added(checkpoint, parts)
    changes += _describe_statistics(manifest, parts)
    states = saved_callbacks(manifest)
    changes += [_DROPPED.format(name) for name in sorted(states.keys() - set(callbacks))]
    check_resumed(parts, manifest, str(path))
    parts.state.step = manifest.step
    parts.state.optimizer_steps = optimizer_steps
    parts.state.skipped_in_a_row = saved_count(manifest, "skipped_in_a_row", 0)
    parts.state.samples_seen = manifest.samples_seen
    parts.state.tokens_seen = saved_count(manifest, "tokens_seen")
    parts.state.loss_scale = saved_scale(
        manifest, parts.config.loss_scale, parts.config.train.dtype
    )
    parts.state.callbacks = {name: state for name, state in states.items() if name in callbacks}
    parts.stop_reason = saved_reason(manifest) if callbacks else None
    if manifest.step == 0:
        log(f"starting from the weights of {path}")
    else:
        log(f"resuming from {path}: step {manifest.step}, {manifest.samples_seen} samples seen")
    for change in changes:
        log(f"  changed: {change}")


def _optimizer_states(parts: Parts) -> tuple[str, ...]:
    own = parts.optimizer.own
    return saved_states_of(parts.config.optimizer) if own is None else own.names


def _check_unfrozen(checkpoint: checkpoints.CheckpointReader, parts: Parts) -> None:
    """Refuse weights that the checkpoint has without optimizer states, beside others with states.

    AdamW's states count their steps from the start of the run: new ones would take steps several
    times too long.
    """
    weights = set(checkpoint.parameters(checkpoints.TensorKind.WEIGHTS))
    kinds = [kind for kind in checkpoint.kinds() if kind != checkpoints.TensorKind.WEIGHTS]
    trained = {name for kind in kinds for name in checkpoint.parameters(kind)}
    names = [
        name
        for name, parameter in parts.blueprint.model.layers.named_parameters()
        if parameter.requires_grad and name in weights and name not in trained
    ]
    if trained and names:
        more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        raise CheckpointError(
            "MW-RUN-040",
            f"{checkpoint.path}: {names[0]}{more} were frozen in this run, and are trained now"
            " (model.parameter_groups): the checkpoint has no optimizer state of them. Freeze them"
            " again to resume. To train them later, start a run in which their group has"
            " learning_rate_factor = 0 instead of frozen = true, and raise it at a resume",
        )


def _describe_statistics(manifest: Manifest, parts: Parts) -> list[str]:
    """Return a line where nn.SyncBatchNorm takes the statistics of another number of samples than
    before: every layout is allowed, and that number is part of the model.
    """
    before: list[int] = []
    for section, key in (("parallel", "dp"), ("batch", "micro_batch_size")):
        keys = manifest.config.get(section)
        value = keys.get(key) if isinstance(keys, Mapping) else None
        before += [value] if isinstance(value, int) else []
    if not parts.blueprint.is_synchronised or manifest.step == 0 or len(before) < 2:
        return []
    dp, together = parts.mesh.grid.dp, before[0] * before[1]
    now = dp * batch_numbers(parts.config.batch).micro_batch_size
    if together == now:
        return []
    keeps = "choose a dp that divides them"
    if together % dp == 0:
        keeps = f"batch.micro_batch_size = {together // dp} keeps them"
    return [
        f"nn.SyncBatchNorm: statistics of dp x micro_batch_size = {together} samples -> {now}, which"
        f" train other numbers; {keeps}"
    ]


def _describe_added(checkpoint: checkpoints.CheckpointReader, parts: Parts) -> list[str]:
    """Return a line for each state of a callback that only the checkpoint has,
    or only this start.
    """
    own = {checkpoints.TensorKind.WEIGHTS, checkpoints.TensorKind.MASTER, *_optimizer_states(parts)}
    saved, added = set(checkpoint.kinds()) - own, set(parts.optimizer.added)
    dropped = [_DROPPED.format(name) for name in sorted(saved - added)]
    if checkpoint.manifest.step == 0:
        return dropped
    return dropped + [
        f"the callback's state {name} starts from the weights" for name in sorted(added - saved)
    ]


def record_start(
    parts: Parts,
    files: RunFiles,
    corpus_times: Mapping[str, int] | None,
    log: Callable[[str], None],
    configured: RunConfig | None = None,
) -> None:
    """Record this start in the run's directory, on rank 0: configuration, log of starts with the layout
    in use, placement of the ranks.

    Called after :func:`resume`, so that a run that cannot be resumed keeps the configuration it was
    trained with.

    Args:
        corpus_times: modification time of each file of the corpus in ns, by path.
        configured: with the layout that the next start has; None: the one in use.
    """
    config, mesh = parts.config, parts.mesh
    if mesh.rank != 0:
        return
    write_snapshot(files.directory, configured or config)
    if parts.state.step < config.train.steps:
        parts.restarts = starts.record_start(
            files.directory, parts.state.step, mesh.grid, mesh.nodes, corpus_times, log
        )
    files.remember()


def newest_sound(
    directory: Place, mesh: Mesh, warn: Warn = print_warning, only: Sequence[Place] | None = None
) -> Place | None:
    """Return the newest checkpoint that verifies, or None without any. Collective:
    each rank hashes some of the files.

    Args:
        only: candidates, newest first; None: all of the run. Rank 0 warns of each skipped one and
            its damaged file.

    Raises:
        CheckpointError: on every rank; there are some, and none verifies.
    """

    def verify(path: Place) -> Place:
        problem, digest, unreadable, away = None, "", False, False
        try:
            checkpoint = checkpoints.open_checkpoint(path)
            checkpoint.verify(slice(mesh.rank, None, mesh.grid.size))
            digest = checkpoint.digest
        except CheckpointError as error:
            problem, unreadable = error.message, isinstance(error, UnreadableError)
            away = isinstance(error, StoreAwayError)
        results: list[tuple[str | None, str, bool, bool]] = mesh.world.gather_objects(
            (problem, digest, unreadable, away)
        )
        problems = list(dict.fromkeys(text for text, *_ in results if text is not None))
        if any(away for *_, away in results):
            raise StoreAwayError("MW-RUN-076", "\n".join(problems))
        if any(unreadable for _, _, unreadable, _ in results):
            raise UnreadableError("MW-RUN-017", "\n".join(problems))
        if not problems and len({digest for _, digest, *_ in results}) > 1:
            problems = [
                f"{path}: not all ranks read the same checkpoint: is it on a file system that all"
                " share?"
            ]
        if problems:
            raise CheckpointError("MW-RUN-018", "\n".join(problems))
        return path

    own = [each.path for each in checkpoints.find(directory)] if only is None else list(only)
    paths: list[Place] = mesh.world.gather_objects(own, StorePath)[0]
    return checkpoints.first_sound(
        directory, paths, verify, warn if mesh.rank == 0 else lambda message: None
    )


def saved_callbacks(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """Return the states of callbacks from the manifest.
    Raises CheckpointError for anything but tables by name.
    """
    found = manifest.state.get("callbacks", {})
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise CheckpointError(
            "MW-RUN-032",
            f"the manifest of the checkpoint of step {manifest.step} has state.callbacks ="
            f" {reprlib.repr(found)}, which must be a table for each callback: it was not written"
            " by this project; take another checkpoint",
        )
    return dict(found)


def saved_reason(manifest: Manifest) -> str | None:
    """Return why a callback wants the run to end after its next step; None: it does not.

    Raises:
        CheckpointError: the manifest has no text there.
    """
    found = manifest.state.get(STOP_REASON)
    if found is None or isinstance(found, str):
        return found
    raise CheckpointError(
        "MW-RUN-039",
        f"the manifest of the checkpoint of step {manifest.step} has state.{STOP_REASON} ="
        f" {reprlib.repr(found)}, which must be a text: it was not written by this project; take"
        " another checkpoint",
    )


def saved_scale(manifest: Manifest, keys: LossScaling, dtype: str) -> LossScale:
    """Return the loss scale from the manifest; the first one of a run where there is none,
    or the scale is fixed.

    Raises:
        CheckpointError: it is no loss scale.
    """
    found = manifest.state.get("loss_scale")
    if found is None or dtype != "float16" or keys.fixed is not None:
        return first_scale(keys, dtype)
    if isinstance(found, dict):
        counts = [found.get(name) for name in ("sound_steps", "tolerated")]
    else:
        counts = [None]
    value = found.get("value") if isinstance(found, dict) else None
    is_sound = (
        isinstance(value, float)
        and 0 < value <= MAX_SCALE
        and all(type(n) is int and n >= 0 for n in counts)
    )
    if not is_sound or len(found) != len(LossScale._fields):
        raise CheckpointError(
            "MW-RUN-033",
            f"the manifest of the checkpoint of step {manifest.step} has state.loss_scale ="
            f" {reprlib.repr(found)}, which is no loss scale: it was not written by this project;"
            " take another checkpoint",
        )
    return LossScale(**found)


def saved_count(manifest: Manifest, name: str, default: int | None = None) -> int:
    """Return a whole number >= 0 from the manifest's ``state``.
    Raises CheckpointError for anything else.
    """
    value = manifest.state.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(
            "MW-RUN-019",
            f"the manifest of the checkpoint of step {manifest.step} has state.{name} = {value!r},"
            " which must be a whole number from 0 up: it was not written by this project; take"
            " another checkpoint",
        )
    return value
