"""Memory of one pipeline rank at its peak, by category: at rest, and along its row of actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.config import Parallel, RunConfig, Train, shard_factor
from meshwright.optimizer import step_bytes, table_bytes
from meshwright.optimizer.at_rest import Elements, StateWidths, held_at_rest, shards_expert_weights
from meshwright.schedule.action import Schedule
from meshwright_plan.planner.matrix_step import MatrixCounts, temporary_bytes
from meshwright_plan.planner.memory.footprint import Footprint
from meshwright_plan.planner.memory.reduction import Backend, ReductionBuffers
from meshwright_plan.planner.memory.row import ActionMemory, offloaded_bytes, row_peak
from meshwright_plan.planner.rates import FrameworkTraits


class StageContents(NamedTuple):
    """Contents of a stage, from which its memory follows."""

    elements: Elements
    """Parameter elements on one tp rank."""
    footprint: Footprint
    """Memory for one micro-batch."""
    matrices: MatrixCounts
    """Matrices that are stepped as a whole."""


class RankMemory(NamedTuple):
    """Peak memory of one rank on its device, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    messages: int
    temporaries: int
    host: int
    """Bytes at rest in host memory instead."""
    at: str
    """Action of the row at the peak."""

    @property
    def at_rest(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes of all categories on the device."""
        return self.at_rest + self.activations + self.messages + self.temporaries


CATEGORIES = ("weights", "gradients", "optimizer", "activations", "messages", "temporaries")
"""Fields of :class:`RankMemory` that add up to its total."""


def rank_memory(
    config: RunConfig,
    schedule: Schedule,
    pp_rank: int,
    stages: Sequence[StageContents],
    backend: Backend,
    traits: FrameworkTraits,
) -> RankMemory:
    """Return the peak memory of a pipeline rank, in a framework with these traits.

    ``stages``: all stages of the model.
    """
    of_rank = [stages[index] for index in schedule.stages_of(pp_rank)]
    footprints = [stage.footprint for stage in stages]
    widths = StateWidths(traits.wide_gradient_bytes, traits.has_weight_copy)

    at_rest = [
        held_at_rest(config.parallel, config.optimizer, config.train.dtype, stage.elements, widths)
        for stage in of_rank
    ]
    weights, gradients, optimizer, host = map(sum, zip(*at_rest, strict=True))
    if config.optimizer.has_blocks:
        states = [state for state in config.optimizer.spec.states if state.is_stored_as("8bit")]
        forms = frozenset(state.form for state in states)
        optimizer += table_bytes(forms, config.train.dtype == "float64")
    host += offloaded_bytes(schedule, pp_rank, footprints)

    gathers_experts = all(
        shards_expert_weights(config.parallel, stage.elements) for stage in of_rank
    )
    buffers = ReductionBuffers(config, backend, gathers_experts, widths.gradient)
    peak = row_peak(schedule, pp_rank, footprints, buffers, traits.frees_sent_outputs)
    in_step = _optimizer_step_bytes(config.parallel, config.train, of_rank)
    if in_step > peak.total:
        peak = ActionMemory(0, 0, in_step, "STEP")
    return RankMemory(
        weights,
        gradients,
        optimizer,
        peak.activations,
        peak.messages,
        peak.temporaries,
        host,
        peak.at,
    )


def _optimizer_step_bytes(parallel: Parallel, train: Train, stages: Sequence[StageContents]) -> int:
    """Return the temporary bytes of an optimizer step: matrices that are stepped as a whole,
    or the sums of an optimizer with means over parameters, and the chunk that it updates at a time.
    """
    of_matrices = temporary_bytes(parallel, train, [stage.matrices for stage in stages])
    factors = sum(stage.elements.factors for stage in stages)
    if not factors:
        return of_matrices
    trained = sum(stage.elements.trained for stage in stages)
    device = "cpu" if train.device == "cpu" else "cuda"
    return of_matrices + step_bytes(factors, trained // shard_factor(parallel), device)
