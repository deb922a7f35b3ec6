"""The blueprint of a run: everything that is decided before the first collective, a pure function of config and tp
rank.

    RunConfig -> Grid, model on meta, sharding, stages, schedule, shapes between stages -> Blueprint

The launcher draws it once, to refuse what cannot work before any process exists. Each rank draws it again, and the
ranks compare digests. Nothing here needs a GPU, a network, or more memory than a model on the meta device.

"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from meshwright.config import RunConfig, dump, is_meant_for_gpu, phases
from meshwright.context_parallel import plan as context
from meshwright.context_parallel.cut import HeadCut, TokenCut
from meshwright.data.sources import example
from meshwright.expert_parallel import plan as experts
from meshwright.fp8.convert import check_sizes
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.model.build import PlainModel, configured_model
from meshwright.model.meter import reference
from meshwright.model.running_buffers import cast_model
from meshwright.optimizer import sampled_rates, with_settings
from meshwright.parameters import ParameterInfo
from meshwright.pipeline.plan import (
    LayerCost,
    ModelDescription,
    check_recompute,
    check_running,
    count_layers,
    cut_layers,
    describe_boundaries,
    describe_model,
    offloaded_names,
    recomputed_names,
)
from meshwright.pipeline.values import MetaMicrobatch, ValueSpec, cross_entropy, with_heads
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedule, schedule_digest
from meshwright.tensor_parallel import plan as sharding
from meshwright.tensor_parallel.check import check_sequence_lengths, check_supported
from meshwright.tensor_parallel.cross_entropy import check_output_shape

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


Ranks = Group | None
"""Group of this rank on an axis, or None for the first rank of one that does not exist yet."""


@dataclass(frozen=True)
class Blueprint:
    """Decisions that all ranks of a layout share, as seen from one tp rank."""

    config: RunConfig
    grid: Grid
    model: PlainModel
    """Parameters on meta, in the training dtype, sharded over tp."""
    infos: dict[str, ParameterInfo]
    example: MetaMicrobatch
    """Shapes of a micro-batch."""
    stages: list[range]
    """Layers of each stage."""
    schedule: Schedule
    """Schedule of a step; of the largest, with a batch-size ramp."""
    boundaries: list[ValueSpec]
    """Output spec of stage i, the input spec of stage i+1."""
    layer_costs: list[LayerCost]
    """Cost of one micro-batch of each full (unsharded) layer, the loss included in the last."""
    running: tuple[str, ...] = ()
    """Buffers that forward changes: part of the state, as weights are."""
    recomputed: tuple[str, ...] = ()
    """Layers, and parts of layers, that backward computes again."""
    ramp: tuple[Schedule, ...] = ()
    """Schedules of the smaller steps of a batch-size ramp."""
    metrics: tuple[str, ...] = ()
    """Names that layers and the loss record."""
    cut: TokenCut = field(kw_only=True)
    """Tokens of each sample that this rank has."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model. Tied weights count once, padding not at all."""
        names = {self.model.canonical(name) for name in self.infos}
        return sum(torch.Size(self.infos[name].global_shape).numel() for name in names)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one optimizer step, see :class:`LayerCost`: no recompute, full attention."""
        batch = batch_numbers(self.config)
        return sum(cost.model_flops for cost in self.layer_costs) * batch.global_batch / batch.micro_batch_size

    def stage_layers(self, stage: int) -> nn.Sequential:
        """Return the layers of one stage, under their names in the whole model."""
        named = list(self.model.layers.named_children())
        layers = nn.Sequential()
        for index in self.stages[stage]:
            layers.add_module(*named[index])
        return layers

    def stage_of_parameter(self) -> dict[str, list[int]]:
        """Return canonical parameter name -> the stages that hold it, in order; several for a tied weight."""
        found: dict[str, list[int]] = {}
        for stage in range(len(self.stages)):
            for name, _ in self.stage_layers(stage).named_parameters(remove_duplicate=False):
                stages = found.setdefault(self.model.canonical(name), [])
                if stage not in stages:
                    stages.append(stage)
        return found

    def digest(self) -> str:
        """Return a digest of configuration, schedule and stages, which must be equal on all ranks."""
        groups = sorted((i.name, *i.settings) for i in self.infos.values())
        rates = sampled_rates(self.config.optimizer, self.config.train.steps)
        schedules = "".join(map(schedule_digest, (self.schedule, *self.ramp)))
        text = dump(self.config) + schedules + repr((self.stages, groups, rates, self.metrics))
        return hashlib.sha256(text.encode()).hexdigest()


class BatchNumbers(NamedTuple):
    """The resolved batch: ``global_batch = micro_batch_size x chunks x dp``."""

    micro_batch_size: int
    chunks: int
    global_batch: int


def batch_numbers(config: RunConfig, samples_seen: int | None = None) -> BatchNumbers:
    """Return the batch numbers of a resolved config.

    ``samples_seen``: samples before the step; None: the largest step of a batch-size ramp.
    """
    batch = config.batch
    assert batch.micro_batch_size is not None and batch.chunks is not None and batch.global_batch is not None
    largest = BatchNumbers(batch.micro_batch_size, batch.chunks, batch.global_batch)
    if samples_seen is None or batch.ramp is None:
        return largest
    size = [phase for phase in phases(batch) if phase.samples_seen <= samples_seen][-1].global_batch
    return BatchNumbers(batch.micro_batch_size, batch.chunks * size // batch.global_batch, size)


def draw_blueprint(config: RunConfig, tp: Ranks = None, cp: Ranks = None, ep: Ranks = None) -> Blueprint:
    """Draw the blueprint of a resolved config: describe the model, check it, shard it, plan its stages.

    Args:
        tp: this rank's tensor-parallel group; None: rank 0, without any process. ``cp``: of tokens. ``ep``: of experts.

    Raises:
        UserError: whatever cannot work, before any process group exists.
    """
    parallel, batch, dtype = config.parallel, batch_numbers(config), DTYPES[config.train.dtype]
    grid = Grid(*parallel.degrees)
    shapes = MetaMicrobatch(*example(config, batch.micro_batch_size))
    if parallel.sequence:
        check_sequence_lengths(
            shapes.inputs, parallel.tp, config.data.sequence_length if config.data.builder is None else None
        )
    model = configured_model(config)
    check_supported(config.model.builder, model.impossible, grid, sequence=parallel.sequence)
    whole = describe_model(config, model, shapes)
    check_recompute(config.pipeline, model, config.model.builder)
    offloaded_names(config.pipeline, model)  # refuses a pattern that fits nothing
    recomputed = recomputed_names(config.pipeline, model)
    schedule = draw_schedule(config)
    sizes = [batch_numbers(config, phase.samples_seen).chunks for phase in phases(config.batch)[:-1]]
    ramp = tuple(draw_schedule(config.replace(batch={"chunks": chunks})) for chunks in sizes)
    check_running(config, model, whole.running, schedule, recomputed)
    costs = count_layers(
        model.layers,
        shapes.inputs,
        shapes.labels,
        reference(config.train.device, config.train.dtype),
        dtype=dtype,
        loss=model.loss or with_heads(cross_entropy, model.loss_heads),
        recompute=recomputed,
    )
    stages = cut_layers(config, costs, schedule.num_stages)
    cut = cut_tokens(config, model, shapes, cp or Group("cp", tuple(range(grid.cp)), 0))
    infos = shard(config, model, whole, tp, ep)
    boundaries, local = describe_boundaries(model.layers, stages, shapes.cast(dtype).inputs)
    for part, full in zip(local.leaves, whole.output.leaves, strict=True):
        of_rank = cut.shape_of(full.shape)
        check_output_shape(model.layers, part.shape, of_rank, grid.tp, has_own_loss=model.loss is not None)
    return Blueprint(
        config,
        grid,
        model,
        infos,
        shapes.cast(dtype),
        stages,
        schedule,
        boundaries,
        costs,
        tuple(whole.running),
        tuple(recomputed),
        ramp,
        whole.metrics,
        cut=cut,
    )


def cut_tokens(config: RunConfig, model: PlainModel, shapes: MetaMicrobatch, cp: Group) -> TokenCut:
    """Share the tokens of the samples over the cp group, in place; return the cut."""
    parallel, builder = config.parallel, config.model.builder
    cut = TokenCut(cp, parallel.cp_order, shapes.labels, model.draw)
    parts = parallel.tp if parallel.sequence else 1
    cut.check(builder, shapes.inputs, parts=parts, heads=len(model.loss_heads))
    head_cut = HeadCut(cp) if parallel.cp_exchange == "heads" else None
    context.apply(builder, model.layers, model.plan, shapes.inputs, cut, head_cut)
    return cut


def shard(
    config: RunConfig, model: PlainModel, whole: ModelDescription, tp: Ranks, ep: Ranks
) -> dict[str, ParameterInfo]:
    """Apply the sharding plan and the training dtype to the model, in place; return its parameters by name."""
    dtype, parallel = DTYPES[config.train.dtype], config.parallel
    infos = sharding.apply(
        model.layers,
        plan=model.plan,
        tied=model.tied,
        group=tp or Group("tp", tuple(range(parallel.tp)), 0),
        sequence=parallel.sequence,
        divisible=model.divisible,
        shared=model.shared_units,
    )
    of_experts = ep or Group("ep", tuple(range(parallel.ep)), 0)
    infos = experts.apply(config.model.builder, model.layers, model.plan, infos, of_experts, model.tied)
    if is_meant_for_gpu(config.train.device, config.train.dtype):
        check_sizes(model.layers)
    cast_model(model.layers, whole.running, dtype)
    return with_settings(infos, config.optimizer, model.groups, model.matrices, model.canonical)
