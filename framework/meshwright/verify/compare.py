"""Comparison of a layout's numbers with the reference: distances, tolerances,
and descriptions of the problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.verify.distance import constant_factor, first_beyond, is_equal, relative
from meshwright.verify.metrics import compare_metrics, passes_of
from meshwright.verify.reference import RunNumbers, validated_after
from meshwright.verify.repetition import compare_repetition, compare_rules, suspect_of_resume
from meshwright.verify.report import VerdictRow
from meshwright.verify.suspect import Distances, Limits, find_suspect
from meshwright.verify.tolerance import TOLERANCES, Tolerance

ROUNDING_MARGIN = 4.0
"""Allowed distance of a layout from the reference,
in units of the reference's distance from exact arithmetic.
"""
MAX_ROUND = 0.5
"""Largest allowed share of float32 masters that the weights' 16-bit dtype represents exactly;
by chance <= 2**-13.
"""


def relative_distances(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return, per parameter, the norm of the difference over the norm of the reference.

    The denominator is at least 1e-6 of the norm of all parameters, scaled to this parameter's
    number of elements. Below that floor a parameter's own norm is rounding noise. A missing tensor,
    another shape or NaN gives inf, and so does anything else than zeros where all references are
    zero.
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

    Some parameters have a gradient of nothing but rounding error (such as the key bias of
    attention, which softmax cancels). AdamW scales such a gradient up to full steps, and no two
    orders of summation agree on the result. The tolerance of their weights is raised to
    ``ROUNDING_MARGIN`` times ``rounding``. In float64, ``rounding`` and ``noise`` are measured only
    for a layout that fails without them.

    Args:
        again: Numbers of a second run of the layout; None: run once.
        rounding: Distance of the reference's weights from those of a more exact run, or of another
            order of sums in float64, per parameter.
        noise: Distance of two gradients by rounding alone, per parameter; the tolerance is at least
            this.
    """
    gradients = relative_distances(found.gradients, expected.gradients)
    weights = relative_distances(found.weights, expected.weights)
    if expected.masters:
        weights |= relative_distances(found.masters, expected.masters)
    initial, samples = _in_initial(found, expected), _in_samples(found, expected)
    repetition = [] if again is None else compare_repetition(found, again)
    problems = [*initial, *samples]
    problems += _in_numbers(found, expected, tolerance, gradients, noise or {})
    problems += _in_weights(found, expected, tolerance, weights, rounding or {})
    problems += [*compare_rules(found, expected), *_in_masters(found, expected), *repetition]
    # lower precisions round the argmax of an accuracy otherwise
    if tolerance is TOLERANCES["float64"]:
        problems += compare_metrics(found, expected, tolerance.later)
    suspect = ""
    if problems:
        suspect = _suspect(
            found, expected, tolerance, Distances(gradients, {}, weights), noise or {}
        )
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
        suspect=suspect or (suspect_of_resume(found, again) if repetition else ""),
    )


def _suspect(
    found: RunNumbers,
    expected: RunNumbers,
    tolerance: Tolerance,
    distances: Distances,
    noise: Mapping[str, float],
) -> str:
    """Return what a layout's difference points to (suspect.py)."""
    gradients = {
        name: max(tolerance.gradient, noise.get(name, 0.0)) for name in distances.gradients
    }
    norm = max(tolerance.gradient, tolerance.later_norm)
    update = tolerance.weights or tolerance.later
    stepped = relative_distances(found.stepped, expected.stepped) if found.stepped else {}
    limits = Limits(tolerance.loss, max(tolerance.later, tolerance.loss), norm, gradients, update)
    return find_suspect(found, expected, distances._replace(stepped=stepped), limits)


def _relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    return [relative(*pair) for pair in zip(found, expected, strict=True)]


def _in_initial(found: RunNumbers, expected: RunNumbers) -> list[str]:
    """Compare the initial weights bit by bit."""
    problems = []
    unequal = [
        name
        for name, tensor in expected.initial.items()
        if not is_equal(found.initial.get(name), tensor)
    ]
    extra = sorted(found.initial.keys() - expected.initial.keys())
    if unequal:
        problems.append(
            f"initial weights differ, first {unequal[0]} ({len(unequal)} of"
            f" {len(expected.initial)})"
        )
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


