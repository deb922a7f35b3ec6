"""Construction of one rank's parts from a configuration and a mesh, ``build(config, mesh) ->
Parts``: opens the data, makes process groups and allocates the weights, but runs no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshwright.blueprint import Blueprint, draw_blueprint, units_of
from meshwright.config import (
    Optimizer,
    RunConfig,
    bucket_bytes,
    expert_shard_factor,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.data.mixture_losses import corpus_losses, with_corpora
from meshwright.data.sources import (
    Source,
    ValidationSources,
    data_fingerprint,
    expect_alternation,
    open_files,
    open_sources,
)
from meshwright.data_parallel.expert_replica import fully_sharded_replica
from meshwright.data_parallel.members import parameter_at, shard_layout, stage_members
from meshwright.data_parallel.replica import BucketReplica, Replica
from meshwright.data_parallel.sharding import ShardedParameters, StageParameter
from meshwright.data_parallel.ties import tied_groups
from meshwright.data_parallel.units import Units
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders, open_holders
from meshwright.mesh.mesh import Mesh
from meshwright.model.build import materialise
from meshwright.model.sync_batch_norm import join_replicas
from meshwright.optimizer import (
    HostMemory,
    OffloadedOptimizer,
    ShardLayout,
    first_scale,
    host_memory,
)
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.parameters import DTYPES
from meshwright.parts import Parts, TrainState
from meshwright.pipeline.activation_offload import ActivationOffload, activation_offload
from meshwright.pipeline.compiled import compile_layers
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import Loss, Losses, StageSpec, cross_entropy, with_heads
from meshwright.schedule.analysis import links_of
from meshwright.tensor_parallel.cross_entropy import (
    check_full_sequence,
    split_vocab_size,
    vocab_parallel_cross_entropy,
)
from meshwright.watch.observers import handle_nonfinite


def build(
    config: RunConfig,
    mesh: Mesh,
    sources: tuple[Source, ValidationSources] | None = None,
    blueprint: Blueprint | None = None,
) -> Parts:
    """Build one rank's parts. Collective over all ranks; ``config`` is resolved.

    Args:
        sources: training and validation samples; None opens the corpora of the configuration.
        blueprint: this rank's own, if it exists already. Its layers become the rank's layers: no
            other rank may use the same object.
    """
    if blueprint is None:
        blueprint = draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep)
    # before any other collective: ranks with different decisions would hang in one of them
    mesh.compare_digests(blueprint.digest())
    training, validations = open_sources(config) if sources is None else sources
    open_files(training, *validations.values())
    if blueprint.is_synchronised:
        join_replicas(blueprint.model.layers, mesh.second_group(mesh.replicas, "dp_statistics"))
        expect_alternation(training)
    holders_by_axis = open_holders(
        mesh,
        shard_factor(config.parallel),
        expert_shard_factor(config.parallel),
        needs_whole_weights=config.optimizer.spec.needs_full_weights,
    )
    host = host_memory(config.parallel, mesh.device)
    offload = activation_offload(config.pipeline, mesh.device)
    stages, replicas = _build_stages(blueprint, mesh, holders_by_axis, host, offload)
    optimizer = make_optimizer(config.optimizer, replicas, host=host, seed=config.run.seed)
    executor = Executor(
        blueprint.schedule,
        mesh.open_links(links_of(blueprint.schedules)),
        stages,
        mesh.device,
        current=blueprint.model.current,
        replicas=replicas,
        reduces_each_microbatch=reduces_each_microbatch(config.parallel),
        metrics=blueprint.metrics,
        offload=offload,
        reads_samples=blueprint.cut.by_sample,
        ep=mesh.ep,
    )
    return Parts(
        config,
        mesh,
        blueprint,
        executor,
        replicas=replicas,
        optimizer=optimizer,
        source=training,
        validations=validations,
        data_fingerprint=data_fingerprint(training),
        state=TrainState(loss_scale=first_scale(config.loss_scale, config.train.dtype)),
        on_nonfinite=handle_nonfinite,
    )


def pick_loss(blueprint: Blueprint, tp: Group, *, training: bool) -> Loss:
    """Return the loss for full or vocabulary-sharded logits;
    loss options and head weights apply in training only.
    """
    model = blueprint.model
    if model.loss is not None:
        return model.loss
    options = model.loss_options if training else {}
    smoothing = options.get("label_smoothing", 0.0)
    z_loss = options.get("z_loss", 0.0)
    vocab_size = split_vocab_size(model.layers, blueprint.infos)

    def of_full_logits(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, label_smoothing=smoothing, z_loss=z_loss)

    def of_sharded_logits(logits: Tensor, labels: Tensor) -> Tensor:
        assert vocab_size is not None
        return vocab_parallel_cross_entropy(
            logits, labels, tp, vocab_size, label_smoothing=smoothing, z_loss=z_loss
        )

    if vocab_size is None:
        check_full_sequence(model.layers, sequence=blueprint.config.parallel.sequence)
    loss = of_full_logits if vocab_size is None else of_sharded_logits
    return with_heads(loss, model.loss_heads, training=training)


def make_optimizer(
    optimizer: Optimizer, replicas: Mapping[int, Replica], *, host: HostMemory | None, seed: int
) -> FlatOptimizer:
    """Build the optimizer over this rank's shards of all buckets.
    Steps and all-gathers them in the order of forward.
    """
    shards: list[OptimizerShard] = []
    order: list[int] = []
    for replica in replicas.values():
        first = len(shards)
        for bucket in replica.buckets:
            shards.append(_optimizer_shard(bucket, shard_layout(bucket, seed)))
        # the buckets of a stage are in the order of backward
        order += reversed(range(first, len(shards)))
    if host is not None:
        return OffloadedOptimizer(shards, optimizer, host, order=order)
    return FlatOptimizer(shards, optimizer, order=order)


def _optimizer_shard(bucket: ShardedParameters, layout: ShardLayout) -> OptimizerShard:
    return OptimizerShard(
        weights=bucket.master,
        gradient=bucket.shard_gradient,
        decays=bucket.kind.decays,
        is_eight_bit=bucket.kind.is_eight_bit,
        fetch_gradient=bucket.fetch_gradient,
        after_step=bucket.gather,
        wait=bucket.wait,
        settings=bucket.kind.settings,
        layout=layout,
        name_of=lambda element: parameter_at(bucket, element),
    )


def make_stage(
    blueprint: Blueprint,
    index: int,
    layers: nn.Sequential,
    losses: Losses,
    before_layer: Callable[[str], None],
    offload: ActivationOffload | None = None,
) -> Stage:
    """Build a stage of these layers with the specs of the blueprint.

    ``losses``: (training, validation).
    """
    spec = StageSpec(
        index,
        input=blueprint.boundaries[index - 1] if index > 0 else None,
        output=blueprint.boundaries[index] if index < len(blueprint.stages) - 1 else None,
        label_scale=1.0 / blueprint.label_positions,
        splits_backward=blueprint.schedule.splits_backward,
        recomputed=blueprint.recomputed,
        running=frozenset(blueprint.running),
        offloaded=blueprint.offloaded,
        checks_loss=blueprint.model.loss is not None,
    )
    training_loss, validation_loss = losses
    return Stage(
        spec,
        layers,
        training_loss,
        validation_loss=validation_loss,
        before_layer=before_layer,
        offload=offload,
        current=blueprint.model.current,
    )


def _build_stages(
    blueprint: Blueprint,
    mesh: Mesh,
    holders_by_axis: Mapping[str | None, Holders],
    host: HostMemory | None,
    offload: ActivationOffload | None,
) -> tuple[dict[int, Stage], dict[int, Replica]]:
    """Build the stages of this rank with their weights, and the replica of each."""
    config, model = blueprint.config, blueprint.model
    stages_of = blueprint.stage_of_parameter()
    tied = tied_groups(stages_of, blueprint.schedule.rank_of, mesh)
    training_loss = pick_loss(blueprint, mesh.tp, training=True)
    if of_corpora := corpus_losses(blueprint.config.data):
        training_loss = with_corpora(training_loss, of_corpora, blueprint.model.current)
    validation_loss = pick_loss(blueprint, mesh.tp, training=False)
    losses = training_loss, validation_loss
    stages: dict[int, Stage] = {}
    replicas: dict[int, Replica] = {}
    for index in blueprint.schedule.stages_of(mesh.at.pp_rank):
        weight_shards = _weight_shards(blueprint, index, holders_by_axis[None].shard_group)
        layers = _materialise_stage(
            blueprint, index, mesh, is_fully_sharded=weight_shards is not None
        )
        members = stage_members(
            index,
            layers,
            infos=blueprint.infos,
            canonical=model.canonical,
            stages_of=stages_of,
            holders_by_axis=holders_by_axis,
            tied=tied,
        )
        # first the replica, which moves the weights into buckets, then what uses them
        replica = _make_replica(
            config,
            members,
            layers,
            mesh.device,
            host=host,
            weight_shards=weight_shards,
            units=units_of(config.parallel, list(model.layers._modules)),
        )
        compile_layers(layers, config.train, config.pipeline, mesh.device, warns=mesh.rank == 0)
        stages[index] = make_stage(
            blueprint, index, layers, losses, replica.wait_for_layer, offload
        )
        replicas[index] = replica
    model.release()  # first values that a run of the builder has left in memory
    return stages, replicas


def _weight_shards(blueprint: Blueprint, stage: int, shard_group: Group) -> Group | None:
    """Return the replicas over which FSDP2 shards the weights of a stage: ZeRO-3 over several ranks.
    It shards no stage of scalars.
    """
    has_rows = any(parameter.dim() for parameter in blueprint.stage_layers(stage).parameters())
    is_sharded = blueprint.config.parallel.zero == 3 and shard_group.size > 1 and has_rows
    return shard_group if is_sharded else None


def _materialise_stage(
    blueprint: Blueprint, stage: int, mesh: Mesh, *, is_fully_sharded: bool
) -> nn.Sequential:
    """Return the layers of a stage with their weights. Collective over the ranks of the stage."""
    # FSDP2 moves its shards to the device: the whole weights of a stage need not fit there
    device = torch.device("cpu") if is_fully_sharded else mesh.device
    return materialise(
        blueprint.stage_layers(stage),
        blueprint.model,
        blueprint.infos,
        DTYPES[blueprint.config.train.dtype],
        device,
        ranks=(mesh.replicas, mesh.tp, mesh.device),  # they draw the initial weights together
    )


def _make_replica(
    config: RunConfig,
    members: list[StageParameter],
    layers: nn.Sequential,
    device: torch.device,
    *,
    host: HostMemory | None,
    weight_shards: Group | None,
    units: Units,
) -> Replica:
    """Return the replica of a stage, sharded according to ``parallel.zero``.

    ``weight_shards``: replicas that shard its weights by FSDP2, in ``units``; None: each holds them.
    """

    def in_buckets(members: list[StageParameter]) -> BucketReplica:
        return BucketReplica(
            members,
            bucket_bytes=bucket_bytes(config.parallel, config.train),
            keeps_gradient=config.parallel.zero < 2,
            host=host,
            block_size=config.optimizer.block_size,
        )

    if weight_shards is None:
        return in_buckets(members)
    return fully_sharded_replica(
        members,
        layers,
        weight_shards,
        device,
        offload=host is not None,
        units=units,
        make_buckets=in_buckets,
    )
