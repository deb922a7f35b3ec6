"""Summary printed before the first step: placement, batch arithmetic, schedule, bytes of each rank.
Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.blueprint import Blueprint
from meshwright.config import (
    batch_numbers,
    expert_shard_factor,
    phases,
    reduces_each_microbatch,
    shard_factor,
)
from meshwright.mesh import draw_placement, expert_replicas
from meshwright.optimizer import matrices_of
from meshwright.optimizer.at_rest import Elements, held_at_rest
from meshwright.parameters import DTYPES
from meshwright.run.mirror_size import mirror_size
from meshwright.schedule.analysis import Costs, Timeline, bubble_share, peak_activations, simulate
from meshwright.schedule.drawing import text as schedule_text
from meshwright.terminal.format import format_size, format_table

WIDTH = 80


class RankShare(NamedTuple):
    """Memory of each rank of one stage; equal on all tp ranks."""

    stage: int
    layers: str
    num_parameters: int
    """Parameters of the rank's part of the stage, padding included."""
    weight_bytes: int
    """Bytes of weights; with ZeRO-3 a shard in the optimizer's dtype,
    without the layer or two gathered at a time.
    """
    gradient_bytes: int
    """Gradient bytes kept over a step; backward adds some unreduced buckets with ZeRO-2,
    a layer with ZeRO-3.
    """
    optimizer_bytes: int
    """Bytes of this rank's shard of the optimizer state and, in 16 bits below ZeRO-3,
    of the master weights.
    """
    host_bytes: int
    """Bytes of the states that ``parallel.offload`` keeps in host memory;
    the other fields do not contain them.
    """
    peak_activations: int
    """Largest number of micro-batches in flight."""


def rank_shares(blueprint: Blueprint) -> list[RankShare]:
    """Return parameters and bytes of a rank of each stage.
    Flat buckets may add padding of a few elements each.
    """
    peaks = peak_activations(blueprint.schedule)
    shares = []
    for stage, layers in enumerate(blueprint.stages):
        names = list(dict(blueprint.stage_layers(stage).named_children()))
        elements = _elements(blueprint, stage)
        shares.append(
            RankShare(
                stage,
                names[0] if len(layers) == 1 else f"{names[0]}..{names[-1]}",
                elements.trained + elements.frozen + elements.of_experts.frozen,
                *held_at_rest(
                    blueprint.config.parallel,
                    blueprint.config.optimizer,
                    blueprint.config.train.dtype,
                    elements,
                ),
                peaks[blueprint.schedule.rank_of(stage)],
            )
        )
    return shares


def _shared(blueprint: Blueprint, stage: int) -> int:
    """Return the elements of weights that several modules of a stage share;
    ZeRO-3 gathers them once.
    """
    uses = Counter(
        parameter
        for _, parameter in blueprint.stage_layers(stage).named_parameters(remove_duplicate=False)
    )
    return sum(parameter.numel() for parameter, times in uses.items() if times > 1)


def _elements(blueprint: Blueprint, stage: int) -> Elements:
    infos, canonical = blueprint.infos, blueprint.model.canonical
    return Elements.of_parameters(
        blueprint.config.optimizer,
        (
            (infos[canonical(name)], parameter.requires_grad)
            for name, parameter in blueprint.stage_layers(stage).named_parameters()
        ),
    )


def batch_arithmetic(blueprint: Blueprint) -> tuple[str, str]:
    """Return two lines: global_batch as a product, and the tokens (or labels) of a step."""
    batch, grid = batch_numbers(blueprint.config.batch), blueprint.grid
    example = blueprint.example
    if blueprint.config.data.builder is None:
        length, what = example.tokens_per_sample, "tokens"
        one_stream = length == blueprint.config.data.sequence_length
        of_each = "sequence_length" if one_stream else "tokens_per_sample"  # encoder and decoder
    else:
        length, of_each, what = example.labels_per_sample, "labels_per_sample", "labels"
    tokens = f"{batch.global_batch * length:,} {what} per step"
    return (
        (
            f"micro_batch_size {batch.micro_batch_size} x chunks {batch.chunks} x dp {grid.dp} = "
            f"global_batch {batch.global_batch}"
        ),
        f"global_batch {batch.global_batch} x {of_each} {length} = {tokens}",
    )


def _ramp(blueprint: Blueprint) -> list[str]:
    """Return the lines of a batch-size ramp; none without one."""
    if blueprint.config.batch.ramp is None:
        return []
    first, *later = phases(blueprint.config.batch)
    sizes = ", ".join(
        f"{each.global_batch:,} from step {each.first_step + 1:,}" for each in later[-4:]
    )
    omitted = " ..., then" if len(later) > 4 else ","
    return [f"           ramp: {first.global_batch:,} samples{omitted} {sizes}"]


