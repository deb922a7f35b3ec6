"""build(config, mesh) -> Parts: everything that one rank needs to train, put together once, with nothing started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from framework.blueprint import DTYPES, Blueprint, batch_numbers, draw_blueprint
from framework.config import RunConfig
from framework.data.dataset import DatasetFeed, open_dataset
from framework.data.order import OnceInOrder, SampleOrder
from framework.data.samples import Corpus, Feed, validation_steps
from framework.data.span_corruption import SpanCorruptionFeed, open_corpus
from framework.data.tokenizer import end_of_document_id
from framework.data.tokenizer import load as load_tokenizer
from framework.data_parallel.replica import StageReplica
from framework.errors import MeshError, ModelError
from framework.materialise import materialise, stage_members, tied_groups
from framework.mesh.comm import Group
from framework.mesh.mesh import Mesh
from framework.optimizer.adamw import FlatAdamW, Shard
from framework.pipeline.executor import Executor, Microbatch, Result
from framework.pipeline.recompute import Context, recompute_parts
from framework.pipeline.running import running_values
from framework.pipeline.stage import Stage
from framework.pipeline.values import IGNORED_LABEL, Loss, cast_floats
from framework.schedule.action import Kind
from framework.seeding import Draw
from framework.state import TrainState
from framework.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from framework.tensor_parallel.layers import VocabHead


class Source(Protocol):
    """Where micro-batches come from: a :class:`framework.data.samples.Feed`, or verify's own."""

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> tuple[Any, Tensor, Tensor]:
        """(inputs, each tensor (B, ...), labels (B, ...), global sample indices (B,)) of micro-batch m of a replica."""


AnyFeed = Feed | SpanCorruptionFeed | DatasetFeed
"""What the data room reads a run's own samples with."""


@dataclass
class Parts:
    """One rank's parts."""

    config: RunConfig
    mesh: Mesh
    blueprint: Blueprint
    replicas: dict[int, StageReplica]
    executor: Executor
    optimizer: FlatAdamW
    feed: Source
    validation: Source | None
    state: TrainState = field(default_factory=TrainState)
    last: Result | None = None
    """What the last step's row has brought: when each action ran."""
    data_s: float = 0.0
    """Seconds of the current step that went into reading samples."""
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


def open_feeds(config: RunConfig) -> tuple[AnyFeed, AnyFeed | None]:
    """The training feed, shuffled by the seed, and the validation feed, once in order.

    Raises:
        DataError: before anything distributed exists when called by the launcher.
    """
    data = config.data
    if data.builder is not None:
        samples, held_out_samples = open_dataset(config, "train"), open_dataset(config, "validation")
        assert samples is not None
        if held_out_samples is not None:  # as the training samples are: the stages know one shape
            held_out_samples = held_out_samples._replace(like=samples.like)
            held_out_samples.sample(0)
        return (
            DatasetFeed(samples, SampleOrder(samples.num_samples, config.run.seed)),
            DatasetFeed(held_out_samples, OnceInOrder(held_out_samples.num_samples)) if held_out_samples else None,
        )
    vocab_size = config.model.options.get("vocab_size")
    vocab_size = vocab_size if isinstance(vocab_size, int) else None
    if data.task == "span_corruption":

        def corrupted(prefix: str, order: type[SampleOrder] | type[OnceInOrder]) -> SpanCorruptionFeed:
            found = open_corpus(prefix, data.sequence_length, vocab_size)
            how = (
                SampleOrder(found.num_samples, config.run.seed)
                if order is SampleOrder
                else OnceInOrder(found.num_samples)
            )
            return SpanCorruptionFeed(found, how, data.sequence_length, config.run.seed)

        held_out_feed = corrupted(data.validation, OnceInOrder) if data.validation is not None else None
        return corrupted(data.train, SampleOrder), held_out_feed
    eod_id = None if data.tokenizer is None else end_of_document_id(load_tokenizer(Path(data.tokenizer)))

    def corpus_at(prefix: str) -> Corpus:
        return Corpus(prefix, data.sequence_length, vocab_size, eod_id, data.eod_mask_loss)

    corpus = corpus_at(data.train)
    training = Feed(corpus, SampleOrder(corpus.num_samples, config.run.seed))
    if data.validation is None:
        return training, None
    held_out = corpus_at(data.validation)
    return training, Feed(held_out, OnceInOrder(held_out.num_samples))