def _in_numbers(
    found: RunNumbers,
    expected: RunNumbers,
    tolerance: Tolerance,
    gradients: Mapping[str, float],
    noise: Mapping[str, float],
) -> list[str]:
    """Compare losses and gradient norms of all steps, the gradients of step 1,
    and the validation losses.
    """
    steps = range(1, len(expected.losses) + 1)
    later = max(tolerance.later, tolerance.loss)
    limits = {name: max(tolerance.gradient, noise.get(name, 0.0)) for name in gradients}
    norm = max(limits.values(), default=tolerance.gradient)
    # there only gradients near zero have noise beyond the tolerance
    if tolerance is TOLERANCES["float64"]:
        norm = tolerance.gradient
    later_norm = max(tolerance.later_norm, tolerance.gradient)
    return [
        *first_beyond("loss of step", steps, found.losses, expected.losses, tolerance.loss, later),
        *_parameters_beyond(
            "gradients of step 1", gradients, limits, lambda first: _ratio(found, expected, first)
        ),
        *first_beyond(
            "gradient norm of step", steps, found.grad_norms, expected.grad_norms, norm, later_norm
        ),
        *first_beyond(
            "validation loss after step",
            validated_after(len(steps)),
            found.validation,
            expected.validation,
            later,
            later,
        ),
    ]


def _parameters_beyond(
    what: str,
    distances: Mapping[str, float],
    limits: Mapping[str, float],
    explain: Callable[[str], str],
) -> list[str]:
    """Describe the parameters that exceed their tolerance.
    ``explain`` returns an addition for the first of them.
    """
    missed = [name for name, distance in distances.items() if not distance <= limits[name]]
    if not missed:
        return []
    first = missed[0]
    return [
        f"{what} differ in {len(missed)} of {len(distances)} parameters, first {first}:"
        f" {distances[first]:.1e} of its norm, tolerance {limits[first]:.0e}{explain(first)}"
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
    """Check that masters keep bits that the weights' dtype drops,
    and that the weights are the rounded masters.
    """
    problems = []
    dtypes = {name: tensor.dtype for name, tensor in expected.weights.items()}
    moved = [
        n
        for n, master in expected.masters.items()
        if _round_share(master, dtypes[n]) < MAX_ROUND / 2
    ]
    rounded = [
        n
        for n in moved
        if n not in found.masters or _round_share(found.masters[n], dtypes[n]) > MAX_ROUND
    ]
    if rounded:
        problems.append(
            f"master weights of {rounded[0]} ({len(rounded)} of {len(expected.masters)} parameters)"
            f" have no bits beyond {str(dtypes[rounded[0]]).removeprefix('torch.')} after"
            f" {len(expected.losses)} steps: the optimizer must step float32 weights"
        )
    stale = [
        name
        for name, master in found.masters.items()
        if expected.masters
        and not is_equal(found.weights.get(name), master.to(expected.weights[name].dtype))
    ]
    if stale:
        problems.append(
            f"weights are not the master weights rounded, first {stale[0]} ({len(stale)}"
            " parameters)"
        )
    return problems


def _round_share(master: Tensor, dtype: torch.dtype) -> float:
    """Return the share of nonzero elements that ``dtype`` represents exactly."""
    nonzero = master[master != 0]
    if nonzero.numel():
        return float((nonzero.to(dtype).to(nonzero.dtype) == nonzero).double().mean())
    return 1.0


def _ratio(found: RunNumbers, expected: RunNumbers, name: str) -> str:
    """Describe a constant factor between two gradients (a sum or mean in the wrong place);
    "" if there is none.
    """
    ours, theirs = found.gradients.get(name), expected.gradients[name]
    if ours is None or ours.shape != theirs.shape:
        return "; it is missing, or of another shape"
    factor = constant_factor(ours.double(), theirs.double())
    if factor is None or abs(factor - 1) <= 1e-9:
        return ""
    return f"; it is {factor:.6g} times the reference's"


def _first_step(found: RunNumbers, expected: RunNumbers, tolerance: float) -> str:
    """Describe the first step whose loss exceeds the tolerance,
    as an addition to a message on weights.
    """
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True), start=1):
        if not relative(ours, theirs) <= tolerance:
            return f"; the loss first differs in step {step}"
    return "; every step's loss is within it"
