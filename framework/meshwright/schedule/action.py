"""Actions of a pipeline schedule: the ordered operations of each pipeline rank,
as plain data with a text form.

    # 1f1b pp=2 num_stages=2 chunks=2 placement=loop
    0F0 {0SEND_F0+0RECV_B0} 0F1 {0SEND_F1+0RECV_B1} 0B0 ...    a row per pp_rank; each action is stage, kind and
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 ...                 micro-batch; braces: communications posted together;
                                                               {0F2+3B1}: a pair, computed in turns

An action has no time, buffer or rank. The simulator or a measurement adds time, buffers belong to
the stage, and the rank is the index of the row. :mod:`text` formats and parses this form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """Kinds of actions. A closed set: handlers, checks, costs and drawings are tables keyed by it.

    ``2SEND_F0``: stage 2 sends its output of micro-batch 0 to stage 3. ``3RECV_F0``: stage 3
        receives it as its input.
    ``3SEND_B0``: stage 3 sends the gradient of its input to stage 2. ``2RECV_B0``: stage 2 receives
        it.
    """

    F = "F"
    """Forward."""
    B = "B"
    """The whole backward: I and W at once."""
    I = "I"  # noqa: E741  the letter of the literature
    """The input-gradient half of the backward."""
    W = "W"
    """The weight-gradient half of the backward."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    """End of a stage's gradient reduction: post the remaining ones, wait for all,
    sum partial gradients over tp.
    """
    STEP = "STEP"
    """One optimizer step of all stages of the rank."""


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
COMMUNICATION = SENDS | RECEIVES
COMPLETES_BACKWARD = frozenset({Kind.B, Kind.W})
"""Actions after which a micro-batch's activations are freed
and its weight gradient is accumulated.
"""

# kind of one end of a message -> (kind of the other end, its stage relative to this one)
_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
# computation -> (its message, stage of the other end relative to its own). W is in neither: all that
# it needs was kept by the I of its stage.
_RECEIVED_FOR = {Kind.F: (Kind.RECV_F, -1), Kind.B: (Kind.RECV_B, 1), Kind.I: (Kind.RECV_B, 1)}
_SENT_AFTER = {Kind.F: (Kind.SEND_F, 1), Kind.B: (Kind.SEND_B, -1), Kind.I: (Kind.SEND_B, -1)}


class Action(NamedTuple):
    """One operation of a pipeline rank. REDUCE has no micro-batch;
    STEP has neither micro-batch nor stage.
    """

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{stage}{self.kind}{microbatch}"

    def partner(self) -> Action:
        """Return the other end of a communication: ``2SEND_F0`` <-> ``3RECV_F0``,
        ``3SEND_B0`` <-> ``2RECV_B0``.
        """
        assert self.stage is not None, self
        kind, offset = _PARTNERS[self.kind]
        return Action(kind, self.stage + offset, self.microbatch)


Item: TypeAlias = Action | tuple[Action, ...]
"""Item of a row: an action, a group of communications that are posted and awaited together,
or a pair.
"""


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item.

    An Action is itself a tuple: only ``isinstance(item, Action)`` separates it from a group.
    """
    return (item,) if isinstance(item, Action) else item


class Placement(StrEnum):
    """Placement of stages on pipeline ranks."""

    LOOP = "loop"
    """Stages are assigned to ranks in round-robin order: 0 1 .. pp-1 0 1 .."""
    V = "v"
    """Stages go down the ranks and come back: 0 1 .. pp-1 pp-1 .. 1 0;
    at the turn nothing is sent.
    """

    def pp_rank(self, stage: int, pp: int) -> int:
        """Return the pipeline rank of a stage."""
        turn, position = divmod(stage, pp)
        return pp - 1 - position if self is Placement.V and turn % 2 else position


