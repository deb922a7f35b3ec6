"""Error bars of predicted step times: the mean error of the published runs that are most like a plan.

``python benchmarks/planner_accuracy.py --classes`` prints ``ERRORS`` anew. Each run is predicted with
constants that were fitted on other sources (docs/planner-accuracy.md).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshwright_plan.planner.hardware import Hardware

GENERATIONS = {
    "Volta": "V100",
    "Ampere": "A100|A800|A6000|A40|A10",
    "Hopper": "H100|H200|H800|H20|GH200",
    "Blackwell": "G?B200|G?B300",
}
"""Generation -> words by which the name of a device belongs to it."""
MEASURED_ERROR_SHARE = 0.125
"""Mean error after ``calibrate`` (16 layouts on CPUs)."""


class RunKind(NamedTuple):
    """Kind of run: properties on which the error of a prediction depends."""

    generation: str
    """Generation of the device; empty: none of :data:`GENERATIONS`."""
    has_experts: bool
    is_float8: bool

    def __str__(self) -> str:
        words = [
            "mixture of experts" if self.has_experts else "dense",
            self.generation,
            "float8" if self.is_float8 else "",
        ]
        return ", ".join(word for word in words if word)


class KindError(NamedTuple):
    """Error of the published runs of one kind."""

    kind: RunKind
    num_runs: int
    share: float
    """Mean relative error of their step times."""


class ErrorBar(NamedTuple):
    """Error bar of a prediction."""

    share: float
    """Relative error."""
    text: str
    """Source of the figure."""


ERRORS = (
    KindError(RunKind("Ampere", has_experts=False, is_float8=False), 276, 0.042),
    KindError(RunKind("Blackwell", has_experts=False, is_float8=False), 31, 0.028),
    KindError(RunKind("Blackwell", has_experts=False, is_float8=True), 5, 0.142),
    KindError(RunKind("Blackwell", has_experts=True, is_float8=False), 2, 0.113),
    KindError(RunKind("Blackwell", has_experts=True, is_float8=True), 8, 0.213),
    KindError(RunKind("Hopper", has_experts=False, is_float8=False), 85, 0.049),
    KindError(RunKind("Hopper", has_experts=False, is_float8=True), 22, 0.071),
    KindError(RunKind("Hopper", has_experts=True, is_float8=False), 9, 0.209),
    KindError(RunKind("Hopper", has_experts=True, is_float8=True), 1, 0.548),
    KindError(RunKind("Volta", has_experts=False, is_float8=False), 5, 0.076),
)


def generation_of(name: str) -> str:
    """Return the generation of a device by its name, such as ``H100 SXM``; empty: not known."""
    for generation, words in GENERATIONS.items():
        if re.search(rf"\b({words})\b", name):
            return generation
    return ""


def error_bar(hardware: Hardware, *, has_experts: bool, is_float8: bool) -> ErrorBar:
    """Return the error bar of step times on a hardware."""
    if hardware.measured or hardware.products:
        text = "mean error of 16 layouts on CPUs after `calibrate`"
        return ErrorBar(MEASURED_ERROR_SHARE, text)
    kind = RunKind(generation_of(hardware.name), has_experts, is_float8)
    nearest = nearest_error(kind)
    like = "of this kind" if nearest.kind == kind else "most like it"
    text = f"mean error of {nearest.num_runs} published runs {like} ({nearest.kind})"
    return ErrorBar(nearest.share, text)


def nearest_error(kind: RunKind) -> KindError:
    """Return the error of a kind; of an unknown one that of the kind that differs least: in precision,
    then in the device, of which the worst counts.
    """
    of_device = [each for each in ERRORS if each.kind[:2] == kind[:2]]
    for each in of_device:
        if each.kind == kind:
            return each
    other_devices = [each for each in ERRORS if each.kind[1:] == kind[1:]]
    of_models = [each for each in ERRORS if each.kind.has_experts == kind.has_experts]
    return max(of_device or other_devices or of_models, key=lambda each: each.share)
