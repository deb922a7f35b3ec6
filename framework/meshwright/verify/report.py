"""Rows and table of a comparison, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.terminal.format import format_table

HEADER = (
    *(
        "layout",
        "init",
        "samples",
        "loss 1",
        "losses",
        "norms",
        "gradient",
        "weights",
        "validation",
        "again",
    ),
    "verdict",
)


class VerdictRow(NamedTuple):
    """Comparison of one layout with the reference. Distances are relative."""

    layout: str
    initial_equal: bool = False
    samples_equal: bool = False
    loss: float = 0.0
    """Difference of the loss of step 1."""
    losses: float = 0.0
    """Largest difference of a loss over all steps."""
    norms: float = 0.0
    """Largest difference of a gradient norm over all steps."""
    gradient: float = 0.0
    """Worst parameter's gradient in step 1:
    norm of the difference over the norm of the reference's gradient.
    """
    gradient_name: str = ""
    weights: float = 0.0
    """Worst weight or master weight after the last step:
    norm of the difference over the norm of the reference's.
    """
    weights_name: str = ""
    validation: float = 0.0
    """Largest difference of a validation loss (eval mode)."""
    repeats: bool | None = None
    """True if a second run gave the same bits in every loss, gradient norm and validation loss.
    None: run once.
    """
    problems: Sequence[str] = ()
    """Every failed comparison, with the first parameter or step that differs."""
    suspect: str = ""
    """Rule or tensor that the problems point to; "" without any, or if no single one stands out."""
    failure: str = ""
    """``refused: reason`` or ``cannot run: reason``; the row then has no numbers."""

    @property
    def passed(self) -> bool:
        """True if the layout ran and missed no tolerance."""
        return not self.problems and not self.failure

    @property
    def verdict(self) -> str:
        """Verdict in one or two words."""
        if self.failure:
            return self.failure.partition(":")[0]
        return "same numbers" if self.passed else "DIFFERENT"

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns of HEADER."""
        if self.failure:
            return (self.layout, *[""] * (len(HEADER) - 2), self.verdict)
        numbers = (self.loss, self.losses, self.norms, self.gradient, self.weights, self.validation)
        return (
            self.layout,
            "equal" if self.initial_equal else "DIFFER",
            "equal" if self.samples_equal else "DIFFER",
            *(f"{number:.1e}" for number in numbers),
            {None: "-", True: "equal", False: "DIFFER"}[self.repeats],
            self.verdict,
        )


class Report(NamedTuple):
    """Comparison of all layouts with the reference."""

    title: str
    rows: list[VerdictRow]
    problems: Sequence[str] = ()
    """Initial values that are not the builder's, whatever the layout."""
    notes: tuple[str, ...] = ()
    """Remarks about the plain run."""

    @property
    def passed(self) -> bool:
        """True if no check of the model failed and no layout missed a tolerance."""
        return not self.problems and all(row.passed for row in self.rows)

    def table(self) -> str:
        """Return the report as text: a row per layout, then the problems."""
        cells = [row.cells() for row in self.rows]
        rule = ["-" * max(map(len, column)) for column in zip(HEADER, *cells, strict=True)]
        lines = format_table([HEADER, rule, *cells], "<" * len(HEADER))
        for row in self.rows:
            lines += [
                f"{row.layout}: {problem}"
                for problem in (*row.problems, *[row.failure] * bool(row.failure))
            ]
            lines += [f"{row.layout}: points to {row.suspect}"] * bool(row.suspect)
        return "\n".join([self.title, "", *lines, *self.problems, *self.notes, "", self._verdict()])

    def _verdict(self) -> str:
        different = sum(bool(row.problems) for row in self.rows)
        failed = sum(bool(row.failure) for row in self.rows)
        parts = []
        if different:
            parts.append(f"{different} of {len(self.rows)} layouts differ")
        if failed:
            parts.append(f"{failed} of {len(self.rows)} layouts could not be run")
        if self.problems:
            parts.append(f"{len(self.problems)} initial values are not the builder's")
        return "; ".join(parts) or f"all {len(self.rows)} layouts agree"


def join_reports(reports: Sequence[Report]) -> Report:
    """Return one report of several trials of a model, under the title of the first."""
    rows = [row for report in reports for row in report.rows]
    problems = dict.fromkeys(problem for report in reports for problem in report.problems)
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    return Report(reports[0].title, rows, list(problems), tuple(notes))
