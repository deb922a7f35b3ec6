"""Rule or tensor that a difference points to:
the first part of training in which a layout leaves the plain run.

The parts of a step follow each other, so the first that differs is where to look; all later ones
differ with it:

    initial values | samples | forward | backward | norm | update | learning rate, loss scale, cursor of later steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.verify.distance import RULE_TOLERANCE, constant_factor, is_beyond
from meshwright.verify.reference import RunNumbers, validated_after

MAX_NAMES = 3
"""Most tensors that are named."""


class Limits(NamedTuple):
    """Relative distances beyond which numbers differ."""

    loss: float
    later: float
    norm: float
    gradients: Mapping[str, float]
    update: float


class Distances(NamedTuple):
    """Relative distances of a layout's tensors from the plain run's, by parameter."""

    gradients: Mapping[str, float]
    stepped: Mapping[str, float]
    weights: Mapping[str, float]


def find_suspect(
    found: RunNumbers, expected: RunNumbers, distances: Distances, limits: Limits
) -> str:
    """Return the part of training that differs first, with tensor or step;
    "" if these numbers show none.
    """
    parts: tuple[Callable[[], str], ...] = (
        lambda: _initial(found, expected),
        lambda: _samples(found, expected, steps=1),
        lambda: _step_one(found, expected, distances, limits),
        lambda: _numbers(
            "the learning rate (optimizer.schedule, warm-up)", found.rates, expected.rates
        ),
        lambda: _numbers("the loss scale", found.scales, expected.scales),
        lambda: _samples(found, expected, steps=len(expected.losses)),
        lambda: _update(found, expected, distances, limits),
        lambda: _later(found, expected, distances, limits),
    )
    return next(filter(None, (part() for part in parts)), "")


def _initial(found: RunNumbers, expected: RunNumbers) -> str:
    unequal = [
        name
        for name, tensor in expected.initial.items()
        if name not in found.initial or not torch.equal(found.initial[name], tensor)
    ]
    return f"the initial values of {_names(unequal)}" if unequal else ""


def _samples(found: RunNumbers, expected: RunNumbers, *, steps: int) -> str:
    """Compare the samples of the first ``steps`` steps, and of every validation."""
    is_training = []
    for step in range(1, len(expected.losses) + 1):
        is_training += [step, *[0] * (step in validated_after(len(expected.losses)))]
    for step, ours, theirs in zip(is_training, found.tokens, expected.tokens, strict=True):
        if step > steps or ours == theirs:
            continue
        if not step:
            return "the samples of a validation"
        if len(ours) != len(theirs):
            return (
                f"the batch size: step {step} reads {len(ours)} samples, the plain run"
                f" {len(theirs)}"
            )
        if ours.keys() != theirs.keys():
            first, wanted = min(ours), min(theirs)
            return (
                f"the data cursor: step {step} reads samples from {first} on, the plain run from"
                f" {wanted} on"
            )
        return f"the contents of the samples of step {step}"
    return ""


def _step_one(found: RunNumbers, expected: RunNumbers, distances: Distances, limits: Limits) -> str:
    """Compare forward, backward and gradient norm of step 1."""
    if is_beyond(found.losses[0], expected.losses[0], limits.loss):
        router = _router(found, expected)
        return (
            router
            or "forward or the loss: the loss of step 1 differs, with equal weights and samples"
        )
    # backward comes to the last layers first
    far = _far(distances.gradients, limits.gradients)[::-1]
    if far:
        return (
            "backward, or a sum of gradients: in the order of backward, first those of"
            f" {_names(far)}"
        )
    if is_beyond(found.grad_norms[0], expected.grad_norms[0], limits.norm):
        return "the gradient norm: its gradients agree"
    return ""


def _router(found: RunNumbers, expected: RunNumbers) -> str:
    """Return the first router whose counts of step 1 differ."""
    ours, theirs = found.metrics[0], expected.metrics[0]
    for name in theirs:
        if name.startswith("of sums ") and ours.get(name) != theirs[name]:
            return (
                f"the router {name.removeprefix('of sums ').rpartition('.')[0]}: other experts in"
                " step 1"
            )
    return ""


def _numbers(what: str, found: Sequence[float], expected: Sequence[float]) -> str:
    """Compare a number of each step that layouts compute by a rule alone."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        if is_beyond(ours, theirs, RULE_TOLERANCE):
            return f"{what}: {ours:.6g} in step {step}, by the rule {theirs:.6g}"
    return ""


def _update(found: RunNumbers, expected: RunNumbers, distances: Distances, limits: Limits) -> str:
    """Compare the weights after step 1, whose gradients agree."""
    far = [name for name, distance in distances.stepped.items() if not distance <= limits.update]
    if not far:
        return ""
    first = far[0]
    factor = _factor(found.stepped[first], expected.stepped[first], expected.initial.get(first))
    return (
        f"the optimizer: gradients of step 1 agree, and the update of {_names(far)} does"
        f" not{factor}"
    )


def _factor(found: Tensor, expected: Tensor, before: Tensor | None) -> str:
    """Describe a constant factor between two updates, or "" without one."""
    if before is None or found.shape != before.shape:
        return ""
    factor = constant_factor(found.double() - before.double(), expected.double() - before.double())
    return "" if factor is None else f" (it is {factor:.6g} times the plain run's)"


def _later(found: RunNumbers, expected: RunNumbers, distances: Distances, limits: Limits) -> str:
    """Describe the first later step that differs, and the weights of the last."""
    far = [name for name, distance in distances.weights.items() if not distance <= limits.update]
    of_weights = f"; after the last step {_names(far)}" if far else ""
    for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True), start=1):
        norms = found.grad_norms[step - 1], expected.grad_norms[step - 1]
        if is_beyond(ours, theirs, limits.later):
            if step == 2:
                return (
                    "the weights or the mode of step 2: the update of step 1 agrees. Check the"
                    f" weight gather after it, the return to train mode, dropout{of_weights}"
                )
            return (
                f"the optimizer's state, or the gradients of step {step - 1}: the loss of step"
                f" {step}{of_weights}"
            )
        if is_beyond(*norms, limits.norm):
            return f"gradients of step {step}: their norm, while the loss agrees{of_weights}"
    if far:
        return f"the optimizer: the weights of {_names(far)}, while all losses agree"
    for after, ours, theirs in zip(
        validated_after(len(expected.losses)), found.validation, expected.validation, strict=True
    ):
        if is_beyond(ours, theirs, limits.later):
            return f"validation after step {after}: eval mode, or the weights that it uses"
    return ""


def _far(distances: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    return [name for name, distance in distances.items() if not distance <= limits[name]]


def _names(names: list[str]) -> str:
    """Return the first few names as text, with the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
