"""Replay of a stage from a short rehearsal, in the full schedule row of any pipeline rank with an equal stage.

    rehearsed, 4 micro-batches      0F0  0F1  0F2  0F3  0B0     0B1   0B2   0B3     REDUCE  STEP
    templates                       F                   first   inner   =   last    REDUCE  STEP
    played back, 16                 3F0  3F1  {..}  3B0  3F2  {..}  3B1  ..         the rank's own row, by the executor

All micro-batches behave alike: the two in the middle are compared, and must not differ. Only the first and the last
backward of a step are special. The real executor runs the rank's own row, and messages between stages are real. From
the templates come a stage's storage lifetimes and its collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from meshwright.blueprint import batch_numbers
from meshwright.config import RunConfig
from meshwright.mesh.fake import InterceptedOperation, fake_mesh
from meshwright.mesh.grid import Grid
from meshwright.pipeline.executor import Executor, Microbatch
from meshwright.pipeline.stage import LossPart
from meshwright.pipeline.values import TensorSpec, ValueSpec
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright.tools.dryrun.account import Rehearsal, build_rehearsal
from meshwright.tools.dryrun.recorder import (
    ALIVE,
    ActivityStart,
    RecordedCommunication,
    Recorder,
    StorageLife,
)
from meshwright.tools.dryrun.rehearsal import FakeSource, RehearsalNotes, SharedBlueprint, grid_of

CHUNKS = 4
"""Number of micro-batches of the short rehearsal."""
_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class ReplayError(Exception):
    """Error for a rehearsal whose actions behave differently where they should be equal; the message is the reason."""


class Release(NamedTuple):
    """Release of a storage: ``offset`` operations into the ``times``-th later action of ``kind`` on the stage.

    ``times`` -1 means the action of that kind of the same micro-batch.
    """

    kind: Kind | None
    """Kind of the releasing action; None: it is not released in the step."""
    times: int
    offset: int


class TemplateStorage(NamedTuple):
    """Storage that an action has made. ``born`` is an operation offset within the action."""

    born: int
    num_bytes: int
    ends: Release
    tag: int
    """Number shared by all lives of one storage."""


class Template(NamedTuple):
    """Recorded behaviour of one action. Times are operation offsets within the action."""

    num_operations: int
    lived: tuple[TemplateStorage, ...]
    said: tuple[tuple[int, InterceptedOperation], ...]
    given_at: tuple[int, ...]
    """Offsets at which the returned tensors were made."""
    kept: tuple[bool, ...]
    passed_on: tuple[int, ...]
    """Index of the received tensor that each returned one is; -1: a new tensor."""
    taken_until: tuple[Release, ...]
    """Release of each received tensor."""


Key = tuple[Kind, int, str]
"""Action kind, position among the rank's stages, and roles of the micro-batch's backwards (see :func:`roles_of`)."""


def roles_of(schedule: Schedule, pp_rank: int) -> dict[tuple[int, int], str]:
    """Return (stage, micro-batch) -> roles of its backwards among those of the stage: first, inner or last."""
    order: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for _, action in schedule.actions(pp_rank):
        if action.kind in _BACKWARDS and action.stage is not None and action.microbatch is not None:
            order[action.kind, action.stage].append(action.microbatch)
    found: dict[tuple[int, int], str] = defaultdict(str)
    for (kind, stage), microbatches in sorted(order.items()):
        for number, microbatch in enumerate(microbatches):
            role = "first" if number == 0 else "last" if number == len(microbatches) - 1 else "inner"
            found[stage, microbatch] += f"{kind} {role} "
    return found


def key_of(action: Action, stages: Sequence[int], roles: Mapping[tuple[int, int], str]) -> Key:
    """Return the key of an action's template."""
    if action.stage is None or action.microbatch is None:
        return action.kind, 0 if action.stage is None else stages.index(action.stage), ""
    return action.kind, stages.index(action.stage), roles[action.stage, action.microbatch]


class Templates(NamedTuple):
    """Templates of all stages of a pipeline rank."""

    of: dict[Key, Template]
    before: tuple[tuple[StorageLife, Release, int], ...]
    """Storages from before the step: lifetime, release, and position of the stage whose action releases it."""
    run: RehearsalNotes
    rank: int


