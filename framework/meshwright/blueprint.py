"""The blueprint of a run: all decisions that need no communication. It follows from the config and from the rank's
place in its tp, cp and ep groups.

    RunConfig -> Grid, model on meta, sharding, stages, schedule, shapes between stages -> Blueprint

The launcher draws it once, so that an impossible run is refused before any process starts. In ``build`` each rank draws
it again, and the ranks compare digests. Nothing here needs a GPU, a network, or more memory than a model on meta.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.config import RunConfig, batch_numbers, dump
from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.plan import share_tokens
from meshwright.data.sources import example
from meshwright.errors import ModelError
from meshwright.expert_parallel import plan as experts
from meshwright.fp8.convert import check_sizes
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.model.buffers import cast_model
from meshwright.model.build import PlainModel, configured_model
from meshwright.model.requirements import joined
from meshwright.optimizer import sampled_rates, with_settings
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.pipeline.plan import (
    LayerCost,
    ModelDescription,
    check_running,
    cut_layers,
    describe_boundaries,
    describe_model,
    model_costs,
    offloaded_names,
    recomputed_names,
)
from meshwright.pipeline.values import MetaMicrobatch, ValueSpec
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedules, schedule_digest
from meshwright.tensor_parallel import plan as sharding
from meshwright.tensor_parallel.check import check_sequence_lengths, check_supported
from meshwright.tensor_parallel.cross_entropy import check_output_shape


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Decisions that all ranks share, with the tensor slices (tp, ep) and tokens (cp) of one rank."""

    config: RunConfig
    grid: Grid
    model: PlainModel
    """Model on meta, in the training dtype, with this rank's slices of the parameters."""
    infos: dict[str, ParameterInfo]
    example: MetaMicrobatch
    """Shapes of a micro-batch."""
    stages: list[range]
    """Layers of each stage."""
    schedules: list[Schedule]
    """Schedules by increasing number of micro-batches; several only with a batch-size ramp."""
    boundaries: list[ValueSpec]
    """Output spec of stage i, the input spec of stage i+1."""
    layer_costs: list[LayerCost]
    """Cost of each full (unsharded) layer for one micro-batch; that of the last layer includes the loss."""
    running: tuple[str, ...] = ()
    """Names of the buffers that a training forward changes: part of the model's state, as weights are."""
    recomputed: tuple[str, ...] = ()
    """Names of the layers, and parts of layers, with activation checkpointing (recompute)."""
    offloaded: tuple[str, ...] = ()
    """Names of the layers with activation offload: tensors saved for backward move to host memory."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that layers and the loss record."""
    cut: TokenCut
    """Selection of this rank's tokens of each sample, under context parallelism."""

    @property
    def schedule(self) -> Schedule:
        """The schedule with the most micro-batches."""
        return self.schedules[-1]

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

    @property
    def label_positions(self) -> int:
        """Label positions of the largest global batch, ignored ones included.

        The loss of every micro-batch is scaled by its inverse, and STEP multiplies by it: see step.py.
        """
        return batch_numbers(self.config).global_batch * self.example.labels_per_sample

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
        """Return a digest that must be equal on all ranks.

        It covers config, schedules, stages, settings, rates, names of metrics, and what the builder gives parameters.
        """
        groups = sorted((i.name, *i.settings) for i in self.infos.values())
        rates = sampled_rates(self.config.optimizer, self.config.train.steps)
        schedules = "".join(map(schedule_digest, self.schedules))
        values = "" if self.model.builder_run is None else self.model.builder_run.digest
        text = dump(self.config) + schedules + values + repr((self.stages, groups, rates, self.metrics))
        return hashlib.sha256(text.encode()).hexdigest()


def draw_blueprint(
    config: RunConfig, tp: Group | None = None, cp: Group | None = None, ep: Group | None = None
) -> Blueprint:
    """Draw the blueprint of a resolved config: describe the model, check it, shard it, plan its stages.

    Args:
        tp: this rank's tensor-parallel group. None (also for cp and ep): act as rank 0, before the groups exist.
        cp: the ranks that split the tokens of a sample.
        ep: the ranks that split the experts of a layer.

    Raises:
        UserError: the configuration, the model or the layout cannot work.
    """
    parallel, batch, dtype = config.parallel, batch_numbers(config), DTYPES[config.train.dtype]
    grid = Grid(*parallel.degrees)
    shapes = MetaMicrobatch(*example(config, batch.micro_batch_size))
    corpus_length = config.data.sequence_length if config.data.builder is None else None
    check_sequence_lengths(shapes.inputs, parallel.tp if parallel.sequence else 1, corpus_length)
    model, whole = _describe(config, shapes)
    check_supported(config.model.builder, model.impossible, grid, sequence=parallel.sequence)
    recomputed, offloaded = recomputed_names(config, model), offloaded_names(config.pipeline, model)
    schedules = draw_schedules(config)
    check_running(config, model, whole.running, schedules[-1], recomputed)
    costs = model_costs(config, model, model.layers, shapes, recomputed)
    stages = cut_layers(config, costs, schedules[-1].num_stages)
    first = {axis: Group(axis, tuple(range(getattr(grid, axis))), 0) for axis in ("tp", "cp", "ep")}
    cut = share_tokens(parallel, config.model.builder, model, *shapes, cp or first["cp"])
    infos = shard(config, model, whole.running, tp or first["tp"], ep or first["ep"])
    boundaries, local = describe_boundaries(model.layers, stages, shapes.cast(dtype).inputs)
    for part, full in zip(local.leaves, whole.output.leaves, strict=True):
        of_rank = cut.shape_of(full.shape)
        check_output_shape(model.layers, part.shape, of_rank, grid.tp, has_own_loss=model.loss is not None)
    return Blueprint(
        config=config,
        grid=grid,
        model=model,
        infos=infos,
        example=shapes.cast(dtype),
        stages=stages,
        schedules=schedules,
        boundaries=boundaries,
        layer_costs=costs,
        running=tuple(whole.running),
        recomputed=recomputed,
        offloaded=offloaded,
        metrics=whole.metrics,
        cut=cut,
    )


def _describe(config: RunConfig, shapes: MetaMicrobatch) -> tuple[PlainModel, ModelDescription]:
    """Build the model and run it on meta.

    Raises:
        ModelError: all problems of the model and of its forward.
    """
    problems: list[ModelError] = []
    model = configured_model(config, problems)
    try:
        described = describe_model(config, model, shapes)
    except ModelError as error:
        raise joined([*problems, *error.problems]) from error
    if problems:
        raise joined(problems)
    return model, described


def shard(config: RunConfig, model: PlainModel, running: list[str], tp: Group, ep: Group) -> dict[str, ParameterInfo]:
    """Apply the sharding plan and the training dtype to the model, in place; return its parameters by name.

    ``running``: buffers that forward changes.
    """
    infos = sharding.apply(
        model.layers,
        plan=model.plan,
        tied=model.tied,
        group=tp,
        sequence=config.parallel.sequence,
        divisible=model.divisible,
        shared=model.shared_units,
    )
    infos = experts.apply(config.model.builder, model.layers, model.plan, infos, ep, model.tied)
    check_sizes(model.layers, config.train)
    cast_model(model.layers, running, DTYPES[config.train.dtype])
    return with_settings(infos, config.optimizer, model.groups, model.matrices, model.canonical)
