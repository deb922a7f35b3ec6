"""Retention of checkpoints: deletion of old ones."""

from __future__ import annotations

from meshwright.checkpoint.files import (
    DELETED_SUFFIX,
    as_checkpoint_error,
    checkpoints_directory,
    delete_leftovers,
    remove_directory,
)
from meshwright.checkpoint.in_store import delete_step, remove_leftovers
from meshwright.checkpoint.read import Candidate, find, open_checkpoint
from meshwright.errors import CheckpointError
from meshwright.system.store import Place, StoreAccess, StorePath
from meshwright.terminal.output import Warn, print_warning


def prune(
    run_directory: Place,
    keep_last: int,
    keep_every: int = 0,
    *,
    published: int | None = None,
    warn: Warn = print_warning,
) -> list[Candidate]:
    """Delete all but the newest ``keep_last`` sound checkpoints. Return the deleted ones.
    Only one rank calls it.

    A damaged checkpoint never counts as one of the newest. Everything older than the last kept
    checkpoint is deleted, damaged or not. Before any deletion the newest checkpoint is read back
    and its hashes are verified. If that fails, nothing is deleted and a warning is issued. In an
    object store the sizes alone are compared: reading back would cost as much as a resume. So a
    step after ``published``, which a resume has skipped as damaged, may look whole there: it is
    none of those to keep, and stays.

    Args:
        run_directory: Directory of the run.
        keep_last: Number of checkpoints to keep.
        keep_every: Checkpoints of steps that it divides are never deleted; 0: none is exempt.
        published: The step that this run has just published, which is never deleted; None: not
            known.
        warn: Receives the warnings.
    """
    assert keep_last >= 1 and keep_every >= 0, (keep_last, keep_every)
    if isinstance(run_directory, StorePath):
        try:
            remove_leftovers(run_directory, StoreAccess(), only_deletions=True)
        except OSError as error:
            warn(f"a deletion that was begun before could not be finished: {error.strerror}")
    else:
        delete_leftovers(checkpoints_directory(run_directory).glob(f".tmp-*{DELETED_SUFFIX}"), warn)
    sound: list[Candidate] = []
    candidates = find(run_directory)
    for candidate in candidates:
        if published is not None and candidate.step > published and _is_in_store(candidate):
            continue
        try:
            open_checkpoint(candidate.path)
        except CheckpointError as error:
            warn(f"checkpoint {candidate.path.name} is not one of the {keep_last} to keep: {error}")
            continue
        sound.append(candidate)
        if len(sound) == keep_last:
            break
    if len(sound) < keep_last:
        return []
    older = [
        candidate
        for candidate in candidates
        if candidate.step < sound[-1].step and candidate.step != published
    ]
    obsolete = [candidate for candidate in older if not keep_every or candidate.step % keep_every]
    if not obsolete:
        return []
    try:
        if not isinstance(run_directory, StorePath):
            open_checkpoint(sound[0].path).verify()
    except CheckpointError as error:
        warn(f"older checkpoints are kept, as the newest does not verify: {error}")
        return []
    for candidate in obsolete:
        if isinstance(candidate.path, StorePath):
            delete_step(candidate.path, StoreAccess())
            continue
        with as_checkpoint_error(candidate.path):
            remove_directory(candidate.path)
    return obsolete


def _is_in_store(candidate: Candidate) -> bool:
    return isinstance(candidate.path, StorePath)
