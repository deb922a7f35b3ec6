"""Go on with a run that was saved: the same command again, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from framework import checkpoint as checkpoints
from framework.build import Parts
from framework.checkpoint.manifest import Manifest
from framework.data import fingerprint
from framework.data.dataset import DatasetFeed
from framework.data.samples import Feed
from framework.data.span_corruption import SpanCorruptionFeed
from framework.errors import CheckpointError
from framework.state import restore


def data_fingerprint(parts: Parts) -> dict[str, str]:
    """What must be the same data after a resume: hashes where the corpus has a fingerprint, else its size."""
    if isinstance(parts.feed, DatasetFeed):
        return parts.feed.samples.fingerprint()
    if not isinstance(parts.feed, Feed | SpanCorruptionFeed):
        return {}
    corpus = parts.feed.corpus
    known = fingerprint.read(corpus.prefix.parent)
    if known is None or corpus.known is None:
        return {"train_tokens": str(len(corpus.stream))}
    return {"train": known.files[f"{corpus.prefix.name}.bin"], "tokenizer": known.files["tokenizer.json"]}


def resume(parts: Parts, directory: Path, say: Callable[[str], None]) -> None:
    """Go on from the newest checkpoint that verifies, if there is one. Every rank calls it.

    Raises:
        CheckpointError: on every rank, when there are checkpoints and none of them verifies, or the newest belongs to
            another model, corpus or seed.
    """
    mesh = parts.mesh
    found: tuple[str | None, str | None, list[str]] = (None, None, [])
    if mesh.rank == 0:
        try:
            newest = checkpoints.newest_valid(directory)
            if newest is not None:
                changes = checkpoints.compatible(
                    newest.manifest,
                    parts.config.model_dump(mode="json"),
                    data_fingerprint(parts),
                    place=str(newest.path),
                )
                found = (str(newest.path), None, changes)
        except CheckpointError as error:
            found = (None, str(error), [])
    path, problem, changes = mesh.world.gather_objects(found)[0]
    if problem is not None:
        raise CheckpointError(problem)
    if path is None:
        return
    with checkpoints.open_checkpoint(Path(path)) as checkpoint:
        manifest = checkpoint.manifest
        optimizer_steps = saved_count(manifest, "optimizer_steps")
        restore(checkpoint, parts.replicas, parts.optimizer, optimizer_steps, parts.running())
    parts.state.step = manifest.step
    parts.state.optimizer_steps = optimizer_steps
    parts.state.skipped_in_a_row = saved_count(manifest, "skipped_in_a_row", 0)
    parts.state.samples_seen = manifest.samples_seen
    parts.state.tokens_seen = saved_count(manifest, "tokens_seen")
    say(f"going on from {path}: step {manifest.step}, {manifest.samples_seen} samples seen")
    for change in changes:
        say(f"  changed: {change}")


def saved_count(manifest: Manifest, name: str, default: int | None = None) -> int:
    """A whole number from 0 up out of the manifest's ``state``. Raises CheckpointError for anything else."""
    found = manifest.state.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise CheckpointError(
            f"the manifest of the checkpoint of step {manifest.step} says state.{name} = {found!r}, which must be a "
            f"whole number from 0 up: it was not written by this project; take another checkpoint"
        )
    return found
