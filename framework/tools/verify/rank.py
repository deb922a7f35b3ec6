"""One rank of one layout, trained through the same parts and steps as a real run, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.build import build
from meshwright.config import RunConfig, batch_numbers, parse
from meshwright.data.sources import Source, example, open_sources
from meshwright.data_parallel.members import full_tensor, full_weights
from meshwright.data_parallel.sharding import ShardedParameters
from meshwright.expert_parallel.routing import NO_ROUTING, RoutingPlan
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.model.build import configured_model
from meshwright.optimizer import evaluating
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts
from meshwright.run.observers import total_loss
from meshwright.step import take_step
from meshwright.tools.verify.checksums import checksum
from meshwright.tools.verify.plain_state import digests, widened
from meshwright.tools.verify.reference import RunNumbers, validated_after
from meshwright.tools.verify.routes import validation_key
from meshwright.tools.verify.sources import VerifySource, own_sample, random_corruption, random_documents, random_sample
from meshwright.tracking.observer import hooks_of, step_key

TensorSlice = tuple[ParameterInfo, Tensor]


class RankFindings(NamedTuple):
    """Numbers of one rank, and its slices of the whole tensors. The fields are those of :class:`RunNumbers`."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[dict[int, int]]
    initial: list[TensorSlice]
    gradients: list[TensorSlice]
    weights: list[TensorSlice]
    masters: list[TensorSlice]
    validation: list[float]
    metrics: list[dict[str, float]]


def open_verify_source(config: RunConfig, random_tokens: bool) -> VerifySource:
    """Open random samples, or the run's own: without ``random_tokens``, and for a run with ``data.builder``."""
    length = config.data.sequence_length
    if random_tokens and config.data.builder is None:
        vocab_size = config.model.options.get("vocab_size") or count_logits(config)
        draw: Callable[[int, int, int], Callable[[int], tuple[Any, Tensor]]] = random_sample
        if config.data.task == "span_corruption":
            draw = random_corruption
        elif config.data.document_boundaries:
            draw = random_documents
        return VerifySource(draw(config.run.seed, int(vocab_size), length))
    return VerifySource(own_sample(open_sources(config)[0]))


def count_logits(config: RunConfig) -> int:
    """Return the last dim of the model's logits, measured on meta, for models without a ``vocab_size`` option."""
    layers = configured_model(config).layers.to("meta")
    with torch.no_grad():
        output = layers(example(config, 1)[0])
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
            self.seen[index] = checksum(tree_map(lambda leaf, row=row: leaf[row], inputs), labels[row])
        return inputs, labels


def run_layout(
    rank: int,
    world_size: int,
    config_json: str,
    steps: int,
    random_tokens: bool,
    routing: RoutingPlan = NO_ROUTING,
) -> RankFindings:
    """Train one rank of one layout through the same parts and steps as a training run, and return its numbers."""
    config = parse(config_json)
    mesh = open_mesh(
        Grid(*config.parallel.degrees),
        config.train.device,
        ep_across_nodes=True,
        share_devices=config.launch.share_devices,
    )
    recorder = RecordingSource(open_verify_source(config, random_tokens))
    parts = build(config, mesh, (recorder, None))
    routes = hooks_of(parts, routing)
    findings = RankFindings([], [], [], [], [], [], [], [], [])
    findings.initial.extend(_weights(parts))

    def record_gradients(parts: Parts, factor: float) -> None:
        if parts.state.step == 0:
            findings.gradients.extend(_full_tensors(parts, lambda bucket: bucket.shard_gradient, factor))

    parts.on_gradients = record_gradients
    for step in range(1, steps + 1):
        recorder.seen = {}
        seen = parts.state.samples_seen
        with routes.during(step_key(step), range(seen, seen + batch_numbers(config, seen).global_batch)):
            stats = take_step(parts)
        findings.tokens.append(recorder.seen)
        findings.losses.append(stats.loss)
        findings.grad_norms.append(stats.grad_norm)
        findings.metrics.append(dict(stats.metrics) | digests(parts.step_state.step_sums()))
        if step in validated_after(steps):
            recorder.seen = {}
            size = batch_numbers(config).global_batch
            of_routing = routes.during(validation_key(step, steps), range(steps * size, (steps + 1) * size))
            with evaluating(parts.optimizer), of_routing:
                total = total_loss(parts, parts.feeds(recorder, [steps]))
            findings.tokens.append(recorder.seen)
            findings.validation.append(total.loss_sum / max(total.num_tokens, 1))
            findings.metrics.append(dict(total.metrics))
    findings.weights.extend(_weights(parts))
    if config.train.dtype in ("bfloat16", "float16"):
        findings.masters.extend(_full_tensors(parts, lambda bucket: bucket.master))
    return findings


def _slices(parts: Parts, bucket: ShardedParameters, flat: Tensor) -> list[TensorSlice]:
    """Return this rank's slices of a full flat tensor: none if another rank contributes the same ones."""
    if not bucket.sharding.is_first or not bucket.kind.owns(parts.mesh.at.tp_rank):
        return []
    views = [(slot.member.info, flat[slot.start : slot.stop]) for slot in bucket.slots]
    return [(info, _copy(info.unpadded(view.view(info.local_shape)))) for info, view in views]


def _weights(parts: Parts) -> list[TensorSlice]:
    """Return this rank's slices of weights, frozen weights and running buffers. All-gathers over dp."""
    slices: list[TensorSlice] = []
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        for bucket in (*replica.buckets, *replica.frozen_shards):
            slices += _slices(parts, bucket, full_weights(bucket))
        for member in replica.frozen:
            if parts.mesh.is_first_replica(is_expert=member.info.is_expert) and member.kind.owns(parts.mesh.at.tp_rank):
                slices.append((member.info, _copy(member.info.unpadded(member.parameter.detach()))))
    if parts.mesh.replicas.rank == 0 and parts.mesh.at.tp_rank == 0:
        buffers = widened(parts.running())
        slices += [(ParameterInfo(name, tuple(buffer.shape)), buffer) for name, buffer in buffers.items()]
    return slices


def _full_tensors(
    parts: Parts, shard_of: Callable[[ShardedParameters], Tensor], factor: float = 1.0
) -> list[TensorSlice]:
    """Return this rank's slices of ``shard_of(bucket)`` (gradients, masters), times ``factor``. All-gathers over dp."""
    slices: list[TensorSlice] = []
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            slices += _slices(parts, bucket, full_tensor(bucket, shard_of(bucket)) * factor)
    return slices


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, because training changes it in place afterwards."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


def assemble(slices: Sequence[TensorSlice]) -> dict[str, Tensor]:
    """Assemble whole tensors from the ranks' slices. Missing elements are NaN, so that the comparison fails."""
    whole_tensors: dict[str, Tensor] = {}
    for info, tensor in slices:
        full = whole_tensors.setdefault(info.name, torch.full(info.global_shape, float("nan"), dtype=tensor.dtype))
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
    )
