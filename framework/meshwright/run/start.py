"""Start of a run from the weights of another: ``run.start``, before step 1 of a run without
checkpoints.

    check_start    before any rank: the sources are there, and each tensor has an origin
    start          on the ranks: hash the checkpoint, note it in the run's directory, read my slices

A run that has a checkpoint resumes from it and does not open the sources again. Before its first
checkpoint it starts again from the very weights that ``start.json`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from meshwright.blueprint import Blueprint
from meshwright.checkpoint.boxes import local_boxes
from meshwright.checkpoint.check import intersection
from meshwright.config import RunConfig
from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.errors import CheckpointError, UserError
from meshwright.mesh.mesh import Mesh
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts
from meshwright.run.base import check_base_of
from meshwright.run.directory import START
from meshwright.run.pieces import saved_running
from meshwright.run.places import find_own
from meshwright.run.resume import newest_sound, resume
from meshwright.run.start_account import (
    StartAccount,
    base_places,
    describe,
    make_account,
    other_settings,
    takes_adapters,
)
from meshwright.run.tensors import saved_tensors
from meshwright.run.weight_source import (
    WeightSource,
    candidates_of,
    open_directory_weights,
    open_run_weights,
    tokenizers_of,
)
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_bytes
from meshwright.system.store import Place, parse_place


class StartedFrom(BaseModel):
    """One source in ``start.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    given: Annotated[str, Field(max_length=4096)]
    """Value of ``run.start``."""
    place: Annotated[str, Field(max_length=4096)]
    """The checkpoint; of a directory ``given`` itself."""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StartRecord(BaseModel):
    """Contents of ``start.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["meshwright start 1"] = "meshwright start 1"
    sources: Annotated[tuple[StartedFrom, ...], Field(max_length=64)]


def check_start(blueprint: Blueprint, directory: Path) -> None:
    """Check, before any rank exists, that a run without checkpoints can start from ``run.start``.

    Raises:
        UserError: a source cannot be opened, or the account names tensors without an origin.
    """
    config = blueprint.config
    if not config.run.start or find_own(config, directory):
        return
    earlier = _earlier(directory)
    sources = []
    for given in config.run.starts:
        place, _ = earlier.get(given, (given, ""))
        candidates = _candidates(given, place, directory)
        sources.append(
            open_directory_weights(given, config.model)
            if candidates is None
            else _first_open(candidates)
        )
    make_account(config, list(saved_tensors(blueprint)), sources)


def _candidates(given: str, place: str, directory: Path) -> list[Place] | None:
    """Return the checkpoints of a source, newest first; None: it is no run or checkpoint.

    Args:
        place: that of an earlier start of this run, or ``given``.
        directory: that of this run.

    Raises:
        CheckpointError: there is none, or that of the earlier start is gone.
    """
    if place != given and not parse_place(place).is_dir():
        raise CheckpointError(
            "MW-RUN-060",
            f"{place}, the weights that this run has started from ({directory / START}), is gone:"
            f" put it back; or remove {directory / START} to start from what run.start names now",
        )
    return candidates_of(place)


def _first_open(candidates: Sequence[Place]) -> WeightSource:
    """Open the first checkpoint that is whole; the ranks verify its hashes."""
    problems = []
    for path in candidates:
        try:
            return open_run_weights(path)
        except CheckpointError as error:
            problems.append(error)
    raise CheckpointError.join(problems)


def resume_or_start(
    parts: Parts,
    directory: Path,
    log: Callable[[str], None],
    callbacks: Collection[str] = (),
    mirror: Path | None = None,
) -> None:
    """Resume from the mirror or the newest sound checkpoint, see :func:`~.resume.resume`; without
    any, start from ``run.start``. Collective over all ranks; blocks.

    Raises:
        UserError: on every rank.
    """
    is_resumed = resume(parts, directory, log, callbacks, mirror)
    given = ", ".join(parts.config.run.starts)
    if given and is_resumed:
        log(f"  run.start = {given} is not read: the run has checkpoints of its own")
    elif given:
        start(parts, directory, log)


def start(parts: Parts, directory: Path, log: Callable[[str], None]) -> None:
    """Fill the weights of a new run from ``run.start``. Collective over all ranks; blocks.

    Optimizer states, step, samples and the loss scale stay those of a new run. Master weights are
    the source's float32 ones, where it has some.

    Raises:
        UserError: on every rank; see :func:`check_start`.
    """
    config, mesh = parts.config, parts.mesh
    sources = _open_on_ranks(config, directory, mesh)
    account = make_account(config, list(saved_tensors(parts.blueprint)), sources)
    problem = None
    try:
        _fill(parts, account, sources)
    except UserError as error:
        problem = error
    _raise_together(problem, mesh)
    _check_bases(parts, account, sources)
    for line in describe(account, sources, config.model.builder):
        log(line)
    lines = other_settings(config, sources)
    tokenizers = tokenizers_of(parts.data_fingerprint)
    lines += [
        f"the tokenizer of the corpus is another than that of {source.place}"
        for source in sources
        if tokenizers and source.tokenizers and not tokenizers & source.tokenizers
    ]
    for line in lines:
        log(f"  differs {line}")


def _check_bases(parts: Parts, account: StartAccount, sources: Sequence[WeightSource]) -> None:
    """Check that adapters whose base comes from elsewhere stand beside the base that they were
    trained on. Collective; blocks.

    Raises:
        CheckpointError: on every rank; they do not.
    """
    config = parts.config
    places = base_places(account, sources, config.model.builder)
    for index, source in enumerate(sources):
        is_own_base = places.keys() == {index}
        if source.base is None or is_own_base or not takes_adapters(account, index):
            continue
        # two roundings of a base to bfloat16, the bits of a fingerprint, may differ from one
        is_rounded = "float16" in {source.dtype, config.train.dtype}
        if account.grown or (is_rounded and source.dtype != config.train.dtype):
            continue
        check_base_of(source.base, parts, source.place, " and ".join(places.values()))


def _open_on_ranks(config: RunConfig, directory: Path, mesh: Mesh) -> list[WeightSource]:
    """Open the sources on every rank, the same bytes on all of them, and record them on rank 0."""
    before, problem = None, None
    if mesh.rank == 0:
        try:
            before = _earlier(directory)
        except CheckpointError as error:
            problem = error
    _raise_together(problem, mesh)
    earlier: dict[str, list[str]] = mesh.world.gather_objects(before)[0]
    sources: list[WeightSource] = []
    started: list[StartedFrom] = []
    for given in config.run.starts:
        place, digest = earlier.get(given, (given, ""))
        source, is_checkpoint = _open_one(given, place, config, directory, mesh)
        if digest and source.digest != digest:
            raise CheckpointError(
                "MW-RUN-056",
                f"{source.place} has changed since this run has started from it: its hash was"
                f" {digest[:16]} and is {source.digest[:16]}. Choose another run.name to start from"
                f" what is there now, or remove {directory / START}",
            )
        sources.append(source)
        kept_place = source.place if is_checkpoint else given
        started.append(StartedFrom(given=given, place=kept_place, digest=source.digest))
    if mesh.rank == 0:
        text = StartRecord(sources=tuple(started)).model_dump_json(indent=1)
        write_atomic(directory / START, f"{text}\n")
    return sources


def _open_one(
    given: str, place: str, config: RunConfig, directory: Path, mesh: Mesh
) -> tuple[WeightSource, bool]:
    """Open a source on every rank; return it, and whether it is a checkpoint, of which each rank
    has hashed some of the files. Collective.

    Raises:
        UserError: on every rank, the first one of any rank.
    """
    source, problem, candidates = None, None, None
    try:
        candidates = _candidates(given, place, directory)
        if candidates is None:
            source = open_directory_weights(given, config.model)
    except UserError as error:
        problem = error
    _raise_together(problem, mesh)
    is_checkpoint = source is None
    if source is None:
        assert candidates is not None
        first = candidates[0]
        run = first.absolute().parents[1] if isinstance(first, Path) else first.parent
        path = newest_sound(run, mesh, only=candidates)
        assert path is not None
        source = open_run_weights(path)
    digests: list[str] = mesh.world.gather_objects(source.digest)
    if len(set(digests)) > 1:
        raise CheckpointError(
            "MW-RUN-057",
            f"{source.place}: not all ranks read the same files: put them on a file system that"
            " all nodes share",
        )
    return source, is_checkpoint


def _raise_together(problem: UserError | None, mesh: Mesh) -> None:
    """Raise the first problem of any rank on every rank. Collective; blocks."""
    problems: list[str | None] = mesh.world.gather_objects(
        None if problem is None else str(problem)
    )
    if problem is not None:
        raise problem
    found = next((text for text in problems if text is not None), None)
    if found is not None:
        raise CheckpointError("MW-RUN-058", f"another rank cannot open run.start: {found}")


def _earlier(directory: Path) -> dict[str, list[str]]:
    """Return place and digest of each source of an earlier start, by its value of ``run.start``.

    Raises:
        CheckpointError: the record is damaged.
    """
    place = directory / START
    try:
        record = StartRecord.model_validate_json(read_bytes(place))
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise CheckpointError(
            "MW-RUN-041",
            f"{place} is damaged ({problem}): remove it to start from what run.start names now",
        ) from None
    return {each.given: [each.place, each.digest] for each in record.sources}


# -- my slices


class _Filler(NamedTuple):
    """Reader of this rank's slices by the names of the model."""

    account: StartAccount
    sources: Sequence[WeightSource]

    def read(self, info: ParameterInfo, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
        """Return the local slice of a tensor on the CPU, padding zero, and a mask of its elements
        that the source has; mask None: all. None: the tensor keeps its initial values.
        """
        origin = self.account.taken.get(info.name)
        if origin is None:
            return None
        source = self.sources[origin.source]
        local = torch.zeros(info.local_shape, dtype=dtype)
        known = torch.zeros(info.local_shape, dtype=torch.bool)
        boxes = local_boxes(info, info.unpadded(local))
        masks = local_boxes(info, info.unpadded(known))
        start = (0,) * len(origin.shape)
        for (offset, shape, inside), (_, _, mask) in zip(boxes, masks, strict=True):
            common = intersection(offset, shape, start, origin.shape)
            if common is None:
                continue
            box_offset = tuple(first for first, _ in common)
            box_shape = tuple(last - first for first, last in common)
            place = tuple(slice(0, length) for length in box_shape)
            inside[place].copy_(source.read_box(origin.name, box_offset, box_shape))
            mask[place] = True
        return local, known if info.name in self.account.grown else None

    def copy(self, info: ParameterInfo, tensor: Tensor) -> None:
        """Fill a tensor of ``info.local_shape``."""
        found = self.read(info, tensor.dtype)
        if found is not None:
            _copy_known(tensor.view(info.local_shape), *found)

    def copy_bucket(self, bucket: ShardedParameters) -> None:
        """Fill the weights and master weights of a bucket."""
        first, last = bucket.shard_range
        for slot in bucket.slots:
            found = self.read(slot.member.info, bucket.master.dtype)
            if found is None:
                continue
            values, known = (None if each is None else each.reshape(-1) for each in found)
            assert values is not None
            if bucket.flat is not None:
                _copy_known(bucket.flat[slot.start : slot.stop], values, known)
            start, stop = max(slot.start, first), min(slot.stop, last)
            if start >= stop:
                continue
            mine = slice(start - slot.start, stop - slot.start)
            master = bucket.master[start - first : stop - first]
            _copy_known(master, values[mine], None if known is None else known[mine])


def _copy_known(target: Tensor, values: Tensor, known: Tensor | None) -> None:
    """Copy values into a tensor, where they are known."""
    if known is None:
        target.copy_(values)
        return
    rounded = values.to(device=target.device, dtype=target.dtype)
    target.copy_(torch.where(known.to(target.device), rounded, target))


def _fill(parts: Parts, account: StartAccount, sources: Sequence[WeightSource]) -> None:
    """Fill this rank's weights, master weights and running buffers. No communication."""
    filler = _Filler(account, sources)
    with torch.no_grad():
        for name, buffer in saved_running(parts).items():
            filler.copy(ParameterInfo(name, tuple(buffer.shape)), buffer)
        for replica in parts.replicas.values():
            for member in replica.frozen:
                filler.copy(member.info, member.parameter.data)
            for bucket in replica.frozen_shards:
                filler.copy_bucket(bucket)
        for bucket, added in _with_added(parts):
            filler.copy_bucket(bucket)
            for state in added:
                state.copy_(bucket.master)  # a callback's state starts from the weights


def _with_added(parts: Parts) -> Iterator[tuple[ShardedParameters, list[Tensor]]]:
    """Yield each trained bucket with the states that callbacks have added to it."""
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    for index, bucket in enumerate(buckets):
        yield bucket, [flats[index] for flats in parts.optimizer.added.values()]
