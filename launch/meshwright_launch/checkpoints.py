"""Command ``meshwright checkpoint``: list, verify and show the checkpoints of a run. No ranks."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

from meshwright.checkpoint import Candidate, CheckpointReader, find, open_checkpoint
from meshwright.checkpoint.files import checkpoints_directory, retried
from meshwright.checkpoint.manifest import TensorEntry
from meshwright.errors import CheckpointError
from meshwright.run.directory import is_checkpoint
from meshwright.run.places import find_in, saved_places
from meshwright.system.store import Place, StoreAccess, StorePath
from meshwright.terminal.format import format_size, format_table
from meshwright.terminal.output import put


def list_checkpoints(options: argparse.Namespace, _: list[str]) -> int:
    """Print a table of a run's checkpoints, oldest first, and the other directories beside them."""
    run: Place = options.place
    if is_checkpoint(run):
        run = _run_of(run) or run
    rows = [("step", "samples seen", "saved on", "tensors", "files", "size", "")]
    candidates = _find_all(run)
    for candidate in reversed(candidates):
        try:
            manifest = open_checkpoint(candidate.path).manifest
        except CheckpointError as error:
            rows.append(
                (str(candidate.step), "", "", "", "", "", f"DAMAGED: {str(error).splitlines()[0]}")
            )
            continue
        sizes = [file.size for file in manifest.files.values()]
        numbers = f"{len(manifest.tensors):,}", f"{len(sizes):,}", format_size(sum(sizes))
        is_elsewhere = candidate.path.parent != checkpoints_directory(run)
        rows.append(
            (
                str(candidate.step),
                f"{manifest.samples_seen:,}",
                layout(manifest.config),
                *numbers,
                str(candidate.path.parent) if is_elsewhere else "",
            )
        )
    lines = format_table(rows, ">><>>><")
    listed = {candidate.path for candidate in candidates}
    for directory in map(checkpoints_directory, saved_places(run)):
        for path in sorted(each for each in _folders_in(directory) if each not in listed):
            what = (
                "a save in progress, or one that died"
                if path.name.startswith(".tmp-")
                else "not a checkpoint"
            )
            lines.append(f"{path}: {what}")
    put("\n".join(lines))
    return 0


def _folders_in(directory: Place) -> list[Place]:
    """Return the folders directly below a directory, which may be missing."""
    if isinstance(directory, StorePath):
        sizes = retried(lambda: StoreAccess().names(directory), directory)
        return [directory / name for name, size in sizes.items() if size is None]
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _run_of(checkpoint: Place) -> Place | None:
    """Return the run whose checkpoint it is; None: it was copied out of one."""
    if isinstance(checkpoint, StorePath):
        return checkpoint.parent
    run = checkpoint.absolute().parents[1]
    return run if checkpoint.absolute().parent == checkpoints_directory(run) else None


def verify(options: argparse.Namespace, _: list[str]) -> int:
    """Verify one checkpoint, or all of a run, oldest first. Return 1 if one is damaged, else 0."""
    place, step = options.place, options.step
    chosen = find_checkpoint(place, step)
    is_single = step is not None or chosen.path == place
    is_damaged = False
    for candidate in [chosen] if is_single else reversed(_find_all(place)):
        lines = [f"{candidate.path}: sound"]
        try:
            open_checkpoint(candidate.path).verify()
        except CheckpointError as error:
            is_damaged = True
            lines = [
                f"{candidate.path}: DAMAGED",
                *(f"  {line}" for line in str(error).splitlines()),
            ]
        put("\n".join(lines), flush=True)
    return 1 if is_damaged else 0


def show(options: argparse.Namespace, _: list[str]) -> int:
    """Print the metadata and the tensors of a checkpoint, or the pieces of one parameter."""
    checkpoint = open_checkpoint(find_checkpoint(options.place, options.step).path)
    put(
        _describe(checkpoint)
        if options.tensor is None
        else _describe_pieces(checkpoint, options.tensor)
    )
    return 0


