"""Model of a layout for predictions: schedule, stages, layer profiles and footprints,
without building a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.config import RunConfig
from meshwright.mesh import Grid
from meshwright.optimizer.at_rest import Elements, shards_expert_weights
from meshwright.schedule.action import Schedule
from meshwright_plan.planner.layer_profile import LayerProfile
from meshwright_plan.planner.matrix_step import MatrixCounts
from meshwright_plan.planner.memory.footprint import Footprint
from meshwright_plan.planner.memory.rank import RankMemory, StageContents, rank_memory
from meshwright_plan.planner.memory.reduction import Backend
from meshwright_plan.planner.rates import OWN_TRAITS, FrameworkTraits


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
    """Matrices of each stage that are stepped as a whole."""

    @property
    def grid(self) -> Grid:
        """Degrees of the layout."""
        return Grid.of(self.config.parallel.degrees)

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

    def gathers_experts(self, stages: Sequence[int]) -> bool:
        """Return True if ZeRO-3 shards, and so gathers,
        the weights of these stages' shared experts.
        """
        return all(
            shards_expert_weights(self.config.parallel, self.elements[stage]) for stage in stages
        )

    def memory(
        self, pp_rank: int, backend: Backend, traits: FrameworkTraits = OWN_TRAITS
    ) -> RankMemory:
        """Return the peak memory of a pipeline rank, in a framework with these traits."""
        parts = zip(self.elements, self.footprints, self.matrices, strict=True)
        stages = [StageContents(*of_stage) for of_stage in parts]
        return rank_memory(self.config, self.schedule, pp_rank, stages, backend, traits)
