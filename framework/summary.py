"""What is said before the first step: placement, batch arithmetic, schedule, bytes of each rank. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch

from framework.blueprint import DTYPES, Blueprint, batch_numbers
from framework.mesh.view import draw
from framework.parameters import ParameterInfo
from framework.schedule.draw import text as schedule_text
from framework.schedule.simulate import Costs, bubble_share, peak_activations, simulate


class RankShare(NamedTuple):
    """What the ranks of one stage hold each; tp ranks hold alike."""

    stage: int
    layers: str
    num_parameters: int
    """In memory, padding included."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Moments and, under bfloat16, master weights; of the ZeRO shard."""
    peak_activations: int
    """Micro-batches in flight."""


def rank_shares(blueprint: Blueprint) -> list[RankShare]:
    """Parameters and bytes of a rank of each stage. Flat buckets may add padding of a few elements per bucket."""
    config = blueprint.config
    dtype = DTYPES[config.train.dtype]
    accumulate_bytes = 8 if dtype == torch.float64 else 4
    per_element = 2 * accumulate_bytes + (0 if dtype.itemsize == accumulate_bytes else accumulate_bytes)
    shards = blueprint.grid.dp if config.parallel.zero else 1
    peaks = peak_activations(blueprint.schedule)
    shares = []
    for stage, layers in enumerate(blueprint.stages):
        names = list(dict(blueprint.stage_layers(stage).named_children()))
        local = blueprint.stage_layers(stage).named_parameters()
        count = sum(_numel(blueprint.infos[blueprint.model.canonical(name)]) for name, _ in local)
        shares.append(
            RankShare(
                stage,
                names[0] if len(layers) == 1 else f"{names[0]} .. {names[-1]}",
                count,
                count * dtype.itemsize,
                count * accumulate_bytes,
                count * per_element // shards,
                peaks[blueprint.schedule.rank_of(stage)],
            )
        )
    return shares


def _numel(info: ParameterInfo) -> int:
    return torch.Size(info.local_shape).numel()


def batch_arithmetic(blueprint: Blueprint) -> str:
    """``micro_batch_size x chunks x dp = global_batch``, with numbers."""
    batch, grid = batch_numbers(blueprint.config), blueprint.grid
    sequence_length = blueprint.config.data.sequence_length
    return (
        f"batch      micro_batch_size {batch.micro_batch_size} x chunks {batch.chunks} x dp {grid.dp} = "
        f"global_batch {batch.global_batch} samples; x {sequence_length} tokens = "
        f"{batch.global_batch * sequence_length:,} tokens per step"
    )


def summarise(blueprint: Blueprint, nodes: list[str]) -> str:
    """The whole text."""
    grid, config = blueprint.grid, blueprint.config
    timeline = simulate(blueprint.schedule, Costs())
    rows = [("stage", "layers", "parameters", "weights", "gradients", "optimizer", "in flight")]
    for share in rank_shares(blueprint):
        rows.append(
            (
                str(share.stage),
                share.layers,
                f"{share.num_parameters:,}",
                _mib(share.weight_bytes),
                _mib(share.gradient_bytes),
                _mib(share.optimizer_bytes),
                str(share.peak_activations),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    zero = f"ZeRO-{config.parallel.zero}"
    sequence = ", sequence parallel" if config.parallel.sequence else ""
    return "\n".join(
        [
            draw(grid, nodes),
            "",
            f"model      {config.model.builder}: {blueprint.num_parameters:,} parameters, "
            f"{len(blueprint.model.layers)} layers, {config.train.dtype}, {zero}{sequence}",
            batch_arithmetic(blueprint),
            f"schedule   {config.pipeline.schedule}: bubble {bubble_share(timeline):.1%} of the step when B costs 2 F",
            "",
            schedule_text(timeline),
            "",
            "each rank of a stage holds",
            *(f"  {line}" for line in table),
        ]
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
