"""Comparison of the second run of a layout, which is stopped and resumed in the middle, with the
first, and of a run that begins from the checkpoint of another layout.
"""

from __future__ import annotations

from meshwright.verify.distance import RULE_TOLERANCE, first_beyond, is_beyond, is_equal
from meshwright.verify.metrics import passes_of
from meshwright.verify.reference import RunNumbers
from meshwright.verify.tolerance import Tolerance


def compare_repetition(first: RunNumbers, second: RunNumbers) -> list[str]:
    """Compare two runs of one layout bit by bit; the second was perhaps stopped,
    saved and resumed in the middle.
    """
    problems = []
    if second.lost:
        problems.append(
            f"a resume did not bring back {', '.join(second.lost[:3])} ({len(second.lost)} in all)"
        )
    unequal = [
        name
        for name, tensor in first.weights.items()
        if not is_equal(second.weights.get(name), tensor)
    ]
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
    """Return the step after which the second run of a layout is stopped and resumed; 0:
    not at all.
    """
    return steps // 2


def compare_moved(
    other: str, found: RunNumbers, expected: RunNumbers, tolerance: Tolerance
) -> tuple[list[str], str]:
    """Compare a run that began from the checkpoint of the layout ``other``; return (problems,
    what they point to).
    """
    steps, first = len(expected.losses), resumed_after(len(expected.losses))
    passes = len([name for name in passes_of(steps) if _is_within(name, first)])
    wanted = expected._replace(
        losses=expected.losses[first:],
        grad_norms=expected.grad_norms[first:],
        tokens=expected.tokens[passes:],
    )
    place = f"resumed after step {first} from the checkpoint of {other}"
    names = passes_of(steps)[passes:]
    for name, ours, theirs in zip(names, found.tokens, wanted.tokens, strict=True):
        if ours != theirs:
            suspect = f"the data cursor after a resume, in {name}"
            return [f"{place}: samples differ, first in {name}"], suspect
    later, later_norm = tolerance.later, tolerance.later_norm
    steps_after, validation = range(first + 1, steps + 1), expected.validation[-1:]
    problems = [
        *first_beyond("loss of step", steps_after, found.losses, wanted.losses, 0, later),
        *first_beyond(
            "gradient norm of step", steps_after, found.grad_norms, wanted.grad_norms, 0, later_norm
        ),
        *first_beyond(
            "validation loss after step", [steps], found.validation, validation, 0, later
        ),
    ]
    rules = expected._replace(rates=expected.rates[first:], scales=expected.scales[first:])
    problems += compare_rules(found, rules, first + 1)
    suspect = "the resume: state, counts or weights" if problems else ""
    return [f"{place}: {problem}" for problem in problems], suspect


def _is_within(name: str, step: int) -> bool:
    """Return whether a pass of that name is one of the first ``step`` steps,
    or a validation after one.
    """
    return int(name.rpartition(" ")[2]) <= step


def _bits(numbers: RunNumbers) -> list[str]:
    return [value.hex() for value in (*numbers.losses, *numbers.grad_norms, *numbers.validation)]


def compare_rules(found: RunNumbers, expected: RunNumbers, first: int = 1) -> list[str]:
    """Compare the learning rate and the loss scale of each step from step ``first`` on,
    which rules give.
    """
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


def suspect_of_resume(first: RunNumbers, again: RunNumbers | None) -> str:
    """Return what the difference of a second run points to,
    which was perhaps resumed in the middle.
    """
    assert again is not None
    if again.lost:
        return f"the resume: {', '.join(again.lost[:3])} is not what was saved"
    steps = enumerate(zip(first.losses, again.losses, strict=True), start=1)
    differing = next((step for step, losses in steps if losses[0] != losses[1]), 0)
    if again.resumed_after and differing > again.resumed_after:
        return (
            f"the resume, or the order of sums: all that was saved came back, and step {differing}"
            " differs"
        )
    return "the order of sums: two runs differ" if differing else ""
