"""Model of a layout for predictions: schedule, stages, layer profiles and footprints, without building a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.config import RunConfig, shard_factor
from meshwright.mesh import Grid
from meshwright.optimizer import step_bytes, table_bytes
from meshwright.optimizer.at_rest import Elements, StateWidths, held_at_rest, shards_expert_weights
from meshwright.schedule.action import Schedule
from meshwright_plan.planner.footprint import Footprint, offloaded_bytes
from meshwright_plan.planner.layer_profile import LayerProfile
from meshwright_plan.planner.matrix_step import MatrixCounts, temporary_bytes
from meshwright_plan.planner.memory import ActionMemory, RankMemory, row_peak
from meshwright_plan.planner.rates import OWN_TRAITS, FrameworkTraits
from meshwright_plan.planner.reduction_buffers import Backend, ReductionBuffers


@dataclass
class LayoutModel:
    """One layout of one model."""

    config: RunConfig
    schedule: Schedule
    stages: list[range]
    layers: tuple[LayerProfile, ...]
    elements: list[Elements]
    """Parameter elements of each stage, on one tp rank."""
    footprints: list[Footprint]
    """Memory of each stage for one micro-batch."""
    matrices: list[MatrixCounts]
    """Whole matrices of each stage, which Muon steps."""

    @property
    def grid(self) -> Grid:
        """Degrees of the layout."""
        return Grid(*self.config.parallel.degrees)

    def stage(self, index: int) -> tuple[LayerProfile, ...]:
        """Return the profiles of a stage's layers."""
        return self.layers[self.stages[index].start : self.stages[index].stop]

    def unlike_ranks(self) -> list[int]:
        """Return the first and the last pipeline rank of each group with equal footprints.

        No other rank of a group holds more than both of them.
        """
        first: dict[tuple[Footprint, ...], int] = {}
        last: dict[tuple[Footprint, ...], int] = {}
        for rank in range(self.schedule.pp):
            own = tuple(self.footprints[stage] for stage in self.schedule.stages_of(rank))
            first.setdefault(own, rank)
            last[own] = rank
        return sorted({*first.values(), *last.values()})

    def matrices_of(self, pp_rank: int) -> list[MatrixCounts]:
        """Return the matrices of each stage of a pipeline rank."""
        return [self.matrices[stage] for stage in self.schedule.stages_of(pp_rank)]

    def _factored_step(self, pp_rank: int) -> int:
        """Return the temporary bytes of an Adafactor step: its sums, and the chunk that it updates at a time."""
        of_rank = [self.elements[stage] for stage in self.schedule.stages_of(pp_rank)]
        factors, trained = sum(each.factors for each in of_rank), sum(each.trained for each in of_rank)
        if not factors:
            return 0
        device = "cpu" if self.config.train.device == "cpu" else "cuda"
        return step_bytes(factors, trained // shard_factor(self.config), device)

    def gathers_experts(self, stages: Sequence[int]) -> bool:
        """Return True if ZeRO-3 shards, and so gathers, the weights of these stages' shared experts."""
        return all(shards_expert_weights(self.config, self.elements[stage]) for stage in stages)

    def memory(self, pp_rank: int, backend: Backend, traits: FrameworkTraits = OWN_TRAITS) -> RankMemory:
        """Return the peak memory of a pipeline rank, in a framework with these traits."""
        widths = StateWidths(traits.wide_gradient_bytes, traits.has_weight_copy)
        own = self.schedule.stages_of(pp_rank)
        at_rest = [held_at_rest(self.config, self.elements[stage], widths) for stage in own]
        weights, gradients, optimizer, host = map(sum, zip(*at_rest, strict=True))
        if self.config.optimizer.name == "adamw8bit":
            optimizer += table_bytes(self.config.train.dtype == "float64")
        host += offloaded_bytes(self.schedule, pp_rank, self.footprints)
        buffers = ReductionBuffers(self.config, backend, self.gathers_experts(own), widths.gradient)
        peak = row_peak(self.schedule, pp_rank, self.footprints, buffers, frees_sent=traits.frees_sent_outputs)
        step = temporary_bytes(self.config, self.matrices_of(pp_rank)) + self._factored_step(pp_rank)
        if step > peak.total:
            peak = ActionMemory(0, 0, step, "STEP")
        return RankMemory(weights, gradients, optimizer, *peak[:3], host, peak.at)
