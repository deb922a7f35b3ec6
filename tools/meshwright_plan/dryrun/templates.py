"""Templates of the actions of a stage, from a dry run with few micro-batches.

    recorded, 4 micro-batches      0F0  0F1  0F2  0F3  0B0     0B1   0B2   0B3     REDUCE  STEP
    templates                      F                   first   inner   =   last    REDUCE  STEP
    replayed, 16                   3F0  3F1  {..}  3B0  3F2  {..}  3B1  ..         the rank's own row, by the executor

All micro-batches must behave alike, except for the first and the last backward of a step; the two
in the middle are compared. A template contains the lifetimes of the storages that an action makes,
and its collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.mesh.fake import InterceptedOperation
from meshwright.schedule.action import Action, Kind, Schedule
from meshwright_plan.dryrun.fake_step import StageTensors, StepRecording
from meshwright_plan.dryrun.recorder import StorageLife

CHUNKS = 4
"""Number of micro-batches of the short dry run."""
_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class ReplayError(Exception):
    """Recording that cannot be extended: actions differ that should be equal.
    The message is the reason.
    """


class Release(NamedTuple):
    """Release of a storage: ``offset`` operations into the ``times``-th later action
    of ``kind`` on the stage.

    ``times`` -1 means the action of that kind of the same micro-batch.
    """

    kind: Kind | None
    """Kind of the releasing action; None: it is not released in the step."""
    times: int
    offset: int


NEVER = Release(None, 0, 0)


class TemplateStorage(NamedTuple):
    """Storage that an action has made. ``born`` is an operation offset within the action."""

    born: int
    num_bytes: int
    release: Release
    number: int
    """Number within the template, shared by all lives of one storage."""


def in_order(storages: Iterable[TemplateStorage]) -> tuple[TemplateStorage, ...]:
    """Return storages in the order in which they were made, those of one operation by number.

    Releases have no order, as some never come.
    """
    return tuple(sorted(storages, key=lambda each: (each.born, each.number)))


class Template(NamedTuple):
    """Recorded behaviour of one action. Times are operation offsets within the action."""

    num_operations: int
    storages: tuple[TemplateStorage, ...]
    communication: tuple[tuple[int, InterceptedOperation], ...]
    output_offsets: tuple[int, ...]
    """Offsets at which the returned tensors were made."""
    outputs_kept: tuple[bool, ...]
    output_sources: tuple[int, ...]
    """Index of the received tensor that each returned one is; -1: a new tensor."""
    input_releases: tuple[Release, ...]
    """Release of each received tensor; :data:`NEVER`: nothing holds it beyond the action."""


Key = tuple[Kind, int, str]
"""Action kind, position among the rank's stages,
and roles of the micro-batch's backwards (see :func:`roles_of`).
"""


def roles_of(schedule: Schedule, pp_rank: int) -> dict[tuple[int, int], str]:
    """Return (stage, micro-batch) -> roles of its backwards among those of the stage: first,
    inner or last.
    """
    order: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for _, action in schedule.actions(pp_rank):
        if action.kind in _BACKWARDS and action.stage is not None and action.microbatch is not None:
            order[action.kind, action.stage].append(action.microbatch)
    roles: dict[tuple[int, int], str] = defaultdict(str)
    for (kind, stage), microbatches in sorted(order.items()):
        for number, microbatch in enumerate(microbatches):
            role = (
                "first" if number == 0 else "last" if number == len(microbatches) - 1 else "inner"
            )
            roles[stage, microbatch] += f"{kind} {role} "
    return roles


def key_of(action: Action, stages: Sequence[int], roles: Mapping[tuple[int, int], str]) -> Key:
    """Return the key of an action's template."""
    if action.stage is None or action.microbatch is None:
        return action.kind, 0 if action.stage is None else stages.index(action.stage), ""
    return action.kind, stages.index(action.stage), roles[action.stage, action.microbatch]


class Templates(NamedTuple):
    """Templates of all stages of a pipeline rank."""

    by_key: dict[Key, Template]
    before: tuple[tuple[StorageLife, Release, int], ...]
    """Storages from before the step: lifetime, release,
    and position of the stage whose action releases it.
    """
    run: StepRecording


def build_templates(run: StepRecording, schedule: Schedule, pp_rank: int) -> Templates:
    """Build the templates from a recording with :data:`CHUNKS` micro-batches.

    Raises:
        ReplayError: two actions that should be equal differ, or no template can express when a
            storage is released.
    """
    builder, stages, roles = _Builder(run), schedule.stages_of(pp_rank), roles_of(schedule, pp_rank)
    storages = builder.storages()
    by_key: dict[Key, Template] = {}
    for action in builder.places:
        template, key = builder.template(action, storages[action]), key_of(action, stages, roles)
        if by_key.setdefault(key, template) != template:
            raise ReplayError(f"{action} is not like another {action.kind} of its stage")
    before = []
    for life in run.recorder.lives:
        if life.born <= run.first and life.died >= run.first and life.num_bytes:
            release, stage = builder.release(life, None) if life.died > run.first else (NEVER, None)
            before.append((life, release, stages.index(stage) if stage is not None else 0))
    return Templates(by_key, tuple(before), run)


