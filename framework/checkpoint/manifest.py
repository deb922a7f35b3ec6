"""Manifest of a checkpoint: its fields, its text, and the checks when it is read back.

This module works on text and numbers and touches no tensor. A manifest may come from anywhere, so reading is strict. It
refuses unknown or duplicate keys, numbers that are not whole and non-negative, file names with a path, and tensors that
their pieces do not cover exactly once. All of this happens before a shard is opened.
"""

from __future__ import annotations

import itertools
import json
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.checkpoint.counts import contradictions
from meshwright.errors import CheckpointError
from meshwright.system.bounded import parse_json

FORMAT: Final = "meshwright-checkpoint"
VERSION: Final = 1
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"

MAX_DIMS: Final = 64
"""Bound on the number of dims of a tensor in a manifest."""
MAX_CUT_DIMS: Final = 6
MAX_ELEMENTS: Final = 2**60
MOST_BOXES, MOST_COMPARED = 8, 500_000

Count = Annotated[int, Field(ge=0, lt=2**60)]
"""A number of elements or bytes."""
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number; the bound is at least any bound of the configuration, see [bounds of whole numbers] in
framework/config/schema.py."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")]
"""A plain file name: no separator and no leading dot, so that no piece lies outside its checkpoint."""


class TensorKind(StrEnum):
    """Role of a tensor for its parameter. The value is the first part of the tensor's name."""

    WEIGHTS = "weights"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"

    def of(self, parameter: str) -> str:
        """Return the name of the tensor in manifest and shards."""
        return f"{self}/{parameter}"


class Dtype(StrEnum):
    """Element types, with the names used by safetensors."""

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    U8 = "U8"


class CheckpointMetadata(NamedTuple):
    """Metadata of a checkpoint besides its tensors; all of it plain JSON."""

    step: int
    samples_seen: int
    seed: int
    config: Mapping[str, Any]
    """Resolved configuration: ``RunConfig.model_dump(mode="json")``."""
    data_fingerprint: Mapping[str, str]
    """Fingerprints that must not change in a resumed run, by name: ``{"train": "...", "tokenizer": "..."}``."""
    state: Mapping[str, Any]
    """Scalar state, such as the optimizer's step count."""