def summarise(blueprint: Blueprint, nodes: list[str], width: int = WIDTH) -> str:
    """Return the whole summary. ``width``: columns of the schedule;
    all else fits into 80 if names are short.
    """
    config, timeline = blueprint.config, simulate(blueprint.schedule, Costs())
    of_samples, of_tokens = batch_arithmetic(blueprint)
    bubble = f"{bubble_share(timeline):.1%} of the time is bubble (dots) when B costs 2 F"
    zero, shards = f"ZeRO-{config.parallel.zero}", shard_factor(config.parallel)
    if config.parallel.zero and shards < blueprint.grid.num_replicas:
        zero += f" in {blueprint.grid.num_replicas // shards} groups of {shards}"
    sequence = ", sequence parallel" if config.parallel.sequence else ""
    return "\n".join(
        [
            draw_placement(blueprint.grid, nodes),
            "",
            (
                f"model      {config.model.builder}, {len(blueprint.model.layers)} layers, "
                f"{blueprint.num_parameters:,} parameters"
            ),
            f"           {config.train.dtype}, {zero}{sequence}",
            *_first_weights(blueprint),
            f"batch      {of_samples}",
            f"           {of_tokens}",
            *_ramp(blueprint),
            *_sharding_traffic(blueprint),
            *_eight_bit(blueprint),
            *_matrices(blueprint),
            *blueprint.cut.lines(),
            *_offload(blueprint),
            *_mirror(blueprint, nodes),
            f"schedule   {config.pipeline.schedule}: {bubble}",
            "",
            *_rows(timeline, width),
            "",
            "each rank of a stage holds",
            *_table(rank_shares(blueprint)),
        ]
    )


def _first_weights(blueprint: Blueprint) -> list[str]:
    """Return the model's own line on its first weights, if it has one."""
    note = blueprint.model.weights_note
    return [f"           {note}"] if note else []