class _Builder:
    """Builder of templates, from the recording of a step."""

    def __init__(self, run: StepRecording) -> None:
        self.run, self.recorder = run, run.recorder
        starts = [start for start in self.recorder.activities if start.at > run.first]
        ends = [*(start.at for start in starts[1:]), self.recorder.now + 1]
        self.spans = [
            (start.at, end, start.activity) for start, end in zip(starts, ends, strict=True)
        ]
        self.places: dict[Action, tuple[int, int]] = {}
        """Action -> its first operation, and that of the next activity."""
        for start, end, action in self.spans:
            if isinstance(action, Action) and action.kind in (
                Kind.F,
                *_BACKWARDS,
                Kind.REDUCE,
                Kind.STEP,
            ):
                self.places[action] = (start, end)
        self.first_births = {life.number: life.born for life in reversed(self.recorder.lives)}
        self.last_deaths = {life.number: life.died for life in self.recorder.lives}

    def activity_at(self, moment: int) -> object:
        """Return the rank's activity at an operation."""
        return next(
            (activity for start, end, activity in self.spans if start <= moment < end), None
        )

    def release(self, life: StorageLife, maker: Action | None) -> tuple[Release, int | None]:
        """Return the release of a storage that ``maker`` has made,
        and the stage of the releasing action.

        ``maker`` None: it was made before the step.
        """
        if life.died >= self.recorder.now:
            return NEVER, None
        releaser = self.activity_at(life.died)
        if not isinstance(releaser, Action) or releaser not in self.places:
            raise ReplayError(f"a storage of {maker} is released in {releaser}")
        key, end = (releaser.kind, releaser.stage), self.places[releaser][0]
        offset = life.died - end
        if maker is not None and (releaser.stage, releaser.microbatch) == (
            maker.stage,
            maker.microbatch,
        ):
            return Release(releaser.kind, -1, offset), releaser.stage
        if maker is not None and releaser.stage not in (maker.stage, None):
            raise ReplayError(f"a storage of {maker} is released in {releaser}")
        made = self.places[maker][0] if maker is not None else 0
        starts = [
            start
            for action, (start, _) in self.places.items()
            if (action.kind, action.stage) == key
        ]
        return (
            Release(releaser.kind, sum(made < start <= end for start in starts), offset),
            releaser.stage,
        )

    def storages(self) -> dict[Action, list[TemplateStorage]]:
        """Return the storages that each action has made,
        without a stage's inputs and outputs and sample indices.
        """
        tensors = self.run.stage_tensors.values()
        excluded = {
            number
            for each in tensors
            for number in (*each.outputs, *each.inputs, *each.sample_indices)
        }
        by_maker: dict[Action, list[TemplateStorage]] = defaultdict(list)
        numbers: dict[int, int] = {}
        for life in self.recorder.lives:
            if life.born <= self.run.first or life.number in excluded or not life.num_bytes:
                continue
            maker = self.activity_at(life.born)
            if isinstance(maker, Action) and maker in self.places:
                number = numbers.setdefault(life.number, len(numbers))
                born, release = life.born - self.places[maker][0], self.release(life, maker)[0]
                by_maker[maker].append(TemplateStorage(born, life.num_bytes, release, number))
        return by_maker

    def template(self, action: Action, storages: Sequence[TemplateStorage]) -> Template:
        """Return the template of one action."""
        start, end = self.places[action]
        tensors = self.run.stage_tensors.get(action, StageTensors((), (), ()))
        first_number = min((storage.number for storage in storages), default=0)
        return Template(
            end - start - 1,
            in_order(
                storage._replace(number=storage.number - first_number) for storage in storages
            ),
            tuple(
                (each.at - start, each.call)
                for each in self.recorder.communication
                if start < each.at < end
            ),
            tuple(self.first_births[number] - start for number in tensors.outputs),
            tensors.outputs_kept,
            tuple(tensors.inputs.index(n) if n in tensors.inputs else -1 for n in tensors.outputs),
            tuple(self._input_release(number, action) for number in tensors.inputs),
        )

    def _input_release(self, number: int, action: Action) -> Release:
        died = self.last_deaths[number]
        releaser = self.activity_at(died)
        if (
            isinstance(releaser, Action)
            and releaser in self.places
            and releaser.microbatch == action.microbatch
        ):
            return Release(releaser.kind, -1, died - self.places[releaser][0])
        return NEVER
