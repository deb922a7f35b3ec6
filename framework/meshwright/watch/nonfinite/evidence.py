"""Findings of NaN and Inf on each rank, and the choice of the first one.
Only :func:`broken` reads tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.mesh import Grid
from meshwright.watch.ranks import ranks_at, samples_named

MAX_FINDINGS = 16
"""Maximal number of findings of one kind that a rank sends to the others: the first ones."""

MAX_NORM = 1e18
"""Largest gradient norm in float32: the square of a larger one overflows."""


class EvidenceKind(StrEnum):
    """Kind of value that is not finite."""

    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    SUM = "sum"
    """Gradient summed over several ranks."""


class Evidence(NamedTuple):
    """One tensor or loss that is not finite, and its place in the step."""

    kind: EvidenceKind
    ranks: tuple[int, ...]
    """Candidate origins: the rank that found it, or all ranks that contributed to a sum."""
    stage: int
    position: int
    """Position in the stage: of the module call within one forward, or of the parameter."""
    name: str
    description: str
    """``3 of 64 numbers are NaN``."""
    dp_rank: int
    microbatch: int | None = None
    samples: tuple[int, ...] = ()
    piece: tuple[int, int] = (0, 0)
    """(tp rank, shard index) of a piece of a gradient."""


def broken(tensor: Tensor, *, is_gradient: bool = False) -> str | None:
    """Return a description of the NaN and Inf in a tensor, or None if it is finite.

    The norm of a gradient must also have a finite square in float32.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    counts = [
        f"{count} of {tensor.numel()} {what}"
        for count, what in ((num_nan, "NaN"), (num_infinite, "inf"))
        if count
    ]
    if counts:
        return " and ".join(counts)
    if is_gradient and tensor.dtype != torch.float64:
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        if norm > MAX_NORM:
            return f"norm {norm:.1e}, whose square overflows in float32"
    return None


class Cause(NamedTuple):
    """Origin of the first NaN or Inf: its candidate ranks, and a description for the message."""

    ranks: tuple[int, ...]
    text: str


def forward_order(evidence: Evidence) -> tuple[int, ...]:
    microbatch = -1 if evidence.microbatch is None else evidence.microbatch
    return evidence.stage, evidence.dp_rank, microbatch, evidence.position


def backward_order(evidence: Evidence) -> tuple[int, ...]:
    microbatch = -1 if evidence.microbatch is None else evidence.microbatch
    return -evidence.stage, -evidence.position, evidence.dp_rank, microbatch


def cause(evidence: Sequence[Evidence], grid: Grid) -> Cause | None:
    """Return the first of all findings of all ranks; None if there are none. Pure:
    all ranks get the same result.

    If several ranks found the same value at the same point, all of them are named, since the origin
    is unknown.
    """
    weights = [each for each in evidence if each.kind is EvidenceKind.WEIGHT]
    forward = [each for each in evidence if each.kind in (EvidenceKind.INPUT, EvidenceKind.OUTPUT)]
    forward = forward or [each for each in evidence if each.kind is EvidenceKind.LOSS]
    own = [each for each in evidence if each.kind is EvidenceKind.GRADIENT]
    explained = {(each.stage, each.position, each.piece) for each in own}
    sums = [
        each
        for each in evidence
        if each.kind is EvidenceKind.SUM
        and (each.stage, each.position, each.piece) not in explained
    ]
    if weights:
        first = min(weights, key=lambda each: (each.stage, each.position))
        same = [each for each in weights if each.name == first.name]
    elif forward:
        first = min(forward, key=forward_order)
        same = [each for each in forward if forward_order(each) == forward_order(first)]
    elif own or sums:
        first = min(
            [*own, *sums],
            key=lambda each: (-each.stage, -each.position, len(each.ranks), each.dp_rank),
        )
        same = [
            each
            for each in (own if first.kind is EvidenceKind.GRADIENT else sums)
            if (each.stage, each.position, each.dp_rank)
            == (first.stage, first.position, first.dp_rank)
        ]
    else:
        return None
    ranks = tuple(sorted({rank for each in same for rank in each.ranks}))
    where = ranks_at(grid, ranks)
    if len(ranks) > 1 and first.kind is not EvidenceKind.WEIGHT:
        where += ", one of which is the origin"
    at = ""
    if first.microbatch is not None:
        replica = f" of replica dp{first.dp_rank}" if grid.dp > 1 else ""
        at = f" in micro-batch {first.microbatch}{replica}, {samples_named(first.samples)}"
    elif first.samples:
        at = f" in one of its micro-batches, {samples_named(first.samples)}"
    return Cause(ranks, f"{where}: {_describe(first)}{at}")


def _describe(first: Evidence) -> str:
    gradient = f"the gradient of {first.name} is not finite ({first.description})"
    texts = {
        EvidenceKind.WEIGHT: f"the weight {first.name} is not finite ({first.description})",
        EvidenceKind.INPUT: (
            f"the samples are not finite ({first.description}) as they are read from the data"
        ),
        EvidenceKind.OUTPUT: (
            f"the output of {first.name} is the first that is not finite ({first.description})"
        ),
        EvidenceKind.LOSS: f"the loss is {first.description}",
    }
    return texts.get(first.kind, gradient)
