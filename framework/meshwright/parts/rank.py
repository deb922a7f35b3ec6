"""Parts of one rank, and the state of its run.

build     Parts          all that one rank needs to train: mesh, executor, replicas, optimizer, data, state
          StepFeed       this rank's micro-batches of a step
step      StepStats      the numbers of one optimizer step, the same on every rank
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.config import RunConfig, batch_numbers
from meshwright.config.batch import validation_steps
from meshwright.data.mixture_losses import CorporaOf
from meshwright.data.trim import trim, trimmed_length
from meshwright.data.work import Dealt, WeighedSource, deal
from meshwright.model.buffers import StepState
from meshwright.optimizer import LossScale, add_state
from meshwright.parameters import DTYPES
from meshwright.pipeline.values import Feed, Microbatch, cast_floats

if TYPE_CHECKING:  # a step needs the parts, not how they are planned and built
    from meshwright.blueprint import Blueprint
    from meshwright.data.sources import Source, ValidationSources
    from meshwright.data_parallel.replica import Replica
    from meshwright.mesh.mesh import Mesh
    from meshwright.optimizer.flat import FlatOptimizer
    from meshwright.pipeline.executor import Executor, RowResult

STOP = "stop"  # a signal to end the run
ENOUGH = "enough"  # a callback's request to end it
SAVE_DUE = "save_due"  # a checkpoint is due by the clock
NOT_WRITTEN = "not_written"  # a checkpoint could not be written
FILES_LOST = "files_lost"  # the run's files are gone
NOT_MIRRORED = "not_mirrored"  # the step before could not be mirrored in memory
FLAGS = (STOP, ENOUGH, SAVE_DUE, NOT_WRITTEN, FILES_LOST, NOT_MIRRORED)
"""Flags of a step, each set if any rank sets it."""


def is_saved(step: int, flags: Collection[str], *, every: int, last: int) -> bool:
    """Return whether a checkpoint is due after a step in which some rank raised these flags.

    ``every``: ``checkpoint.every``; ``last``: ``train.steps``.
    """
    is_raised = any(flag in flags for flag in (STOP, ENOUGH, SAVE_DUE, FILES_LOST))
    return is_raised or step == last or (every > 0 and step % every == 0)


@dataclass
class TrainState:
    """State of a run besides its tensors: all that a resume on any layout needs."""

    step: int = 0
    """Steps taken, skipped ones included."""
    optimizer_steps: int = 0
    """Steps that have changed the weights."""
    skipped_in_a_row: int = 0
    """Number of steps skipped in a row up to now."""
    samples_seen: int = 0
    """The data cursor: the global index of the next sample."""
    tokens_seen: int = 0
    """Labels that counted, summed over all steps."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Loss scale of the next step."""
    callbacks: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """State of callbacks after the last step, as JSON, by the callback's name."""


@dataclass
class ForwardParts:
    """Parts that run this rank's stages forward, for inference and for training."""

    config: RunConfig
    mesh: Mesh
    blueprint: Blueprint
    executor: Executor
    data_s: float = field(default=0.0, kw_only=True)
    """Seconds of the current step that went into reading samples."""

    def feeds(self, source: Source, batches: Iterable[int]) -> Iterator[StepFeed]:
        """Return the feeds of these global batches of a source; ``batches``: their numbers,
        from 0.
        """
        size = batch_numbers(self.config.batch).global_batch
        return (StepFeed(self, source, batch * size) for batch in batches)


