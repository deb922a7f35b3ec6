"""What one rank holds: its parts, and where its run stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from meshwright.blueprint import Blueprint
from meshwright.checkpoint import Behind
from meshwright.config import RunConfig
from meshwright.data.sources import Source
from meshwright.data_parallel.replica import Replica
from meshwright.mesh.mesh import Mesh
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.pipeline.executor import Executor, Result
from meshwright.pipeline.running_stats import running_values
from meshwright.system.signals import StopRequest


@dataclass
class TrainState:
    """Where a run stands: all that a layout-free resume needs besides the tensors."""

    step: int = 0
    """Steps taken, skipped ones included."""
    optimizer_steps: int = 0
    """Steps that have changed the weights."""
    skipped_in_a_row: int = 0
    """The last so many steps were skipped."""
    samples_seen: int = 0
    """The data cursor: the global index of the next sample."""
    tokens_seen: int = 0
    """Labels that counted, summed over all steps."""


@dataclass
class Forward:
    """What one rank needs to run its stages forward: a model in use needs no more, and one that trains has it too."""

    config: RunConfig
    mesh: Mesh
    blueprint: Blueprint
    executor: Executor
    data_s: float = field(default=0.0, kw_only=True)
    """Seconds of the current step that went into reading samples."""


@dataclass
class Parts(Forward):
    """One rank's parts."""

    replicas: dict[int, Replica]
    optimizer: FlatOptimizer
    source: Source
    """Training samples."""
    validation: Source | None
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the training data at the start, by name: a resumed run must have the same."""
    state: TrainState = field(default_factory=TrainState)
    last: Result | None = None
    """What the last step's row has brought: when each action ran."""
    asked: StopRequest = field(default_factory=StopRequest)
    """Looked at in each step: a request to one rank ends the run on all of them after it."""
    behind: Behind = field(default_factory=Behind)
    """The checkpoint that is being written. Looked at in each step: a failure of one rank is known to all of them."""
    files_lost: Callable[[], bool] = lambda: False
    """Looked at in each step: the run's directory is no longer the one that it began in. See run/files."""
    restarts: int = 0
    """How often the run had been started before."""
    on_gradients: Callable[[Parts, float], None] | None = None
    """Called in each step with (parts, factor) when gradients are whole, before clipping; gradient = factor x what lies
    in the buckets. For whoever wants to look: verify does."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.blueprint.model.layers)

    def running(self) -> dict[str, Tensor]:
        """The running buffers of my stages by name, as they are now; the same on every tp rank."""
        found: dict[str, Tensor] = {}
        for stage in self.executor.stages.values():
            found |= running_values(stage.layers, self.blueprint.running)
        return found
