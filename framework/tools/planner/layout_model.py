"""Layout model: schedule, stages and layer profiles of a run, without building the run.

A :class:`ModelCache` holds one model and caches results: equal layers are profiled once, and layouts share what they
have in common. A search can thus evaluate hundreds of layouts of a 405B-parameter model in seconds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from meshwright.blueprint import DTYPES, batch_numbers, cast_parameters, cut
from meshwright.config import RunConfig
from meshwright.data.example import example
from meshwright.mesh.fake import CountingGroup
from meshwright.model.build import PlainModel, build_model
from meshwright.model.meter import reference
from meshwright.optimizer.eight_bit import with_blocks
from meshwright.pipeline.costs import LayerCost, count_layers
from meshwright.pipeline.outline import outline_of
from meshwright.pipeline.recompute import check_recompute, recomputed_names
from meshwright.pipeline.values import Loss, MetaMicrobatch, cross_entropy
from meshwright.schedule.action import Schedule
from meshwright.schedule.load import draw_schedule
from meshwright.tensor_parallel import plan as sharding
from meshwright.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from meshwright.tensor_parallel.layers import VocabHead
from meshwright.tools.planner.memory import Footprint, RankMemory, Transport, footprint, rank_memory
from meshwright.tools.planner.operations import ExecutionOptions
from meshwright.tools.planner.profile import LayerProfile, counting_group, profile_layers
from meshwright.tools.summary import Elements


@dataclass
class LayoutModel:
    """One layout of one model."""

    config: RunConfig
    schedule: Schedule
    stages: list[range]
    layers: tuple[LayerProfile, ...]
    elements: list[Elements]
    """Parameter elements of each stage, on one tp rank."""
    footprints: list[Footprint]
    """Memory of each stage for one micro-batch."""

    def stage(self, index: int) -> tuple[LayerProfile, ...]:
        """Return the profiles of a stage's layers."""
        return self.layers[self.stages[index].start : self.stages[index].stop]

    def unlike_ranks(self) -> list[int]:
        """Return the first and the last pipeline rank of each group with equal footprints.

        No other rank of a group holds more than both of them.
        """
        first: dict[tuple[Footprint, ...], int] = {}
        last: dict[tuple[Footprint, ...], int] = {}
        for rank in range(self.schedule.pp):
            held = tuple(self.footprints[stage] for stage in self.schedule.stages_of(rank))
            first.setdefault(held, rank)
            last[held] = rank
        return sorted({*first.values(), *last.values()})

    def memory(self, pp_rank: int, transport: Transport) -> RankMemory:
        """Return the peak memory of a pipeline rank."""
        stages = self.schedule.stages_of(pp_rank)
        return rank_memory(
            self.config,
            self.schedule,
            pp_rank,
            {index: self.footprints[index] for index in stages},
            {index: self.elements[index] for index in stages},
            transport,
        )


