"""Run the layouts on a pool of ranks, the reference here, and compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from framework.blueprint import DTYPES, draw_blueprint
from framework.build import Parts, build
from framework.checkpoint import Kind
from framework.config import RunConfig, parse
from framework.data.example import example
from framework.feeds import Source, open_feeds
from framework.mesh.grid import Grid
from framework.mesh.mesh import open_mesh
from framework.model import build_model
from framework.parameters import ParameterInfo
from framework.state import flat_pieces
from framework.step import take_step
from framework.verify.compare import BARS, Report, Row, compare, worst
from framework.verify.feed import VerifyFeed, own_sample, random_corruption, random_documents, random_sample
from framework.verify.layouts import Layout, layout_config
from framework.verify.reference import Findings, checksum, run_reference, widened
from framework.verify.traits import traits_of


class Pool(Protocol):
    """Ranks that wait for work; ``launch.pool.RankPool`` is one."""

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = ...) -> list[Any]:
        """``function(rank, world_size, *args)`` on each rank; the results by rank."""


class RankFindings(NamedTuple):
    """What one rank reports of a run: numbers on rank 0, and the parts of tensors that it stands for."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[dict[int, int]]
    initial: list[tuple[ParameterInfo, Any]]
    gradients: list[tuple[ParameterInfo, Any]]
    weights: list[tuple[ParameterInfo, Any]]


def open_feed(config: RunConfig, random_tokens: bool) -> VerifyFeed:
    """The run's own samples, or random ones."""
    length = config.data.sequence_length
    if random_tokens and config.data.builder is None:
        vocab_size = config.model.options.get("vocab_size") or count_logits(config)
        draw: Callable[[int, int, int], Callable[[int], tuple[Any, Tensor]]] = random_sample
        if config.data.task == "span_corruption":
            draw = random_corruption
        elif config.data.document_boundaries:
            draw = random_documents
        return VerifyFeed(draw(config.run.seed, int(vocab_size), length))
    return VerifyFeed(own_sample(open_feeds(config)[0]))


def count_logits(config: RunConfig) -> int:
    """The vocabulary of a model that calls it otherwise, or has a default: the length of its logits, found on meta."""
    layers = build_model(config.model.builder, config.model.options, config.run.seed).layers.to("meta")
    with torch.no_grad():
        logits = layers(example(config, 1)[0])
    return int(logits.shape[-1])


@dataclass
class Recorder:
    """A source that remembers what it was asked for: what this rank has trained on, not what it should have."""

    source: Source
    seen: dict[int, int] = field(default_factory=dict)
    """Global sample index -> checksum of its token ids and labels."""

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> tuple[Any, Tensor, Tensor]:
        """As the source gives it."""
        inputs, labels, indices = self.source.microbatch(samples_seen, dp_rank, dp, micro_batch_size, chunks, m)
        for row, index in enumerate(indices.tolist()):
            self.seen[index] = checksum(tree_map(lambda leaf, row=row: leaf[row], inputs), labels[row])
        return inputs, labels, indices


def run_layout(rank: int, world_size: int, config_json: str, steps: int, random_tokens: bool) -> RankFindings:
    """One rank of one layout, through the same parts and steps as a training run."""
    config = parse(config_json)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(Grid(parallel.pp, parallel.dp, parallel.tp), config.train.device)
    recorder = Recorder(open_feed(config, random_tokens))
    parts = build(config, mesh, (recorder, None))
    findings = RankFindings([], [], [], [], [], [])
    findings.initial.extend(_weights(parts))

    def keep(parts: Parts, factor: float) -> None:
        if parts.state.step == 0:
            findings.gradients.extend(_gradients(parts, factor))

    parts.on_gradients = keep
    for _ in range(steps):
        recorder.seen = {}
        stats = take_step(parts)
        findings.tokens.append(recorder.seen)
        findings.losses.append(stats.loss)
        findings.grad_norms.append(stats.grad_norm)
    findings.weights.extend(_weights(parts))
    return findings


def _weights(parts: Parts) -> list[tuple[ParameterInfo, Any]]:
    """The weights and running buffers that this rank stands for: the ones the optimizer steps, in full precision."""
    found = []
    for replica in parts.replicas.values():
        replica.ready_all()
        for bucket in replica.buckets:
            weights = bucket.whole_weights()
            if bucket.kind.owns(parts.mesh.at.tp_rank) and parts.mesh.at.dp_rank == 0:
                found += [(p.info, _copy(p.tensor)) for p in flat_pieces(Kind.WEIGHTS, bucket, weights)]
    if parts.mesh.at.dp_rank == 0 and parts.mesh.at.tp_rank == 0:
        buffers = widened(parts.running())
        found += [(ParameterInfo(name, tuple(buffer.shape)), buffer) for name, buffer in buffers.items()]
    return found


