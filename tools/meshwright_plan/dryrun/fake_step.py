"""Dry run of one step of one rank: the rank's own code on tensors with shapes and without values.

    blueprint -> fake mesh -> build() -> optimizer state -> one step along the rank's schedule row
                    |            |              |                   |
                    +---- every operation: allocations, releases, communication ---> RankProfile

The code is that of training: stages, buckets, regions, fully_shard, optimizer. The fake tensors are
on CPU, with the saved tensors of CUDA's kernels if the run is for GPUs (kernels.py). Checks that
read values are skipped.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.build import build
from meshwright.config import Parallel, RunConfig, shard_factor
from meshwright.current import CurrentMicrobatch
from meshwright.data_parallel.ties import sum_ties
from meshwright.mesh import Coordinates, Grid
from meshwright.mesh.fake import PlaceholderGroup, fake_mesh
from meshwright.optimizer import states_of
from meshwright.parts import Parts, StepFeed
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.schedule.action import Action, Kind
from meshwright.step import all_reduce_sums
from meshwright_plan.dryrun.kernels import kernels_of
from meshwright_plan.dryrun.rank_profile import Category, RankProfile, build_profile
from meshwright_plan.dryrun.recorder import StepRecorder

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.FakeTensorMode": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


@dataclass
class FakeSource:
    """Source (:class:`meshwright.data.sources.Source`) of samples of the right shape, all zero."""

    example: MetaMicrobatch

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return zeros."""
        return tree_map(_zeros, self.example.inputs), _zeros(self.example.labels)


def _zeros(outline: Tensor) -> Tensor:
    return torch.zeros(outline.shape, dtype=outline.dtype)