@dataclass
class StepFeed:
    """The micro-batches of one step for this replica, on this rank's device:
    as many as the executor's schedule has.

    NOTE [sample indices]: a step trains on global_batch consecutive sample indices from
    samples_seen on. Micro-batch m of data-parallel rank dp_rank is the block of micro_batch_size
    indices that starts at samples_seen + (dp_rank x chunks + m) x micro_batch_size. This formula is nowhere
    else. Sources are read by index, so the layout does not matter, and a resume needs one number.
    With ``batch.balance = "work"`` the same indices are dealt by data/work.py. A model with
    nn.SyncBatchNorm couples the m-th micro-batches of all replicas, so these are neighbours: the block
    starts at samples_seen + (m x dp + dp_rank) x micro_batch_size. data/read_ahead.py guesses both.
    """

    parts: ForwardParts
    source: Source
    samples_seen: int
    is_balanced: bool = False
    """True: by the work of the samples."""
    _samples: dict[int, tuple[Any, Tensor]] = field(default_factory=dict, init=False)
    """Samples of each micro-batch that was read, where rows are trimmed."""

    @functools.cached_property
    def _dealt(self) -> Dealt:
        """The whole step's deal. Without communication: every rank reads the same documents."""
        size, chunks = self.parts.config.batch.micro_batch_size, self.parts.executor.schedule.chunks
        dp = self.parts.mesh.grid.dp
        assert size is not None
        rows = range(self.samples_seen, self.samples_seen + dp * chunks * size)
        source = cast(WeighedSource, self.source)
        return deal(source.work(rows), dp, chunks, size)

    def indices(self, m: int) -> Sequence[int]:
        """Return the sample indices of micro-batch ``m``: see NOTE [sample indices]."""
        if self.is_balanced:
            rows = self._dealt[self.parts.mesh.at.dp_rank, m]
            return [self.samples_seen + int(row) for row in rows]
        micro_batch_size = self.parts.config.batch.micro_batch_size
        # of this step's batch: take_step sets the schedule first, in a batch-size ramp
        chunks = self.parts.executor.schedule.chunks
        assert micro_batch_size is not None
        assert 0 <= m < chunks, (m, chunks)
        dp_rank = self.parts.mesh.at.dp_rank
        block = dp_rank * chunks + m
        if self.parts.blueprint.is_synchronised:
            block = m * self.parts.mesh.grid.dp + dp_rank
        first = self.samples_seen + block * micro_batch_size
        return range(first, first + micro_batch_size)

    def length(self, m: int) -> int | None:
        """Return the tokens of the rows of micro-batch ``m`` with ``batch.padding = "trim"``, else
        None. Without communication: every rank reads the same samples.
        """
        multiple = self.parts.blueprint.trim_multiple
        return trimmed_length(self._trimmable(m)[1], multiple) if multiple else None

    def _trimmable(self, m: int) -> tuple[Any, Tensor]:
        """Return the whole samples of micro-batch ``m``, read once in a step: a stage asks for their
        length before it receives them.
        """
        if m not in self._samples:
            self._samples[m] = self._read(m)
        return self._samples[m]

    def _read(self, m: int) -> tuple[Any, Tensor]:
        """Read the samples; add the seconds to the parts' ``data_s``."""
        start_s = time.perf_counter()
        samples = self.source.read(self.indices(m))
        self.parts.data_s += time.perf_counter() - start_s
        return samples

    def microbatch(self, m: int) -> Microbatch:
        """Read micro-batch ``m`` and begin its copy to the device."""
        parts, device = self.parts, self.parts.mesh.device
        length = self.length(m)
        samples = self._read(m) if length is None else trim(self._trimmable(m), length)
        dtype = DTYPES[parts.config.train.dtype]
        # Every cp rank reads whole samples, because positions and document starts count over all
        # of a sample. Its labels are cut here, its inputs in the model (context_parallel/plan.py).
        cut = parts.blueprint.cut
        tokens = cut.tokens_of(samples[0], device)
        inputs, labels = (tree_map(parts.mesh.to_device, part) for part in samples)
        # the loss is computed in float32
        labels = cast_floats(labels, torch.promote_types(dtype, torch.float32))
        labels = cut.take_labels(labels, tokens)
        return Microbatch(
            cast_floats(inputs, dtype), labels, self.sample_indices(m), tokens, self._corpora(m)
        )

    def _corpora(self, m: int) -> Tensor | None:
        """Return the training corpus of each sample, (B,) int64 on the device;
        None where there is one alone.
        """
        corpora_of: CorporaOf | None = getattr(self.source, "corpora_of", None)
        found = [] if corpora_of is None else corpora_of(self.indices(m))
        return self.parts.mesh.to_device(torch.tensor(found)) if found else None

    def sample_indices(self, m: int) -> Tensor:
        """Return :meth:`indices` as (B,) int64 on the device."""
        indices, device = self.indices(m), self.parts.mesh.device
        if isinstance(indices, range):  # made on the device, without a copy
            return torch.arange(indices.start, indices.stop, device=device)
        return torch.tensor(indices, device=device)


