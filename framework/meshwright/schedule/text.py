"""Text form of schedules: a header, and a row of actions for each pipeline rank. No torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from meshwright.errors import ScheduleError
from meshwright.schedule.action import (
    COMMUNICATION,
    COMPUTE,
    Action,
    Item,
    Kind,
    Placement,
    Schedule,
    actions_of,
)
from meshwright.system.bounded import read_text

_HEADER = re.compile(
    r"# (?P<name>[^\s$\\]{1,100}) pp=(?P<pp>\d{1,9}) num_stages=(?P<num_stages>\d{1,9})"
    r" chunks=(?P<chunks>\d{1,9}) "
    r"placement=(?P<placement>\w+)",
    re.ASCII,
)
_ACTION = re.compile(
    r"(?P<stage>\d{1,9})?(?P<kind>[A-Z]+(?:_[A-Z])?)(?P<microbatch>\d{1,9})?", re.ASCII
)
_HAS_STAGE = frozenset(Kind) - {Kind.STEP}
_HAS_MICROBATCH = COMPUTE | COMMUNICATION


def format_item(item: Item) -> str:
    """Format an item: ``2F0``; in braces a pair, ``{0F2+3B1}``,
    or communications posted together.
    """
    if isinstance(item, Action):
        return str(item)
    return "{" + "+".join(str(action) for action in item) + "}"


def is_pair(item: Item) -> bool:
    """Return whether an item is a pair: F and then a backward (B or I) of another stage,
    computed in turns.
    """
    actions = actions_of(item)
    kinds = [action.kind for action in actions]
    return kinds in ([Kind.F, Kind.B], [Kind.F, Kind.I]) and actions[0].stage != actions[1].stage


def format_schedule(schedule: Schedule) -> str:
    """Format a schedule: a header and a row per pipeline rank.
    Inverse of :func:`parse_schedule`.
    """
    header = (
        f"# {schedule.name} pp={schedule.pp} num_stages={schedule.num_stages}"
        f" chunks={schedule.chunks} placement={schedule.placement}"
    )
    return "\n".join(
        [header, *(" ".join(format_item(item) for item in row) for row in schedule.rows), ""]
    )


def schedule_digest(schedule: Schedule) -> str:
    """Return the sha256 of the text form, which must be equal on all ranks."""
    return hashlib.sha256(format_schedule(schedule).encode()).hexdigest()


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule from a text file. Its order is not checked.

    Rows of computations only (``is_lowered`` is false) must be lowered (:func:`lower`) before
    :func:`check`.

    Raises:
        ScheduleError: the file cannot be read or parsed; names file, line and word.
    """
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ScheduleError(
            "MW-SCHEDULE-001",
            f"{path}: cannot be read ({reason}); pipeline.schedule_file names a schedule as text",
        ) from None
    return parse_schedule(text, f"{path}, ")


def parse_schedule(text: str, source: str = "") -> Schedule:
    """Parse the text form of a schedule. Blank lines and comments, lines that begin with ``#``,
    are skipped.

    Raises:
        ScheduleError: with the line and the word that cannot be parsed, after ``source``.
    """
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    headers = [
        (number, _HEADER.fullmatch(line)) for number, line in lines if _HEADER.fullmatch(line)
    ]
    rows = [(number, line) for number, line in lines if not line.startswith("#")]
    if len(headers) != 1 or (rows and rows[0][0] < headers[0][0]):
        number = headers[-1][0] if headers else lines[0][0] if lines else 1
        what = f"{len(headers)} headers" if len(headers) > 1 else "no header above the first row"
        raise ScheduleError(
            "MW-SCHEDULE-002",
            f"{source}line {number}: {what}: write one line "
            f"'# NAME pp=P num_stages=S chunks=M placement={'|'.join(Placement)}' above the rows",
        )
    ((number, header),) = headers
    assert header is not None
    pp, num_stages, chunks = (int(header[name]) for name in ("pp", "num_stages", "chunks"))
    num_words = sum(len(line.split()) for _, line in rows)
    problem = _header_problem(pp, num_stages, chunks, header["placement"], len(rows), num_words)
    if problem:
        raise ScheduleError("MW-SCHEDULE-003", f"{source}line {number}: {problem}")
    return Schedule(
        name=header["name"],
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
        placement=Placement(header["placement"]),
    )


def _header_problem(
    pp: int, num_stages: int, chunks: int, placement: str, num_rows: int, num_words: int
) -> str | None:
    if placement not in list(Placement):
        return f"placement={placement} is not known: choose one of {', '.join(Placement)}"
    if pp < 1 or chunks < 1:
        return (
            f"pp={pp} chunks={chunks}: a step needs at least one pipeline rank and one micro-batch"
        )
    if num_stages < 1 or num_stages % pp:
        return (
            f"num_stages={num_stages} must be a multiple of pp={pp}: write {pp}, {2 * pp},"
            f" {3 * pp} .."
        )
    if num_rows != pp:
        there = "is 1 row" if num_rows == 1 else f"are {num_rows} rows"
        return f"pp={pp}, but there {there}: write one row per pipeline rank"
    if num_stages * chunks > num_words:
        return (
            f"num_stages={num_stages} chunks={chunks} is {num_stages * chunks} forwards, but the"
            f" rows hold {num_words} words in all: correct the header, or write the rows whole"
        )
    return None


def _parse_item(word: str, where: str) -> Item:
    if not word.startswith("{"):
        return _parse_action(word, where)
    group = tuple(_parse_action(part, where) for part in word[1:].removesuffix("}").split("+"))
    if not word.endswith("}") or not (
        is_pair(group) or {action.kind for action in group} <= COMMUNICATION
    ):
        raise ScheduleError(
            "MW-SCHEDULE-004",
            f"{where}: a group is written {{0SEND_F1+0RECV_B0}}, without blanks, of SEND and RECV"
            " only; a pair {0F2+3B1}, F and then B or I of another stage",
        )
    return group


def _parse_action(word: str, where: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is not None and match["kind"] in list(Kind):
        kind = Kind(match["kind"])
        stage, microbatch = (
            None if match[part] is None else int(match[part]) for part in ("stage", "microbatch")
        )
        if (stage is not None) == (kind in _HAS_STAGE) and (microbatch is not None) == (
            kind in _HAS_MICROBATCH
        ):
            return Action(kind, stage, microbatch)
    raise ScheduleError(
        "MW-SCHEDULE-005",
        f"{where} is no action: write <stage><kind><micro-batch> like 2F0 or 1RECV_F1, 2REDUCE,"
        f" STEP; kinds: {', '.join(Kind)}",
    )