@dataclass
class ModelCache:
    """One model with cached results about it."""

    config: RunConfig
    """Configuration with the model, the data and the precision; each sketch brings its own layout."""
    practice: ExecutionOptions
    draw: Callable[[RunConfig], Schedule] = draw_schedule
    """Function that returns the schedule of a layout; the default also checks it, as for a run."""
    seen: dict[Any, Any] = field(default_factory=dict)
    """Cache of results that layouts share, by the values on which they depend."""
    _layers: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> PlainModel:
        """Whole plain model, on meta."""
        return build_model(self.config.model.builder, self.config.model.options, self.config.run.seed)

    @cached_property
    def names(self) -> list[str]:
        """Names of the layers."""
        return list(self.model.layers._modules)

    @cached_property
    def representatives(self) -> list[str]:
        """Name of the first equal layer, for each layer: equal outline and sharding kinds, no own tie."""
        first: dict[Any, str] = {}
        tied = {name.partition(".")[0] for names in self.model.tied for name in names}
        found = []
        for name, layer in self.model.layers.named_children():
            key = (outline_of(layer), name if name in tied else "", self._patterns_of(name))
            found.append(first.setdefault(key, name))
        return found

    def _patterns_of(self, name: str) -> tuple[str, ...]:
        """Return the sharding plan's kind for each module of a layer; "" if no pattern matches."""
        from fnmatch import fnmatchcase

        parts = [part for part, _ in self.model.layers.get_submodule(name).named_modules(prefix=name)]
        return tuple(
            next((kind for pattern, kind in self.model.plan.items() if fnmatchcase(part, pattern)), "")
            for part in parts
        )

    def example(self, micro_batch_size: int) -> MetaMicrobatch:
        """Return a micro-batch on meta, in the training dtype."""
        dtype = DTYPES[self.config.train.dtype]
        return MetaMicrobatch(*example(self.config, micro_batch_size)).cast(dtype)

    def recomputed(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the layers, or parts of layers, that are recomputed in backward."""
        key = ("recomputed", config.pipeline.recompute, tuple(config.pipeline.recompute_layers))
        if key not in self.seen:
            check_recompute(config.pipeline, self.model, config.model.builder)
            self.seen[key] = tuple(recomputed_names(config.pipeline, self.model))
        names: tuple[str, ...] = self.seen[key]
        return names

    def costs(self, config: RunConfig) -> list[LayerCost]:
        """Count the layers' costs by which layers are assigned to stages, exactly as for a run."""
        size = batch_numbers(config).micro_batch_size
        names = self.recomputed(config)
        key = ("costs", size, names)
        if key not in self.seen:
            shapes = MetaMicrobatch(*example(self.config, size))
            whole = nn.Sequential()
            for name, first in zip(self.names, self.representatives, strict=True):
                whole.add_module(name, self.model.layers.get_submodule(first))
            self.seen[key] = count_layers(
                whole,
                shapes.inputs,
                shapes.labels,
                reference(config.train.device, config.train.dtype),
                dtype=DTYPES[config.train.dtype],
                loss=self.model.loss or cross_entropy,
                recompute=names,
            )
        found: list[LayerCost] = self.seen[key]
        return found

    def split(
        self, tp: int, sequence: bool
    ) -> tuple[nn.Sequential, CountingGroup, dict[str, list[tuple[str, int, bool, bool]]]]:
        """Shard the representative layers over ``tp`` ranks.

        Returns:
            The layers on one tp rank, their group, and for each layer its parameters as (name, local elements, in
            blocks, trained).
        """
        key = ("split", tp, sequence)
        if key not in self.seen:
            kept = nn.Sequential()
            for name in dict.fromkeys(self.representatives):
                kept.add_module(name, self.model.layers.get_submodule(name))
            layers = copy.deepcopy(kept)
            group = counting_group(tp)
            infos = sharding.apply(
                layers,
                plan=self.model.plan,
                tied=[names for names in self.model.tied if all(n.partition(".")[0] in kept._modules for n in names)],
                group=group,
                sequence=sequence,
                divisible=self.model.divisible,
            )
            if self.config.optimizer.name == "adamw8bit":
                infos = with_blocks(infos, self.config.optimizer.block_size)
            cast_parameters(layers, DTYPES[self.config.train.dtype])
            parameters: dict[str, list[tuple[str, int, bool, bool]]] = {}
            for name, parameter in layers.named_parameters(remove_duplicate=False):
                info = infos[name]
                layer, _, rest = name.partition(".")
                numel = math.prod(info.local_shape)
                parameters.setdefault(layer, []).append((rest, numel, info.in_blocks, parameter.requires_grad))
            self.seen[key] = layers, group, parameters
        found: tuple[nn.Sequential, CountingGroup, dict[str, list[tuple[str, int, bool, bool]]]] = self.seen[key]
        return found

    def profiles(self, config: RunConfig, *, splits_backward: bool) -> tuple[LayerProfile, ...]:
        """Return the profile of each layer."""
        parallel, size = config.parallel, batch_numbers(config).micro_batch_size
        names = self.recomputed(config)
        sequence = parallel.sequence and parallel.tp > 1
        key = ("profiles", parallel.tp, sequence, size, names, splits_backward)
        if key not in self.seen:
            layers, group, _ = self.split(parallel.tp, sequence)
            shapes = self.example(size)
            found = profile_layers(
                [(n, layers.get_submodule(first)) for n, first in zip(self.names, self.representatives, strict=True)],
                shapes.inputs,
                shapes.labels,
                tp=group,
                loss=self.loss(layers, group),
                practice=self.practice,
                recompute=names,
                splits_backward=splits_backward,
                seen=self._layers,
            )
            self.seen[key] = found
        profiles: tuple[LayerProfile, ...] = self.seen[key]
        return profiles

    def total_elements(self, tp: int, sequence: bool) -> Elements:
        """Count the parameter elements of a tp rank over all stages."""
        _, _, parameters = self.split(tp, sequence and tp > 1)
        key = ("all elements", tp, sequence)
        if key not in self.seen:
            (self.seen[key],) = self._elements(parameters, [range(len(self.names))])
        found: Elements = self.seen[key]
        return found

    def flops_per_step(self, config: RunConfig) -> float:
        """Return the model FLOPs of a step: forward plus twice as much for backward; no recompute, full attention."""
        batch = batch_numbers(config)
        forward = sum(cost.forward.flops for cost in self.costs(config))
        return 3.0 * forward * batch.global_batch / batch.micro_batch_size

    def loss(self, layers: nn.Sequential, group: CountingGroup) -> Loss:
        """Return the loss that ``meshwright.build`` would choose."""
        if self.model.loss is not None:
            return self.model.loss
        heads = [name for name, module in layers[-1].named_modules() if isinstance(module, VocabHead)]
        if not heads:
            return cross_entropy
        vocab_size = self.model.layers[-1].get_submodule(heads[-1]).get_parameter("weight").shape[0]

        def loss(output: Any, labels: Tensor) -> Tensor:
            return vocab_parallel_cross_entropy(output, labels, group, vocab_size)

        return loss

    def sketch(self, config: RunConfig, schedule: Schedule | None = None, *, roughly: bool = False) -> LayoutModel:
        """Build the layout model; ``config`` is resolved, and differs from the workbench's only in layout and batch.

        ``schedule``: None draws and checks one. ``roughly``: stages are cut as for micro-batches of one sample.

        Raises:
            UserError: the layout cannot be run, for the reason that a launch would give.
        """
        schedule = schedule or self.draw(config)
        layers = self.profiles(config, splits_backward=schedule.splits_backward)
        stages = self.cut(_of_samples(config, 1) if roughly else config, schedule.num_stages)
        _, _, parameters = self.split(config.parallel.tp, config.parallel.sequence and config.parallel.tp > 1)
        key = ("elements", config.parallel.tp, tuple(run.start for run in stages))
        if key not in self.seen:
            self.seen[key] = self._elements(parameters, stages)
        elements: list[Elements] = self.seen[key]
        return LayoutModel(config, schedule, stages, layers, elements, self._footprints(layers, stages))

    def _elements(
        self, parameters: dict[str, list[tuple[str, int, bool, bool]]], stages: list[range]
    ) -> list[Elements]:
        """Count the parameter elements of each stage; a weight shared by several of its layers counts once."""
        elements = []
        for run in stages:
            counted: set[str] = set()
            found = [0, 0, 0]
            for index in run:
                for rest, numel, in_blocks, trained in parameters.get(self.representatives[index], []):
                    name = self.model.canonical(f"{self.names[index]}.{rest}")
                    if name not in counted:
                        counted.add(name)
                        found[(0 if in_blocks else 1) if trained else 2] += numel
            elements.append(Elements(*found))
        return elements

    def cut(self, config: RunConfig, num_stages: int) -> list[range]:
        """Cut the layers into stages, as a run does."""
        size, names = batch_numbers(config).micro_batch_size, self.recomputed(config)
        key = ("cut", size, names, num_stages, config.parallel.pp, str(config.pipeline.balance))
        if key not in self.seen:
            self.seen[key] = cut(config, self.costs(config), num_stages)
        stages: list[range] = self.seen[key]
        return stages

    def _footprints(self, layers: tuple[LayerProfile, ...], stages: list[range]) -> list[Footprint]:
        key = ("footprints", id(layers), tuple(run.start for run in stages))
        if key not in self.seen:
            found = []
            for index, run in enumerate(stages):
                inputs: list[tuple[int, bool]] = []
                if index:
                    inputs = [(leaf.bytes, leaf.needs_gradient) for leaf in layers[run.start - 1].outputs]
                found.append(footprint(layers[run.start : run.stop], inputs, last=index == len(stages) - 1))
            self.seen[key] = found
        footprints: list[Footprint] = self.seen[key]
        return footprints


def _of_samples(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"micro_batch_size": size})})


def predicted_peaks(config: RunConfig, transport: Transport, practice: ExecutionOptions) -> list[int]:
    """Predict the peak memory of each pipeline rank, in bytes."""
    drawn = ModelCache(config, practice).sketch(config)
    return [drawn.memory(pp_rank, transport).total for pp_rank in range(config.parallel.pp)]
