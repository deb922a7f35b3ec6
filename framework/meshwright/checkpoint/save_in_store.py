"""Saves of checkpoints to an object store: the layout of `in_store`.

    rank 0          begin            remove what dead attempts left
    each writer     upload_shard     attempt.json, its files, then its report
    rank 0          publish          when all reports exist: compare sizes, write SHA256SUMS, then manifest.json

All of it runs on the writers' threads, so that a store that is away blocks no step. An attempt that
fails stays as it is, and the next one removes it: a request may have been fulfilled although its
answer was lost, that of the manifest too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from meshwright.checkpoint.in_store import ATTEMPT, NUM_THREADS, remove_leftovers
from meshwright.checkpoint.manifest import MANIFEST, SUMS, CheckpointMetadata, Manifest, render_sums
from meshwright.checkpoint.read import open_checkpoint
from meshwright.checkpoint.save import checked_text, merge, parse_report
from meshwright.checkpoint.shard import REPORT_SUFFIX, TensorPiece, write_files
from meshwright.errors import CheckpointError, UnreadableError
from meshwright.system.bounded import MAX_MANIFEST_BYTES
from meshwright.system.process import map_in_daemon_threads
from meshwright.system.store import StoreAccess, StorePath
from meshwright.terminal.output import Warn, print_warning


@contextmanager
def _as_checkpoint_error(path: StorePath) -> Iterator[None]:
    """Convert an OSError of a save into a CheckpointError that names the object and the seconds."""
    start_s = time.monotonic()
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "MW-CHECKPOINT-034",
            f"{error.filename or path}: {error.strerror}, after {time.monotonic() - start_s:.0f} s"
            " (checkpoint.upload_timeout_s): published checkpoints are unchanged",
        ) from error


def begin(
    step: StorePath,
    attempt: str,
    access: StoreAccess,
    *,
    tried: Collection[str] = (),
    warn: Warn = print_warning,
) -> bool:
    """Remove what dead attempts have left. First rank only. Return True if the step is published
    already, by one of the attempts ``tried`` of this process: the answer to its manifest was lost.

    A damaged checkpoint of this step, which a resume has skipped, loses its publication: its
    manifest gets another name.

    Raises:
        CheckpointError: a sound checkpoint of this step exists, or the store does not answer.
    """
    run = step.parent
    try:
        remove_leftovers(run, access, own=attempt)
    except OSError as error:  # it must not keep all later saves from the store
        if error.errno != errno.ECANCELED:
            warn(
                f"files of a dead save cannot be removed now: {error.filename or run}:"
                f" {error.strerror}"
            )
    with _as_checkpoint_error(run):
        is_there = access.size(step / MANIFEST) is not None
    return is_there and _is_published(step, attempt, access, tried, warn)


def _manifest_text(step: StorePath, access: StoreAccess) -> bytes | None:
    """Return the text of a step's manifest; None: there is none."""
    if access.size(step / MANIFEST) is None:
        return None
    return access.read_all(step / MANIFEST, MAX_MANIFEST_BYTES)


def _is_published(
    step: StorePath, attempt: str, access: StoreAccess, tried: Collection[str], warn: Warn
) -> bool:
    """Verify a step with a manifest; see :func:`begin`. A damaged one is set aside."""
    with _as_checkpoint_error(step):
        before = _manifest_text(step, access)
    try:
        with open_checkpoint(step) as found:
            found.verify()
            files = list(found.manifest.files)
    except UnreadableError:
        raise
    except CheckpointError as error:
        _set_aside(step, attempt, access, before)
        warn(f"{step} does not verify and is no checkpoint any more: {error}")
        return False
    if not any(f"-{name}-" in file for name in tried for file in files):
        raise CheckpointError(
            "MW-CHECKPOINT-037",
            f"{step} exists and is sound: a checkpoint is never overwritten. Resume from it"
            " with the same command, or choose another run.name",
        )
    return True


def _set_aside(step: StorePath, attempt: str, access: StoreAccess, damaged: bytes | None) -> None:
    """Give the manifest that did not verify another name, unless another one is there by now."""
    with _as_checkpoint_error(step):
        text = _manifest_text(step, access)
        if text is None:
            return
        if text != damaged:
            raise CheckpointError(
                "MW-CHECKPOINT-038",
                f"{step / MANIFEST} was written while it was verified: does another job save there?"
                " Choose another run.name or checkpoint.directory",
            )
        access.put(step / f"broken-manifest-{attempt}.json", text)
        access.remove([step / MANIFEST])


def upload_shard(
    step: StorePath,
    attempt: str,
    shard_name: str,
    pieces: Iterable[TensorPiece],
    access: StoreAccess,
    *,
    max_file_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Upload the attempt's mark, this rank's files of a step, then their report. Blocks.

    Every rank writes the mark, the same object: files without one would never be removed.

    Raises:
        CheckpointError: names the object that could not be uploaded, and the seconds.
    """

    def write(name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        with _as_checkpoint_error(step / name):
            return access.upload(step / name, chunks)

    mark = _attempt_place(step, attempt) / ATTEMPT
    with _as_checkpoint_error(mark):
        access.put(mark, b"{}\n")
    report = write_files(
        write,
        f"{shard_name}-{attempt}",
        pieces,
        max_file_bytes=max_file_bytes,
        copied=True,
        on_bytes=on_bytes,
    )
    place = _attempt_place(step, attempt) / f"{shard_name}{REPORT_SUFFIX}"
    with _as_checkpoint_error(place):
        access.put(place, report.model_dump_json().encode())


def _attempt_place(step: StorePath, attempt: str) -> StorePath:
    return step.parent / f".tmp-{step.name}-{attempt}"


def reports_present(step: StorePath, attempt: str, access: StoreAccess) -> set[str]:
    """Return the names of the shards whose files are complete, by one listing of the reports."""
    place = _attempt_place(step, attempt)
    with _as_checkpoint_error(place):
        names = access.names(place)
    return {name.removesuffix(REPORT_SUFFIX) for name in names if name.endswith(REPORT_SUFFIX)}


def publish(
    step: StorePath,
    attempt: str,
    shard_names: Iterable[str],
    head: CheckpointMetadata,
    access: StoreAccess,
) -> Manifest:
    """Merge the shards' reports, compare the sizes of the objects, and publish the step.

    Raises:
        CheckpointError: a report is none, a tensor is not covered exactly once, an object has
            another size, or the step exists. Nothing is published then.
    """
    place = _attempt_place(step, attempt)
    names = [f"{name}{REPORT_SUFFIX}" for name in sorted(shard_names)]
    with _as_checkpoint_error(place):
        written = access.names(place)
        texts = map_in_daemon_threads(
            lambda name: access.read(
                place / name, 0, min(written.get(name) or 0, MAX_MANIFEST_BYTES)
            ),
            names,
            NUM_THREADS,
        )
        sizes = access.names(step)
    reports = [parse_report(text, place / name) for name, text in zip(names, texts, strict=True)]
    manifest = merge(head, reports)
    text = checked_text(manifest, sizes, step, step)
    if MANIFEST in sizes:
        raise CheckpointError(
            "MW-CHECKPOINT-035",
            f"{step} appeared during the save: does another job save there? Choose another run.name"
            " or checkpoint.directory",
        )
    with _as_checkpoint_error(step / MANIFEST):
        sums = render_sums(hashlib.sha256(text).hexdigest(), manifest.files)
        access.put(step / SUMS, sums)
        access.put(step / MANIFEST, text)
    with contextlib.suppress(OSError):  # published: the next save removes them
        access.remove([place / name for name in [*names, ATTEMPT]])
    return manifest
