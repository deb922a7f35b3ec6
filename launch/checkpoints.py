"""Command ``meshwright checkpoint``: the checkpoints of a run, their soundness and their contents. No ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint import Candidate, CheckpointReader, find, open_checkpoint
from meshwright.checkpoint.files import checkpoints_directory
from meshwright.checkpoint.manifest import MANIFEST, TensorEntry
from meshwright.errors import CheckpointError
from meshwright.terminal.format import format_size, format_table
from meshwright.tools.trust import foreign_builders

if TYPE_CHECKING:
    from meshwright.tools.reshard import ReshardResult


def find_checkpoint(place: Path, step: int | None) -> Candidate:
    """Return the checkpoint at ``place``. For a run directory: the newest, or the one of ``step``.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if (place / MANIFEST).is_file():
        found = [candidate for candidate in find(place.parent.parent) if candidate.path.name == place.name]
        chosen = found[0] if found else Candidate(open_checkpoint(place).manifest.step, place)
        if step is not None and step != chosen.step:
            raise CheckpointError(
                "MW-LAUNCH-001", f"{place} is a checkpoint of step {chosen.step}, and --step asks for {step}"
            )
        return chosen
    candidates = _all(place)
    if step is None:
        return candidates[0]
    for candidate in candidates:
        if candidate.step == step:
            return candidate
    steps = ", ".join(str(candidate.step) for candidate in reversed(candidates))
    raise CheckpointError("MW-LAUNCH-002", f"{place} has no checkpoint of step {step}; it has those of steps {steps}")


def _all(run: Path) -> list[Candidate]:
    """Return the checkpoints of a run, newest first; raise CheckpointError if there is none."""
    candidates = find(run)
    if not candidates:
        what = "has no checkpoint yet" if run.is_dir() else "is no directory"
        raise CheckpointError(
            "MW-LAUNCH-003", f"{run} {what}: give a run directory, such as runs/demo, or one of its checkpoints/step-*"
        )
    return candidates


def table(run: Path) -> str:
    """Return a table of a run's checkpoints, oldest first, and the other directories beside them."""
    rows = [("step", "samples seen", "saved on", "tensors", "files", "size", "")]
    candidates = _all(run)
    for candidate in reversed(candidates):
        try:
            manifest = open_checkpoint(candidate.path).manifest
        except CheckpointError as error:
            rows.append((str(candidate.step), "", "", "", "", "", f"DAMAGED: {str(error).splitlines()[0]}"))
            continue
        sizes = [file.size for file in manifest.files.values()]
        numbers = f"{len(manifest.tensors):,}", f"{len(sizes):,}", format_size(sum(sizes))
        rows.append((str(candidate.step), f"{manifest.samples_seen:,}", layout(manifest.config), *numbers, ""))
    lines = format_table(rows, ">><>>><")
    counted = {candidate.path.name for candidate in candidates}
    directory = checkpoints_directory(run)
    for name in sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name not in counted):
        what = "a save under way, or one that died" if name.startswith(".tmp-") else "does not count"
        lines.append(f"{directory / name}: {what}")
    return "\n".join(lines)


def verify_checkpoints(place: Path, step: int | None) -> Iterator[tuple[Path, str]]:
    """Verify one checkpoint, or all of a run, oldest first; yield each path and the error ("" if sound)."""
    chosen = find_checkpoint(place, step)
    one = step is not None or chosen.path == place
    for candidate in [chosen] if one else reversed(find(place)):
        try:
            open_checkpoint(candidate.path).verify()
        except CheckpointError as error:
            yield candidate.path, str(error)
        else:
            yield candidate.path, ""


def describe_checkpoint(checkpoint: CheckpointReader, parameter: str | None) -> str:
    """Return the metadata of a checkpoint and its tensors, or only the pieces of ``parameter``."""
    manifest = checkpoint.manifest
    if parameter is not None:
        return _pieces(checkpoint, parameter)
    kinds = Counter(name.partition("/")[0] for name in manifest.tensors)
    of_kind = {
        kind: sum(size_of(entry) for name, entry in manifest.tensors.items() if name.startswith(f"{kind}/"))
        for kind in kinds
    }
    lines = [
        str(checkpoint.path),
        f"step          {manifest.step}",
        f"samples seen  {manifest.samples_seen:,}",
        f"seed          {manifest.seed}",
        f"saved on      {layout(manifest.config)}",
        f"model         {manifest.config.get('model', {}).get('builder', '?')}",
        *(f"data          {name} {digest[:16]}" for name, digest in sorted(manifest.data_fingerprint.items())),
        f"versions      {', '.join(f'{name} {version}' for name, version in sorted(manifest.versions.items()))}",
        *(f"{kind:<13} {number:,} tensors, {format_size(of_kind[kind])}" for kind, number in kinds.items()),
        "",
    ]
    rows = []
    for name, entry in manifest.tensors.items():
        rows.append((name, str(entry.dtype), _shape(entry), f"{len(entry.pieces)} pieces" if entry.pieces[1:] else ""))
    return "\n".join([*lines, *(format_table(rows, "<<<<") if rows else [])])


def _pieces(checkpoint: CheckpointReader, name: str) -> str:
    """Return the pieces of a tensor, found by its own name or by that of its parameter."""
    tensors = checkpoint.manifest.tensors
    found = [key for key in tensors if name in (key, key.partition("/")[2])]
    if not found:
        near = ", ".join(sorted({key.partition("/")[2] for key in tensors})[:4])
        raise CheckpointError("MW-LAUNCH-004", f"{checkpoint.path} has no tensor {name!r}; it has those of {near}, ...")
    lines = []
    for key in found:
        entry = tensors[key]
        lines.append(f"{key}  {entry.dtype}  {_shape(entry)}  {format_size(size_of(entry))}")
        for piece in entry.pieces:
            box = ", ".join(f"{o}:{o + n}" for o, n in zip(piece.offset, piece.shape, strict=True))
            lines.append(f"  [{box}]  {piece.file}")
    return "\n".join(lines)


def resharded(source: Path, written: ReshardResult, out: Path) -> str:
    """Return the summary of a resharded checkpoint, with the command that trains from it."""
    before, after = (layout(open_checkpoint(path).manifest.config) for path in (source, written.path))
    files = sorted(written.manifest.files.items())
    total = format_size(sum(file.size for _, file in files))
    trust = " --trust-code" if foreign_builders(written.config) else ""
    return "\n".join(
        [
            f"{source}: {before}",
            f"{written.path}: {after}",
            *format_table([(f"  {name}", format_size(file.size)) for name, file in files], "<>"),
            f"{len(files):,} file{'s' * (len(files) != 1)}, {total}",
            f"go on with: meshwright train {out / 'config.toml'}{trust}",
        ]
    )


def _shape(entry: TensorEntry) -> str:
    return f"({', '.join(map(str, entry.shape))})"


def size_of(entry: TensorEntry) -> int:
    """Return the bytes of a tensor's elements."""
    return math.prod(entry.shape) * entry.dtype.as_torch.itemsize


def layout(config: dict[str, Any]) -> str:
    """Return the layout of a saved configuration, such as ``dp2 x pp2 x tp2, 1f1b``; any other layout can load it."""
    parallel, pipeline = config.get("parallel", {}), config.get("pipeline", {})
    degrees = " x ".join(f"{axis}{parallel[axis]}" for axis in ("dp", "pp", "tp") if axis in parallel)
    return ", ".join(filter(None, [degrees, str(pipeline.get("schedule", ""))])) or "?"