@dataclass(frozen=True)
class Schedule:
    """Actions of every pipeline rank in one step: ``for item in schedule.rows[pp_rank]``.

    Every rank holds all rows: to check the whole for deadlocks, to hash it, and to draw it.
    """

    name: str
    pp: int
    num_stages: int
    chunks: int
    """Micro-batches per replica and step (Megatron-LM: num_microbatches;
    its "model chunks" are stages here).
    """
    rows: tuple[tuple[Item, ...], ...]
    placement: Placement = Placement.LOOP

    def __post_init__(self) -> None:
        assert len(self.rows) == self.pp >= 1, (len(self.rows), self.pp)
        assert self.num_stages % self.pp == 0, (
            f"{self.num_stages} stages over {self.pp} pipeline ranks"
        )
        for row in self.rows:
            for item in row:
                if not isinstance(item, Action):
                    kinds = {action.kind for action in item}
                    is_pair = len(item) == 2 and kinds <= COMPUTE
                    is_group = len(item) > 0 and kinds <= COMMUNICATION
                    assert is_pair or is_group, f"posted together: {item}"

    @property
    def interleave(self) -> int:
        """Number of stages per pipeline rank."""
        return self.num_stages // self.pp

    @cached_property
    def is_lowered(self) -> bool:
        """True if the rows hold messages, REDUCE or STEP besides computations, and can run;
        else lower them first.
        """
        return not self._kinds <= COMPUTE

    @cached_property
    def splits_backward(self) -> bool:
        """True when some backward is split into I and W."""
        return Kind.I in self._kinds

    @cached_property
    def _kinds(self) -> frozenset[Kind]:
        """Kinds of all actions of all rows."""
        rows = (self.actions(pp_rank) for pp_rank in range(self.pp))
        return frozenset(action.kind for row in rows for _, action in row)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage. A stage out of range, in a faulty schedule,
        may give no valid rank.
        """
        if stage < self.num_stages:
            return self._ranks[stage]
        return self.placement.pp_rank(stage, self.pp)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage, cached for the lookup at every message."""
        return tuple(self.placement.pp_rank(stage, self.pp) for stage in range(self.num_stages))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, first to last."""
        return tuple(stage for stage, rank in enumerate(self._ranks) if rank == pp_rank)

    def actions(self, pp_rank: int) -> Iterator[tuple[int, Action]]:
        """Yield (position of its item in the row, action) for each action of a row;
        groups and pairs are flattened.
        """
        return (
            (position, action)
            for position, item in enumerate(self.rows[pp_rank])
            for action in actions_of(item)
        )

    def peer(self, action: Action) -> int:
        """Return the pipeline rank at the other end of a communication."""
        stage = action.partner().stage
        assert stage is not None
        return self.rank_of(stage)

    def receive_for(self, action: Action) -> Action | None:
        """Return the receive that a computation needs;
        None where its input comes from this rank.
        """
        return self._message(action, _RECEIVED_FOR)

    def send_after(self, action: Action) -> Action | None:
        """Return the send that follows a computation; None where no other rank needs its output."""
        return self._message(action, _SENT_AFTER)

    def _message(self, action: Action, table: Mapping[Kind, tuple[Kind, int]]) -> Action | None:
        """Return the message of ``table`` to or from the neighbouring stage,
        if that is on another rank.
        """
        stage = action.stage
        kind, offset = table.get(action.kind, (None, 0))
        if kind is None or stage is None or not 0 <= stage + offset < self.num_stages:
            return None
        if self._ranks[stage + offset] == self.rank_of(stage):
            return None  # the turn of a V: both stages are on this rank
        return Action(kind, stage, action.microbatch)

    def last_backwards(self, pp_rank: int) -> frozenset[Action]:
        """Return the B or W of each stage of the rank after which its weight gradient is complete,
        so that its reduction may begin.
        """
        last = {
            action.stage: action
            for _, action in self.actions(pp_rank)
            if action.kind in COMPLETES_BACKWARD
        }
        return frozenset(last.values())