def build_templates(run: RehearsalNotes, rank: int, schedule: Schedule, pp_rank: int) -> Templates:
    """Build the templates from a rehearsal with :data:`CHUNKS` micro-batches.

    Raises:
        CannotPlay: two actions that should be equal differ, or no template can express when a storage is released.
    """
    recorder, stages = run.recorder, schedule.stages_of(pp_rank)
    begun = [each for each in recorder.begun if each.at > run.first]
    ends = [*(each.at for each in begun[1:]), recorder.now + 1]
    spans = list(zip(begun, ends, strict=True))
    roles = roles_of(schedule, pp_rank)
    places: dict[Action, tuple[int, int]] = {}
    for each, end in spans:
        action = each.what
        if isinstance(action, Action) and action.kind in (Kind.F, *_BACKWARDS, Kind.REDUCE, Kind.STEP):
            places[action] = (each.at, end)

    def at(moment: int) -> object:
        return next((each.what for each, end in spans if each.at <= moment < end), None)

    def goes(life: StorageLife, maker: Action | None) -> tuple[Release, int | None]:
        if life.died >= recorder.now:
            return Release(None, 0, 0), None
        ender = at(life.died)
        if not isinstance(ender, Action) or ender not in places:
            raise ReplayError(f"something of {maker} goes with {ender}")
        offset = life.died - places[ender][0]
        if maker is not None and (ender.stage, ender.microbatch) == (maker.stage, maker.microbatch):
            return Release(ender.kind, -1, offset), ender.stage
        if maker is not None and ender.stage not in (maker.stage, None):
            raise ReplayError(f"something of {maker} goes with {ender}")
        later = places[maker][0] if maker is not None else 0
        count = sum(1 for a in places if (a.kind, a.stage) == (ender.kind, ender.stage) and places[a][0] > later)
        after = sum(
            1 for a in places if (a.kind, a.stage) == (ender.kind, ender.stage) and places[a][0] > places[ender][0]
        )
        return Release(ender.kind, count - after, offset), ender.stage

    apart = {number for handed in run.handed.values() for number in (*handed.given, *handed.taken, *handed.beside)}
    by_action: dict[Action, list[TemplateStorage]] = defaultdict(list)
    tags: dict[int, int] = {}
    for life in recorder.lives:
        if life.born <= run.first or life.number in apart or not life.num_bytes:
            continue
        maker = at(life.born)
        if isinstance(maker, Action) and maker in places:
            tag = tags.setdefault(life.number, len(tags))
            first = places[maker][0]
            by_action[maker].append(TemplateStorage(life.born - first, life.num_bytes, goes(life, maker)[0], tag))
    found: dict[Key, Template] = {}
    for action, (start, end) in places.items():
        handed = run.handed.get(action)
        births = {life.number: life.born for life in reversed(recorder.lives)}
        given = () if handed is None else handed.given
        passed = tuple(handed.taken.index(n) if handed and n in handed.taken else -1 for n in given)
        first_tag = min((lived.tag for lived in by_action[action]), default=0)
        template = Template(
            end - start - 1,
            tuple(sorted(lived._replace(tag=lived.tag - first_tag) for lived in by_action[action])),
            tuple((said.at - start, said.heard) for said in recorder.said if start < said.at < end),
            tuple(births[number] - start for number in given),
            () if handed is None else handed.kept,
            passed,
            tuple(_until(run, number, action, at, places) for number in handed.taken) if handed else (),
        )
        key = key_of(action, stages, roles)
        if key in found and found[key] != template:
            raise ReplayError(f"{action} is not like another {action.kind} of its stage")
        found[key] = template
    before = []
    for life in recorder.lives:
        if life.born <= run.first and life.died >= run.first and life.num_bytes:
            ends_, stage = goes(life, None) if life.died > run.first else (Release(None, 0, 0), None)
            before.append((life, ends_, stages.index(stage) if stage is not None else 0))
    return Templates(found, tuple(before), run, rank)


def _until(
    run: RehearsalNotes, number: int, action: Action, at: Any, places: Mapping[Action, tuple[int, int]]
) -> Release:
    """Return the release of a tensor that an action received; ``kind`` None: nothing holds it beyond the action."""
    died = next(life.died for life in reversed(run.recorder.lives) if life.number == number)
    ender = at(died)
    if isinstance(ender, Action) and ender in places and ender.microbatch == action.microbatch:
        return Release(ender.kind, -1, died - places[ender][0])
    return Release(None, 0, 0)