def find_checkpoint(place: Place, step: int | None) -> Candidate:
    """Return the checkpoint at ``place``. For a run directory: the newest, or the one of ``step``.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if is_checkpoint(place):
        run = place.parent if isinstance(place, StorePath) else place.parent.parent
        found = [each for each in find(run) if each.path.name == place.name]
        chosen = found[0] if found else Candidate(open_checkpoint(place).manifest.step, place)
        if step is not None and step != chosen.step:
            raise CheckpointError(
                "MW-LAUNCH-001",
                f"{place} is the checkpoint of step {chosen.step}, not of --step {step}",
            )
        return chosen
    candidates = _find_all(place)
    if step is None:
        return candidates[0]
    for candidate in candidates:
        if candidate.step == step:
            return candidate
    steps = ", ".join(str(candidate.step) for candidate in reversed(candidates))
    raise CheckpointError(
        "MW-LAUNCH-002", f"{place} has no checkpoint of step {step}; it has those of steps {steps}"
    )


def _find_all(run: Place) -> list[Candidate]:
    """Return the checkpoints of a run, newest first; raise CheckpointError if there is none."""
    candidates = find_in(saved_places(run))
    if not candidates:
        is_run = isinstance(run, StorePath) or run.is_dir()
        what = "has no checkpoint yet" if is_run else "is no directory"
        raise CheckpointError(
            "MW-LAUNCH-003",
            f"{run} {what}: give a run directory, such as runs/demo, or one of its"
            " checkpoints/step-*",
        )
    return candidates


def _describe(checkpoint: CheckpointReader) -> str:
    """Return the metadata of a checkpoint and the list of its tensors."""
    manifest = checkpoint.manifest
    kinds = Counter(name.partition("/")[0] for name in manifest.tensors)
    of_kind = {
        kind: sum(
            size_of(entry)
            for name, entry in manifest.tensors.items()
            if name.startswith(f"{kind}/")
        )
        for kind in kinds
    }
    lines = [
        str(checkpoint.path),
        f"step          {manifest.step}",
        f"samples seen  {manifest.samples_seen:,}",
        f"seed          {manifest.seed}",
        f"saved on      {layout(manifest.config)}",
        f"model         {manifest.config.get('model', {}).get('builder', '?')}",
        *(
            f"data          {name} {digest[:16]}"
            for name, digest in sorted(manifest.data_fingerprint.items())
        ),
        (
            "versions     "
            f" {', '.join(f'{name} {version}' for name, version in sorted(manifest.versions.items()))}"
        ),
        *(
            f"{kind:<13} {number:,} tensors, {format_size(of_kind[kind])}"
            for kind, number in kinds.items()
        ),
        "",
    ]
    rows = [
        (
            name,
            str(entry.dtype),
            _shape(entry),
            f"{len(entry.pieces)} pieces" if entry.pieces[1:] else "",
        )
        for name, entry in manifest.tensors.items()
    ]
    return "\n".join([*lines, *(format_table(rows, "<<<<") if rows else [])])


def _describe_pieces(checkpoint: CheckpointReader, name: str) -> str:
    """Return the pieces of the tensors with this name, or of the parameter with this name."""
    tensors = checkpoint.manifest.tensors
    found = [key for key in tensors if name in (key, key.partition("/")[2])]
    if not found:
        near = ", ".join(sorted({key.partition("/")[2] for key in tensors})[:4])
        raise CheckpointError(
            "MW-LAUNCH-004",
            f"{checkpoint.path} has no tensor {name!r}; it has those of {near}, ...",
        )
    lines = []
    for key in found:
        entry = tensors[key]
        lines.append(f"{key}  {entry.dtype}  {_shape(entry)}  {format_size(size_of(entry))}")
        for piece in entry.pieces:
            box = ", ".join(f"{o}:{o + n}" for o, n in zip(piece.offset, piece.shape, strict=True))
            lines.append(f"  [{box}]  {piece.file}")
    return "\n".join(lines)


def _shape(entry: TensorEntry) -> str:
    return f"({', '.join(map(str, entry.shape))})"


def size_of(entry: TensorEntry) -> int:
    """Return the bytes of a tensor's elements."""
    return math.prod(entry.shape) * entry.dtype.as_torch.itemsize


def layout(config: dict[str, Any]) -> str:
    """Return the layout of a saved configuration, such as ``dp2 x pp2 x tp2, 1f1b``;
    any other layout can load it.
    """
    parallel, pipeline = config.get("parallel", {}), config.get("pipeline", {})
    degrees = " x ".join(
        f"{axis}{parallel[axis]}"
        for axis in (
            "dp",
            "pp",
            "tp",
            *(axis for axis in ("cp", "ep") if parallel.get(axis, 1) != 1),
        )
        if axis in parallel
    )
    return ", ".join(filter(None, [degrees, str(pipeline.get("schedule", ""))])) or "?"
