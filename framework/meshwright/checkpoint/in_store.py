"""Checkpoints in an object store, which has no rename: what is written last publishes.

    s3://bucket/prefix/<run.name>/
      step-00000100/
        pp0-dp0-tp0-1a2b3c4d-00000.safetensors   the attempt is in the name: two attempts never mix
        SHA256SUMS
        manifest.json                            written last, deleted first: with it the step exists
      .tmp-step-00000200-5e6f7a8b/               a save in progress, or one that died
        attempt.json                             written first
        pp0-dp0-tp0.shard.json                   report of a shard whose files are complete
      .tmp-step-00000050-deleted/                a deletion in progress, or one that died

Files and manifest are those of a directory: a step copied into ``runs/NAME/checkpoints`` is a checkpoint there,
and back. The steps of a run are one listing with a delimiter, and a request for the manifest of each.
`save_in_store` writes them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.ranges import RangedFile
from meshwright.system.bounded import MAX_MANIFEST_BYTES
from meshwright.system.process import map_in_daemon_threads
from meshwright.system.store import StoreAccess, StoreError, StorePath

ATTEMPT = "attempt.json"
DELETED = "deleted"
"""Name of the attempt that is a deletion."""
LEFTOVER = re.compile(r"\.tmp-(step-\d{8,18})-([A-Za-z0-9]{1,32})", flags=re.ASCII)
NUM_THREADS = 16
BLOCK_BYTES = 2**20
"""Bytes that a read of fewer takes at once: small tensors lie side by side."""
NUM_BLOCKS = 64


def remove_leftovers(
    run: StorePath, access: StoreAccess, *, own: str = "", only_deletions: bool = False
) -> None:
    """Remove what dead saves and deletions have left. One rank calls it, while none is saved besides
    the attempt ``own``. A mark whose files the store does not let go keeps none of the others.

    Raises:
        OSError: the store does not answer, or does not remove something.
    """
    problem: StoreError | None = None
    for name in access.names(run):
        found = LEFTOVER.fullmatch(name)
        if found is None or found[2] == own or (only_deletions and found[2] != DELETED):
            continue
        step, attempt = run / found[1], found[2]
        try:
            if attempt == DELETED:
                _finish_deletion(step, own, access)
            else:
                _remove_attempt(step, attempt, access)
        except StoreError as error:
            if error.is_passing:
                raise
            problem = error
    if problem is not None:
        raise problem


def _remove_attempt(step: StorePath, attempt: str, access: StoreAccess) -> None:
    """Remove what a dead attempt has left of a step. Its mark goes when a look finds nothing else:
    a request of a dead process may still arrive after the first look.
    """
    left = [each for each in access.names(step) if f"-{attempt}-" in each]
    if left and access.size(step / MANIFEST) is not None:
        text = access.read_all(step / MANIFEST, MAX_MANIFEST_BYTES).decode(errors="replace")
        left = [each for each in left if f'"{each}"' not in text]
    access.remove([step / each for each in left])
    if not access.abort_uploads(step, f"-{attempt}-") and not left:
        marks = step.parent / f".tmp-{step.name}-{attempt}"
        access.remove([marks / each for each in access.names(marks)])


def delete_step(step: StorePath, access: StoreAccess) -> None:
    """Delete a step, its manifest first, so that no reader takes half of it."""
    access.put(_deletion_mark(step), b"{}\n")
    access.remove([step / MANIFEST])
    access.remove([step / name for name in access.names(step)])
    access.remove([_deletion_mark(step)])


def _deletion_mark(step: StorePath) -> StorePath:
    return step.parent / f".tmp-{step.name}-{DELETED}" / ATTEMPT


def _finish_deletion(step: StorePath, own: str, access: StoreAccess) -> None:
    """Remove the rest of a step whose deletion died; what the attempt ``own`` writes there stays.

    With a manifest it is a whole step still, or was saved again: only the mark goes, and retention
    decides anew.
    """
    if access.size(step / MANIFEST) is None:
        names = [name for name in access.names(step) if not own or f"-{own}-" not in name]
        access.remove([step / name for name in names])
    access.remove([_deletion_mark(step)])


def published(steps: Iterable[StorePath], access: StoreAccess) -> list[StorePath]:
    """Return the steps that have a manifest."""
    found = list(steps)
    sizes = map_in_daemon_threads(lambda step: access.size(step / MANIFEST), found, NUM_THREADS)
    return [step for step, size in zip(found, sizes, strict=True) if size is not None]


def file_opener(
    step: StorePath, sizes: Mapping[str, int], access: StoreAccess
) -> Callable[[str], RangedFile]:
    """Return a function that opens a file of a step for reading by ranges. ``sizes``: bytes of
    each file.
    """

    @functools.lru_cache(NUM_BLOCKS)
    def block(name: str, index: int) -> bytes:
        start = index * BLOCK_BYTES
        return access.read(step / name, start, min(start + BLOCK_BYTES, sizes[name]))

    def read(name: str, start: int, stop: int) -> bytes:
        if stop - start >= BLOCK_BYTES:
            return access.read(step / name, start, stop)
        first, last = start // BLOCK_BYTES, max(stop - 1, start) // BLOCK_BYTES
        found = b"".join(block(name, index) for index in range(first, last + 1))
        return found[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    return lambda name: RangedFile(str(step / name), sizes[name], functools.partial(read, name))