class Player:
    """Player of one rank's templates; it writes lifetimes and collectives into a recorder."""

    def __init__(self, templates: Templates, recorder: Recorder, grid: Grid, pp_rank: int, schedule: Schedule) -> None:
        self.templates, self.recorder = templates, recorder
        self._grid, self._pp_rank = grid, pp_rank
        self.stages, self._roles = schedule.stages_of(pp_rank), roles_of(schedule, pp_rank)
        self._same: dict[tuple[Kind | None, int, int | None], list[tuple[StorageLife, int]]] = defaultdict(list)
        self._later: dict[tuple[Kind, int], list[list[Any]]] = defaultdict(list)
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        for life, ends, position in templates.before:
            fresh = StorageLife(life.number, life.num_bytes, 0, 0)
            recorder.lives.append(fresh)
            if ends.kind is not None:
                self._later[ends.kind, position].append([ends.times, fresh, ends.offset])

    def template(self, action: Action) -> Template:
        """Return the template of an action."""
        return self.templates.of[key_of(action, self.stages, self._roles)]

    def play(
        self,
        action: Action,
        made: Sequence[TensorSpec | None] = (),
        drops: list[tuple[int, Tensor]] | None = None,
    ) -> list[Tensor | None]:
        """Play one action and return a tensor for each spec, made at its recorded offset.

        Args:
            made: specs of the returned tensors; None: no new tensor.
            drops: (offset, tensor) pairs to release during the action; emptied.
        """
        kind, position, _ = key_of(action, self.stages, self._roles)
        template, microbatch, recorder = self.template(action), action.microbatch, self.recorder
        base = recorder.begun[-1].at
        for life, offset in self._same.pop((kind, position, microbatch), ()):
            life.died = base + offset
        for waiting in list(self._later[kind, position]):
            waiting[0] -= 1
            if waiting[0] == 0:
                waiting[1].died = base + waiting[2]
                self._later[kind, position].remove(waiting)
        tags: dict[int, int] = defaultdict(recorder.next_number)
        for lived in template.lived:
            life = StorageLife(tags[lived.tag], lived.num_bytes, base + lived.born, base + lived.born)
            recorder.lives.append(life)
            if lived.ends.kind is None:
                continue
            if lived.ends.times == -1 and lived.ends.kind is kind:
                life.died = base + lived.ends.offset
            elif lived.ends.times == -1:
                self._same[lived.ends.kind, position, microbatch].append((life, lived.ends.offset))
            else:
                place = 0 if lived.ends.kind is Kind.STEP else position
                self._later[lived.ends.kind, place].append([lived.ends.times, life, lived.ends.offset])
        for offset, heard in template.said:
            if heard.peer is None:
                recorder.said.append(
                    RecordedCommunication(base + offset, heard._replace(group=self._group(heard.group)), ())
                )
        tensors: list[Tensor | None] = [None] * len(made)
        left = sorted(drops or (), key=lambda drop: -drop[0])
        if drops:
            drops.clear()
        for index in sorted(range(len(made)), key=lambda i: template.given_at[i]):
            spec = made[index]
            if spec is not None:
                at = max(template.given_at[index] - 1, 0)
                self._drop(left, base, at)
                recorder.now = base + at
                tensors[index] = torch.empty(spec.shape, dtype=spec.dtype)
        self._drop(left, base, template.num_operations)
        recorder.now = base + template.num_operations
        return tensors

    def _drop(self, drops: list[tuple[int, Tensor]], base: int, until: int) -> None:
        while drops and drops[-1][0] <= until:
            self.recorder.now = base + drops[-1][0]
            drops.pop()

    def _group(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return this rank's counterpart of a group of the rehearsed rank."""
        if ranks not in self._groups:
            grid = self._grid
            at = [grid.coordinates(rank) for rank in ranks]
            if len({each.pp_rank for each in at}) == 1:
                self._groups[ranks] = tuple(grid.rank(each._replace(pp_rank=self._pp_rank)) for each in at)
            else:
                self._groups[ranks] = ranks
        return self._groups[ranks]


class ReplayedStage:
    """Stage for the executor that plays templates instead of computing."""

    def __init__(self, player: Player, index: int, spec: tuple[ValueSpec | None, ValueSpec | None]) -> None:
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

    def forward(self, microbatch: int, inputs: Any, labels: Tensor | None, *, train: bool) -> list[Tensor] | LossPart:
        """Play the forward; return the stage's output tensors, or a loss without a value on the last stage."""
        taken = [*tree_leaves(inputs), *([] if labels is None else [labels])]
        action = Action(Kind.F, self.index, microbatch)
        template = self._player.template(action)
        specs = self.output_spec.leaves if self.output_spec is not None else ()
        made = [None if index >= 0 else spec for spec, index in zip(specs, template.passed_on, strict=True)]
        fresh = self._player.play(action, made)
        found = [
            taken[index] if tensor is None else tensor for tensor, index in zip(fresh, template.passed_on, strict=True)
        ]
        self._hold(action, taken)
        for tensor, kept in zip(found, template.kept, strict=True):
            if kept:  # held until the end of its backward
                self._held[microbatch, Kind.B].append((ALIVE, tensor))
        return LossPart(torch.empty((), device="meta"), torch.empty((), device="meta")) if self.is_last else found

    def backward(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Play the whole backward; return the gradients of the stage's inputs."""
        return self._back(Kind.B, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        """Play the input-gradient half of the backward; return the gradients of the stage's inputs."""
        return self._back(Kind.I, microbatch, gradients)

    def _back(self, kind: Kind, microbatch: int, gradients: list[Tensor] | None) -> list[Tensor]:
        specs = self.input_spec.with_gradient if self.input_spec is not None else ()
        action = Action(kind, self.index, microbatch)
        self._hold(action, gradients or [])
        drops = self._drops(microbatch, kind)
        found = self._player.play(action, list(specs), drops)
        return [tensor for tensor in found if tensor is not None]

    def backward_weight(self, microbatch: int) -> None:
        """Play the weight-gradient half of the backward."""
        self._player.play(Action(Kind.W, self.index, microbatch), drops=self._drops(microbatch, Kind.W))

    def _hold(self, action: Action, taken: Sequence[Tensor]) -> None:
        """Hold received tensors until the later action of their micro-batch that releases them."""
        assert action.microbatch is not None
        for tensor, until in zip(taken, self._player.template(action).taken_until, strict=True):
            if until.kind is not None and until.kind is not action.kind:
                self._held[action.microbatch, until.kind].append((until.offset, tensor))

    def _drops(self, microbatch: int, kind: Kind) -> list[tuple[int, Tensor]]:
        held = self._held.pop((microbatch, kind), [])
        return held + (self._held.pop((microbatch, Kind.B), []) if kind is Kind.I else [])

    def awaited(self, microbatch: int) -> set[Tensor]:
        """Return the empty set: a played stage has no parameters whose gradients W would add to."""
        return set()


class _Feed:
    """Feed of a step with samples of the right shape."""

    def __init__(self, source: FakeSource, config: RunConfig) -> None:
        self._source, self._size = source, batch_numbers(config).micro_batch_size

    def microbatch(self, m: int) -> Microbatch:
        return Microbatch(*self._source.read(range(self._size)), self.sample_indices(m))

    def sample_indices(self, m: int) -> Tensor:
        return torch.zeros(self._size, dtype=torch.int64)


def replay(templates: Templates, config: RunConfig, rank: int, drawn: SharedBlueprint, schedule: Schedule) -> Rehearsal:
    """Play one step of ``rank``, whose stages must equal those of the templates."""
    grid, blueprint = grid_of(config), drawn.blueprint
    recorder = Recorder(1 + max(life.number for life in templates.run.recorder.lives))
    with fake_mesh(grid, rank, recorder.begin) as mesh, FakeTensorMode(), recorder:
        player = Player(templates, recorder, grid, mesh.at.pp_rank, schedule)
        last = schedule.num_stages - 1
        stages: Mapping[int, Any] = {
            index: ReplayedStage(
                player,
                index,
                (
                    blueprint.boundaries[index - 1] if index > 0 else None,
                    blueprint.boundaries[index] if index < last else None,
                ),
            )
            for index in schedule.stages_of(mesh.at.pp_rank)
        }
        latest: list[Tensor] = []

        def on_microbatch(sample_indices: Tensor) -> None:
            latest[:] = [sample_indices]

        executor = Executor(
            schedule,
            mesh.pp,
            dict(stages),
            mesh.device,
            on_microbatch=on_microbatch,
            reduce=lambda stage: _ignore(player.play(Action(Kind.REDUCE, stage))),
        )
        feed = _Feed(FakeSource(blueprint.example), config)
        executor.run(feed, lambda result: _ignore(player.play(Action(Kind.STEP))))
        recorder.begun.insert(0, ActivityStart(0, "before"))
        return build_rehearsal(recorder, rank, mesh.at.pp_rank, 0, templates.run.roles, templates.run.on_host)


def _ignore(_: object) -> None:
    return None