def _sharding_traffic(blueprint: Blueprint) -> list[str]:
    """Return lines on the traffic of ZeRO-2 and -3 at the largest stage; none for ZeRO-0 and -1,
    or one shard.
    """
    config, shards = blueprint.config, shard_factor(blueprint.config.parallel)
    if config.parallel.zero < 2 or shards == 1:
        return []
    stages = range(len(blueprint.stages))
    trained = max(_elements(blueprint, stage).dense for stage in stages)
    dtype, chunks = DTYPES[config.train.dtype], batch_numbers(config.batch).chunks
    whole = trained * (8 if dtype == torch.float64 else 4)

    def sent(num_bytes: int) -> str:
        return format_size(num_bytes * (shards - 1) // shards)

    lines = []
    if config.parallel.zero == 3:
        counts = {stage: _elements(blueprint, stage) for stage in stages}
        gathered = max(
            2 * (each.dense + each.frozen) - _shared(blueprint, stage)
            for stage, each in counts.items()
        )
        at_once = config.parallel.unit_layers
        lines.append(
            f"weights    gathered {'layer by layer' if at_once == 1 else f'{at_once} layers at once'},"
            f" forward and backward: a rank sends {'at most ' * bool(config.parallel.keep_gathered)}"
            f"{chunks} x {sent(gathered * dtype.itemsize)} in a step"
        )
    if of_experts := max(_elements(blueprint, stage).of_experts.trained for stage in stages):
        replicas = len(expert_replicas(blueprint.grid, 0))
        kept = format_size(of_experts * (8 if dtype == torch.float64 else 4))
        over = (
            f"summed over {replicas} ranks with the same experts, in"
            f" {expert_shard_factor(config.parallel)} shards"
        )
        lines.append(f"experts    gradients of {kept} per rank, {over}")
    if not reduces_each_microbatch(config.parallel):
        return [
            *lines,
            (
                f"gradients  reduced once per step, and unsharded until then: {format_size(whole)}"
                " per rank"
            ),
        ]
    summed = f"{chunks} x {sent(whole)}"
    return [
        *lines,
        (
            f"gradients  summed over {shards} replicas after each micro-batch: a rank sends"
            f" {summed} in a step"
        ),
        (
            f'           (parallel.reduce = "step": once, with {format_size(whole)} per rank until'
            " then)"
        ),
    ]


def _eight_bit(blueprint: Blueprint) -> list[str]:
    """Return a line with the share of parameters that have 8-bit optimizer state;
    none for other optimizers.
    """
    optimizer = blueprint.config.optimizer
    if not optimizer.has_blocks:
        return []
    kept = [_elements(blueprint, stage) for stage in range(len(blueprint.stages))]
    num_eight_bit = sum(stage.num_eight_bit + stage.of_experts.num_eight_bit for stage in kept)
    share = num_eight_bit / max(sum(stage.trained for stage in kept), 1)
    return [
        f"optimizer  8-bit states of {share:.1%} of all elements: matrices whose rows are blocks of"
        f" {optimizer.block_size}"
    ]


def _matrices(blueprint: Blueprint) -> list[str]:
    """Return lines on the matrices that are stepped as a whole: their number and share,
    and the bytes of their exchange.
    """
    config = blueprint.config
    stages = range(len(blueprint.stages))
    canonical = blueprint.model.canonical
    infos = {
        canonical(name): info for name, info in blueprint.infos.items() if info.matrix is not None
    }
    if not infos:
        return []
    kept = [_elements(blueprint, stage) for stage in stages]
    matrices = sum(stage.matrices + stage.of_experts.matrices for stage in kept)
    share = matrices / sum(stage.trained for stage in kept)
    itemsize = 4 if config.train.dtype == "float16" else DTYPES[config.train.dtype].itemsize
    sent = [0.0] * blueprint.grid.pp
    for stage in stages:
        for name, _ in blueprint.stage_layers(stage).named_parameters():
            if (info := infos.get(canonical(name))) is not None:
                count_shards = expert_shard_factor if info.sliced_over == "ep" else shard_factor
                shards = count_shards(config.parallel)
                holders = shards * (blueprint.grid.tp if info.sliced_over == "tp" else 1)
                numel = math.prod(info.local_shape) / shards
                sent[blueprint.schedule.rank_of(stage)] += numel * itemsize * (1 - 1 / holders)
    number = sum(len(matrices_of(info._replace(slice=None))) for info in infos.values())
    return [
        (
            f"optimizer  {config.optimizer.spec.title} on {number:,} matrices, {share:.1%} of all"
            " elements, and AdamW on the others"
        ),
        (
            "           matrices go to their homes and back: a rank sends 2 x"
            f" {format_size(round(max(sent)))} in a step"
        ),
    ]


def _offload(blueprint: Blueprint) -> list[str]:
    """Return a line with the host memory of the largest stage;
    none without ``parallel.offload``.
    """
    parallel = blueprint.config.parallel
    if not parallel.offload:
        return []
    most = max(share.host_bytes for share in rank_shares(blueprint))
    kind = (
        "its states " if parallel.zero == 3 and shard_factor(blueprint.config.parallel) > 1 else ""
    )
    files = ""
    if parallel.offload_directory:
        files = f", {kind}in files in {parallel.offload_directory}"
    return [
        f"offload    the optimizer steps on the host: {format_size(most)} of host memory per"
        f" rank{files}"
    ]


def _mirror(blueprint: Blueprint, nodes: Sequence[str]) -> list[str]:
    """Return the lines on the mirror in host memory; none without ``watch.mirror``."""
    if not blueprint.config.watch.mirror:
        return []
    size = mirror_size(blueprint, nodes)
    most = format_size(round(max(size.held.values())))
    line = "mirror     the last two steps in memory, so that a dead rank is replaced in place:"
    if len(size.held) == 1:
        return [f"{line} {most}"]
    return [
        f"{line} at most {most} on a node,",
        (
            "           of its ranks and of those of the node before; a rank sends"
            f" {format_size(round(max(size.sent)))} in a step"
        ),
    ]


def _rows(timeline: Timeline, width: int) -> list[str]:
    """Return the rows of the schedule, labelled by pipeline rank."""
    rows = schedule_text(timeline, width + len("rank ") - len("pp")).splitlines()[1:]
    return [row.replace("rank ", "pp", 1) for row in rows]


def _table(shares: list[RankShare]) -> list[str]:
    rows = [("stage", "layers", "parameters", "weights", "gradients", "optimizer", "in flight")]
    for share in shares:
        rows.append(
            (
                str(share.stage),
                share.layers,
                (
                    f"{share.num_parameters:,}"
                    if share.num_parameters < 10**9
                    else f"{share.num_parameters / 1e6:,.1f}M"
                ),
                format_size(share.weight_bytes),
                format_size(share.gradient_bytes),
                format_size(share.optimizer_bytes),
                str(share.peak_activations),
            )
        )
    return format_table(rows, "<<>>>>>")
