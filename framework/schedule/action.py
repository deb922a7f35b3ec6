"""Actions of a pipeline schedule: the ordered operations of each pipeline rank, as plain data with a text form.

    # 1f1b pp=2 num_stages=2 chunks=2 placement=loop
    0F0 0SEND_F0 0F1 {0SEND_F1+0RECV_B0} 0B0 ...       a row per pp_rank; the number before the kind is the stage,
    1RECV_F0 1F0 1B0 {1SEND_B0+1RECV_F1} 1F1 ...       the one after it the micro-batch; braces: posted together

There is no time, buffer, rank or idle in an action. Time is added by the simulator or by a measurement, idle is
derived, buffers belong to the stage, and the rank is the index of the row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

from meshwright.errors import ScheduleError
from meshwright.system.bounded import read_text


class Kind(StrEnum):
    """Kinds of actions. Closed: handlers, rules, costs and pictures are tables keyed by it.

    ``2SEND_F0``: stage 2 sends its output of micro-batch 0 to stage 3. ``3RECV_F0``: stage 3 receives its input of it.
    ``3SEND_B0``: stage 3 sends the gradient of its input to stage 2. ``2RECV_B0``: stage 2 receives that of its output.
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
    """Sum of the stage's complete gradients over the data-parallel replicas."""
    STEP = "STEP"
    """One optimizer step of all stages of the rank."""


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
COMMUNICATION = SENDS | RECEIVES
LAST_HALVES = frozenset({Kind.B, Kind.W})
"""Actions after which a micro-batch's activations are freed and its weight gradient is accumulated."""

_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_RECEIVED_FOR = {Kind.F: (Kind.RECV_F, -1), Kind.B: (Kind.RECV_B, 1), Kind.I: (Kind.RECV_B, 1)}
_SENT_AFTER = {Kind.F: (Kind.SEND_F, 1), Kind.B: (Kind.SEND_B, -1), Kind.I: (Kind.SEND_B, -1)}


class Action(NamedTuple):
    """One operation of a pipeline rank. REDUCE has no micro-batch; STEP has neither micro-batch nor stage."""

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{stage}{self.kind}{microbatch}"

    def partner(self) -> Action:
        """Return the other end of a communication: ``2SEND_F0`` <-> ``3RECV_F0``, ``3SEND_B0`` <-> ``2RECV_B0``."""
        assert self.stage is not None, self
        kind, offset = _PARTNERS[self.kind]
        return Action(kind, self.stage + offset, self.microbatch)


