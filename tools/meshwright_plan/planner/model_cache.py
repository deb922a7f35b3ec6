"""Cache of the data that all layouts of one model share: its layers, their profiles,
costs and stages.

A :class:`ModelCache` contains one model and caches results by the values on which they depend, so
that equal layers are profiled once. A search can thus evaluate hundreds of layouts of a
405B-parameter model in seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.blueprint import units_of
from meshwright.config import Pipeline, RunConfig, Train, batch_numbers
from meshwright.config.combinations.features import Traits
from meshwright.data.sources import example
from meshwright.mesh.fake import CountingGroup
from meshwright.model.build import PlainModel, configured_model
from meshwright.optimizer.at_rest import Elements
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.pipeline.plan import (
    LayerCost,
    cut_layers,
    draw_functions_by_name,
    model_costs,
    outline_of,
    recomputed_names,
)
from meshwright.pipeline.values import Loss, MetaMicrobatch, cross_entropy, with_heads
from meshwright.placement.patterns import entry_for, fits
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedule
from meshwright.tensor_parallel.cross_entropy import split_vocab_size, vocab_parallel_cross_entropy
from meshwright.traits import find_traits
from meshwright_plan.planner.choice import Pins
from meshwright_plan.planner.context import EXCHANGE, ContextModel
from meshwright_plan.planner.error_bars import ErrorBar, error_bar
from meshwright_plan.planner.experts import AXIS as EP
from meshwright_plan.planner.experts import ExpertGroup, load_limit
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.kernels import ExecutionOptions, stand_for
from meshwright_plan.planner.layer_profile import LayerProfile
from meshwright_plan.planner.layout_model import LayoutModel
from meshwright_plan.planner.matrix_step import MatrixCounts, count_sizes
from meshwright_plan.planner.memory.footprint import Footprint, SharedWeight, stage_footprints
from meshwright_plan.planner.profile import LayerProfiler, counting_group
from meshwright_plan.planner.split_layers import LocalParameter, SplitLayers, shard

T = TypeVar("T")


@dataclass
class ModelCache:
    """One model with cached results about it."""

    config: RunConfig
    """Configuration with the model, the data and the precision; its layout is not used."""
    execution: ExecutionOptions
    draw: Callable[[Pipeline, int, int | None], Schedule] = draw_schedule
    """Function (pipeline section, pp, chunks) -> schedule of a layout; the default also checks it,
    as for a run.
    """
    results: dict[Any, Any] = field(default_factory=dict)
    """Cache of results that layouts share, by the values on which they depend."""
    pins: Pins = field(default_factory=dict)
    skew: float = 1.0
    """Rows of the busiest rank's experts over the mean of the ranks
    that share a layer's experts.
    """
    _layers: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the result stored under ``key``, computed at the first call."""
        if key not in self.results:
            self.results[key] = compute()
        result: T = self.results[key]
        return result

    def replaced(self, **changes: Any) -> ModelCache:
        """Return a cache with changed fields for the same model, which is not built again."""
        other = replace(self, **changes)
        other.__dict__["model"] = self.model
        return other

    @cached_property
    def model(self) -> PlainModel:
        """Whole plain model, on meta."""
        model = configured_model(self.config)
        shapes = MetaMicrobatch(*example(self.config.data, 1))
        draw_functions_by_name(model, shapes.cast(torch.float32).inputs)
        return model

    def error_bar(self, hardware: Hardware) -> ErrorBar:
        """Return the error bar of predicted step times."""
        is_float8 = self.config.train.linear == "fp8"
        return error_bar(hardware, has_experts=bool(self.traits.experts), is_float8=is_float8)

    @cached_property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self.model.layers._modules)

    @cached_property
    def representatives(self) -> list[str]:
        """Name of the first equal layer, for each layer: equal outline and sharding kinds,
        no own tie.
        """
        first: dict[Any, str] = {}
        tied = {name.partition(".")[0] for names in self.model.tied for name in names}
        return [
            first.setdefault(
                (
                    outline_of(layer),
                    name if name in tied else "",
                    self._kinds_of(name),
                    self._matrices_of(name),
                ),
                name,
            )
            for name, layer in self.model.layers.named_children()
        ]

    def _matrices_of(self, layer: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (name, rows of its matrices) of each weight of a layer that is stepped as matrices."""
        prefix, matrices = f"{layer}.", self.model.matrices
        return tuple(
            (name.removeprefix(prefix), rows)
            for name, rows in matrices.items()
            if name.startswith(prefix)
        )

    def _kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the sharding plan's kind for each module of a layer; "" if no pattern matches."""
        parts = [
            part for part, _ in self.model.layers.get_submodule(name).named_modules(prefix=name)
        ]
        return tuple(entry_for(part, self.model.plan) or "" for part in parts)

    def example(self, micro_batch_size: int) -> MetaMicrobatch:
        """Return a micro-batch on meta, in the training dtype."""
        dtype = DTYPES[self.config.train.dtype]
        return MetaMicrobatch(*example(self.config.data, micro_batch_size)).cast(dtype)

    def recomputed(self, pipeline: Pipeline) -> tuple[str, ...]:
        """Return the names of the layers, or parts of layers, that are recomputed in backward."""

        def find() -> tuple[str, ...]:
            return recomputed_names(pipeline, self.model, self.config.model.builder)

        key = ("recomputed", pipeline.recompute, tuple(pipeline.recompute_layers))
        return self.cached(key, find)

    def costs(self, size: int, names: tuple[str, ...], train: Train) -> list[LayerCost]:
        """Return the layers' costs, from which stages are cut, as in a run.

        ``size``: samples of a micro-batch. ``names``: what is recomputed.
        """

        def count() -> list[LayerCost]:
            shapes, whole = MetaMicrobatch(*example(self.config.data, size)), nn.Sequential()
            for name, first in zip(self.names, self.representatives, strict=True):
                whole.add_module(name, self.model.layers.get_submodule(first))
            return model_costs(train, self.model, whole, shapes, names)

        return self.cached(("costs", size, names), count)

    @cached_property
    def context(self) -> ContextModel:
        """Context parallelism of the model."""
        return ContextModel(self.config, self.model)

    @cached_property
    def traits(self) -> Traits:
        """Traits of the model, without its running buffers: see ``requirements``."""
        return find_traits(
            self.config, self.model, MetaMicrobatch(*example(self.config.data, 1)), ()
        )

    @cached_property
    def load_limit(self) -> float:
        """Largest load of a rank's experts that their capacity allows."""
        return load_limit(self.model)

    def split(
        self, tp: int, sequence: bool, cp: int = 1, ep: int = 1, exchange: str = EXCHANGE
    ) -> SplitLayers:
        """Shard the representative layers over ``tp`` ranks, after their tokens over ``cp`` and
        their experts over ``ep``.
        """
        key = ("split", tp, sequence, cp, ep, self.skew, exchange)
        return self.cached(key, lambda: self._split(tp, sequence, cp, ep, exchange))

    def _split(self, tp: int, sequence: bool, cp: int, ep: int, exchange: str) -> SplitLayers:
        originals, whole = nn.Sequential(), self.context.layers(cp, tp if sequence else 1, exchange)
        for name in dict.fromkeys(self.representatives):
            originals.add_module(name, whole.get_submodule(name))
        layers, group = copy.deepcopy(originals), counting_group(tp)
        meter = self.context.install_meter(layers, group, cp, exchange)
        of_experts = ExpertGroup(EP, tuple(range(ep)), 0, traffic=group.traffic)
        of_experts.skew = min(self.skew, self.load_limit, ep)
        parameters = shard(self.config, self.model, layers, group, of_experts, sequence=sequence)
        stand_for("cuda" if self.execution.groups_experts else "", layers)
        return SplitLayers(layers, group, parameters, meter, (ep, self.skew))

    def profiles(self, config: RunConfig, *, splits_backward: bool) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer."""
        parallel, size = config.parallel, batch_numbers(config.batch).micro_batch_size
        names, cp, ep = self.recomputed(config.pipeline), parallel.cp, parallel.ep
        sequence = parallel.sequence and parallel.tp > 1

        def profile() -> tuple[LayerProfile, ...]:
            layers, group, _, meter, load = self.split(
                parallel.tp, sequence, cp, ep, parallel.cp_exchange
            )
            shapes = self.example(size)
            found = LayerProfiler(
                group, self.loss(layers, group), self.execution, self._layers, meter, load
            ).profile(
                [
                    (n, layers.get_submodule(first))
                    for n, first in zip(self.names, self.representatives, strict=True)
                ],
                shapes.inputs,
                self.context.labels(cp, shapes.labels),
                recompute=names,
                splits_backward=splits_backward,
            )
            return self.context.with_shares(found, parallel, size)

        context = (cp, parallel.cp_exchange, parallel.cp_order)
        key = (
            "profiles",
            parallel.tp,
            context,
            ep,
            self.skew,
            sequence,
            size,
            names,
            splits_backward,
        )
        return self.cached(key, profile)

    def total_elements(self, tp: int, sequence: bool, ep: int = 1) -> Elements:
        """Count the parameter elements of a tp rank over all stages."""
        parameters = self.split(tp, sequence and tp > 1, ep=ep).parameters
        whole = [range(len(self.names))]
        return self.cached(
            ("all elements", tp, sequence, ep), lambda: self._elements(parameters, whole)[0][0]
        )

    def flops_per_step(self, config: RunConfig) -> float:
        """Return the model FLOPs of a step: forward plus twice as much for backward; no recompute,
        full attention.
        """
        batch, names = batch_numbers(config.batch), self.recomputed(config.pipeline)
        costs = self.costs(batch.micro_batch_size, names, config.train)
        return sum(cost.model_flops for cost in costs) * batch.global_batch / batch.micro_batch_size

    def loss(self, layers: nn.Sequential, group: CountingGroup) -> Loss:
        """Return the loss that ``meshwright.build`` would choose."""
        if self.model.loss is not None:
            return self.model.loss
        options = self.model.loss_options
        parameters = self.model.layers.named_parameters(remove_duplicate=False)
        vocab_size = split_vocab_size(
            layers, {name: ParameterInfo(name, tuple(each.shape)) for name, each in parameters}
        )
        if vocab_size is None:
            return with_heads(partial(cross_entropy, **options), self.model.loss_heads)
        loss = partial(vocab_parallel_cross_entropy, group=group, vocab_size=vocab_size, **options)
        return with_heads(loss, self.model.loss_heads)

    def layout(
        self, config: RunConfig, schedule: Schedule | None = None, *, approximate: bool = False
    ) -> LayoutModel:
        """Build the layout model; ``config`` is resolved,
        and differs from the cache's own only in layout and batch.

        ``schedule``: None draws and checks one. ``approximate``: stages are cut as for
            micro-batches of one sample
        without recompute.

        Raises:
            UserError: the layout cannot be run, for the reason that a launch would give.
        """
        schedule = schedule or self.draw(config.pipeline, config.parallel.pp, config.batch.chunks)
        layers = self.profiles(config, splits_backward=schedule.splits_backward)
        alike = config.replace(
            batch={"micro_batch_size": 1}, pipeline={"recompute": "none", "recompute_layers": ["*"]}
        )
        stages = self.cut(alike if approximate else config, schedule.num_stages)
        tp, ep = config.parallel.tp, config.parallel.ep
        parameters = self.split(tp, config.parallel.sequence and tp > 1, ep=ep).parameters
        key = ("elements", tp, ep, tuple(run.start for run in stages))
        elements, matrices = self.cached(key, lambda: self._elements(parameters, stages))
        patterns = config.pipeline.offload_activations
        away = tuple(
            at for at, name in enumerate(self.names if patterns else ()) if fits(name, *patterns)
        )
        units = units_of(config.parallel, self.names)
        footprints = [
            of._replace(
                units=tuple(
                    (len(unit), kept) for unit, kept in units.of(self.names[i] for i in run)
                )
            )
            for of, run in zip(
                self._footprints(layers, stages, parameters, away), stages, strict=True
            )
        ]
        return LayoutModel(config, schedule, stages, layers, elements, footprints, matrices)

    def _elements(
        self, parameters: dict[str, list[LocalParameter]], stages: list[range]
    ) -> tuple[list[Elements], list[MatrixCounts]]:
        """Count the elements and matrices of each stage;
        a weight shared by several of its layers counts once.
        """

        def count(run: range) -> tuple[Elements, MatrixCounts]:
            counted: dict[str, LocalParameter] = {}
            for index in run:
                for each in parameters.get(self.representatives[index], []):
                    counted.setdefault(
                        self.model.canonical(f"{self.names[index]}.{each.name}"), each
                    )
            elements = Elements.of_parameters(
                self.config.optimizer, ((each.info, each.trained) for each in counted.values())
            )
            of_run = count_sizes(size for each in counted.values() for size in each.matrices)
            return elements, of_run

        found = [self._of_run("elements", run, parameters, count) for run in stages]
        return [elements for elements, _ in found], [matrices for _, matrices in found]

    def _of_run(
        self,
        kind: str,
        run: range,
        parameters: dict[str, list[LocalParameter]],
        compute: Callable[[range], T],
    ) -> T:
        """Return ``compute(run)``, cached for all runs of equal layers
        with these ``parameters``.
        """
        key = kind, id(parameters), tuple(self.representatives[run.start : run.stop])
        return self.cached(key, lambda: compute(run))

    def cut(self, config: RunConfig, num_stages: int) -> list[range]:
        """Cut the layers into stages, as a run does."""
        size, names = batch_numbers(config.batch).micro_batch_size, self.recomputed(config.pipeline)
        key = ("cut", size, names, num_stages, config.parallel.pp, str(config.pipeline.balance))

        def cut() -> list[range]:
            costs = self.costs(size, names, config.train)
            return cut_layers(config.pipeline.balance, costs, num_stages, config.parallel.pp)

        return self.cached(key, cut)

    def _footprints(
        self,
        layers: tuple[LayerProfile, ...],
        stages: list[range],
        parameters: dict[str, list[LocalParameter]],
        away: tuple[int, ...],
    ) -> list[Footprint]:

        def shared(run: range) -> tuple[SharedWeight, ...]:
            return self._of_run(
                "shared", run, parameters, partial(self._shared, parameters=parameters)
            )

        key = ("footprints", id(layers), tuple(run.start for run in stages), away)
        return self.cached(key, lambda: stage_footprints(layers, stages, shared, away))

    def _shared(
        self, run: range, parameters: dict[str, list[LocalParameter]]
    ) -> tuple[SharedWeight, ...]:
        """Return the trained weights that several layers of a stage use."""
        itemsize = DTYPES[self.config.train.dtype].itemsize
        users: dict[str, SharedWeight] = {}
        for place, index in enumerate(run):
            for each in parameters.get(self.representatives[index], []):
                name = self.model.canonical(f"{self.names[index]}.{each.name}")
                if each.trained:
                    first = users[name].first if name in users else place
                    users[name] = SharedWeight(first, place, each.num_elements * itemsize)
        return tuple(weight for weight in users.values() if weight.first < weight.last)
