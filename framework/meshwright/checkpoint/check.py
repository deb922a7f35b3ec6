"""Strict parsing of a manifest, which is untrusted input. All checks run before a shard is opened.

Refused are unknown or duplicate keys, numbers that are not whole and non-negative, file names with
a path, tensors that their pieces do not cover exactly once, and counts that contradict each other:

    samples_seen      = step x batch.global_batch (a run never changes its global batch; see `compatible`); at most that
                        with batch.ramp
    optimizer_steps  <= step
    skipped_in_a_row <= step - optimizer_steps, and <= watch.most_skipped of the start that saved
    tokens_seen      <= samples_seen x data.sequence_length, for a causal corpus
    seed              = run.seed

The counts are compared with the configuration in the manifest itself. Missing keys are not
compared.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from meshwright.checkpoint.manifest import FORMAT, KIND, VERSION, Manifest, PieceEntry, TensorEntry
from meshwright.config import RunConfig
from meshwright.errors import CheckpointError
from meshwright.system.bounded import parse_json

MAX_DIMS: Final = 64
"""Bound on the number of dims of a tensor in a manifest."""
MAX_CUT_DIMS: Final = 6
MAX_ELEMENTS: Final = 2**60
MOST_BOXES, MOST_COMPARED = 8, 500_000  # pieces listed in a message; comparisons to find an overlap
STATE = ("tokens_seen", "optimizer_steps", "skipped_in_a_row")


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
        raise CheckpointError(
            "MW-CHECKPOINT-006", f'{place}: not a manifest: "format" is not "{FORMAT}"'
        )
    if raw.get("version") != VERSION:
        raise CheckpointError(
            "MW-CHECKPOINT-007",
            f"{place}: format version {raw.get('version')!r}, this meshwright reads version"
            f" {VERSION}: read it with the meshwright that wrote it ({raw.get('versions')})",
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        found = [
            f"{place}: {'.'.join(map(str, e['loc']))}: {e['msg']} (it is"
            f" {reprlib.repr(e['input'])})"
            for e in error.errors()[:20]
        ]
        raise CheckpointError("MW-CHECKPOINT-008", "\n".join(found)) from error
    problems = check(manifest)
    if problems:
        raise CheckpointError(
            "MW-CHECKPOINT-009", "\n".join(f"{place}: {problem}" for problem in problems[:20])
        )
    return manifest


def check(manifest: Manifest) -> list[str]:
    """Check the parts of a well-formed manifest against each other: counts, names, files,
    exact cover of each tensor.

    Return the problems.
    """
    problems = _no_tables(manifest.config) or contradictions(manifest)
    used: set[tuple[str, str]] = set()
    for name, entry in manifest.tensors.items():
        kind, _, parameter = name.partition("/")
        if not KIND.fullmatch(kind) or not parameter:
            problems.append(
                f"tensor {name!r}: the name must be <kind>/<parameter>, such as weights/0.weight"
            )
        for part in entry.pieces:
            if part.file not in manifest.files:
                problems.append(
                    f"tensor {name!r}: its file {part.file} has no size and hash in the manifest"
                )
            if (part.file, part.key) in used:
                problems.append(f"tensor {name!r}: {part.file} key {part.key!r} is used twice")
            used.add((part.file, part.key))
        problem = coverage(entry)
        if problem:
            problems.append(f"tensor {name!r}: {problem}")
    return problems


def coverage(entry: TensorEntry) -> str | None:
    """Check that every element of the tensor lies in exactly one piece. Return the problem,
    or None.

    The time is linear in the number of pieces (see :func:`_is_exact`).
    """
    rank = len(entry.shape)
    if rank > MAX_DIMS or math.prod(entry.shape) >= MAX_ELEMENTS:
        return (
            f"the shape {list(entry.shape)[:MAX_DIMS]} has more than {MAX_DIMS} dims or 2^60"
            " elements"
        )
    for part in entry.pieces:
        if len(part.offset) != rank or len(part.shape) != rank:
            return (
                f"offset {part.offset} and shape {part.shape} do not have the {rank} dims of"
                f" {list(entry.shape)}"
            )
        if any(
            o + n > size for o, n, size in zip(part.offset, part.shape, entry.shape, strict=True)
        ):
            return f"{_box(part)} exceeds the shape {list(entry.shape)}"
        if 0 in part.shape:
            return f"{_box(part)} is empty"
    if len(_cut_dims(entry)) > MAX_CUT_DIMS:
        return f"its pieces are cut along more than {MAX_CUT_DIMS} dims"
    if _is_exact(entry):
        return None
    pair = _find_overlap(entry.pieces)
    if pair is not None:
        return f"{_box(pair[0])} and {_box(pair[1])} overlap: the same elements were written twice"
    covered = sum(math.prod(part.shape) for part in entry.pieces)
    if covered >= math.prod(entry.shape) > 0:
        return (
            f"some of its {len(entry.pieces)} pieces overlap: the same elements were written twice"
        )
    parts = sorted(entry.pieces, key=lambda part: part.offset)
    listed = ", ".join(map(_box, parts[:MOST_BOXES])) + (", ..." if len(parts) > MOST_BOXES else "")
    total = math.prod(entry.shape)
    return (
        f"the pieces hold {covered} of the {total} elements of shape {list(entry.shape)}:"
        f" {listed or 'no pieces'}"
    )


def _is_exact(entry: TensorEntry) -> bool:
    """Check an exact cover by signed corners, in time linear in the number of pieces.

    The mixed difference along all dims of a box's indicator is +1 or -1 at its corners and 0
    elsewhere. Two functions with bounded support are equal if their mixed differences are equal. So
    the pieces add up to 1 everywhere in the tensor if their signed corners add up to the tensor's
    own.
    """
    whole = PieceEntry(
        file="whole.safetensors", key="", offset=(0,) * len(entry.shape), shape=entry.shape
    )
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
    return [
        dim
        for dim, size in enumerate(entry.shape)
        if any(part.shape[dim] != size for part in entry.pieces)
    ]


def _find_overlap(pieces: Sequence[PieceEntry]) -> tuple[PieceEntry, PieceEntry] | None:
    """Find two overlapping pieces for a message; None if MOST_COMPARED comparisons find none."""
    compared = 0
    parts = sorted(pieces, key=lambda part: part.offset)
    for at, part in enumerate(parts):
        for other in itertools.islice(parts, at + 1, None):
            compared += 1
            if compared > MOST_COMPARED or (
                part.offset and other.offset[0] >= part.offset[0] + part.shape[0]
            ):
                break
            if intersection(part.offset, part.shape, other.offset, other.shape) is not None:
                return part, other
    return None


def intersection(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    other_offset: tuple[int, ...],
    other_shape: tuple[int, ...],
) -> tuple[tuple[int, int], ...] | None:
    """Return ``(start, stop)`` per dim of the intersection of two boxes in global coordinates;
    None if it is empty.
    """
    common = []
    for o, n, other_o, other_n in zip(offset, shape, other_offset, other_shape, strict=True):
        start, stop = max(o, other_o), min(o + n, other_o + other_n)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def _box(part: PieceEntry) -> str:
    ranges = ", ".join(f"{o}:{o + n}" for o, n in zip(part.offset, part.shape, strict=True))
    return f"[{ranges}] in {part.file}"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {name!r} occurs twice")
    return found


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not allowed in a checkpoint")


def _no_tables(config: Mapping[str, Any]) -> list[str]:
    """Return the sections of the configuration that are no tables, one line each."""
    return [
        f"config.{name} = {reprlib.repr(config[name])}, which must be a table"
        for name in RunConfig.model_fields
        if name in config and not isinstance(config[name], Mapping)
    ]


def contradictions(manifest: Manifest) -> list[str]:
    """Return the contradictions between the counts, one line each with both values."""
    step, samples_seen, seed = manifest.step, manifest.samples_seen, manifest.seed
    config, state = manifest.config, manifest.state
    problems = [
        f"state.{name} = {state[name]!r}, which must be a whole number from 0 up"
        for name in STATE
        if name in state and not _is_count(state[name])
    ]
    if problems:
        return problems
    global_batch = _value(config, "batch", "global_batch")
    is_ramp = _value(config, "batch", "ramp") is not None
    if _is_count(global_batch) and (
        samples_seen > step * global_batch if is_ramp else samples_seen != step * global_batch
    ):
        problems.append(
            f"samples_seen = {samples_seen}, and step {step} x batch.global_batch {global_batch} = "
            f"{step * global_batch}"
        )
    recorded_seed = _value(config, "run", "seed")
    if _is_count(recorded_seed) and seed != recorded_seed:
        problems.append(f"seed = {seed}, and its run.seed = {recorded_seed}")
    return (
        problems
        + _step_contradictions(step, config, state)
        + _token_contradictions(samples_seen, config, state)
    )


def _step_contradictions(
    step: int, config: Mapping[str, Any], state: Mapping[str, Any]
) -> list[str]:
    problems = []
    taken, in_a_row = state.get("optimizer_steps"), state.get("skipped_in_a_row")
    if taken is not None and taken > step:
        problems.append(f"state.optimizer_steps = {taken}, more than its step {step}")
    elif taken is not None and in_a_row is not None and in_a_row > step - taken:
        problems.append(
            f"state.skipped_in_a_row = {in_a_row}, and {taken} of its {step} steps were taken: at"
            f" most {step - taken}"
        )
    most = _value(config, "watch", "most_skipped")
    if _value(config, "watch", "on_nonfinite") == "stop":
        most = 0
    if in_a_row is not None and _is_count(most) and in_a_row > most:
        problems.append(
            f"state.skipped_in_a_row = {in_a_row}, and its run allowed {most} (watch.most_skipped)"
        )
    return problems


def _token_contradictions(
    samples_seen: int, config: Mapping[str, Any], state: Mapping[str, Any]
) -> list[str]:
    tokens, length = state.get("tokens_seen"), _value(config, "data", "sequence_length")
    is_causal = (
        _value(config, "data", "task") == "causal" and _value(config, "data", "builder") is None
    )
    if tokens is None or not is_causal or not _is_count(length) or tokens <= samples_seen * length:
        return []
    return [f"state.tokens_seen = {tokens}, more than {samples_seen} samples of {length} tokens"]


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    table = config.get(section)
    return table.get(key) if isinstance(table, Mapping) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