@dataclass
class Parts(ForwardParts):
    """One rank's parts."""

    replicas: dict[int, Replica]
    optimizer: FlatOptimizer
    source: Source
    """Training samples."""
    validations: ValidationSources
    """Validation samples by name; a single set has the name ""."""
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the training data at the start, by name: a resumed run must have the same."""
    state: TrainState = field(default_factory=TrainState)
    last: RowResult | None = None
    """Result of the last step's row: times of its actions, losses, recorded metrics."""
    flags: dict[str, Callable[[], bool]] = field(
        default_factory=lambda: dict.fromkeys(FLAGS, lambda: False)
    )
    """Function of each of FLAGS, called once per step on every rank;
    :class:`StepStats` has those raised anywhere.
    """
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last validation by their names in a record: those that layers and the loss
    recorded, and of several sets the loss of each.
    """
    written_files: list[Path] = field(default_factory=list)
    """Files that observers of this rank have written since the last save. They are synced before a
    checkpoint of the step appears, for example when a resumed run reads them. Used on rank 0: see
    NOTE [files of a checkpoint].
    """
    restarts: int = 0
    """Number of earlier launches of this run."""
    is_from_memory: bool = False
    """True if this start resumed from a mirror in memory, which may be newer than all checkpoints."""
    stop_reason: str | None = None
    """Reason for which a callback on this rank has asked to end the run;
    see :meth:`request_stop`.
    """
    is_stopped: bool = False
    """True when the run ends before ``train.steps`` because a callback has asked for it;
    the same on every rank.
    """
    on_gradients: Callable[[Parts, float], None] | None = None
    """Called in each step when gradients are complete, before clipping: (parts, factor). The
    gradient of the mean loss is factor x the contents of the buckets.
    """
    on_nonfinite: Callable[[Parts, Feed, StepStats], None] | None = None
    """Called on all ranks when loss or gradient norm is NaN or Inf, before any weight has changed:
    (parts, the step's feed, its numbers). It raises, or returns to skip the step. None: the step is
    skipped.
    """

    step_state: StepState = field(init=False)
    """Buffers of this rank's layers that forward changes."""

    def __post_init__(self) -> None:
        """Build the step state."""
        stages = self.executor.stages.values()
        local_layers = [name for stage in stages for name in stage.layers._modules]
        replicas = self.mesh.replicas
        # tp ranks have equal statistics, of which one counts; under sequence parallelism each has
        # those of its own tokens
        adds = self.mesh.at.tp_rank == 0 or self.config.parallel.sequence
        self.step_state = StepState(
            self.blueprint.model.layers,
            self.blueprint.running,
            local_layers,
            (replicas.rank, replicas.size),
            adds,
        )

    def add_state(self, name: str) -> list[Tensor]:
        """Add a state of one number per weight; return a flat tensor per shard.
        For an observer's ``setup``.
        """
        return add_state(self.optimizer, name)

    def validation_feeds(self, name: str = "") -> Iterator[StepFeed]:
        """Yield the feeds of one validation on the set of this name."""
        source = self.validations[name]
        global_batch = batch_numbers(self.config.batch).global_batch
        at_most = self.config.train.validate_steps
        num_batches = validation_steps(source.num_samples, global_batch, at_most)
        return self.feeds(source, range(num_batches))

    def running(self) -> dict[str, Tensor]:
        """Return the running buffers of this rank's stages by name, as they are now.
        Equal on every tp rank.
        """
        return self.step_state.buffers()

    def request_stop(self, reason: str) -> None:
        """Request to end the run after the next step, with a checkpoint and exit code 0.
        One rank is enough.

        Checkpoints until then hold the request, so that a resumed run ends after the same step.
        """
        self.stop_reason = str(reason)


class StepStats(NamedTuple):
    """Numbers of one optimizer step; the same on every rank."""

    loss: float
    """Mean over the labels of the global batch that count."""
    grad_norm: float
    """Norm of the whole model's gradient, before clipping."""
    learning_rate: float
    num_tokens: int
    """Labels that counted."""
    bubble_share: float
    """Idle share of the ranks, 0..1, until the pipeline rank that computes longest has ended;
    on CUDA, of the step before.
    """
    flags: frozenset[str] = frozenset()
    """FLAGS that some rank raised."""
    skipped: bool = False
    """True if loss or gradient norm was NaN or Inf: weights and optimizer state did not change."""
    loss_scale: float = 1.0
    """Loss scale of the step; 1 unless the run computes in float16."""
    num_samples: int = 0
    """Samples of the step over all replicas."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics that layers and the loss recorded (``meshwright.record``), by name."""
