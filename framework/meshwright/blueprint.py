"""The blueprint of a run: all decisions that need no communication. It follows from the config and
from the rank's place in its tp, cp and ep groups.

    describe       RunConfig               -> the whole model on meta, its output, shapes of a micro-batch
    plan_stages    the whole model         -> schedules, cost of each layer, layers of each stage, recompute
    shard          the whole model, groups -> this rank's slices of the parameters, its tokens of a sample
    boundaries     this rank's model       -> shapes between stages

The launcher draws it once, so that an impossible run is refused before any process starts. In
``build`` each rank draws it again, and the ranks compare digests. Nothing here needs a GPU, a
network, or more memory than a model on meta.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from meshwright.config import Parallel, RunConfig, batch_numbers, dump
from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.plan import share_tokens
from meshwright.data.mixture_losses import corpus_losses
from meshwright.data.sources import example
from meshwright.data.trim import check_rows, length_multiple
from meshwright.data_parallel.units import Units
from meshwright.errors import ModelError
from meshwright.expert_parallel import plan as experts
from meshwright.fp8.convert import check_sizes
from meshwright.mesh import Grid
from meshwright.mesh.comm import Group
from meshwright.model.buffers import cast_model
from meshwright.model.build import PlainModel, configured_model
from meshwright.model.requirements import joined
from meshwright.model.sync_batch_norm import join_replicas, synchronised
from meshwright.optimizer import sampled_rates, with_settings
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.pipeline.plan import (
    LayerCost,
    ModelDescription,
    check_running,
    check_synchronised,
    check_trimmable,
    cut_layers,
    describe_boundaries,
    describe_model,
    draw_functions_by_name,
    model_costs,
    offloaded_names,
    recomputed_names,
    with_token_dims,
)
from meshwright.pipeline.values import MetaMicrobatch, ValueSpec
from meshwright.placement.patterns import check_patterns, matching
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedules, schedule_digest
from meshwright.tensor_parallel import plan as sharding
from meshwright.tensor_parallel.check import check_sequence_lengths, check_supported
from meshwright.tensor_parallel.cross_entropy import check_output_shape


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Decisions that all ranks share, with the tensor slices (tp, ep) and tokens (cp)
    of one rank.
    """

    config: RunConfig
    grid: Grid
    model: PlainModel
    """Model on meta, in the training dtype, with this rank's slices of the parameters.

    The object itself: ``build`` gives the layers of this rank's stages their weights in place, so
    that a blueprint serves one build.
    """
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
    """Cost of each full (unsharded) layer for one micro-batch;
    that of the last layer includes the loss.
    """
    running: tuple[str, ...] = ()
    """Names of the buffers that a training forward changes: part of the model's state,
    as weights are.
    """
    recomputed: tuple[str, ...] = ()
    """Names of the layers, and parts of layers, with activation checkpointing (recompute)."""
    is_synchronised: bool = False
    """True if batch statistics are those of all replicas (``nn.SyncBatchNorm``)."""
    offloaded: tuple[str, ...] = ()
    """Names of the layers with activation offload:
    tensors saved for backward move to host memory.
    """
    metrics: tuple[str, ...] = ()
    """Names of the metrics that layers and the loss record."""
    cut: TokenCut
    """Selection of this rank's tokens of each sample, under context parallelism."""
    trim_multiple: int = 0
    """Number whose multiples are lengths of trimmed rows; 0: rows are whole."""

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
        """Model FLOPs of one optimizer step, see :class:`LayerCost`: no recompute,
        full attention.
        """
        batch = batch_numbers(self.config.batch)
        per_microbatch = sum(cost.model_flops for cost in self.layer_costs)
        return per_microbatch * batch.global_batch / batch.micro_batch_size

    @property
    def label_positions(self) -> int:
        """Label positions of the largest global batch, ignored ones included.

        The loss of every micro-batch is scaled by its inverse, and STEP multiplies by it: see
        step.py.
        """
        return batch_numbers(self.config.batch).global_batch * self.example.labels_per_sample

    def stage_layers(self, stage: int) -> nn.Sequential:
        """Return the layers of one stage, under their names in the whole model."""
        named = list(self.model.layers.named_children())
        layers = nn.Sequential()
        for index in self.stages[stage]:
            layers.add_module(*named[index])
        return layers

    def stage_of_parameter(self) -> dict[str, list[int]]:
        """Return canonical parameter name -> the stages that hold it, in order;
        several for a tied weight.
        """
        stages_of: dict[str, list[int]] = {}
        for stage in range(len(self.stages)):
            for name, _ in self.stage_layers(stage).named_parameters(remove_duplicate=False):
                holders = stages_of.setdefault(self.model.canonical(name), [])
                if stage not in holders:
                    holders.append(stage)
        return stages_of

    def digest(self) -> str:
        """Return a digest that must be equal on all ranks.

        It covers config, schedules, stages, settings, rates, names of metrics, and what the builder
        gives parameters.
        """
        settings = sorted((info.name, *info.settings) for info in self.infos.values())
        rates = sampled_rates(self.config.optimizer, self.config.train.steps)
        schedules = "".join(schedule_digest(schedule) for schedule in self.schedules)
        first_values = "" if self.model.builder_run is None else self.model.builder_run.digest
        planned = repr((self.stages, settings, rates, self.metrics))
        text = dump(self.config) + schedules + first_values + planned
        return hashlib.sha256(text.encode()).hexdigest()


