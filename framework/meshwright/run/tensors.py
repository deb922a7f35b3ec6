"""Metadata of a checkpoint, and the way back from its tensors to this rank's shards.

Of master weights and states a rank reads its own shard alone, of weights what its layout keeps.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT
from meshwright.blueprint import Blueprint
from meshwright.checkpoint import CheckpointMetadata, CheckpointReader, TensorKind
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.preflight import BYTES_PER_TENSOR, SavedTensor, checkpoint_bytes
from meshwright.config import RunConfig, leaves_out_base
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.sharding import ShardedParameters, slot_parts
from meshwright.errors import CheckpointError
from meshwright.model.buffers import is_saved
from meshwright.optimizer import (
    GRADIENT_POINT,
    factor_infos,
    factors_of,
    read_record,
    restore_states,
    saved_states_of,
    state_names,
)
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts, TrainState
from meshwright.run.pieces import is_of_adapters
from meshwright.system.bounded import shortened

STOP_REASON, MAX_REASON = "stop_reason", 1000
"""Key of a callback's request to end the run in a checkpoint's state,
and the characters of it that are kept.
"""


def saved_tensors(blueprint: Blueprint) -> Iterator[SavedTensor]:
    """Yield every weight and running buffer that a checkpoint holds, each once,
    with its global shape.
    """
    layers = blueprint.model.layers
    config = blueprint.config
    is_base_left_out = leaves_out_base(config.adapter, config.model, config.run)
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        is_left_out = is_base_left_out and not is_adapter(name)
        if blueprint.model.canonical(name) == name and not is_left_out:
            shape = blueprint.infos[name].global_shape
            yield SavedTensor(name, shape, parameter.dtype, parameter.requires_grad)
    for name in filter(partial(is_saved, layers), blueprint.running):
        buffer = layers.get_buffer(name)
        yield SavedTensor(name, tuple(buffer.shape), buffer.dtype, False)


def saved_factors(blueprint: Blueprint) -> Iterator[SavedTensor]:
    """Yield the factored optimizer states of a checkpoint,
    each under the name of its weight.
    """
    for name, shape, dtype, trained in saved_tensors(blueprint):
        for _, info in factor_infos(blueprint.config.optimizer, name, shape) if trained else ():
            yield SavedTensor(
                name, info.global_shape, torch.promote_types(dtype, torch.float32), False
            )


def checkpoint_size(blueprint: Blueprint, num_added: int = 0) -> int:
    """Return the bytes of a checkpoint of a run, in any layout.

    ``num_added``: states per weight that callbacks have added.
    """
    tensors, factors = saved_tensors(blueprint), saved_factors(blueprint)
    return tensors_bytes(blueprint, tensors, factors, num_added, BYTES_PER_TENSOR)


def tensors_bytes(
    blueprint: Blueprint,
    tensors: Iterable[SavedTensor],
    factors: Iterable[SavedTensor] = (),
    num_added: int = 0,
    bytes_per_tensor: int = 0,
) -> int:
    """Return the bytes of these tensors of a checkpoint, with the master weights and states of
    trained ones.

    Args:
        factors: factored states, from :func:`saved_factors`.
        num_added: states per weight that callbacks have added.
        bytes_per_tensor: of headers and manifest.
    """
    size = checkpoint_bytes(factors, 0, bytes_per_tensor)
    by_kind: dict[bool, list[SavedTensor]] = {False: [], True: []}
    for tensor in tensors:
        by_kind[tensor.name in blueprint.model.matrices].append(tensor)
    for is_matrix, of_kind in by_kind.items():
        states = saved_states_of(blueprint.config.optimizer, is_matrix=is_matrix)
        size += checkpoint_bytes(of_kind, len(states) + num_added, bytes_per_tensor)
    return size


OWN_OPTIMIZER = "own_optimizer"
"""Key in a manifest's ``state``: names and numbers in the state
of an ``optimizer.builder``'s optimizer.
"""


def agree_on_states(parts: Parts, *, checks: bool = True) -> dict[str, Any] | None:
    """Return the record of the states that a user's optimizer has now; None for other optimizers.
    Collective; blocks.

    ``checks``: check the next step against a new optimizer that continues from these states.

    Raises:
        ConfigError: on every rank, if a checkpoint could not hold the states.
    """
    own = parts.optimizer.own
    if own is None:
        return None
    states = own.agree(parts.mesh.world, parts.optimizer.added)
    if checks:
        own.request_check()
    return states.record()


def take_states(optimizer: FlatOptimizer, manifest: Manifest) -> None:
    """Take the names and numbers of a user's optimizer from a manifest;
    an older one has no record of them.

    Raises:
        CheckpointError: the record was not written by this project.
    """
    found = manifest.state.get(OWN_OPTIMIZER)
    if optimizer.own is None or found is None:
        return
    try:
        optimizer.own.states = read_record(found)
    except ValueError as error:
        raise CheckpointError(
            "MW-RUN-038",
            f"the manifest of the checkpoint of step {manifest.step} has state.{OWN_OPTIMIZER} ="
            f" {reprlib.repr(found)}: {error}. It was not written by this project; take another"
            " checkpoint",
        ) from None


def checkpoint_metadata(
    config: RunConfig,
    state: TrainState,
    data_fingerprint: Mapping[str, str],
    base: str | None = None,
    stop_reason: str | None = None,
    own_optimizer: Mapping[str, Any] | None = None,
) -> CheckpointMetadata:
    """Return the metadata of a checkpoint of this state.

    Args:
        base: fingerprint of the frozen base of adapters.
        stop_reason: of a callback that has asked to end the run after the next step.
        own_optimizer: see :func:`agree_on_states`.
    """
    return CheckpointMetadata(
        step=state.step,
        samples_seen=state.samples_seen,
        seed=config.run.seed,
        config=config.model_dump(mode="json"),
        data_fingerprint=data_fingerprint,
        state={
            "tokens_seen": state.tokens_seen,
            "optimizer_steps": state.optimizer_steps,
            "skipped_in_a_row": state.skipped_in_a_row,
            **(
                {"loss_scale": state.loss_scale._asdict()}
                if config.train.dtype == "float16"
                else {}
            ),
            **({"callbacks": state.callbacks} if state.callbacks else {}),
            **({FINGERPRINT: base} if base is not None else {}),
            **(
                {STOP_REASON: shortened(stop_reason, MAX_REASON)} if stop_reason is not None else {}
            ),
            **({OWN_OPTIMIZER: own_optimizer} if own_optimizer is not None else {}),
        },
    )


def restore(
    checkpoint: CheckpointReader,
    replicas: Mapping[int, Replica],
    optimizer: FlatOptimizer,
    optimizer_steps: int,
    running: Mapping[str, Tensor],
) -> None:
    """Load weights, running buffers, master weights and optimizer states from a checkpoint
    of any layout.

    A checkpoint without optimizer steps (an imported model) has weights alone: master weights start
    as copies of them. So does a callback's state that the checkpoint does not have. Adapters that
    an imported model lacks keep their first values, as does a frozen base that checkpoints leave
    out.

    Raises:
        CheckpointError: a parameter is missing, or has another shape.
    """
    is_fresh = not optimizer_steps and not checkpoint.parameters(TensorKind.MASTER)
    saved_names = set(checkpoint.parameters(TensorKind.WEIGHTS))
    adapted = any(map(is_adapter, saved_names))
    has_base = not adapted or not all(map(is_adapter, saved_names - running.keys()))
    for name, buffer in running.items():
        saved = checkpoint.read(
            TensorKind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer.dtype
        )
        assert saved is not None  # a missing weight raises in read
        buffer.copy_(saved)
    is_apart = bool(optimizer_steps) and GRADIENT_POINT in saved_states_of(optimizer.config)
    stepped = TensorKind(GRADIENT_POINT) if is_apart else TensorKind.WEIGHTS
    has_masters = not is_fresh and stepped == TensorKind.WEIGHTS
    index = 0
    for replica in replicas.values():
        for member in replica.frozen:
            if not (adapted if is_adapter(member.info.name) else has_base):
                continue
            found = _read(checkpoint, TensorKind.WEIGHTS, member.info, member.parameter.dtype)
            member.parameter.data.copy_(found.view(member.info.local_shape))
        for bucket in replica.frozen_shards:
            if adapted if is_of_adapters(bucket) else has_base:
                _restore_weights(checkpoint, bucket, TensorKind.WEIGHTS, has_master=False)
        for bucket in replica.buckets:
            if not is_fresh or adapted or not is_of_adapters(bucket):
                has_master = has_masters and bucket.is_mixed_precision
                _restore_weights(checkpoint, bucket, stepped, has_master=has_master)
                _restore_states(checkpoint, bucket, optimizer, index, optimizer_steps)
            index += 1


@torch.no_grad()
def _restore_weights(
    checkpoint: CheckpointReader,
    bucket: ShardedParameters,
    stepped: TensorKind,
    *,
    has_master: bool,
) -> None:
    """Load the weights of a bucket, and this rank's shard of the master weights.

    Args:
        stepped: kind of the tensors that the optimizer stepped when it had no master weights.
        has_master: False: master weights start as copies of the weights.
    """
    shard_range = bucket.shard_range
    if bucket.flat is None:
        kind = TensorKind.MASTER if has_master else stepped
        bucket.master.copy_(_read_range(checkpoint, kind, bucket, shard_range))
        return
    weights = _read_range(checkpoint, stepped, bucket, (0, bucket.numel))
    bucket.flat.copy_(weights)
    if has_master:
        bucket.master.copy_(_read_range(checkpoint, TensorKind.MASTER, bucket, shard_range))
    else:
        bucket.master.copy_(weights[slice(*shard_range)])


def _restore_states(
    checkpoint: CheckpointReader,
    bucket: ShardedParameters,
    optimizer: FlatOptimizer,
    index: int,
    optimizer_steps: int,
) -> None:
    """Load this rank's shard of the states of the optimizer and of callbacks.

    ``index``: of the bucket's shard in the optimizer.
    """
    shard_range = bucket.shard_range
    if optimizer_steps:
        states = {
            name: _read_range(checkpoint, TensorKind(name), bucket, shard_range)
            for name in state_names(optimizer, index)
        }
        restore_states(optimizer, index, states, optimizer_steps)
        for name, info, tensor in factors_of(optimizer, index):
            tensor.copy_(_read(checkpoint, TensorKind(name), info, tensor.dtype))
    for name, shards in optimizer.added.items():
        kind = TensorKind(name)
        is_saved = bool(checkpoint.parameters(kind))
        shards[index].copy_(
            _read_range(checkpoint, kind, bucket, shard_range) if is_saved else bucket.master
        )


def _read(
    checkpoint: CheckpointReader, kind: TensorKind, info: ParameterInfo, dtype: torch.dtype
) -> Tensor:
    found = checkpoint.read(kind, info, dtype)
    return _found(found, checkpoint, kind, info)


def _found(
    found: Tensor | None, checkpoint: CheckpointReader, kind: TensorKind, info: ParameterInfo
) -> Tensor:
    """Return a tensor that was read. Raises CheckpointError: the checkpoint has none of its kind."""
    if found is None:
        raise CheckpointError(
            "MW-RUN-029",
            f"{checkpoint.path} has no {kind} of the parameter {info.name}: it was saved by another"
            " model, or without its optimizer. Choose another run.name to start a new run",
        )
    return found


def _read_range(
    checkpoint: CheckpointReader,
    kind: TensorKind,
    bucket: ShardedParameters,
    bucket_range: tuple[int, int],
) -> Tensor:
    """Read elements [start, stop) of a bucket, flat, in the dtype of the optimizer; padding zero.

    No other elements are read.
    """
    start, stop = bucket_range
    flat = torch.zeros(stop - start, dtype=bucket.master.dtype, device=bucket.master.device)
    for part in slot_parts(bucket.slots, start, stop):
        info, size = part.slot.member.info, part.stop - part.start
        read = checkpoint.read_range(kind, info, part.position, part.position + size)
        flat[part.start - start : part.stop - start] = _found(read, checkpoint, kind, info)
    return flat
