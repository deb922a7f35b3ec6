"""One rank of one layout, trained through the same parts and steps as a real run,
and its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.build import build
from meshwright.config import RunConfig, batch_numbers, parse
from meshwright.data.sources import Source, example, open_sources
from meshwright.data.work import WeighedSource
from meshwright.data_parallel.members import full_tensor, full_weights
from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.expert_parallel.routing import NO_ROUTING, RoutingPlan
from meshwright.mesh import Grid
from meshwright.mesh.mesh import Mesh, open_mesh
from meshwright.model.build import configured_model
from meshwright.optimizer import evaluating
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts
from meshwright.run.observers import total_loss
from meshwright.run.pieces import saved_pieces
from meshwright.run.resume import resume
from meshwright.run.saving import Saver
from meshwright.step import take_step
from meshwright.tracking.observer import hooks_of, step_key
from meshwright.verify.checksums import checksum
from meshwright.verify.plain_state import digests, widened
from meshwright.verify.reference import RunNumbers, validated_after
from meshwright.verify.routes import validation_key
from meshwright.verify.sources import (
    VerifySource,
    own_sample,
    random_corruption,
    random_documents,
    random_sample,
)

TensorSlice = tuple[ParameterInfo, Tensor]


class RankFindings(NamedTuple):
    """Numbers of one rank, and its slices of the whole tensors.
    The fields are those of :class:`RunNumbers`.
    """

    losses: list[float]
    grad_norms: list[float]
    tokens: list[dict[int, int]]
    initial: list[TensorSlice]
    gradients: list[TensorSlice]
    weights: list[TensorSlice]
    masters: list[TensorSlice]
    validation: list[float]
    metrics: list[dict[str, float]]
    rates: list[float]
    scales: list[float]
    stepped: list[TensorSlice]
    lost: list[str]


class Pause(NamedTuple):
    """Stop of a run after ``step`` steps, with a checkpoint below ``directory``,
    from which it is resumed.

    ``is_saved``: True if another layout has left the checkpoint; the run then starts from it.
    """

    step: int
    directory: Path
    is_saved: bool = False


def open_verify_source(config: RunConfig, random_tokens: bool) -> VerifySource:
    """Open random samples, or the run's own: without ``random_tokens``,
    and for a run with ``data.builder``.
    """
    length = config.data.sequence_length
    if random_tokens and config.data.builder is None:
        vocab_size = config.model.options.get("vocab_size") or count_logits(config)
        draw: Callable[[int, int, int], Callable[[int], tuple[Any, Tensor]]] = random_sample
        if config.data.task == "span_corruption":
            draw = random_corruption
        elif config.data.document_boundaries:
            draw = random_documents
        ends = config.batch.padding == "trim"
        return VerifySource(draw(config.run.seed, int(vocab_size), length), ends)
    return VerifySource(own_sample(open_sources(config)[0]))


def count_logits(config: RunConfig) -> int:
    """Return the last dim of the model's logits, measured on meta,
    for models without a ``vocab_size`` option.
    """
    layers = configured_model(config).layers.to("meta")
    with torch.no_grad():
        output = layers(example(config.data, 1)[0])
    return int((output[0] if isinstance(output, tuple) else output).shape[-1])


@dataclass
class RecordingSource:
    """Source that records the samples that this rank has actually read."""

    source: Source
    seen: dict[int, int] = field(default_factory=dict)
    """Global sample index -> checksum of its token ids and labels."""

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Read from the source, and record a checksum of each sample."""
        inputs, labels = self.source.read(indices)
        for row, index in enumerate(indices):
            self.seen[index] = checksum(
                tree_map(lambda leaf, row=row: leaf[row], inputs), labels[row]
            )
        return inputs, labels

    def work(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the work of these samples, which records nothing."""
        return cast(WeighedSource, self.source).work(indices)


def run_layout(
    rank: int,
    world_size: int,
    config_json: str,
    steps: int,
    random_tokens: bool,
    routing: RoutingPlan = NO_ROUTING,
    pause: Pause | None = None,
) -> RankFindings:
    """Train one rank of one layout through the same parts and steps as a training run,
    and return its numbers.

    ``pause``: save in the middle, build everything anew, and resume. From the checkpoint of another
    layout only the steps after it are run.
    """
    config = parse(config_json)
    mesh = open_mesh(
        Grid.of(config.parallel.degrees),
        config.train.device,
        ep_across_nodes=True,
        share_devices=config.launch.share_devices,
    )
    run = _Run(config, mesh, random_tokens, routing)
    first = 1
    if pause is not None and pause.is_saved:
        resume(run.parts, pause.directory, _ignore)
        first = pause.step + 1
    else:
        run.findings.initial.extend(_weights(run.parts))
    for step in range(first, steps + 1):
        run.take_step(step)
        if step in validated_after(steps):
            run.validate(step, steps)
        if pause is not None and step == pause.step:
            run.save_and_resume(pause.directory)
    run.findings.weights.extend(_weights(run.parts))
    if config.train.dtype in ("bfloat16", "float16"):
        run.findings.masters.extend(_full_tensors(run.parts, lambda bucket: bucket.master))
    return run.findings


class _Run:
    """Run of one rank: its parts, which a resume replaces, and its numbers."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, random_tokens: bool, routing: RoutingPlan
    ) -> None:
        self.config, self.mesh, self.routing = config, mesh, routing
        self.recorder = RecordingSource(open_verify_source(config, random_tokens))
        self.findings = RankFindings([], [], [], [], [], [], [], [], [], [], [], [], [])
        self._build()

    def _build(self) -> None:
        self.parts = build(self.config, self.mesh, (self.recorder, {}))
        self.routes = hooks_of(self.parts, self.routing)
        self.parts.on_gradients = self._record_gradients

    def _record_gradients(self, parts: Parts, factor: float) -> None:
        if parts.state.step == 0:
            self.findings.gradients.extend(
                _full_tensors(parts, lambda bucket: bucket.shard_gradient, factor)
            )

    def take_step(self, step: int) -> None:
        """Take one step, and add its numbers to the findings."""
        findings, parts = self.findings, self.parts
        self.recorder.seen = {}
        seen = parts.state.samples_seen
        with self.routes.during(
            step_key(step), range(seen, seen + batch_numbers(self.config.batch, seen).global_batch)
        ):
            stats = take_step(parts)
        findings.tokens.append(self.recorder.seen)
        findings.losses.append(stats.loss)
        findings.grad_norms.append(math.inf if stats.skipped else stats.grad_norm)
        findings.metrics.append(dict(stats.metrics) | digests(parts.step_state.step_sums()))
        findings.rates.append(stats.learning_rate)
        findings.scales.append(stats.loss_scale)
        if step == 1:
            findings.stepped.extend(_weights(parts))

    def validate(self, step: int, steps: int) -> None:
        """Validate on the global batch after the last step's,
        and add the numbers to the findings.
        """
        findings, parts = self.findings, self.parts
        self.recorder.seen = {}
        size = batch_numbers(self.config.batch).global_batch
        of_routing = self.routes.during(
            validation_key(step, steps), range(steps * size, (steps + 1) * size)
        )
        with evaluating(parts.optimizer), of_routing:
            total = total_loss(parts, parts.feeds(self.recorder, [steps]))
        findings.tokens.append(self.recorder.seen)
        findings.validation.append(total.loss_sum / max(total.num_tokens, 1))
        findings.metrics.append(dict(total.metrics))

    def save_and_resume(self, directory: Path) -> None:
        """Save a checkpoint, build the parts anew, and resume from it.
        Collective over all ranks.
        """
        saver = Saver(self.parts, directory, _ignore)
        saver.start()
        saver.finish_or_fail()
        before = _state_of(self.parts)
        self._build()
        resume(self.parts, directory, _ignore)
        after = _state_of(self.parts)
        self.findings.lost.extend(
            name for name, value in before.items() if after.get(name) != value
        )