class WholeModel(NamedTuple):
    """The model as its builder gives it, with one forward of it. On meta, not sharded until
    :func:`shard` changes the layers.
    """

    plain: PlainModel
    shapes: MetaMicrobatch
    """Shapes of a micro-batch, in the dtypes of the samples."""
    forward: ModelDescription
    """Output, running buffers and metrics of that forward."""


class StagePlan(NamedTuple):
    """Decisions on the whole model, which every rank makes alike."""

    schedules: list[Schedule]
    stages: list[range]
    layer_costs: list[LayerCost]
    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...]


class Groups(NamedTuple):
    """The groups over which a model is sharded: only this rank's place in them matters here."""

    tp: Group
    cp: Group
    ep: Group


def draw_blueprint(
    config: RunConfig,
    tp: Group | None = None,
    cp: Group | None = None,
    ep: Group | None = None,
    *,
    whole: WholeModel | None = None,
) -> Blueprint:
    """Draw the blueprint of a resolved config: describe the model, plan its stages, shard it.

    Args:
        tp: this rank's tensor-parallel group. None (also for cp and ep): act as rank 0, before the
            groups exist.
        cp: the ranks that split the tokens of a sample.
        ep: the ranks that split the experts of a layer.
        whole: the model of :func:`describe`, which is sharded in place; None: describe it.

    Raises:
        UserError: the configuration, the model or the layout cannot work.
    """
    grid = Grid.of(config.parallel.degrees)
    groups = Groups(
        tp=tp or _first_group("tp", grid.tp),
        cp=cp or _first_group("cp", grid.cp),
        ep=ep or _first_group("ep", grid.ep),
    )
    whole = whole or describe(config)
    _check_degrees(config, whole)
    if config.batch.padding == "trim":
        check_rows(*whole.shapes, config.data.builder or "data.train")
        check_trimmable(config.model.builder, whole.plain, whole.forward)
    plan = plan_stages(config, whole)
    # From here on the model is this rank's: shard() changes its layers in place. A second model,
    # even on meta, would separate ties, dropouts and hooks from the objects that refer to them.
    cut, infos = shard(config, whole, groups)
    example = whole.shapes.cast(DTYPES[config.train.dtype])
    boundaries = _boundaries(whole, plan.stages, example, cut, grid)
    multiple = 0
    if config.batch.padding == "trim":
        multiple = length_multiple(example.labels.shape[1], grid.tp)
        boundaries = with_token_dims(boundaries, whole.plain.layers, plan.stages, example, multiple)
    return Blueprint(
        config=config,
        grid=grid,
        model=whole.plain,
        infos=infos,
        example=example,
        stages=plan.stages,
        schedules=plan.schedules,
        boundaries=boundaries,
        layer_costs=plan.layer_costs,
        running=tuple(whole.forward.running),
        recomputed=plan.recomputed,
        is_synchronised=any(True for _ in synchronised(whole.plain.layers)),
        offloaded=plan.offloaded,
        metrics=(*whole.forward.metrics, *corpus_losses(config.data)),
        cut=cut,
        trim_multiple=multiple,
    )


def _first_group(name: str, size: int) -> Group:
    """Return the group of this name and size as its first rank has it, without communication."""
    return Group(name, tuple(range(size)), 0)


def describe(config: RunConfig) -> WholeModel:
    """Build the model and run it on meta.

    Raises:
        ModelError: all problems of the model and of its forward.
    """
    shapes = MetaMicrobatch(*example(config.data, batch_numbers(config.batch).micro_batch_size))
    problems: list[ModelError] = []
    model = configured_model(config, problems)
    draw_functions_by_name(model, shapes.cast(torch.float32).inputs)
    replicas = Grid.of(config.parallel.degrees).num_replicas
    join_replicas(model.layers, _first_group("dp", replicas))  # their number, for shapes
    try:
        forward = describe_model(
            model,
            config.model.builder,
            shapes,
            recompute=config.pipeline.recompute,
            document_boundaries=config.data.document_boundaries,
        )
    except ModelError as error:
        raise joined([*problems, *error.problems]) from error
    if problems:
        raise joined(problems)
    return WholeModel(model, shapes, forward)


