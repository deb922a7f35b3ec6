"""Bytes that a rank holds between steps: weights, gradients and optimizer state, by ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.config import Optimizer, RunConfig, expert_shard_factor, reduces_each_microbatch, shard_factor
from meshwright.optimizer import states_of
from meshwright.parameters import DTYPES


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
    """Counts of the experts sharded over ep ranks, which have other replica groups; the other fields exclude them."""
    rows: int = 0
    """Greatest common divisor, over layers, of the experts of a rank (dim 0 of the weights); set in ``experts``."""

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
    def of_counts(cls, counts: Sequence[int], experts: Elements | None = None, rows: int = 0) -> Elements:
        """Return the counts of all fields but ``experts``, in their order."""
        num_eight_bit, others, frozen, matrices, factors = counts
        return cls(num_eight_bit, others, frozen, matrices, factors, experts, rows)


def shards_expert_weights(config: RunConfig, elements: Elements) -> bool:
    """Return whether ZeRO-3 shards the weights of a stage's experts: if its shards divide the experts of a rank."""
    shards = expert_shard_factor(config)
    return config.parallel.zero == 3 and shards > 1 and elements.of_experts.rows % shards == 0


class StateWidths(NamedTuple):
    """Choices of precision in which frameworks differ; the defaults are meshwright's. The planner sets others."""

    gradient: int = 4
    """Bytes per element of an accumulated gradient; never less than those of a float64 weight."""
    has_copy: bool = True
    """True: weights in the compute dtype besides float32 master weights; False: float32 weights alone."""


OWN_WIDTHS = StateWidths()


def state_bytes(optimizer: Optimizer, itemsize: int, *, is_eight_bit: bool = False, is_matrix: bool = False) -> float:
    """Return the bytes of optimizer state per element.

    Args:
        itemsize: bytes per element of the master weights.
        is_eight_bit: the state is kept in 8 bits, in blocks with a scale each.
        is_matrix: Muon steps the elements as matrices.
    """
    if is_eight_bit:
        return 2 * (1 + itemsize / optimizer.block_size)
    itemsize = 2 if optimizer.state_dtype == "bfloat16" else itemsize
    return len(states_of(optimizer, is_matrix=is_matrix)) * itemsize


def held_at_rest(config: RunConfig, elements: Elements, widths: StateWidths = OWN_WIDTHS) -> tuple[int, int, int, int]:
    """Return (weights, gradients, optimizer state) in bytes on the device, then the bytes on the host (offload).

    Master weights count as optimizer state; under ZeRO-3 they are the weights. Experts sharded over ep ranks are
    sharded over their own replicas. ZeRO-3 leaves them as ZeRO-2 does where its shards do not divide their number.
    """
    own = _held_at_rest(config, elements, shard_factor(config), config.parallel.zero, widths)
    if elements.experts is None:
        return own
    zero = config.parallel.zero if shards_expert_weights(config, elements) else min(config.parallel.zero, 2)
    of_experts = _held_at_rest(config, elements.experts, expert_shard_factor(config), zero, widths)
    weights, gradients, states, host = (sum(pair) for pair in zip(own, of_experts, strict=True))
    return weights, gradients, states, host


def _held_at_rest(
    config: RunConfig, elements: Elements, shards: int, zero: int, widths: StateWidths
) -> tuple[int, int, int, int]:
    trained, frozen = elements.dense, elements.frozen
    dtype, offload = DTYPES[config.train.dtype], config.parallel.offload
    wide = torch.float64.itemsize if dtype == torch.float64 else torch.float32.itemsize
    shard = trained // shards * wide
    held = (
        elements.num_eight_bit * state_bytes(config.optimizer, wide, is_eight_bit=True),
        elements.others * state_bytes(config.optimizer, wide),
        elements.matrices * state_bytes(config.optimizer, wide, is_matrix=True) if elements.matrices else 0,
    )
    states = round(sum(number / shards for number in held)) + elements.factors * wide
    gradient = max(widths.gradient, wide) if wide > 4 else widths.gradient
    gradients = _gradient_bytes(config, trained * gradient, shards)
    base = frozen // shards * dtype.itemsize  # under ZeRO-3
    if zero == 3 and shards > 1:
        if offload:
            summed = trained // shards * gradient
            return 0, gradients - summed, 0, shard + summed + states + base
        return shard + base, gradients, states, 0
    itemsize = dtype.itemsize if widths.has_copy else wide
    weights = trained * itemsize + frozen * dtype.itemsize
    if offload:
        return weights, gradients, 0, shard + states
    return weights, gradients, states + (shard if itemsize < wide else 0), 0


def _gradient_bytes(config: RunConfig, whole: int, shards: int) -> int:
    """Return the gradient bytes at rest: from ZeRO-2 on a shard, plus ``whole`` where it is reduced once per step."""
    if config.parallel.zero < 2 or shards == 1:
        return whole
    return whole // shards + (0 if reduces_each_microbatch(config) else whole)