def _gradients(parts: Parts, factor: float) -> list[tuple[ParameterInfo, Any]]:
    """The gradients that this rank stands for; gathers over dp."""
    found = []
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            flat = bucket.whole(bucket.shard_gradient) * factor
            if bucket.kind.owns(parts.mesh.at.tp_rank) and parts.mesh.at.dp_rank == 0:
                found += [(p.info, _copy(p.tensor)) for p in flat_pieces(Kind.WEIGHTS, bucket, flat)]
    return found


def _copy(tensor: Tensor) -> Tensor:
    """On CPU; what trains on goes on changing."""
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


def assemble(parts: Sequence[tuple[ParameterInfo, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors out of the ranks' slices; elements that nobody gave are NaN, so that they cannot pass."""
    whole_tensors: dict[str, Tensor] = {}
    for info, tensor in parts:
        full = whole_tensors.setdefault(info.name, torch.full(info.global_shape, float("nan"), dtype=tensor.dtype))
        if info.slice is None:
            full.copy_(tensor)
        else:
            full.narrow(info.slice.dim, info.slice.start, info.slice.stop - info.slice.start).copy_(tensor)
    return whole_tensors


def merge(ranks: Sequence[RankFindings]) -> Findings:
    """One layout's findings out of its ranks'."""
    tokens: list[dict[int, int]] = [{} for _ in ranks[0].tokens]
    for rank in ranks:
        for step, checksums in enumerate(rank.tokens):
            tokens[step].update(checksums)
    return Findings(
        ranks[0].losses,
        ranks[0].grad_norms,
        tokens,
        assemble([part for rank in ranks for part in rank.initial]),
        assemble([part for rank in ranks for part in rank.gradients]),
        assemble([part for rank in ranks for part in rank.weights]),
    )


def groupings(global_batch: int) -> list[int]:
    """Some ways to take the samples of a batch several at a time."""
    return [size for size in range(2, global_batch + 1) if global_batch % size == 0][:4]


def rounding_of(
    expected: Findings, plain: RunConfig, feed: VerifyFeed, steps: int, micro_batch_size: int, others: Sequence[int]
) -> dict[str, float]:
    """How far float32 alone carries each parameter from where exact arithmetic would: the farthest of several runs.

    AdamW divides an element's gradient by its own size, so that one that is nearly zero moves by its rounding, and a
    single run may have been lucky in it. ``others``: micro-batch sizes in which the same samples are taken again: other
    orders of the same sums, as those of a layout are.
    """
    exact = run_reference(plain, feed, steps, torch.float64, micro_batch_size)
    runs = [expected, *(run_reference(plain, feed, steps, torch.float32, size) for size in others)]
    distances = [worst(found.weights, exact.weights) for found in runs]
    return {name: max(distance[name] for distance in distances) for name in distances[0]}


def verify(
    config: RunConfig,
    layouts: Sequence[Layout],
    pool: Pool,
    *,
    global_batch: int,
    steps: int = 10,
    dtype: str = "float64",
    random_tokens: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Run the reference once and each layout twice; compare by the bars of the precision.

    Raises:
        UserError: a layout that cannot be (its message says why).
    """
    plain = layout_config(config, Layout(), global_batch, dtype)
    traits, feed = traits_of(plain), open_feed(plain, random_tokens)
    configs = [layout_config(config, layout, global_batch, dtype) for layout in layouts]
    for laid_out in configs:
        draw_blueprint(laid_out)  # what cannot be is said here, before anything runs

    @functools.cache
    def reference(micro_batch_size: int) -> tuple[Findings, dict[str, float] | None]:
        """And how far rounding alone carries its weights, where that is looked at."""
        expected = run_reference(plain, feed, steps, DTYPES[dtype], micro_batch_size)
        if dtype != "float32":
            return expected, None
        others = () if traits.couples_samples else groupings(global_batch)
        return expected, rounding_of(expected, plain, feed, steps, micro_batch_size, others)

    rows = []
    for layout, laid_out in zip(layouts, configs, strict=True):
        # samples that see each other in their micro-batch must have the same company in the plain run
        expected, rounding = reference(layout.micro_batch_size if traits.couples_samples else 1)
        text = laid_out.model_dump_json()
        runs = [merge(pool.run(run_layout, layout.size, text, steps, random_tokens)) for _ in range(2)]
        rows.append(compare(str(layout), runs[0], runs[1], expected, BARS[dtype], rounding))
        on_row(rows[-1])
    of_tokens = "" if config.data.builder is not None else f" of {config.data.sequence_length} tokens"
    return Report(
        f"{config.model.builder}, {traits.num_parameters:,} parameters, {dtype}, {steps} steps of "
        f"{global_batch} samples{of_tokens}, against one plain process",
        rows,
    )
