"""Publication of a checkpoint from the shards of all writers.

    rank 0          begin            remove the files of dead attempts, make .tmp-step-...
    each writer     write_shard      its files and its report, synced
    rank 0          publish          when all reports exist: merge them, check the cover, sync manifest and SHA256SUMS,
                                     one rename

During training `write_shard` and `publish` run on a thread of each rank (`async_writer`).

After a kill at any moment there is either no ``step-*`` directory of this step or a complete one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from meshwright.checkpoint.check import check, parse
from meshwright.checkpoint.files import (
    DELETED_SUFFIX,
    as_checkpoint_error,
    checkpoints_directory,
    delete_leftovers,
    final_directory,
    regular_size,
    temporary_directory,
    write_synced,
)
from meshwright.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    SUMS,
    VERSION,
    CheckpointMetadata,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    render,
    render_sums,
)
from meshwright.checkpoint.read import open_checkpoint
from meshwright.checkpoint.shard import REPORT_SUFFIX, ShardReport
from meshwright.errors import CheckpointError, UnreadableError
from meshwright.system.atomic import make_directory_synced, rename_synced, sync
from meshwright.system.bounded import MAX_MANIFEST_BYTES, read_bytes
from meshwright.system.process import versions
from meshwright.system.store import Place
from meshwright.terminal.output import Warn, print_warning


def begin(run_directory: Path, step: int, attempt: str, *, warn: Warn = print_warning) -> Path:
    """Create the temporary directory of this attempt, and remove those of dead attempts.

    One rank calls it before the others write. A published checkpoint of this step is never
    modified. A damaged one, which a resume has skipped, is renamed to ``broken-*`` so that the run
    can continue.

    Raises:
        CheckpointError: A sound checkpoint of this step exists.
    """
    directory = checkpoints_directory(run_directory)
    with as_checkpoint_error(directory):
        make_directory_synced(directory)
        sync(directory.parent)  # its maker may have died before it did so
    final = final_directory(run_directory, step)
    temporary = temporary_directory(run_directory, step, attempt)
    if final.exists():
        try:
            with open_checkpoint(final) as found:
                found.verify()
        except UnreadableError:
            raise
        except CheckpointError as error:
            aside = directory / f"broken-{final.name}-{attempt}"
            final.rename(aside)
            warn(f"{final} does not verify and is moved to {aside.name}: {error}")
        else:
            raise CheckpointError(
                "MW-CHECKPOINT-023",
                f"{final} exists and is sound: a checkpoint is never overwritten. Resume from it"
                " with the same command, or choose another run.name",
            )
    left = directory.glob(".tmp-*")  # what is being deleted is left to `prune`
    delete_leftovers((path for path in left if not path.name.endswith(DELETED_SUFFIX)), warn)
    with as_checkpoint_error(temporary):
        temporary.mkdir()
    return temporary


def publish(temporary: Path, final: Path, head: CheckpointMetadata) -> Manifest:
    """Merge the shards' reports, write the manifest and publish the checkpoint by one rename.

    One rank calls it, after all shards are written.

    Raises:
        CheckpointError: A tensor is not covered exactly once, a file has the wrong size, a value of
            ``head`` could not be read back, or ``final`` exists. Nothing is published.
    """
    reports = sorted(temporary.glob(f"*{REPORT_SUFFIX}"))
    manifest = merge(
        head,
        [parse_report(read_bytes(path, MAX_MANIFEST_BYTES), path) for path in reports],
    )
    sizes = {name: regular_size(temporary / name) for name in manifest.files}
    text = checked_text(manifest, sizes, final, temporary)
    for report in reports:
        report.unlink()
    write_synced(temporary / MANIFEST, [text])
    write_synced(temporary / SUMS, [render_sums(hashlib.sha256(text).hexdigest(), manifest.files)])
    sync(temporary)
    if final.exists():
        raise CheckpointError(
            "MW-CHECKPOINT-025",
            f"{final} appeared during the save: does another job use this run directory?",
        )
    with as_checkpoint_error(final):
        rename_synced(temporary, final)
    return manifest


def parse_report(text: bytes, place: Place) -> ShardReport:
    """Parse the report of a shard. ``place`` is its path, for the message.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return ShardReport.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(
            "MW-CHECKPOINT-039",
            f"{place}: is no report of a shard ({error.error_count()} problems): does another job"
            " write there? Nothing is published",
        ) from error


def checked_text(
    manifest: Manifest, sizes: Mapping[str, int | None], final: Place, written: Place
) -> bytes:
    """Return the text of a manifest to publish. ``sizes``: bytes of each file as it is stored.

    Raises:
        CheckpointError: see :func:`publish`.
    """
    problems = check(manifest)
    for name, file in manifest.files.items():
        size = sizes.get(name)
        if size != file.size:
            problems.append(f"file {name}: {file.size} bytes were written, {size} are on the disk")
    if problems:
        raise CheckpointError(
            "MW-CHECKPOINT-024",
            "\n".join(f"{final.name}: {problem}" for problem in problems[:20])
            + f"\nnothing is published; the written files stay in {written} until the next save",
        )
    # as a resume will
    parse(render(manifest.model_copy(update={"tensors": {}, "files": {}})), str(final / MANIFEST))
    text = render(manifest)
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            "MW-CHECKPOINT-032",
            f"{final.name}: its manifest would have {len(text):,} bytes, more than the"
            f" {MAX_MANIFEST_BYTES:,} that are read: the ranks write too many boxes. Lower"
            " parallel.shard_factor",
        )
    return text


def merge(head: CheckpointMetadata, reports: Sequence[ShardReport]) -> Manifest:
    """Merge the reports of all shards into one manifest.

    Raises:
        CheckpointError: Two shards disagree on a tensor's global shape or dtype.
    """
    pieces: dict[str, list[PieceEntry]] = {}
    entries: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    for report in reports:
        files.update(report.files)
        for name, entry in report.tensors.items():
            first = entries.setdefault(name, entry)
            if (first.shape, first.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    "MW-CHECKPOINT-026",
                    f"tensor {name!r}: one rank has {first.dtype}{list(first.shape)}, another"
                    f" {entry.dtype}{list(entry.shape)}: the ranks did not build the same model",
                )
            pieces.setdefault(name, []).extend(entry.pieces)
    return Manifest(
        format=FORMAT,
        version=VERSION,
        step=head.step,
        samples_seen=head.samples_seen,
        seed=head.seed,
        saved_at_s=int(time.time()),
        config=dict(head.config),
        data_fingerprint=dict(head.data_fingerprint),
        versions=versions(),
        state=dict(head.state),
        tensors={
            name: entry.model_copy(update={"pieces": tuple(pieces[name])})
            for name, entry in entries.items()
        },
        files=files,
    )
