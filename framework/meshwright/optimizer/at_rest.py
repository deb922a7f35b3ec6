"""Bytes that a rank holds between steps: weights, gradients and optimizer state, by ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from meshwright.config import (
    Optimizer,
    Parallel,
    expert_shard_factor,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.optimizer.choice import codec_of, states_of
from meshwright.optimizer.codecs import NUMBERS
from meshwright.optimizer.factored import factor_elements
from meshwright.parameters import DTYPES, ParameterInfo


class Elements(NamedTuple):
    """Element counts of a rank's parameters."""

    num_eight_bit: int
    """Trained elements whose optimizer state an 8-bit optimizer keeps in 8 bits."""
    others: int
    frozen: int
    """Elements that are not trained."""
    matrices: int = 0
    """Trained elements of whole matrices, of which Muon keeps the momentum."""
    factors: int = 0
    """Elements of Adafactor's states, whole on every rank."""
    experts: Elements | None = None
    """Counts of the experts sharded over ep ranks, which have other replica groups;
    the other fields exclude them.
    """
    rows: int = 0
    """Greatest common divisor, over layers, of the experts of a rank (dim 0 of the weights);
    set in ``experts``.
    """

    @property
    def trained(self) -> int:
        """Elements with a gradient, experts included."""
        return self.dense + (self.experts.trained if self.experts else 0)

    @property
    def dense(self) -> int:
        """Elements with a gradient, without the experts sharded over ep ranks."""
        return self.num_eight_bit + self.others + self.matrices

    @property
    def of_experts(self) -> Elements:
        """Counts of the experts sharded over ep ranks; zeros without any."""
        return self.experts or Elements(0, 0, 0)

    def divided(self, number: int) -> Elements:
        """Return all counts divided by a number, rounded down."""
        experts = self.experts and self.experts.divided(number)
        return self.of_counts([count // number for count in self[:5]], experts, self.rows)

    @classmethod
    def of_parameters(
        cls, optimizer: Optimizer, parameters: Iterable[tuple[ParameterInfo, bool]]
    ) -> Elements:
        """Count the elements of a rank's parameters, each with True if it is trained."""
        dense, experts = [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]
        rows = 0
        for info, is_trained in parameters:
            counts = dense
            if info.sliced_over == "ep":
                counts, rows = experts, math.gcd(rows, info.local_shape[0])
            state = 0 if info.is_eight_bit else 3 if info.matrix is not None else 1
            counts[state if is_trained else 2] += math.prod(info.local_shape)
            if is_trained:
                counts[4] += factor_elements(optimizer, info.global_shape)
        return cls.of_counts(dense, cls.of_counts(experts, rows=rows) if any(experts) else None)

    @classmethod
    def of_counts(
        cls, counts: Sequence[int], experts: Elements | None = None, rows: int = 0
    ) -> Elements:
        """Return the counts of all fields but ``experts``, in their order."""
        num_eight_bit, others, frozen, matrices, factors = counts
        return cls(num_eight_bit, others, frozen, matrices, factors, experts, rows)


def shards_expert_weights(parallel: Parallel, elements: Elements) -> bool:
    """Return whether ZeRO-3 shards the weights of a stage's experts:
    if its shards divide the experts of a rank.
    """
    shards = expert_shard_factor(parallel)
    return parallel.zero == 3 and shards > 1 and elements.of_experts.rows % shards == 0


class StateWidths(NamedTuple):
    """Choices of precision in which frameworks differ; the defaults are meshwright's.
    The planner sets others.
    """

    gradient: int = 4
    """Bytes per element of an accumulated gradient; never less than those of a float64 weight."""
    has_copy: bool = True
    """True: weights in the compute dtype besides float32 master weights; False:
    float32 weights alone.
    """


OWN_WIDTHS = StateWidths()


def state_bytes(
    optimizer: Optimizer, itemsize: int, *, is_eight_bit: bool = False, is_matrix: bool = False
) -> float:
    """Return the bytes of optimizer state per element.

    Args:
        itemsize: bytes per element of the master weights.
        is_eight_bit: the state is kept in 8 bits, in blocks with a scale each.
        is_matrix: the elements are stepped as matrices.
    """
    if optimizer.builder is not None:
        return len(states_of(optimizer)) * itemsize
    is_stored_so = is_eight_bit or not optimizer.has_blocks
    codec = codec_of(optimizer) if is_stored_so else NUMBERS
    states = optimizer.spec.matrix_states if is_matrix else optimizer.states
    return sum(codec.of(state).bytes_per_element(itemsize) for state in states)


def held_at_rest(
    parallel: Parallel,
    optimizer: Optimizer,
    dtype: str,
    elements: Elements,
    widths: StateWidths = OWN_WIDTHS,
) -> tuple[int, int, int, int]:
    """Return (weights, gradients, optimizer state) in bytes on the device,
    then the bytes on the host (offload).

    Master weights count as optimizer state; under ZeRO-3 they are the weights. Experts sharded over
    ep ranks are sharded over their own replicas. ZeRO-3 leaves them as ZeRO-2 does where its shards
    do not divide their number. ``dtype``: ``train.dtype``.
    """
    zero, shards = parallel.zero, shard_factor(parallel)
    own = _held_at_rest(parallel, optimizer, dtype, elements, shards, zero, widths)
    if elements.experts is None:
        return own
    if not shards_expert_weights(parallel, elements):
        zero = min(zero, 2)
    shards = expert_shard_factor(parallel)
    of_experts = _held_at_rest(parallel, optimizer, dtype, elements.experts, shards, zero, widths)
    weights, gradients, states, host = (sum(pair) for pair in zip(own, of_experts, strict=True))
    return weights, gradients, states, host


def _held_at_rest(
    parallel: Parallel,
    optimizer: Optimizer,
    dtype: str,
    elements: Elements,
    shards: int,
    zero: int,
    widths: StateWidths,
) -> tuple[int, int, int, int]:
    trained, frozen = elements.dense, elements.frozen
    itemsize = DTYPES[dtype].itemsize
    wide = torch.float64.itemsize if dtype == "float64" else torch.float32.itemsize
    shard = trained // shards * wide
    held = [
        elements.num_eight_bit * state_bytes(optimizer, wide, is_eight_bit=True),
        elements.others * state_bytes(optimizer, wide),
    ]
    if elements.matrices:
        held.append(elements.matrices * state_bytes(optimizer, wide, is_matrix=True))
    states = round(sum(num_bytes / shards for num_bytes in held)) + elements.factors * wide
    gradient = max(widths.gradient, wide) if wide > 4 else widths.gradient
    gradients = _gradient_bytes(parallel, trained * gradient, shards)
    base = frozen // shards * itemsize  # under ZeRO-3
    if zero == 3 and shards > 1:
        if parallel.offload:
            summed = trained // shards * gradient
            return 0, gradients - summed, 0, shard + summed + states + base
        return shard + base, gradients, states, 0
    trained_itemsize = itemsize if widths.has_copy else wide
    weights = trained * trained_itemsize + frozen * itemsize
    if parallel.offload:
        return weights, gradients, 0, shard + states
    return weights, gradients, states + (shard if trained_itemsize < wide else 0), 0


def _gradient_bytes(parallel: Parallel, whole: int, shards: int) -> int:
    """Return the gradient bytes at rest: from ZeRO-2 on a shard,
    plus ``whole`` where it is reduced once per step.
    """
    if parallel.zero < 2 or shards == 1:
        return whole
    return whole // shards + (0 if reduces_each_microbatch(parallel) else whole)