def label_losses(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each label, (..., V) and (...) -> (...); in float32, or float64 for float64 logits."""
    logits = output if output.dtype == torch.float64 else output.float()
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return flat.view(labels.shape)


def pick_loss(blueprint: Blueprint, tp: Group) -> Loss:
    """The loss for what the model's last layer gives: whole logits, or this tp rank's part of the vocabulary."""
    last_name, last_layer = list(blueprint.model.layers.named_children())[-1]
    if blueprint.model.loss is not None:
        return blueprint.model.loss
    heads = [name for name, module in last_layer.named_modules(prefix=last_name) if isinstance(module, VocabHead)]
    if not heads:
        if blueprint.config.parallel.sequence:
            raise ModelError(
                f"parallel.sequence = true, but the last layer, {last_name}, has no linear sharded as 'vocab': its "
                f"input would be a part of the sequence only. Add it to the model's sharding_plan, or set "
                f"parallel.sequence = false"
            )
        return label_losses
    vocab_size = blueprint.infos[f"{heads[-1]}.weight"].global_shape[0]

    def loss(output: Any, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(output, labels, tp, vocab_size)

    return loss


@dataclass
class Again:
    """What has to be as it was when layers of a stage are run once more in backward."""

    draw: Draw
    stage: Stage | None = None

    def __call__(self) -> AbstractContextManager[None]:
        """Called in the first forward: remembers which samples go through; entered around the second."""
        return self._as_it_was(self.draw.sample_indices)

    @contextmanager
    def _as_it_was(self, sample_indices: Tensor | None) -> Iterator[None]:
        assert self.stage is not None
        now, self.draw.sample_indices = self.draw.sample_indices, sample_indices
        try:
            with self.stage.splitting():
                yield
        finally:
            self.draw.sample_indices = now


def plan_recompute(blueprint: Blueprint, layers: nn.Sequential, again: Context) -> dict[str, Context]:
    """The layers that are recomputed as a whole; parts of layers are prepared in place."""
    pipeline, model = blueprint.config.pipeline, blueprint.model
    if pipeline.recompute == "none":
        return {}
    chosen = [name for name in layers._modules if any(fnmatchcase(name, p) for p in pipeline.recompute_layers)]
    if pipeline.recompute == "full":
        return dict.fromkeys(chosen, again)
    for name in chosen:
        recompute_parts(name, layers.get_submodule(name), model.selective_recompute, again)
    return {}


def compare_digests(blueprint: Blueprint, mesh: Mesh) -> None:
    """All ranks must have drawn the same blueprint, or their messages would not fit together.

    Raises:
        MeshError: names the ranks that differ from rank 0.
    """
    digests = mesh.world.gather_objects(blueprint.digest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise MeshError(
            f"ranks {different} have another configuration or schedule than rank 0: start all of them with the same "
            f"config file, overrides and code"
        )


def build(config: RunConfig, mesh: Mesh, feeds: tuple[Source, Source | None] | None = None) -> Parts:
    """Put one rank's parts together. Every rank calls it, in step; ``config`` is resolved.

    ``feeds``: training and validation; None opens the corpora that the config names.
    """
    blueprint = draw_blueprint(config, mesh.tp)
    compare_digests(blueprint, mesh)
    training, validation = open_feeds(config) if feeds is None else feeds
    tied = tied_groups(blueprint, mesh)
    loss = pick_loss(blueprint, mesh.tp)
    labels_per_step = batch_numbers(config).global_batch * blueprint.example.labels_per_sample
    splits = any(action.kind is Kind.I for row in range(mesh.grid.pp) for _, action in blueprint.schedule.actions(row))
    last = len(blueprint.stages) - 1
    replicas: dict[int, StageReplica] = {}
    stages: dict[int, Stage] = {}
    for index in blueprint.schedule.stages_of(mesh.at.pp_rank):
        layers = materialise(blueprint, index, mesh.device)
        replicas[index] = StageReplica(
            stage_members(blueprint, index, layers, tied),
            mesh.dp,
            mesh.tp,
            zero=config.parallel.zero,
            bucket_bytes=config.parallel.bucket_bytes,
        )
        if config.train.compile:
            for layer in layers:
                layer.compile()
        again = Again(blueprint.model.draw)
        stages[index] = Stage(
            index,
            len(blueprint.stages),
            layers,
            input_spec=blueprint.boundaries[index - 1] if index > 0 else None,
            output_spec=blueprint.boundaries[index] if index < last else None,
            loss=loss,
            loss_scale=1.0 / labels_per_step,
            before_layer=replicas[index].ready,
            recompute=plan_recompute(blueprint, layers, again),
            splits_backward=splits,
            running=frozenset(blueprint.running),
        )
        again.stage = stages[index]
    optimizer = FlatAdamW(
        [
            Shard(
                bucket.master,
                bucket.shard_gradient,
                bucket.kind.decays,
                bucket.kind.owns(mesh.at.tp_rank) and (bucket.shards_gradient or mesh.at.dp_rank == 0),
            )
            for replica in replicas.values()
            for bucket in replica.buckets
        ],
        config.optimizer,
    )
    draw = blueprint.model.draw

    def on_microbatch(sample_indices: Tensor) -> None:
        draw.sample_indices = sample_indices

    executor = Executor(
        blueprint.schedule,
        mesh.pp,
        stages,
        mesh.device,
        on_microbatch=on_microbatch,
        begin_last_backward=lambda stage, awaited: replicas[stage].begin_last_backward(awaited),
        reduce=lambda stage: replicas[stage].finish_reduce(),
    )
    return Parts(config, mesh, blueprint, replicas, executor, optimizer, training, validation)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On CUDA by way of pinned memory: the copy of any other waits until the GPU has done all that was asked before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass
class StepFeed:
    """The micro-batches of the step that starts at ``samples_seen``, for this replica, on this device."""

    parts: Parts
    source: Source
    samples_seen: int

    def microbatch(self, m: int) -> Microbatch:
        """Read one; the seconds that takes are added to the parts' ``data_s``."""
        parts, mesh = self.parts, self.parts.mesh
        start_s = time.perf_counter()
        micro_batch_size, chunks, _ = batch_numbers(parts.config)
        found = self.source.microbatch(self.samples_seen, mesh.at.dp_rank, mesh.grid.dp, micro_batch_size, chunks, m)
        parts.data_s += time.perf_counter() - start_s
        dtype = DTYPES[parts.config.train.dtype]
        inputs, labels, indices = (tree_map(lambda leaf: _to_device(leaf, mesh.device), part) for part in found)
        return Microbatch(cast_floats(inputs, dtype), cast_floats(labels, dtype), indices)

    def sample_indices(self, m: int) -> Tensor:
        """(B,) int64 on this device: a step is one run of indices, replicas and their micro-batches in order."""
        micro_batch_size, chunks, _ = batch_numbers(self.parts.config)
        first = self.samples_seen + (self.parts.mesh.at.dp_rank * chunks + m) * micro_batch_size
        return torch.arange(first, first + micro_batch_size, device=self.parts.mesh.device)


def validation_batches(parts: Parts) -> int:
    """Global batches in one validation; 0 without validation data."""
    if not isinstance(parts.validation, AnyFeed):
        return 0
    global_batch = batch_numbers(parts.config).global_batch
    return validation_steps(parts.validation.num_samples, global_batch, parts.config.train.validate_steps)
