"""Two runs side by side: what differs, by how much, where first, and whether a bar is missed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from framework.verify.reference import Findings


class Bar(NamedTuple):
    """The largest differences that count as the same numbers, relative. None: reported only."""

    loss: float
    gradient: float
    weights: float | None


BARS = {
    "float64": Bar(1e-12, 1e-10, 1e-9),
    "float32": Bar(1e-6, 1e-5, 1e-4),
    "bfloat16": Bar(1e-2, 2e-2, None),
}


class Row(NamedTuple):
    """One layout against the reference."""

    layout: str
    initial_equal: bool
    samples_equal: bool
    loss: float
    """Of step 1, relative."""
    gradient: float
    """The worst parameter's: norm of the difference over the norm of the reference's."""
    gradient_name: str
    weights: float
    """The same, of the weights after the last step."""
    weights_name: str
    repeats: bool
    """The same layout run twice gave the same bits in every step's loss."""
    problems: list[str]
    """Every bar that is missed, with the first parameter and the first step that differ."""

    @property
    def passed(self) -> bool:
        """True when no bar is missed."""
        return not self.problems


class Report(NamedTuple):
    """All layouts."""

    title: str
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """True when no layout misses a bar."""
        return all(row.passed for row in self.rows)

    def table(self) -> str:
        """Text for a terminal: a row per layout, then what went wrong in words."""
        header = ("layout", "init", "samples", "loss 1", "gradient", "weights", "again", "verdict")
        cells = [header]
        for row in self.rows:
            cells.append(
                (
                    row.layout,
                    "equal" if row.initial_equal else "DIFFER",
                    "equal" if row.samples_equal else "DIFFER",
                    f"{row.loss:.1e}",
                    f"{row.gradient:.1e}",
                    f"{row.weights:.1e}",
                    "equal" if row.repeats else "DIFFER",
                    "same numbers" if row.passed else "DIFFERENT",
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        for row in self.rows:
            lines += [f"{row.layout}: {problem}" for problem in row.problems]
        failed = sum(not row.passed for row in self.rows)
        verdict = f"{failed} of {len(self.rows)} layouts differ" if failed else f"all {len(self.rows)} layouts agree"
        return "\n".join([self.title, "", *lines, "", verdict])


def relative(found: float, expected: float) -> float:
    """|found - expected| / |expected|; NaN counts as infinitely far."""
    if math.isnan(found) or math.isnan(expected):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-300)


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Per parameter: norm of the difference over the reference's norm.

    A parameter whose reference is all but zero beside the whole (below 1e-6 of the norm of everything, per element)
    is measured against that floor: its own norm is rounding noise.
    """
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    elements = sum(tensor.numel() for tensor in expected.values())
    distances = {}
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape:
            distances[name] = math.inf
            continue
        floor = 1e-6 * total * math.sqrt(tensor.numel() / elements)
        distance = float((found[name].double() - tensor.double()).norm())
        distances[name] = math.inf if math.isnan(distance) else distance / max(float(tensor.double().norm()), floor)
    return distances


ROUNDING_MARGIN = 4.0
"""A layout may be this many times as far from the reference as the reference is from exact arithmetic."""


def compare(
    layout: str,
    found: Findings,
    again: Findings,
    expected: Findings,
    bar: Bar,
    rounding: Mapping[str, float] | None = None,
) -> Row:
    """The row of one layout, run twice, against the reference.

    ``rounding``: how far the reference's own weights are from those of a float64 run, per parameter. Some parameters
    have no gradient but rounding (the bias of attention's keys: softmax does not see it), which AdamW blows up to whole
    steps; no two orders of summation agree on them, and the bar is raised to ``ROUNDING_MARGIN`` times that distance.
    """
    problems = []
    unequal = [name for name, tensor in expected.initial.items() if not _equal(found.initial.get(name), tensor)]
    if unequal:
        problems.append(f"initial weights differ, first {unequal[0]} ({len(unequal)} of {len(expected.initial)})")
    extra = sorted(found.initial.keys() - expected.initial.keys())
    if extra:
        problems.append(f"the layout has parameters that the model has not, first {extra[0]}")
    wrong_tokens = [step for step, tokens in enumerate(expected.tokens) if found.tokens[step] != tokens]
    if wrong_tokens:
        problems.append(f"samples differ, first in step {wrong_tokens[0] + 1}")
    loss = relative(found.losses[0], expected.losses[0])
    if not loss <= bar.loss:
        problems.append(
            f"loss of step 1 is {found.losses[0]!r}, the reference's {expected.losses[0]!r}: "
            f"{loss:.1e} apart, the bar is {bar.loss:.0e}"
        )
    gradients = worst(found.gradients, expected.gradients)
    first = next((name for name, distance in gradients.items() if not distance <= bar.gradient), None)
    if first is not None:
        count = sum(not distance <= bar.gradient for distance in gradients.values())
        problems.append(
            f"gradients of step 1 differ in {count} of {len(gradients)} parameters, first {first}: "
            f"{gradients[first]:.1e} of its norm, the bar is {bar.gradient:.0e}{_ratio(found, expected, first)}"
        )
    norm = relative(found.grad_norms[0], expected.grad_norms[0])
    if not norm <= bar.gradient:
        problems.append(
            f"gradient norm of step 1 is {found.grad_norms[0]!r}, the reference's {expected.grad_norms[0]!r}: "
            f"{norm:.1e} apart, the bar is {bar.gradient:.0e}"
        )
    weights = worst(found.weights, expected.weights)
    if bar.weights is not None:
        limits = {name: max(bar.weights, ROUNDING_MARGIN * (rounding or {}).get(name, 0.0)) for name in weights}
        missed = [name for name, distance in weights.items() if not distance <= limits[name]]
        if missed:
            first, count = missed[0], len(missed)
            problems.append(
                f"weights after {len(expected.losses)} steps differ in {count} of {len(weights)} parameters, first "
                f"{first}: {weights[first]:.1e} of its norm, the bar is {limits[first]:.0e}"
                f"{_first_step(found, expected, bar.weights)}"
            )
    repeats = [value.hex() for value in found.losses] == [value.hex() for value in again.losses]
    if not repeats:
        step = next(i for i, pair in enumerate(zip(found.losses, again.losses, strict=True)) if pair[0] != pair[1])
        problems.append(f"run twice, the loss differs from step {step + 1} on")
    gradient_name = max(gradients, key=lambda name: gradients[name])
    weights_name = max(weights, key=lambda name: weights[name])
    return Row(
        layout,
        not unequal and not extra,
        not wrong_tokens,
        loss,
        gradients[gradient_name],
        gradient_name,
        weights[weights_name],
        weights_name,
        repeats,
        problems,
    )


def _equal(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and found.shape == expected.shape and bool(torch.equal(found, expected))


def _ratio(found: Findings, expected: Findings, name: str) -> str:
    """A constant factor between two gradients is the trace of a sum or a mean in the wrong place: say it."""
    if name not in found.gradients or found.gradients[name].shape != expected.gradients[name].shape:
        return "; it is missing, or of another shape"
    a, b = found.gradients[name].double().flatten(), expected.gradients[name].double().flatten()
    factor = float(torch.dot(a, b) / torch.dot(b, b).clamp_min(1e-300))
    if float((a - factor * b).norm()) < 1e-6 * float(b.norm()) and abs(factor - 1) > 1e-9:
        return f"; it is {factor:.6g} times the reference's"
    return ""


def _first_step(found: Findings, expected: Findings, bar: float) -> str:
    """The first step whose loss is off, in words."""
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True), start=1):
        if not relative(ours, theirs) <= bar:
            return f"; the loss first differs in step {step}"
    return "; every step's loss is within it"
