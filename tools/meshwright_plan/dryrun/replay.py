"""Replay of a step from templates, in the full schedule row of any pipeline rank
with an equal stage.

The real executor runs the rank's own row and posts its messages over the fake transport. A stage's
storage lifetimes and collectives come from the templates of
:mod:`meshwright_plan.dryrun.templates`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from meshwright.blueprint import Blueprint
from meshwright.config import batch_numbers
from meshwright.mesh import Grid
from meshwright.mesh.fake import fake_mesh
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.stage import LossPart
from meshwright.pipeline.values import Microbatch, TensorSpec, ValueSpec
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.schedule.analysis import links_of
from meshwright_plan.dryrun.fake_step import FakeSource, SharedBlueprint, grid_of
from meshwright_plan.dryrun.rank_profile import RankProfile, build_profile
from meshwright_plan.dryrun.recorder import (
    ALIVE,
    ActivityStart,
    RecordedCommunication,
    StepRecorder,
    StorageLife,
)
from meshwright_plan.dryrun.templates import ReplayError, Template, Templates, key_of, roles_of

PRIVATE_TORCH = {
    "torch._subclasses.fake_tensor.FakeTensorMode": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


class TemplatePlayer:
    """Player of one rank's templates; it writes lifetimes and collectives into a recorder."""

    def __init__(
        self,
        templates: Templates,
        recorder: StepRecorder,
        grid: Grid,
        pp_rank: int,
        schedule: Schedule,
    ) -> None:
        self.templates, self.recorder = templates, recorder
        self._grid, self._pp_rank = grid, pp_rank
        self.stages, self._roles = schedule.stages_of(pp_rank), roles_of(schedule, pp_rank)
        self._same: dict[tuple[Kind | None, int, int | None], list[tuple[StorageLife, int]]] = (
            defaultdict(list)
        )
        """(kind, stage position, micro-batch) -> lives that this action ends,
        each with its operation offset.
        """
        self._later: dict[tuple[Kind, int], list[list[Any]]] = defaultdict(list)
        """(kind, stage position) -> [number of such actions until then, life that it ends,
        offset].
        """
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        for life, release, position in templates.before:
            fresh = StorageLife(life.number, life.num_bytes, 0, 0)
            recorder.lives.append(fresh)
            if release.kind is not None:
                self._later[release.kind, position].append([release.times, fresh, release.offset])

    def template(self, action: Action) -> Template:
        """Return the template of an action.

        Raises:
            ReplayError: the short run has no such action, for example where only some backwards are
                split.
        """
        key = key_of(action, self.stages, self._roles)
        if key not in self.templates.by_key:
            raise ReplayError(f"no action of the short run is like {action}")
        return self.templates.by_key[key]

    def play(
        self,
        action: Action,
        output_specs: Sequence[TensorSpec | None] = (),
        releases: list[tuple[int, Tensor]] | None = None,
    ) -> list[Tensor | None]:
        """Play one action and return a tensor for each spec, made at its recorded offset.

        Args:
            output_specs: Specs of the returned tensors; None: no new tensor.
            releases: (offset, tensor) pairs to release during the action; emptied.
        """
        kind, position, _ = key_of(action, self.stages, self._roles)
        template, microbatch, recorder = self.template(action), action.microbatch, self.recorder
        start = recorder.activities[-1].at
        for life, offset in self._same.pop((kind, position, microbatch), ()):
            life.died = start + offset
        for pending in list(self._later[kind, position]):
            pending[0] -= 1
            if pending[0] == 0:
                pending[1].died = start + pending[2]
                self._later[kind, position].remove(pending)
        numbers: dict[int, int] = defaultdict(recorder.next_number)
        for storage in template.storages:
            release = storage.release
            life = StorageLife(
                numbers[storage.number],
                storage.num_bytes,
                start + storage.born,
                start + storage.born,
            )
            recorder.lives.append(life)
            if release.kind is None:
                continue
            if release.times == -1 and release.kind is kind:
                life.died = start + release.offset
            elif release.times == -1:
                self._same[release.kind, position, microbatch].append((life, release.offset))
            else:
                at = 0 if release.kind is Kind.STEP else position
                self._later[release.kind, at].append([release.times, life, release.offset])
        for offset, call in template.communication:
            if call.peer is None:
                call = call._replace(group=self._group(call.group))
                recorder.communication.append(RecordedCommunication(start + offset, call, ()))
        tensors: list[Tensor | None] = [None] * len(output_specs)
        remaining = sorted(releases or (), key=lambda release: -release[0])
        if releases:
            releases.clear()
        for index in sorted(range(len(output_specs)), key=lambda i: template.output_offsets[i]):
            spec = output_specs[index]
            if spec is not None:
                at = max(template.output_offsets[index] - 1, 0)
                self._release(remaining, start, at)
                recorder.now = start + at
                tensors[index] = torch.empty(spec.shape, dtype=spec.dtype)
        self._release(remaining, start, template.num_operations)
        recorder.now = start + template.num_operations
        return tensors

    def _release(self, releases: list[tuple[int, Tensor]], start: int, until: int) -> None:
        """Release the tensors whose offset is at most ``until``, last in the list first."""
        while releases and releases[-1][0] <= until:
            self.recorder.now = start + releases[-1][0]
            releases.pop()

    def _group(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return this rank's counterpart of a group of the recorded rank."""
        if ranks not in self._groups:
            grid = self._grid
            at = [grid.coordinates(rank) for rank in ranks]
            if len({each.pp_rank for each in at}) == 1:
                self._groups[ranks] = tuple(
                    grid.rank(replace(each, pp_rank=self._pp_rank)) for each in at
                )
            else:
                self._groups[ranks] = ranks
        return self._groups[ranks]


class ReplayedStage:
    """Stage for the executor that plays templates instead of computing."""

    def __init__(
        self, player: TemplatePlayer, index: int, spec: tuple[ValueSpec | None, ValueSpec | None]
    ) -> None:
        self._player, self.index = player, index
        self.input_spec, self.output_spec = spec
        self._held: dict[tuple[int, Kind], list[tuple[int, Tensor]]] = defaultdict(list)
        self.num_in_flight = 0

    @property
    def is_first(self) -> bool:
        """True if the stage takes the samples."""
        return self.input_spec is None

    @property
    def is_last(self) -> bool:
        """True if the stage computes the loss."""
        return self.output_spec is None

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        labels: Tensor | None,
        *,
        train: bool,
        length: int | None = None,
    ) -> list[Tensor] | LossPart:
        """Play the forward; return the stage's output tensors,
        or a loss without a value on the last stage.
        """
        received = [*tree_leaves(inputs), *([] if labels is None else [labels])]
        action = Action(Kind.F, self.index, microbatch)
        template = self._player.template(action)
        specs = self.output_spec.leaves if self.output_spec is not None else ()
        new_specs = [
            None if index >= 0 else spec
            for spec, index in zip(specs, template.output_sources, strict=True)
        ]
        created = self._player.play(action, new_specs)
        outputs = [
            received[index] if tensor is None else tensor
            for tensor, index in zip(created, template.output_sources, strict=True)
        ]
        self._hold(action, received)
        for tensor, kept in zip(outputs, template.outputs_kept, strict=True):
            if kept:  # held until the end of its backward
                self._held[microbatch, Kind.B].append((ALIVE, tensor))
        return (
            LossPart(torch.empty((), device="meta"), torch.empty((), device="meta"))
            if self.is_last
            else outputs
        )

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Play the whole backward; return the gradients of the stage's inputs."""
        return self._backward(Kind.B, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Play the input-gradient half of the backward;
        return the gradients of the stage's inputs.
        """
        return self._backward(Kind.I, microbatch, gradients)

    def _backward(
        self, kind: Kind, microbatch: int, gradients: list[Tensor] | None
    ) -> list[Tensor]:
        specs = self.input_spec.with_gradient if self.input_spec is not None else ()
        action = Action(kind, self.index, microbatch)
        self._hold(action, gradients or [])
        tensors = self._player.play(action, list(specs), self._releases(microbatch, kind))
        return [tensor for tensor in tensors if tensor is not None]

    def backward_weight(self, microbatch: int) -> None:
        """Play the weight-gradient half of the backward."""
        self._player.play(
            Action(Kind.W, self.index, microbatch), releases=self._releases(microbatch, Kind.W)
        )

    def _hold(self, action: Action, received: Sequence[Tensor]) -> None:
        """Hold received tensors until the later action of their micro-batch that releases them."""
        assert action.microbatch is not None
        for tensor, release in zip(
            received, self._player.template(action).input_releases, strict=True
        ):
            if release.kind is not None and release.kind is not action.kind:
                self._held[action.microbatch, release.kind].append((release.offset, tensor))

    def _releases(self, microbatch: int, kind: Kind) -> list[tuple[int, Tensor]]:
        """Remove and return the (offset, tensor) pairs that an action releases."""
        held = self._held.pop((microbatch, kind), [])
        return held + (self._held.pop((microbatch, Kind.B), []) if kind is Kind.I else [])

    def deferred_parameters(self, microbatch: int) -> set[Tensor]:
        """Return the empty set: a replayed stage has no parameters whose gradients W would add to."""
        return set()


class ReplayedReplica:
    """Gradient reducer for the executor that plays the template of REDUCE."""

    def __init__(self, player: TemplatePlayer, index: int) -> None:
        self._player, self._index = player, index

    def reduce_during_backward(
        self, awaited: Set[Tensor] | None = None, *, last: bool = True
    ) -> None:
        """Skip: the template of the backward contains its reductions."""

    def reduce_remaining(self) -> None:
        """Skip, as in :meth:`reduce_during_backward`."""

    def finish_reduction(self) -> None:
        """Play REDUCE."""
        self._player.play(Action(Kind.REDUCE, self._index))


class _Feed:
    """Feed of a step with samples of the right shape."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._source, self._cut = FakeSource(blueprint.example), blueprint.cut
        self._size = batch_numbers(blueprint.config.batch).micro_batch_size

    def microbatch(self, m: int) -> Microbatch:
        inputs, labels = self._source.read(range(self._size))
        tokens = self._cut.tokens_of(inputs, torch.device("cpu"))
        return Microbatch(
            inputs, self._cut.take_labels(labels, tokens), self.sample_indices(m), tokens
        )

    def sample_indices(self, m: int) -> Tensor:
        return torch.zeros(self._size, dtype=torch.int64)

    def length(self, m: int) -> int | None:
        return None  # whole rows need the most memory


def replay(
    templates: Templates, rank: int, shared: SharedBlueprint, schedule: Schedule
) -> RankProfile:
    """Replay one step of ``rank``, whose stages must equal those of the templates."""
    blueprint = shared.blueprint
    grid = grid_of(blueprint.config.parallel)
    recorder = StepRecorder(1 + max(life.number for life in templates.run.recorder.lives))
    with fake_mesh(grid, rank, recorder.begin_activity) as mesh:
        links = mesh.open_links(links_of([schedule]))
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            player = TemplatePlayer(templates, recorder, grid, mesh.at.pp_rank, schedule)
            stages: Mapping[int, Any] = {
                index: ReplayedStage(
                    player,
                    index,
                    (
                        blueprint.boundaries[index - 1] if index > 0 else None,
                        blueprint.boundaries[index] if index < schedule.num_stages - 1 else None,
                    ),
                )
                for index in schedule.stages_of(mesh.at.pp_rank)
            }
            replicas: Mapping[int, Any] = {
                index: ReplayedReplica(player, index) for index in stages
            }
            executor = Executor(schedule, links, dict(stages), mesh.device, replicas=replicas)
            with executor.until_step(_Feed(blueprint)):
                player.play(Action(Kind.STEP))
            recorder.activities.insert(0, ActivityStart(0, "before"))
            return build_profile(
                recorder,
                rank,
                mesh.at.pp_rank,
                0,
                templates.run.roles,
                templates.run.host_categories,
            )