def _ignore(message: str) -> None:
    """Drop a message of the save or the resume."""


def _state_of(parts: Parts) -> dict[str, object]:
    """Return all that a resume must bring back, by name: counts,
    and checksums of this rank's pieces of tensors.
    """
    found: dict[str, object] = {
        f"state.{each.name}": getattr(parts.state, each.name) for each in fields(parts.state)
    }
    found["the optimizer's count of steps"] = parts.optimizer.num_steps
    for piece in saved_pieces(parts):
        found[f"{piece.kind} of {piece.info.name}"] = checksum((), piece.tensor.detach().cpu())
    return found


def _slices(bucket: ShardedParameters, flat: Tensor) -> list[TensorSlice]:
    """Return this rank's slices of a full flat tensor:
    none if another rank contributes the same ones.
    """
    if not bucket.holders.is_saved:
        return []
    views = [(slot.member.info, flat[slot.start : slot.stop]) for slot in bucket.slots]
    return [(info, _copy(info.unpadded(view.view(info.local_shape)))) for info, view in views]


def _weights(parts: Parts) -> list[TensorSlice]:
    """Return this rank's slices of weights, frozen weights and running buffers.
    All-gathers over dp.
    """
    slices: list[TensorSlice] = []
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        for bucket in (*replica.buckets, *replica.frozen_shards):
            slices += _slices(bucket, full_weights(bucket))
        for member in replica.frozen:
            if member.holders.is_saved:
                slices.append((member.info, _copy(member.info.unpadded(member.parameter.detach()))))
    if parts.mesh.replicas.rank == 0 and parts.mesh.at.tp_rank == 0:
        buffers = widened(parts.running())
        slices += [
            (ParameterInfo(name, tuple(buffer.shape)), buffer) for name, buffer in buffers.items()
        ]
    return slices