def _check_degrees(config: RunConfig, whole: WholeModel) -> None:
    """Raise :class:`ModelError` for degrees that the samples or the model rule out."""
    parallel, corpus_length = config.parallel, None
    if config.data.builder is None:
        corpus_length = config.data.sequence_length
    parts = parallel.tp if parallel.sequence else 1
    check_sequence_lengths(whole.shapes.inputs, parts, corpus_length)
    grid, impossible = Grid.of(parallel.degrees), whole.plain.impossible
    check_supported(config.model.builder, impossible, grid, sequence=parallel.sequence)


def plan_stages(config: RunConfig, whole: WholeModel) -> StagePlan:
    """Choose what is recomputed and offloaded, draw the schedules, and cut the layers into stages
    of similar cost.

    Before the model is sharded: a stage's cost is that of its whole layers, so that every rank
    makes the same cut.
    """
    model = whole.plain
    recomputed = recomputed_names(config.pipeline, model, config.model.builder)
    offloaded = offloaded_names(config.pipeline, model)
    units_of(config.parallel, list(model.layers._modules))  # its patterns fit layers
    schedules = draw_schedules(config.pipeline, config.parallel.pp, config.batch)
    largest = schedules[-1]
    running = whole.forward.running
    check_synchronised(config.parallel, config.batch.balance, model, running)
    check_running(
        config.parallel,
        config.train.dtype,
        model,
        running,
        largest,
        recomputed,
    )
    costs = model_costs(config.train, model, model.layers, whole.shapes, recomputed)
    stages = cut_layers(config.pipeline.balance, costs, largest.num_stages, config.parallel.pp)
    return StagePlan(schedules, stages, costs, recomputed, offloaded)


def shard(
    config: RunConfig, whole: WholeModel, groups: Groups
) -> tuple[TokenCut, dict[str, ParameterInfo]]:
    """Give the model this rank's tokens (cp), slices (tp) and experts (ep), in place,
    and cast it to the training dtype.

    Tokens first: tensor parallelism then splits this rank's share of them. Experts last: tensor
    parallelism does not cut them, and their slices replace the whole parameters in its result.

    Returns:
        the assignment of tokens to cp ranks, and the parameters by name.
    """
    model, parallel, builder = whole.plain, config.parallel, config.model.builder
    cut = share_tokens(parallel, builder, model, *whole.shapes, groups.cp)
    infos = sharding.apply(
        model.layers,
        plan=model.plan,
        tied=model.tied,
        group=groups.tp,
        sequence=parallel.sequence,
        divisible=model.divisible,
        shared=model.shared_units,
    )
    alike = None if parallel.sequence else groups.tp
    infos = experts.apply(builder, model.layers, model.plan, infos, groups.ep, model.tied, alike)
    check_sizes(model.layers, config.train)
    cast_model(model.layers, whole.forward.running, DTYPES[config.train.dtype])
    infos = with_settings(infos, config.optimizer, model.groups, model.matrices, model.canonical)
    return cut, infos


def units_of(parallel: Parallel, names: Sequence[str]) -> Units:
    """Return the units of layers that ZeRO-3 gathers together, or keeps. ``names``: of all layers
    of the model.

    Raises:
        ModelError: a pattern of ``parallel.keep_gathered`` fits no layer.
    """
    patterns = parallel.keep_gathered
    if isinstance(patterns, bool):
        patterns = ["*"] if patterns else []
    check_patterns("parallel.keep_gathered", patterns, names, "layer")
    return Units(parallel.unit_layers, frozenset(matching(patterns, names)))


def _boundaries(
    whole: WholeModel, stages: list[range], example: MetaMicrobatch, cut: TokenCut, grid: Grid
) -> list[ValueSpec]:
    """Return the spec of each stage's output to the next, by a forward of the sharded model.

    Raises:
        ModelError: its output is not this rank's part of the whole model's.
    """
    model = whole.plain
    boundaries, output = describe_boundaries(model.layers, stages, example.inputs)
    for part, full in zip(output.leaves, whole.forward.output.leaves, strict=True):
        expected = cut.shape_of(full.shape)
        check_output_shape(
            model.layers, part.shape, expected, grid.tp, has_own_loss=model.loss is not None
        )
    return boundaries
