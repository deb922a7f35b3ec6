"""Comparison of a layout's numbers with the reference: distances, tolerances, and descriptions of the problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.verify.distance import RULE_TOLERANCE, is_beyond, relative
from meshwright.verify.layouts import Layout
from meshwright.verify.metrics import compare_metrics, passes_of
from meshwright.verify.reference import RunNumbers, validated_after
from meshwright.verify.report import VerdictRow
from meshwright.verify.suspect import Distances, Limits, find_suspect


class Tolerance(NamedTuple):
    """Tolerances: the largest relative differences that pass. None: reported only."""

    loss: float
    """Tolerance of the loss of step 1."""
    gradient: float
    """Tolerance of each parameter's gradient, and of the gradient norm, in step 1."""
    weights: float | None
    """Tolerance of the weights, or master weights, after the last step."""
    later: float
    """Tolerance of the losses of later steps and of validation losses."""
    later_norm: float
    """Tolerance of the gradient norms of later steps."""


TOLERANCES = {
    "float64": Tolerance(1e-12, 1e-10, 1e-9, 1e-9, 1e-8),
    "float32": Tolerance(1e-6, 1e-5, 1e-4, 1e-4, 1e-3),
    "bfloat16": Tolerance(1e-2, 2e-2, None, 1e-2, 2e-2),
    "float16": Tolerance(2e-3, 4e-3, None, 2e-3, 4e-3),
}
SAME_ROUNDING = Tolerance(1e-6, 1e-5, None, 1e-2, 2e-2)
"""bfloat16 tolerances of layouts that round every activation as the plain run does: one whole sample at a time. float16
has none. Probably CPU products round differently by the memory layout of their operands; this was not isolated.
Gradients are summed in float32 on both sides, so a faulty sum in 16 bits (off by a percent) exceeds them.
"""
ROUNDING_MARGIN = 4.0
"""Allowed distance of a layout from the reference, in units of the reference's distance from exact arithmetic."""
MAX_ROUND = 0.5
"""Largest allowed share of float32 masters that the weights' 16-bit dtype represents exactly; by chance <= 2**-13."""


def tolerance_of(dtype: str, layout: Layout) -> Tolerance:
    """Return the tolerances of a precision, for a layout."""
    whole = layout.tp == layout.cp == layout.ep == layout.micro_batch_size == 1
    if dtype == "bfloat16" and whole:
        return SAME_ROUNDING
    return TOLERANCES[dtype]