class StageTensors(NamedTuple):
    """Storages of the tensors that an action of a stage received and returned."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    outputs_kept: tuple[bool, ...]
    """True for each returned tensor that the stage also keeps for backward."""
    sample_indices: frozenset[int] = frozenset()
    """Storage of the current sample indices, which any layer may read."""


class RecordingStage:
    """Wrapper of a stage that records the tensors it receives and returns."""

    def __init__(
        self,
        stage: Stage,
        recorder: StepRecorder,
        current: CurrentMicrobatch,
        tensors: dict[Action, StageTensors],
    ) -> None:
        self._stage, self._recorder, self._current, self._tensors = (
            stage,
            recorder,
            current,
            tensors,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        labels: Tensor | None,
        *,
        train: bool,
        length: int | None = None,
    ) -> list[Tensor] | LossPart:
        """Run the stage's forward and record its tensors."""
        received = [*tree_leaves(inputs), *([] if labels is None else [labels])]
        outputs = self._stage.forward(microbatch, inputs, labels, train=train, length=length)
        kept = self._recorder.numbers_of(self._stage.roots_of(microbatch))
        self._record(
            Kind.F, microbatch, received, [] if isinstance(outputs, LossPart) else outputs, kept
        )
        return outputs

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the stage's whole backward and record its tensors."""
        return self._backward(Kind.B, self._stage.backward, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Run the stage's input-gradient half and record its tensors."""
        return self._backward(Kind.I, self._stage.backward_input, microbatch, gradients)

    def _backward(
        self,
        kind: Kind,
        run: Callable[..., list[Tensor]],
        microbatch: int,
        gradients: list[Tensor] | None,
    ) -> list[Tensor]:
        outputs = run(microbatch, gradients)
        self._record(kind, microbatch, gradients or [], outputs, set())
        return outputs

    def _record(
        self,
        kind: Kind,
        microbatch: int,
        inputs: list[Tensor],
        outputs: list[Tensor],
        kept: set[int],
    ) -> None:
        recorder, indices = self._recorder, self._current.sample_indices
        numbers = tuple(recorder.number_of(tensor) for tensor in outputs)
        self._tensors[Action(kind, self._stage.index, microbatch)] = StageTensors(
            tuple(recorder.number_of(tensor) for tensor in inputs),
            numbers,
            tuple(number in kept for number in numbers),
            frozenset(recorder.numbers_of([] if indices is None else [indices])),
        )


class SharedBlueprint(NamedTuple):
    """Blueprint drawn before any rank exists, for all ranks of one tp coordinate."""

    blueprint: Blueprint
    groups: tuple[PlaceholderGroup, ...]
    """Placeholder groups of tp, cp and ep in its layers;
    ``become`` makes them those of each rank in turn.
    """

    def for_rank(self, pp_rank: int) -> Blueprint:
        """Return the blueprint with private copies of the layers of a pipeline rank;
        other layers are shared.
        """
        blueprint, model = self.blueprint, self.blueprint.model
        own = _own_layers(blueprint, pp_rank)
        memo: dict[int, Any] = {id(model.current): model.current}
        layers = nn.Sequential()
        for index, (name, layer) in enumerate(model.layers.named_children()):
            layers.add_module(name, copy.deepcopy(layer, memo) if index in own else layer)
        return replace(blueprint, model=replace(model, layers=layers, is_dry=True))


def _own_layers(blueprint: Blueprint, pp_rank: int) -> set[int]:
    """Return the indices of the layers of a pipeline rank."""
    return {
        index
        for stage in blueprint.schedule.stages_of(pp_rank)
        for index in blueprint.stages[stage]
    }


def share_blueprint(config: RunConfig, at: Coordinates | None = None) -> SharedBlueprint:
    """Draw the blueprint of many ranks once: those at the tp, cp and ep coordinates of ``at``."""
    at = at or Coordinates()
    # cached: a user's own optimizer is tried on real tensors, before any are fake
    states_of(config.optimizer)
    grid = grid_of(config.parallel)
    ranks = {"tp": at.tp_rank, "cp": at.cp_rank, "ep": grid.rank(at) % grid.ep}
    groups = [
        PlaceholderGroup(name, tuple(range(getattr(grid, name))), rank)
        for name, rank in ranks.items()
    ]
    blueprint = draw_blueprint(without_offload_directory(config), *groups)
    # rows stay whole: their lengths follow from labels, and whole ones need the most memory
    return SharedBlueprint(replace(blueprint, trim_multiple=0), tuple(groups))


def without_offload_directory(config: RunConfig) -> RunConfig:
    """Return the configuration without an offload directory; ``train.device``,
    which the stages follow, stays.
    """
    return config.replace(parallel={"offload_directory": None})


class StepRecording(NamedTuple):
    """Records of a dry run of one step, from which a profile or templates are built."""

    recorder: StepRecorder
    first: int
    """Number of operations before the step."""
    roles: dict[int, Category]
    stage_tensors: dict[Action, StageTensors]
    host_categories: frozenset[Category]


def profile_rank(
    config: RunConfig,
    rank: int,
    shared: SharedBlueprint | None = None,
    recorder: StepRecorder | None = None,
) -> RankProfile:
    """Dry-run one step of ``rank`` and return its profile;
    see :func:`record_step` for the arguments.
    """
    run = record_step(config, rank, shared, recorder)
    return build_profile(
        run.recorder,
        rank,
        grid_of(config.parallel).coordinates(rank).pp_rank,
        run.first,
        run.roles,
        run.host_categories,
    )


def record_step(
    config: RunConfig,
    rank: int,
    shared: SharedBlueprint | None,
    recorder: StepRecorder | None = None,
    device: str = "cpu",
    step: Callable[[Parts], object] | None = None,
) -> StepRecording:
    """Build ``rank`` on fake tensors, run one step and return all records.

    Args:
        config: resolved.
        shared: blueprint for the tp, cp and ep coordinates of ``rank``; None: drawn here.
        recorder: recorder to use instead of a new :class:`StepRecorder`.
        device: device of the fake tensors.
        step: function that takes the step; None: :func:`_step`, which reads no values.
    """
    recorder = recorder or StepRecorder()
    config = without_offload_directory(config).replace(train={"compile": False})
    with fake_mesh(grid_of(config.parallel), rank, recorder.begin_activity, device) as mesh:
        shared = share_blueprint(config, mesh.at) if shared is None else shared
        for group, of_rank in zip(shared.groups, (mesh.tp, mesh.cp, mesh.ep), strict=True):
            group.assign(of_rank)
        blueprint = shared.for_rank(mesh.at.pp_rank)
        faked = _on_fake_tensors(blueprint, mesh.at.pp_rank, recorder)
        with faked as constants, kernels_of(config.train, device, blueprint.model.layers):
            parts = build(config, mesh, (FakeSource(blueprint.example), {}), blueprint)
            for stage in parts.executor.stages.values():
                stage.calls.skip_first_checks()
            if parts.executor.offload is not None:
                parts.executor.offload.copies.on_allocate = recorder.note_host
            if parts.optimizer.own is not None:
                parts.optimizer.own.is_enabled = False
            _make_states(parts)
            first = recorder.now
            roles = dict.fromkeys(constants, Category.CONSTANTS) | _roles(parts, recorder)
            stage_tensors: dict[Action, StageTensors] = {}
            for index, stage in parts.executor.stages.items():
                parts.executor.stages[index] = RecordingStage(
                    stage, recorder, blueprint.model.current, stage_tensors
                )  # type: ignore[assignment]
            gc.collect()
            gc.disable()  # Python's collector would release storages at arbitrary moments
            try:
                (step or _step)(parts)
            finally:
                gc.enable()
        del parts, blueprint, stage
    gc.collect()
    return StepRecording(recorder, first, roles, stage_tensors, _on_host(config.parallel))


@contextmanager
def _on_fake_tensors(
    blueprint: Blueprint, pp_rank: int, recorder: StepRecorder
) -> Iterator[set[int]]:
    """Make tensors fake and record all operations inside the context;
    yield the storage numbers of the model's buffers.

    The real buffers of this rank's layers are replaced by fake ones. All layers' buffers are
    counted, since each rank builds the whole model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = {id(buffer): buffer for buffer in blueprint.model.layers.buffers() if not buffer.is_meta}
    for owner in blueprint.model.owners.values():
        real |= {id(buffer): buffer for buffer in owner.module.buffers() if not buffer.is_meta}
    fake = {key: mode.from_tensor(buffer) for key, buffer in real.items()}
    for index in _own_layers(blueprint, pp_rank):
        for module in blueprint.model.layers[index].modules():
            for name, buffer in module._buffers.items():
                if id(buffer) in fake:
                    module._buffers[name] = fake[id(buffer)]
    constants = {recorder.number_of(buffer) for buffer in fake.values()}
    with mode, recorder, recorder.recording_resizes():
        yield constants


def grid_of(parallel: Parallel) -> Grid:
    """Return the grid of a resolved configuration."""
    return Grid.of(parallel.degrees)


def _make_states(parts: Parts) -> None:
    """Run one optimizer step, so that its states exist before the recorded step."""
    parts.optimizer.step(0.1, 0.5)
    for replica in parts.replicas.values():
        replica.wait_for_weights()


def _step(parts: Parts) -> None:
    """Take the step of :func:`meshwright.step.take_step` without the parts that read values."""
    for replica in parts.replicas.values():
        replica.begin_step()
    with parts.executor.until_step(StepFeed(parts, parts.source, 0)) as row:
        sum_ties(bucket for replica in parts.replicas.values() for bucket in replica.buckets)
        all_reduce_sums(parts, row)
        parts.optimizer.step(0.1, 0.5)


def _roles(parts: Parts, recorder: StepRecorder) -> dict[int, Category]:
    """Return storage number -> category, for the storages that persist between steps."""
    weights, gradients, optimizer = list[Tensor](), list[Tensor](), list[Tensor]()
    for stage in parts.executor.stages.values():
        for parameter in stage.layers.parameters():
            weights.append(_local(parameter).detach())
            if parameter.grad is not None:
                gradients.append(_local(parameter.grad))
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            optimizer.append(bucket.master)
            gradients.append(bucket.shard_gradient)
            if bucket.flat_gradient is not None:
                gradients.append(bucket.flat_gradient)
    for state in parts.optimizer.inner.state.values():
        optimizer += [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    roles = dict.fromkeys(recorder.numbers_of(optimizer), Category.OPTIMIZER)
    roles |= dict.fromkeys(recorder.numbers_of(gradients), Category.GRADIENTS)
    return roles | dict.fromkeys(recorder.numbers_of(weights), Category.WEIGHTS)


def _on_host(parallel: Parallel) -> frozenset[Category]:
    """Return the categories that offloading keeps in host memory."""
    if not parallel.offload:
        return frozenset()
    shards = (
        (Category.WEIGHTS, Category.GRADIENTS)
        if parallel.zero == 3 and shard_factor(parallel) > 1
        else ()
    )
    return frozenset((Category.OPTIMIZER, *shards))


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
