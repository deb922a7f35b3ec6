"""Conversion of a run's state for checkpoints: flat shards <-> full tensors by name,
one bucket at a time.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT
from meshwright.blueprint import Blueprint
from meshwright.checkpoint import CheckpointMetadata, CheckpointReader, TensorKind, TensorPiece
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.preflight import SavedTensor
from meshwright.config import RunConfig, leaves_out_base
from meshwright.data_parallel.members import full_tensor, full_weights
from meshwright.data_parallel.replica import Replica
from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.errors import CheckpointError
from meshwright.mesh.mesh import Mesh
from meshwright.model.buffers import is_saved
from meshwright.optimizer import (
    GRADIENT_POINT,
    evaluated_weights,
    factor_infos,
    factors_of,
    read_record,
    read_states,
    restore_states,
    saved_states_of,
    state_names,
)
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts, TrainState
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


def saved_running(parts: Parts) -> dict[str, Tensor]:
    """Return the running buffers of this rank's stages that a checkpoint holds, by name."""
    layers = parts.blueprint.model.layers
    return {name: buffer for name, buffer in parts.running().items() if is_saved(layers, name)}


def saved_factors(blueprint: Blueprint) -> Iterator[SavedTensor]:
    """Yield the factored optimizer states of a checkpoint,
    each under the name of its weight.
    """
    for name, shape, dtype, trained in saved_tensors(blueprint):
        for _, info in factor_infos(blueprint.config.optimizer, name, shape) if trained else ():
            yield SavedTensor(
                name, info.global_shape, torch.promote_types(dtype, torch.float32), False
            )


OWN_OPTIMIZER = "own_optimizer"
"""Key in a manifest's ``state``: names and numbers in the state
of an ``optimizer.builder``'s optimizer.
"""


def agree_on_states(parts: Parts) -> dict[str, Any] | None:
    """Return the record of the states that a user's optimizer has now; None for other optimizers.
    Collective; blocks.

    The next step is checked against a new optimizer that continues from these states.

    Raises:
        ConfigError: on every rank, if a checkpoint could not hold the states.
    """
    own = parts.optimizer.own
    if own is None:
        return None
    states = own.agree(parts.mesh.world, parts.optimizer.added)
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


def load_weights(bucket: ShardedParameters, weights: Tensor, master: Tensor | None) -> None:
    """Copy this rank's part from full flat tensors (numel,). Master None:
    masters start from the weights.
    """
    start, stop = bucket.shard_range
    if bucket.flat is not None:
        bucket.flat.copy_(weights)
    bucket.master.copy_((weights if master is None else master)[start:stop])


def flat_pieces(kind: TensorKind, bucket: ShardedParameters, flat: Tensor) -> Iterator[TensorPiece]:
    """Yield the pieces of a flat tensor by parameter, without padding."""
    for slot in bucket.slots:
        info = slot.member.info
        yield TensorPiece(
            kind, info, info.unpadded(flat[slot.start : slot.stop].view(info.local_shape))
        )