def _full_tensors(
    parts: Parts, shard_of: Callable[[ShardedParameters], Tensor], factor: float = 1.0
) -> list[TensorSlice]:
    """Return this rank's slices of ``shard_of(bucket)`` (gradients, masters), times ``factor``.
    All-gathers over dp.
    """
    slices: list[TensorSlice] = []
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            slices += _slices(bucket, full_tensor(bucket, shard_of(bucket)) * factor)
    return slices


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, because training changes it in place afterwards."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


def assemble(slices: Sequence[TensorSlice]) -> dict[str, Tensor]:
    """Assemble whole tensors from the ranks' slices. Missing elements are NaN,
    so that the comparison fails.
    """
    whole_tensors: dict[str, Tensor] = {}
    for info, tensor in slices:
        full = whole_tensors.setdefault(
            info.name, torch.full(info.global_shape, float("nan"), dtype=tensor.dtype)
        )
        if info.slice is None:
            full.copy_(tensor)
        else:
            for here, there in info.ranges_in(tensor, full):
                there.copy_(here)
    return whole_tensors


def merge(ranks: Sequence[RankFindings]) -> RunNumbers:
    """Merge the numbers of all ranks into those of the layout."""
    tokens: list[dict[int, int]] = [{} for _ in ranks[0].tokens]
    for rank in ranks:
        for step, checksums in enumerate(rank.tokens):
            tokens[step].update(checksums)
    return RunNumbers(
        ranks[0].losses,
        ranks[0].grad_norms,
        tokens,
        assemble([each for rank in ranks for each in rank.initial]),
        assemble([each for rank in ranks for each in rank.gradients]),
        assemble([each for rank in ranks for each in rank.weights]),
        assemble([each for rank in ranks for each in rank.masters]),
        ranks[0].validation,
        ranks[0].metrics,
        ranks[0].rates,
        ranks[0].scales,
        assemble([each for rank in ranks for each in rank.stepped]),
        list(dict.fromkeys(name for rank in ranks for name in rank.lost)),
    )