def relative_distances(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, per parameter, the norm of the difference over the norm of the reference.

    The denominator is at least 1e-6 of the norm of all parameters, scaled to this parameter's number of elements. Below
    that floor a parameter's own norm is rounding noise. A missing tensor, another shape or NaN gives inf, and so does
    anything else than zeros where all references are zero.
    """
    total = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    elements = sum(tensor.numel() for tensor in expected.values())
    distances = {}
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape:
            distances[name] = math.inf
            continue
        floor = 1e-6 * total * math.sqrt(tensor.numel() / elements) if elements else 0.0
        distance = float((found[name].double() - tensor.double()).norm())
        norm = max(float(tensor.double().norm()), floor)
        is_far = math.isnan(distance) or (norm == 0 and distance > 0)
        distances[name] = math.inf if is_far else distance / norm if norm else 0.0
    return distances


def compare(
    layout: str,
    found: RunNumbers,
    again: RunNumbers | None,
    expected: RunNumbers,
    tolerance: Tolerance,
    rounding: Mapping[str, float] | None = None,
    noise: Mapping[str, float] | None = None,
) -> VerdictRow:
    """Compare one layout with the reference and return its row.

    Some parameters have a gradient of nothing but rounding error (such as the key bias of attention, which softmax
    cancels). AdamW scales such a gradient up to full steps, and no two orders of summation agree on the result. The
    tolerance of their weights is raised to ``ROUNDING_MARGIN`` times ``rounding``. In float64, ``rounding`` and
    ``noise`` are measured only for a layout that fails without them.

    Args:
        again: Numbers of a second run of the layout; None: run once.
        rounding: Distance of the reference's weights from those of a more exact run, or of another order of sums in
            float64, per parameter.
        noise: Distance of two gradients by rounding alone, per parameter; the tolerance is at least this.
    """
    gradients = relative_distances(found.gradients, expected.gradients)
    weights = relative_distances(found.weights, expected.weights)
    if expected.masters:
        weights |= relative_distances(found.masters, expected.masters)
    initial, samples = _in_initial(found, expected), _in_samples(found, expected)
    repetition = [] if again is None else _in_repetition(found, again)
    problems = [*initial, *samples]
    problems += _in_numbers(found, expected, tolerance, gradients, noise or {})
    problems += _in_weights(found, expected, tolerance, weights, rounding or {})
    problems += [*_in_rules(found, expected), *_in_masters(found, expected), *repetition]
    if tolerance is TOLERANCES["float64"]:  # lower precisions round the argmax of an accuracy otherwise
        problems += compare_metrics(found, expected, tolerance.later)
    suspect = _suspect(found, expected, tolerance, Distances(gradients, {}, weights), noise or {}) if problems else ""
    losses = _relative_differences(found.losses, expected.losses)
    gradient_name = max(gradients, key=lambda name: gradients[name], default="")
    weights_name = max(weights, key=lambda name: weights[name], default="")
    return VerdictRow(
        layout,
        initial_equal=not initial,
        samples_equal=not samples,
        loss=losses[0],
        losses=max(losses),
        norms=max(_relative_differences(found.grad_norms, expected.grad_norms)),
        gradient=gradients.get(gradient_name, 0.0),
        gradient_name=gradient_name,
        weights=weights.get(weights_name, 0.0),
        weights_name=weights_name,
        validation=max(_relative_differences(found.validation, expected.validation)),
        repeats=None if again is None else not repetition,
        problems=problems,
        suspect=suspect or (_suspect_of_resume(found, again) if repetition else ""),
    )


def _suspect(
    found: RunNumbers, expected: RunNumbers, tolerance: Tolerance, distances: Distances, noise: Mapping[str, float]
) -> str:
    """Return what a layout's difference points to (suspect.py)."""
    gradients = {name: max(tolerance.gradient, noise.get(name, 0.0)) for name in distances.gradients}
    norm, update = max(tolerance.gradient, tolerance.later_norm), tolerance.weights or tolerance.later
    stepped = relative_distances(found.stepped, expected.stepped) if found.stepped else {}
    limits = Limits(tolerance.loss, max(tolerance.later, tolerance.loss), norm, gradients, update)
    return find_suspect(found, expected, distances._replace(stepped=stepped), limits)


def _suspect_of_resume(first: RunNumbers, again: RunNumbers | None) -> str:
    """Return what the difference of a second run points to, which was perhaps resumed in the middle."""
    assert again is not None
    if again.lost:
        return f"the resume: {', '.join(again.lost[:3])} is not what was saved"
    steps = enumerate(zip(first.losses, again.losses, strict=True), start=1)
    differing = next((step for step, losses in steps if losses[0] != losses[1]), 0)
    if again.resumed_after and differing > again.resumed_after:
        return f"the resume, or the order of sums: all that was saved came back, and step {differing} differs"
    return "the order of sums: two runs differ" if differing else ""


def _in_rules(found: RunNumbers, expected: RunNumbers, first: int = 1) -> list[str]:
    """Compare the learning rate and the loss scale of each step from step ``first`` on, which rules give."""
    problems = []
    for what, ours, theirs in (
        ("learning rate", found.rates, expected.rates),
        ("loss scale", found.scales, expected.scales),
    ):
        for step, (mine, by_rule) in enumerate(zip(ours, theirs, strict=True), start=first):
            if is_beyond(mine, by_rule, RULE_TOLERANCE):
                problems.append(f"{what} of step {step} is {mine!r}, by its rule {by_rule!r}")
                break
    return problems


def _relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


def _in_initial(found: RunNumbers, expected: RunNumbers) -> list[str]:
    """Compare the initial weights bit by bit."""
    problems = []
    unequal = [name for name, tensor in expected.initial.items() if not _equal(found.initial.get(name), tensor)]
    extra = sorted(found.initial.keys() - expected.initial.keys())
    if unequal:
        problems.append(f"initial weights differ, first {unequal[0]} ({len(unequal)} of {len(expected.initial)})")
    if extra:
        problems.append(f"the layout has parameters that the model lacks, first {extra[0]}")
    return problems


def _in_samples(found: RunNumbers, expected: RunNumbers) -> list[str]:
    """Compare the samples that were read in each step and validation pass."""
    names = passes_of(len(expected.losses))
    for name, ours, theirs in zip(names, found.tokens, expected.tokens, strict=True):
        if ours != theirs:
            return [f"samples differ, first in {name}"]
    return []


def _in_repetition(first: RunNumbers, second: RunNumbers) -> list[str]:
    """Compare two runs of one layout bit by bit; the second was perhaps stopped, saved and resumed in the middle."""
    problems = []
    if second.lost:
        problems.append(f"a resume did not bring back {', '.join(second.lost[:3])} ({len(second.lost)} in all)")
    unequal = [name for name, tensor in first.weights.items() if not _equal(second.weights.get(name), tensor)]
    if _bits(first) == _bits(second) and first.tokens == second.tokens and not unequal:
        return problems
    resumed = f", resumed after step {second.resumed_after}," * (second.resumed_after > 0)
    what = f"a second run of the layout{resumed} has"
    names = passes_of(len(first.losses))
    for name, ours, theirs in zip(names, first.tokens, second.tokens, strict=True):
        if ours != theirs:
            return [*problems, f"{what} other samples from {name} on"]
    for step, losses in enumerate(zip(first.losses, second.losses, strict=True), start=1):
        if losses[0] != losses[1]:
            return [*problems, f"{what} another loss from step {step} on"]
    if unequal:
        return [*problems, f"{what} other weights in the end, first {unequal[0]} ({len(unequal)})"]
    return [*problems, f"{what} other gradient norms or validation losses"]


def resumed_after(steps: int) -> int:
    """Return the step after which the second run of a layout is stopped and resumed; 0: not at all."""
    return steps // 2


def compare_moved(other: str, found: RunNumbers, expected: RunNumbers, tolerance: Tolerance) -> tuple[list[str], str]:
    """Compare a run that began from the checkpoint of the layout ``other``; return (problems, what they point to)."""
    steps, first = len(expected.losses), resumed_after(len(expected.losses))
    passes = len([name for name in passes_of(steps) if _is_within(name, first)])
    wanted = expected._replace(
        losses=expected.losses[first:], grad_norms=expected.grad_norms[first:], tokens=expected.tokens[passes:]
    )
    place = f"resumed after step {first} from the checkpoint of {other}"
    for name, ours, theirs in zip(passes_of(steps)[passes:], found.tokens, wanted.tokens, strict=True):
        if ours != theirs:
            return [f"{place}: samples differ, first in {name}"], f"the data cursor after a resume, in {name}"
    problems = [
        *_first_beyond("loss of step", range(first + 1, steps + 1), found.losses, wanted.losses, 0, tolerance.later),
        *_first_beyond(
            "gradient norm of step",
            range(first + 1, steps + 1),
            found.grad_norms,
            wanted.grad_norms,
            0,
            tolerance.later_norm,
        ),
    ]
    problems += _first_beyond(
        "validation loss after step", [steps], found.validation, expected.validation[-1:], 0, tolerance.later
    )
    rules = expected._replace(rates=expected.rates[first:], scales=expected.scales[first:])
    problems += _in_rules(found, rules, first + 1)
    return [f"{place}: {each}" for each in problems], "the resume: state, counts or weights" if problems else ""


def _is_within(name: str, step: int) -> bool:
    """Return whether a pass of that name is one of the first ``step`` steps, or a validation after one."""
    return int(name.rpartition(" ")[2]) <= step


def _bits(numbers: RunNumbers) -> list[str]:
    return [value.hex() for value in (*numbers.losses, *numbers.grad_norms, *numbers.validation)]


def _in_numbers(
    found: RunNumbers,
    expected: RunNumbers,
    tolerance: Tolerance,
    gradients: Mapping[str, float],
    noise: Mapping[str, float],
) -> list[str]:
    """Compare losses and gradient norms of all steps, the gradients of step 1, and the validation losses."""
    steps = range(1, len(expected.losses) + 1)
    later = max(tolerance.later, tolerance.loss)
    limits = {name: max(tolerance.gradient, noise.get(name, 0.0)) for name in gradients}
    norm = max(limits.values(), default=tolerance.gradient)
    if tolerance is TOLERANCES["float64"]:  # there only gradients near zero have noise beyond the tolerance
        norm = tolerance.gradient
    later_norm = max(tolerance.later_norm, tolerance.gradient)
    return [
        *_first_beyond("loss of step", steps, found.losses, expected.losses, tolerance.loss, later),
        *_parameters_beyond("gradients of step 1", gradients, limits, lambda first: _ratio(found, expected, first)),
        *_first_beyond("gradient norm of step", steps, found.grad_norms, expected.grad_norms, norm, later_norm),
        *_first_beyond(
            "validation loss after step",
            validated_after(len(steps)),
            found.validation,
            expected.validation,
            later,
            later,
        ),
    ]


def _first_beyond(
    what: str, steps: Sequence[int], found: Sequence[float], expected: Sequence[float], first: float, later: float
) -> list[str]:
    """Describe the first number that exceeds its tolerance: ``first`` in step 1, ``later`` in all other steps."""
    for step, ours, theirs in zip(steps, found, expected, strict=True):
        limit, distance = first if step == 1 else later, relative(ours, theirs)
        if not distance <= limit:
            return [
                f"{what} {step} is {ours!r}, the reference's {theirs!r}: {distance:.1e} apart, tolerance {limit:.0e}"
            ]
    return []


def _parameters_beyond(
    what: str, distances: Mapping[str, float], limits: Mapping[str, float], explain: Callable[[str], str]
) -> list[str]:
    """Describe the parameters that exceed their tolerance. ``explain`` returns an addition for the first of them."""
    missed = [name for name, distance in distances.items() if not distance <= limits[name]]
    if not missed:
        return []
    first = missed[0]
    return [
        f"{what} differ in {len(missed)} of {len(distances)} parameters, first {first}: {distances[first]:.1e} of its "
        f"norm, tolerance {limits[first]:.0e}{explain(first)}"
    ]


def _in_weights(
    found: RunNumbers,
    expected: RunNumbers,
    tolerance: Tolerance,
    weights: Mapping[str, float],
    rounding: Mapping[str, float],
) -> list[str]:
    """Compare the weights after the last step."""
    limit = tolerance.weights
    if limit is None:
        return []
    limits = {name: max(limit, ROUNDING_MARGIN * rounding.get(name, 0.0)) for name in weights}
    what = f"weights after {len(expected.losses)} steps"
    return _parameters_beyond(what, weights, limits, lambda _: _first_step(found, expected, limit))


def _in_masters(found: RunNumbers, expected: RunNumbers) -> list[str]:
    """Check that masters keep bits that the weights' dtype drops, and that the weights are the rounded masters."""
    problems = []
    dtypes = {name: tensor.dtype for name, tensor in expected.weights.items()}
    moved = [n for n, master in expected.masters.items() if _round_share(master, dtypes[n]) < MAX_ROUND / 2]
    rounded = [n for n in moved if n not in found.masters or _round_share(found.masters[n], dtypes[n]) > MAX_ROUND]
    if rounded:
        problems.append(
            f"master weights of {rounded[0]} ({len(rounded)} of {len(expected.masters)} parameters) have no bits "
            f"beyond {str(dtypes[rounded[0]]).removeprefix('torch.')} after {len(expected.losses)} steps: the "
            f"optimizer must step float32 weights"
        )
    stale = [
        name
        for name, master in found.masters.items()
        if expected.masters and not _equal(found.weights.get(name), master.to(expected.weights[name].dtype))
    ]
    if stale:
        problems.append(f"weights are not the master weights rounded, first {stale[0]} ({len(stale)} parameters)")
    return problems


def _round_share(master: Tensor, dtype: torch.dtype) -> float:
    """Return the share of nonzero elements that ``dtype`` represents exactly."""
    nonzero = master[master != 0]
    return float((nonzero.to(dtype).to(nonzero.dtype) == nonzero).double().mean()) if nonzero.numel() else 1.0


def _equal(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and found.shape == expected.shape and bool(torch.equal(found, expected))


def _ratio(found: RunNumbers, expected: RunNumbers, name: str) -> str:
    """Describe a constant factor between two gradients (a sum or mean in the wrong place); "" if there is none."""
    if name not in found.gradients or found.gradients[name].shape != expected.gradients[name].shape:
        return "; it is missing, or of another shape"
    a, b = found.gradients[name].double().flatten(), expected.gradients[name].double().flatten()
    factor = float(torch.dot(a, b) / torch.dot(b, b).clamp_min(1e-300))
    if float((a - factor * b).norm()) < 1e-6 * float(b.norm()) and abs(factor - 1) > 1e-9:
        return f"; it is {factor:.6g} times the reference's"
    return ""


def _first_step(found: RunNumbers, expected: RunNumbers, tolerance: float) -> str:
    """Describe the first step whose loss exceeds the tolerance, as an addition to a message on weights."""
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True), start=1):
        if not relative(ours, theirs) <= tolerance:
            return f"; the loss first differs in step {step}"
    return "; every step's loss is within it"