Item: TypeAlias = Action | tuple[Action, ...]
"""Item of a row: an action, or a group of communications that are posted and awaited together."""


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item. (An Action is itself a tuple: check ``isinstance(item, Action)``, never
    ``tuple``.)"""
    return (item,) if isinstance(item, Action) else item


class Placement(StrEnum):
    """Placement of stages on pipeline ranks."""

    LOOP = "loop"
    """Stages go round the ranks: 0 1 .. pp-1 0 1 .."""
    V = "v"
    """Stages go down the ranks and come back: 0 1 .. pp-1 pp-1 .. 1 0; at the turn nothing is sent."""

    def pp_rank(self, stage: int, pp: int) -> int:
        """Return the pipeline rank of a stage."""
        turn, position = divmod(stage, pp)
        return pp - 1 - position if self is Placement.V and turn % 2 else position


@dataclass(frozen=True)
class Schedule:
    """Actions of every pipeline rank in one step: ``for item in schedule.rows[pp_rank]``. All ranks hold all rows."""

    name: str
    pp: int
    num_stages: int
    chunks: int
    rows: tuple[tuple[Item, ...], ...]
    placement: Placement = Placement.LOOP

    def __post_init__(self) -> None:
        assert len(self.rows) == self.pp >= 1, (len(self.rows), self.pp)
        assert self.num_stages % self.pp == 0, f"{self.num_stages} stages over {self.pp} pipeline ranks"
        for row in self.rows:
            for item in row:
                if not isinstance(item, Action):
                    assert item and {action.kind for action in item} <= COMMUNICATION, f"posted together: {item}"

    @property
    def interleave(self) -> int:
        """Number of stages per pipeline rank."""
        return self.num_stages // self.pp

    @property
    def is_lowered(self) -> bool:
        """True if the schedule has communications, and can run; else it is to be lowered first."""
        return any(action.kind not in COMPUTE for rank in range(self.pp) for _, action in self.actions(rank))

    @property
    def splits_backward(self) -> bool:
        """True when some backward is split into I and W."""
        return any(action.kind is Kind.I for rank in range(self.pp) for _, action in self.actions(rank))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage. For a damaged row it may be one that does not exist."""
        return self._ranks[stage] if stage < self.num_stages else self.placement.pp_rank(stage, self.pp)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage, cached for the lookup at every message."""
        return tuple(self.placement.pp_rank(stage, self.pp) for stage in range(self.num_stages))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, first to last."""
        return self._stages[pp_rank]

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.pp)]
        for stage, rank in enumerate(self._ranks):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    def actions(self, pp_rank: int) -> Iterator[tuple[int, Action]]:
        """Yield the actions of a row, groups opened, each with the position of its item in the row."""
        return ((position, action) for position, item in enumerate(self.rows[pp_rank]) for action in actions_of(item))

    def peer(self, action: Action) -> int:
        """Return the pipeline rank at the other end of a communication."""
        stage = action.partner().stage
        assert stage is not None
        return self.rank_of(stage)

    def receive_for(self, action: Action) -> Action | None:
        """Return the receive that a computation needs; None where its input comes from this rank."""
        return self._at_border(action, self._received_for)

    def send_after(self, action: Action) -> Action | None:
        """Return the send that follows a computation; None where no other rank needs its output."""
        return self._at_border(action, self._sent_after)

    def _at_border(self, action: Action, kinds: dict[tuple[Kind, int | None], Kind]) -> Action | None:
        kind = kinds.get(action[:2])
        return None if kind is None else Action(kind, action.stage, action.microbatch)

    @cached_property
    def _received_for(self) -> dict[tuple[Kind, int | None], Kind]:
        return self._border(_RECEIVED_FOR)

    @cached_property
    def _sent_after(self) -> dict[tuple[Kind, int | None], Kind]:
        return self._border(_SENT_AFTER)

    def _border(self, table: dict[Kind, tuple[Kind, int]]) -> dict[tuple[Kind, int | None], Kind]:
        """Return, for each computation, its message to or from another rank, where there is one."""
        found: dict[tuple[Kind, int | None], Kind] = {}
        for kind, (message, offset) in table.items():
            for stage in range(self.num_stages):
                neighbour = stage + offset
                if 0 <= neighbour < self.num_stages and self.rank_of(neighbour) != self.rank_of(stage):
                    found[kind, stage] = message
        return found

    def last_backwards(self, pp_rank: int) -> frozenset[Action]:
        """Return the B or W of each stage of the rank after which its weight gradient is complete: the reduction may
        begin."""
        last = {action.stage: action for _, action in self.actions(pp_rank) if action.kind in LAST_HALVES}
        return frozenset(last.values())

    def digest(self) -> str:
        """Return the sha256 of the text form, which must be equal on all ranks."""
        return hashlib.sha256(format_schedule(self).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------- text form

_HEADER = re.compile(
    r"# (?P<name>\S+) pp=(?P<pp>\d+) num_stages=(?P<num_stages>\d+) chunks=(?P<chunks>\d+) placement=(?P<placement>\w+)"
)
_ACTION = re.compile(r"(?P<stage>\d+)?(?P<kind>[A-Z]+(?:_[A-Z])?)(?P<microbatch>\d+)?", re.ASCII)
_HAS_STAGE = frozenset(Kind) - {Kind.STEP}
_HAS_MICROBATCH = COMPUTE | COMMUNICATION


def format_item(item: Item) -> str:
    """Format an item: ``2F0``, or ``{0SEND_F1+0RECV_B0}`` for communications posted together."""
    return str(item) if isinstance(item, Action) else "{" + "+".join(str(action) for action in item) + "}"


def format_schedule(schedule: Schedule) -> str:
    """Format a schedule: a header and a row per pipeline rank. Inverse of :func:`parse_schedule`."""
    header = (
        f"# {schedule.name} pp={schedule.pp} num_stages={schedule.num_stages} chunks={schedule.chunks}"
        f" placement={schedule.placement}"
    )
    return "\n".join([header, *(" ".join(format_item(item) for item in row) for row in schedule.rows), ""])


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a text file. Its order is not checked.

    Rows of computations only (``is_lowered`` is false) are for :func:`lower`. Its result, or a lowered file, is for
    :func:`check`.

    Raises:
        ScheduleError: with file, line and word.
    """
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ScheduleError(
            "MW-SCHEDULE-001", f"{path}: cannot be read ({reason}); pipeline.schedule_file names a schedule as text"
        ) from None
    return parse_schedule(text, f"{path}, ")


def parse_schedule(text: str, source: str = "") -> Schedule:
    """Parse the text form of a schedule. Blank lines and comments, lines that begin with ``#``, may stand anywhere.

    Raises:
        ScheduleError: with the line and the word that cannot be parsed, after ``source``.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    headers = [(number, _HEADER.fullmatch(line)) for number, line in lines if _HEADER.fullmatch(line)]
    rows = [(number, line) for number, line in lines if not line.startswith("#")]
    if len(headers) != 1 or (rows and rows[0][0] < headers[0][0]):
        number = headers[-1][0] if headers else lines[0][0] if lines else 1
        what = f"{len(headers)} headers" if len(headers) > 1 else "no header above the first row"
        raise ScheduleError(
            "MW-SCHEDULE-002",
            f"{source}line {number}: {what}: write one line "
            f"'# NAME pp=P num_stages=S chunks=M placement={'|'.join(Placement)}' above the rows",
        )
    ((number, found),) = headers
    assert found is not None
    pp, num_stages, chunks = (int(found[name]) for name in ("pp", "num_stages", "chunks"))
    num_words = sum(len(line.split()) for _, line in rows)
    problem = _header_problem(pp, num_stages, chunks, found["placement"], len(rows), num_words)
    if problem:
        raise ScheduleError("MW-SCHEDULE-003", f"{source}line {number}: {problem}")
    return Schedule(
        name=found["name"],
        pp=pp,
        num_stages=num_stages,
        chunks=chunks,
        rows=tuple(
            tuple(
                _parse_item(word, f"{source}line {number}, word {index}: {word!r}")
                for index, word in enumerate(line.split(), start=1)
            )
            for number, line in rows
        ),
        placement=Placement(found["placement"]),
    )


def _header_problem(pp: int, num_stages: int, chunks: int, placement: str, num_rows: int, num_words: int) -> str | None:
    if placement not in list(Placement):
        return f"placement={placement} is not known: choose one of {', '.join(Placement)}"
    if pp < 1 or chunks < 1:
        return f"pp={pp} chunks={chunks}: a step needs at least one pipeline rank and one micro-batch"
    if num_stages < 1 or num_stages % pp:
        return f"num_stages={num_stages} with pp={pp}: every rank holds equally many: write {pp}, {2 * pp}, {3 * pp} .."
    if num_rows != pp:
        there = "is 1 row" if num_rows == 1 else f"are {num_rows} rows"
        return f"pp={pp}, but there {there}: write one row per pipeline rank"
    if num_stages * chunks > num_words:
        return (
            f"num_stages={num_stages} chunks={chunks} is {num_stages * chunks} forwards, but the rows hold {num_words} "
            f"words in all: correct the header, or write the rows whole"
        )
    return None


def _parse_item(word: str, where: str) -> Item:
    if not word.startswith("{"):
        return _parse_action(word, where)
    group = tuple(_parse_action(part, where) for part in word[1:].removesuffix("}").split("+"))
    if not word.endswith("}") or not {action.kind for action in group} <= COMMUNICATION:
        raise ScheduleError(
            "MW-SCHEDULE-004",
            f"{where}: a group is written {{0SEND_F1+0RECV_B0}}, without blanks, of SEND and RECV only",
        )
    return group


def _parse_action(word: str, where: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is not None and found["kind"] in list(Kind):
        kind = Kind(found["kind"])
        stage, microbatch = (None if found[part] is None else int(found[part]) for part in ("stage", "microbatch"))
        if (stage is not None) == (kind in _HAS_STAGE) and (microbatch is not None) == (kind in _HAS_MICROBATCH):
            return Action(kind, stage, microbatch)
    raise ScheduleError(
        "MW-SCHEDULE-005",
        f"{where} is no action: write <stage><kind><micro-batch> like 2F0 or 1RECV_F1, 2REDUCE, STEP; kinds: "
        f"{', '.join(Kind)}",
    )