def pieces(
    replicas: Mapping[int, Replica],
    optimizer: FlatOptimizer,
    mesh: Mesh,
    running: Mapping[str, Tensor],
    with_frozen: bool = True,
) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of a checkpoint. Collective over the shard groups that write:
    every rank must exhaust it, to all-gather shards.

    One rank yields each piece, that of ``Holders.is_saved``. ``running``: buffers that forward changes,
    by name.
    ``with_frozen``: frozen weights too.
    """
    if mesh.replicas.rank == 0 and mesh.at.tp_rank == 0:
        for name, buffer in running.items():
            yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer)
    index = 0
    for replica in replicas.values():
        replica.wait_for_weights()
        for member in replica.frozen:
            if not with_frozen and not is_adapter(member.info.name):
                continue
            if member.holders.is_saved:
                yield TensorPiece(
                    TensorKind.WEIGHTS, member.info, member.info.unpadded(member.parameter.detach())
                )
        for bucket in replica.frozen_shards:
            if (with_frozen or _is_of_adapters(bucket)) and bucket.holders.is_counted:
                weights = full_weights(bucket)
                if bucket.holders.is_saved:
                    yield from flat_pieces(TensorKind.WEIGHTS, bucket, weights)
        for bucket in replica.buckets:
            number, index = index, index + 1
            states, _ = read_states(optimizer, number)
            states |= {name: flats[number] for name, flats in optimizer.added.items()}
            if not bucket.holders.is_counted:
                continue
            shards = {TensorKind(name): state for name, state in states.items()}
            evaluated = evaluated_weights(optimizer, number)
            if bucket.is_mixed_precision:
                shards[TensorKind.MASTER] = evaluated
            is_own = evaluated is bucket.master
            if is_own:
                weights = full_weights(bucket)
            else:
                weights = full_tensor(bucket, evaluated.to(bucket.dtype))
            if bucket.holders.is_saved:
                yield from flat_pieces(TensorKind.WEIGHTS, bucket, weights)
            del weights
            for kind, shard in shards.items():
                flat = full_tensor(bucket, shard)
                if bucket.holders.is_saved:
                    yield from flat_pieces(kind, bucket, flat)
            if bucket.holders.is_saved and mesh.at.tp_rank == 0:  # every holder has whole ones
                for name, info, tensor in factors_of(optimizer, number):
                    yield TensorPiece(TensorKind(name), info, tensor)


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
    index = 0
    for replica in replicas.values():
        for member in replica.frozen:
            if not (adapted if is_adapter(member.info.name) else has_base):
                continue
            found = _read(checkpoint, TensorKind.WEIGHTS, member.info, member.parameter.dtype)
            member.parameter.data.copy_(found.view(member.info.local_shape))
        for bucket in replica.frozen_shards:
            if adapted if _is_of_adapters(bucket) else has_base:
                load_weights(bucket, _read_bucket(checkpoint, TensorKind.WEIGHTS, bucket), None)
        for bucket in replica.buckets:
            start, stop = bucket.shard_range
            if is_fresh and _is_of_adapters(bucket) and not adapted:
                index += 1
                continue
            with torch.no_grad():
                has_master = (
                    bucket.is_mixed_precision and not is_fresh and stepped == TensorKind.WEIGHTS
                )
                master = _read_bucket(checkpoint, TensorKind.MASTER, bucket) if has_master else None
                load_weights(bucket, _read_bucket(checkpoint, stepped, bucket), master)
            if optimizer_steps:
                states = {
                    name: _read_bucket(checkpoint, TensorKind(name), bucket)[start:stop].clone()
                    for name in state_names(optimizer, index)
                }
                restore_states(optimizer, index, states, optimizer_steps)
                for name, info, tensor in factors_of(optimizer, index):
                    tensor.copy_(_read(checkpoint, TensorKind(name), info, tensor.dtype))
            for name, flats in optimizer.added.items():
                kind = TensorKind(name)
                is_saved = bool(checkpoint.parameters(kind))
                flats[index].copy_(
                    _read_bucket(checkpoint, kind, bucket)[start:stop]
                    if is_saved
                    else bucket.master
                )
            index += 1


def _is_of_adapters(bucket: ShardedParameters) -> bool:
    """Return whether all parameters of a bucket are an adapter's."""
    return all(is_adapter(slot.member.info.name) for slot in bucket.slots)


def _read(
    checkpoint: CheckpointReader, kind: TensorKind, info: ParameterInfo, dtype: torch.dtype
) -> Tensor:
    found = checkpoint.read(kind, info, dtype)
    if found is None:
        raise CheckpointError(
            "MW-RUN-029",
            f"{checkpoint.path} has no {kind} of the parameter {info.name}: it was saved by another"
            " model, or without its optimizer. Choose another run.name to start a new run",
        )
    return found


def _read_bucket(
    checkpoint: CheckpointReader, kind: TensorKind, bucket: ShardedParameters
) -> Tensor:
    """Read one kind of tensor for all parameters of a bucket, flat, in the dtype of the optimizer;
    padding zero.
    """
    like = bucket.master
    flat = torch.zeros(bucket.numel, dtype=like.dtype, device=like.device)
    for slot in bucket.slots:
        flat[slot.start : slot.stop] = (
            _read(checkpoint, kind, slot.member.info, like.dtype).to(like.device).reshape(-1)
        )
    return flat
