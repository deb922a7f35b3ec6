"""Notices of a run's page: what went wrong, and what was done about it, the worst first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from meshwright.run.recoveries import PHASES, LoggedRecovery
from meshwright.terminal.format import format_duration, format_number_of
from meshwright.watch.ranks import numbers
from meshwright_plan.report.run import RunContents

MAX_STRAGGLERS = 8
PHASE_NAMES = {
    "detected": "until detected",
    "left": "step left",
    "groups": "groups opened",
    "built": "built",
    "restored": "restored",
    "stepped": "first step",
}


class Notice(NamedTuple):
    """One notice, with a table or the text of a file that are shown on demand."""

    level: Literal["error", "warning", "info"]
    title: str
    text: str
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    lines: str = ""


def notices(run: RunContents) -> list[Notice]:
    """Return the notices of a run: errors, then warnings, then information."""
    found = [*_hang(run), *_not_finite(run), *_stragglers(run), *_damage(run)]
    found += [*_restarts(run), *_recoveries(run)]
    return sorted(found, key=lambda notice: ("error", "warning", "info").index(notice.level))


def _hang(run: RunContents) -> Iterator[Notice]:
    if run.hang:
        text = "hang/report.txt names which rank waited for which."
        yield Notice("error", "The run hung", text, lines=run.hang)


def _not_finite(run: RunContents) -> Iterator[Notice]:
    skipped = [record.step for record in run.records if record.skipped]
    others = [
        record.step
        for record in run.records
        if not record.skipped
        and not (math.isfinite(record.loss) and math.isfinite(record.grad_norm))
    ]
    if skipped:
        title = f"{format_number_of(len(skipped), 'step')} skipped for NaN/Inf"
        text = f"The weights are unchanged by {_steps(skipped)}."
        yield Notice("warning", title, text)
    if others:
        title = f"NaN/Inf in {format_number_of(len(others), 'step')}"
        yield Notice("error", title, f"Loss or gradient norm of {_steps(others)}.")


def _restarts(run: RunContents) -> Iterator[Notice]:
    restarts = [each for each in run.attempts[1:] if each.from_step not in run.recovered_steps]
    repeated = [record for attempt in run.attempts for record in attempt.repeated]
    if not restarts and not repeated:
        return
    text = f"Resumed from {_steps([each.from_step for each in restarts])}." if restarts else ""
    if repeated:
        lost_s = sum(record.step_s for record in repeated)
        total_s = lost_s + sum(record.step_s for record in run.records)
        share = f": {lost_s / total_s:.1%} of the step time" if total_s else ""
        text += (
            f" {format_number_of(len(repeated), 'step')} repeated after a restart,"
            f" {format_duration(lost_s)}{share}."
        )
    layouts = list(dict.fromkeys(each.layout for each in run.attempts if each.layout != "?"))
    if len(layouts) > 1:
        text += f" Layouts: {', then '.join(layouts[:4])}{' ...' if layouts[4:] else ''}."
    title = format_number_of(len(restarts), "restart")
    yield Notice("warning" if repeated else "info", title, text.strip())


def _recoveries(run: RunContents) -> Iterator[Notice]:
    if not run.recoveries:
        return
    title = f"{len(run.recoveries):,} {'recovery' if len(run.recoveries) == 1 else 'recoveries'} in place"
    last = run.recoveries[-1]
    at = "" if last.step is None else f", before step {last.step:,}"
    text = f"The last{at}: {last.what}. Seconds of a phase count from when the failure was seen."
    head = ("time", "failure", "node", "processes replaced", "step")
    phases = tuple(f"{PHASE_NAMES[phase]}, s" for phase in PHASES)
    yield Notice("info", title, text, head + phases, [_row(each) for each in run.recoveries])


def _row(recovery: LoggedRecovery) -> tuple[str, ...]:
    """Return the cells of a recovery in place."""
    seconds = (recovery.seconds.get(phase) for phase in PHASES)
    return (
        recovery.at[:19],
        recovery.what,
        ", ".join(recovery.nodes) or "–",
        "–" if recovery.replaced is None else str(recovery.replaced),
        "–" if recovery.step is None else f"{recovery.step:,}",
        *("–" if each is None else f"{each:.3g}" for each in seconds),
    )


def _stragglers(run: RunContents) -> Iterator[Notice]:
    found: dict[str, list[float]] = {}
    for record in run.records:
        if record.straggler:
            found.setdefault(record.straggler, []).append(record.straggler_share or 0.0)
    if not found:
        return
    order = sorted(found.items(), key=lambda each: -sum(each[1]))[:MAX_STRAGGLERS]
    rows = [(name, f"{len(shares):,}", f"{max(shares):.0%}") for name, shares in order]
    name, shares = order[0]
    text = (
        f"{name}: other ranks waited for it for up to {max(shares):.0%} of a step, in"
        f" {format_number_of(len(shares), 'check')}."
    )
    head = ("straggler", "checks", "longest wait, share of a step")
    yield Notice("warning", format_number_of(len(found), "straggler"), text, head, rows)


def _damage(run: RunContents) -> Iterator[Notice]:
    if run.remarks:
        title = f"{format_number_of(len(run.remarks), 'problem')} with files of the run"
        text = "Everything else is shown."
        yield Notice("warning", title, text, lines="\n".join(run.remarks))


def _steps(steps: Sequence[int]) -> str:
    """Format steps: ``step 7``, ``steps 7-9, 12``."""
    return f"step{'s' * (len(set(steps)) > 1)} {numbers(steps)}"
