"""Construction of one rank's parts from a configuration and a mesh, ``build(config, mesh) -> Parts``: opens the data,
makes process groups and allocates the weights, but runs no step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import (
    RunConfig,
    bucket_bytes,
    expert_shard_factor,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.data.sources import Source, data_fingerprint, open_files, open_sources
from meshwright.data_parallel.expert_stage import StageSharding, fully_sharded_stage, open_sharding
from meshwright.data_parallel.members import parameter_at, shard_layout, stage_members, tied_groups
from meshwright.data_parallel.replica import Replica, StageReplica
from meshwright.data_parallel.sharding import StageParameter
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.model.build import materialise
from meshwright.optimizer import HostMemory, OffloadedOptimizer, first_scale, host_memory
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.parameters import DTYPES
from meshwright.parts import Parts
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.stage import Stage, StageSpec, activation_offload, compile_layers
from meshwright.pipeline.values import Loss, Losses, cross_entropy, with_heads
from meshwright.schedule.analysis import links_of
from meshwright.tensor_parallel.cross_entropy import check_full_sequence, split_vocab_size, vocab_parallel_cross_entropy
from meshwright.watch.observers import handle_nonfinite


def pick_loss(blueprint: Blueprint, tp: Group, *, training: bool) -> Loss:
    """Return the loss for full or vocabulary-sharded logits; loss options and head weights apply in training only."""
    model = blueprint.model
    if model.loss is not None:
        return model.loss
    options = model.loss_options if training else {}
    vocab_size = split_vocab_size(model.layers, blueprint.infos)
    if vocab_size is None:
        check_full_sequence(model.layers, sequence=blueprint.config.parallel.sequence)
        return with_heads(partial(cross_entropy, **options), model.loss_heads, training=training)
    loss = partial(vocab_parallel_cross_entropy, group=tp, vocab_size=vocab_size, **options)
    return with_heads(loss, model.loss_heads, training=training)


def build(
    config: RunConfig,
    mesh: Mesh,
    sources: tuple[Source, Source | None] | None = None,
    blueprint: Blueprint | None = None,
) -> Parts:
    """Build one rank's parts. Collective over all ranks; ``config`` is resolved.

    Args:
        sources: training and validation samples; None opens the corpora of the configuration.
        blueprint: this rank's own, if it exists already. Its layers become the rank's layers: no other rank may use
            the same object.
    """
    blueprint = draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep) if blueprint is None else blueprint
    mesh.compare_digests(blueprint.digest())
    training, validation = open_sources(config) if sources is None else sources
    for source in (training, validation):
        open_files(source)
    sharding = open_sharding(mesh, shard_factor(config), expert_shard_factor(config))
    host = host_memory(config, mesh.device)
    stages, replicas = _make_stages(blueprint, mesh, sharding, host)
    offload = activation_offload(config, mesh.device)
    for stage in stages.values():
        stage.calls.offload = offload
    weight_group = mesh.over_tp(sharding.dense.shard) if config.optimizer.needs_full_weights else None
    optimizer = make_optimizer(config, replicas, mesh.at.tp_rank, host=host, weight_group=weight_group)
    executor = Executor(
        blueprint.schedule,
        mesh.open_links(links_of(blueprint.schedules)),
        stages,
        mesh.device,
        draw=blueprint.model.draw,
        replicas=replicas,
        reduces_each_microbatch=reduces_each_microbatch(config),
        metrics=blueprint.metrics,
        offload=offload,
        reads_samples=blueprint.cut.by_sample,
        ep=mesh.ep,
    )
    fingerprint = data_fingerprint(training)
    parts = Parts(config, mesh, blueprint, executor, replicas, optimizer, training, validation, fingerprint)
    parts.on_nonfinite = handle_nonfinite
    parts.state.loss_scale = first_scale(config)
    return parts


def make_optimizer(
    config: RunConfig,
    replicas: Mapping[int, Replica],
    tp_rank: int,
    *,
    host: HostMemory | None,
    weight_group: Group | None,
) -> FlatOptimizer:
    """Build the optimizer over this rank's shards of all buckets. Steps and all-gathers them in the order of forward.

    ``weight_group``: the ranks that together hold a full weight, over tp and shards; None if the optimizer needs none.
    """
    buckets = [bucket for replica in replicas.values() for bucket in replica.buckets]
    shards = [
        OptimizerShard(
            weights=bucket.master,
            gradient=bucket.shard_gradient,
            decays=bucket.kind.decays,
            is_eight_bit=bucket.kind.is_eight_bit,
            is_counted=bucket.kind.owns(tp_rank) and bucket.sharding.copies.rank == 0,
            fetch_gradient=bucket.fetch_gradient,
            after_step=bucket.gather,
            wait=bucket.wait,
            settings=bucket.kind.settings,
            layout=shard_layout(bucket, weight_group, config.run.seed),
            name_of=partial(parameter_at, bucket),
        )
        for bucket in buckets
    ]
    index_of = {id(bucket): index for index, bucket in enumerate(buckets)}
    order = [index_of[id(bucket)] for replica in replicas.values() for bucket in reversed(replica.buckets)]
    if host is not None:
        return OffloadedOptimizer(shards, config.optimizer, host, order=order)
    return FlatOptimizer(shards, config.optimizer, order=order)


def make_stage(
    blueprint: Blueprint, index: int, layers: nn.Sequential, losses: Losses, before_layer: Callable[[str], None]
) -> Stage:
    """Build a stage of these layers with the specs of the blueprint. ``losses``: (training, validation)."""
    spec = StageSpec(
        index,
        input=blueprint.boundaries[index - 1] if index > 0 else None,
        output=blueprint.boundaries[index] if index < len(blueprint.stages) - 1 else None,
        loss_scale=1.0 / blueprint.label_positions,
        splits_backward=blueprint.schedule.splits_backward,
        recomputed=blueprint.recomputed,
        running=frozenset(blueprint.running),
        offloaded=blueprint.offloaded,
    )
    training_loss, validation_loss = losses
    return Stage(
        spec,
        layers,
        training_loss,
        validation_loss=validation_loss,
        before_layer=before_layer,
        draw=blueprint.model.draw,
        checks_loss=blueprint.model.loss is not None,
    )


def _make_stages(
    blueprint: Blueprint, mesh: Mesh, sharding: StageSharding, host: HostMemory | None
) -> tuple[dict[int, Stage], dict[int, Replica]]:
    """Build the stages of this rank with their weights, and the replica of each."""
    config = blueprint.config
    stages_of = blueprint.stage_of_parameter()
    tied = tied_groups(stages_of, blueprint.schedule.rank_of, mesh)
    losses = pick_loss(blueprint, mesh.tp, training=True), pick_loss(blueprint, mesh.tp, training=False)
    stages: dict[int, Stage] = {}
    replicas: dict[int, Replica] = {}
    for index in blueprint.schedule.stages_of(mesh.at.pp_rank):
        is_fully_sharded = _is_fully_sharded(blueprint, index, sharding)
        layers = _materialise_stage(blueprint, index, mesh, is_fully_sharded=is_fully_sharded)
        members = stage_members(
            index,
            layers,
            infos=blueprint.infos,
            canonical=blueprint.model.canonical,
            stages_of=stages_of,
            tied=tied,
        )
        replicas[index] = _make_replica(
            config, members, layers, mesh, sharding, host=host, is_fully_sharded=is_fully_sharded
        )
        compile_layers(layers, config, mesh.device, warns=mesh.rank == 0)
        stages[index] = make_stage(blueprint, index, layers, losses, replicas[index].wait_for_layer)
    blueprint.model.release()  # first values that a run of the builder has left in memory
    return stages, replicas


def _is_fully_sharded(blueprint: Blueprint, stage: int, sharding: StageSharding) -> bool:
    """Return whether FSDP2 shards the weights of a stage: ZeRO-3 over several ranks. It shards no stage of scalars."""
    has_rows = any(parameter.dim() for parameter in blueprint.stage_layers(stage).parameters())
    return blueprint.config.parallel.zero == 3 and sharding.dense.shard.size > 1 and has_rows


def _materialise_stage(blueprint: Blueprint, stage: int, mesh: Mesh, *, is_fully_sharded: bool) -> nn.Sequential:
    """Return the layers of a stage with their weights. Collective over the ranks of the stage."""
    return materialise(
        blueprint.stage_layers(stage),
        blueprint.model,
        blueprint.infos,
        DTYPES[blueprint.config.train.dtype],
        # FSDP2 moves its shards to the device: the whole weights of a stage need not fit there
        torch.device("cpu") if is_fully_sharded else mesh.device,
        ranks=(mesh.replicas, mesh.tp, mesh.device),  # they draw the initial weights together
    )


def _make_replica(
    config: RunConfig,
    members: list[StageParameter],
    layers: nn.Sequential,
    mesh: Mesh,
    sharding: StageSharding,
    *,
    host: HostMemory | None,
    is_fully_sharded: bool,
) -> Replica:
    """Return the replica of a stage, sharded according to ``parallel.zero``."""

    def in_buckets(members: list[StageParameter]) -> StageReplica:
        return StageReplica(
            members,
            sharding=sharding,
            tp=mesh.tp,
            bucket_bytes=bucket_bytes(config),
            keeps_gradient=config.parallel.zero < 2,
            host=host,
            block_size=config.optimizer.block_size if config.optimizer.name == "adamw8bit" else 1,
        )

    if not is_fully_sharded:
        return in_buckets(members)
    return fully_sharded_stage(
        members, layers, sharding, mesh.tp, mesh.device, offload=host is not None, make_buckets=in_buckets
    )