class StrictModel(BaseModel):
    """Base of the frozen parts of the JSON: no unknown keys, no numbers given as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PieceEntry(StrictModel):
    """One piece of a tensor: the box ``[offset, offset + shape)``, and the file and key of its values."""

    file: FileName
    key: str
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]


class TensorEntry(StrictModel):
    """One tensor of the model: global shape (no padding), dtype, pieces."""

    shape: tuple[Count, ...]
    dtype: Dtype
    pieces: tuple[PieceEntry, ...]


class FileEntry(StrictModel):
    """One file of a shard."""

    size: Count
    """Bytes."""
    sha256: Digest


class Manifest(StrictModel):
    """The whole manifest. ``version`` increases when an older reader could misinterpret a newer checkpoint."""

    format: Literal["meshwright-checkpoint"]
    version: Literal[1]
    step: Int64
    samples_seen: Int64
    seed: Int64
    config: dict[str, Any]
    data_fingerprint: dict[str, str]
    versions: dict[str, str]
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]


def render(manifest: Manifest) -> bytes:
    """Render the manifest as JSON with a line per tensor and per file, suited for ``diff``."""
    data = manifest.model_dump(mode="json")
    lines = []
    for key, value in data.items():
        if key in ("tensors", "files") and value:
            inner = [f"  {_json(name)}: {_json(item)}" for name, item in sorted(value.items())]
            lines.append(f" {_json(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def render_sums(manifest_sha256: str, files: Mapping[str, FileEntry]) -> bytes:
    """Render SHA256SUMS in the format of ``sha256sum -c``. The manifest comes first, because it lists the others."""
    lines = [f"{manifest_sha256}  {MANIFEST}\n"]
    lines += [f"{file.sha256}  {name}\n" for name, file in sorted(files.items())]
    return "".join(lines).encode()


def parse(text: bytes, place: str) -> Manifest:
    """Parse and check a manifest. ``place`` is its path, for messages.

    Raises:
        CheckpointError: The problems found.
    """
    try:
        raw = parse_json(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except ValueError as error:
        raise CheckpointError("MW-CHECKPOINT-005", f"{place}: not a manifest: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError("MW-CHECKPOINT-006", f'{place}: not a manifest: "format" is not "{FORMAT}"')
    if raw.get("version") != VERSION:
        raise CheckpointError(
            "MW-CHECKPOINT-007",
            f"{place}: format version {raw.get('version')!r}, this meshwright reads version {VERSION}: "
            f"read it with the meshwright that wrote it ({raw.get('versions')})",
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        found = [
            f"{place}: {'.'.join(map(str, e['loc']))}: {e['msg']} (it is {reprlib.repr(e['input'])})"
            for e in error.errors()[:20]
        ]
        raise CheckpointError("MW-CHECKPOINT-008", "\n".join(found)) from error
    problems = check(manifest)
    if problems:
        raise CheckpointError("MW-CHECKPOINT-009", "\n".join(f"{place}: {problem}" for problem in problems[:20]))
    return manifest


def check(manifest: Manifest) -> list[str]:
    """Check the parts of a well-formed manifest against each other: counts, names, files, exact cover of each tensor.

    Return the problems.
    """
    problems = contradictions(manifest.step, manifest.samples_seen, manifest.seed, manifest.config, manifest.state)
    kinds = {str(kind) for kind in TensorKind}
    used: set[tuple[str, str]] = set()
    for name, entry in manifest.tensors.items():
        kind, _, parameter = name.partition("/")
        if kind not in kinds or not parameter:
            problems.append(f"tensor {name!r}: the name must be <kind>/<parameter> with a kind of {sorted(kinds)}")
        for part in entry.pieces:
            if part.file not in manifest.files:
                problems.append(f"tensor {name!r}: its file {part.file} has no size and hash in the manifest")
            if (part.file, part.key) in used:
                problems.append(f"tensor {name!r}: {part.file} key {part.key!r} is used twice")
            used.add((part.file, part.key))
        problem = coverage(entry)
        if problem:
            problems.append(f"tensor {name!r}: {problem}")
    return problems


def coverage(entry: TensorEntry) -> str | None:
    """Check that every element of the tensor lies in exactly one piece. Return the problem, or None.

    The time is linear in the number of pieces (see :func:`_is_exact`).
    """
    rank = len(entry.shape)
    if rank > MAX_DIMS or _numel(entry.shape) >= MAX_ELEMENTS:
        return f"the shape {list(entry.shape)[:MAX_DIMS]} has more than {MAX_DIMS} dims or 2^60 elements"
    for part in entry.pieces:
        if len(part.offset) != rank or len(part.shape) != rank:
            return f"offset {part.offset} and shape {part.shape} have not the {rank} dims of {list(entry.shape)}"
        if any(o + n > size for o, n, size in zip(part.offset, part.shape, entry.shape, strict=True)):
            return f"{_box(part)} reaches beyond the shape {list(entry.shape)}"
        if 0 in part.shape:
            return f"{_box(part)} is empty"
    if len(_cut_dims(entry)) > MAX_CUT_DIMS:
        return f"its pieces are cut along more than {MAX_CUT_DIMS} dims"
    if _is_exact(entry):
        return None
    pair = _overlapping(entry.pieces)
    if pair is not None:
        return f"{_box(pair[0])} and {_box(pair[1])} overlap: the same elements were written twice"
    held = sum(_numel(part.shape) for part in entry.pieces)
    if held >= _numel(entry.shape) > 0:
        return f"some of its {len(entry.pieces)} pieces overlap: the same elements were written twice"
    parts = sorted(entry.pieces, key=lambda part: part.offset)
    listed = ", ".join(map(_box, parts[:MOST_BOXES])) + (", ..." if len(parts) > MOST_BOXES else "")
    return f"the pieces hold {held} of the {_numel(entry.shape)} elements of shape {list(entry.shape)}: " + (
        listed or "no piece at all"
    )


def _is_exact(entry: TensorEntry) -> bool:
    """Check an exact cover by signed corners, in time linear in the number of pieces.

    The mixed difference along all dims of a box's indicator is +1 or -1 at its corners and 0 elsewhere. Two functions
    with bounded support are equal if their mixed differences are equal. So the pieces add up to 1 everywhere in the
    tensor if their signed corners add up to the tensor's own.
    """
    whole = PieceEntry(file="whole.safetensors", key="", offset=(0,) * len(entry.shape), shape=entry.shape)
    if 0 in entry.shape:
        return not entry.pieces
    dims = _cut_dims(entry)
    corners: Counter[tuple[int, ...]] = Counter()
    for part, sign in ((whole, -1), *((part, 1) for part in entry.pieces)):
        ends = [((part.offset[dim], 1), (part.offset[dim] + part.shape[dim], -1)) for dim in dims]
        for corner in itertools.product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(each for _, each in corner)
    return not any(corners.values())


def _cut_dims(entry: TensorEntry) -> list[int]:
    return [dim for dim, size in enumerate(entry.shape) if any(part.shape[dim] != size for part in entry.pieces)]


def _overlapping(pieces: Sequence[PieceEntry]) -> tuple[PieceEntry, PieceEntry] | None:
    """Find two overlapping pieces for a message; None if MOST_COMPARED comparisons find none."""
    compared = 0
    parts = sorted(pieces, key=lambda part: part.offset)
    for at, part in enumerate(parts):
        for other in itertools.islice(parts, at + 1, None):
            compared += 1
            if compared > MOST_COMPARED or (part.offset and other.offset[0] >= part.offset[0] + part.shape[0]):
                break
            if intersection(part.offset, part.shape, other.offset, other.shape) is not None:
                return part, other
    return None


def intersection(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Return ``(start, stop)`` per dim of the intersection of two boxes in global coordinates; None if it is empty."""
    common = []
    for o, n, other_o, other_n in zip(offset, shape, other_offset, other_shape, strict=True):
        start, stop = max(o, other_o), min(o + n, other_o + other_n)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _box(part: PieceEntry) -> str:
    ranges = ", ".join(f"{o}:{o + n}" for o, n in zip(part.offset, part.shape, strict=True))
    return f"[{ranges}] in {part.file}"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {name!r} stands there twice")
    return found


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is no number that a checkpoint may hold")
