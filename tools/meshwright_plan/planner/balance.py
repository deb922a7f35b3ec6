"""Output of ``meshwright stages``: cost of each layer, its stage, and the imbalance of the stages.

Pure: a config and the model's outline, no process group and no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from meshwright.blueprint import Blueprint
from meshwright.model.meter import reference
from meshwright.pipeline.plan import LayerCost, layer_weights, partition
from meshwright.schedule.analysis import Costs, simulate
from meshwright.terminal.format import format_count, format_size, format_table

BALANCES = ("layers", "parameters", "time")


class BalanceRow(NamedTuple):
    """Neighbouring layers of one stage that cost the same."""

    first: str
    last: str
    num_layers: int
    cost: LayerCost
    """Cost of each of these layers."""
    stage: int

    @property
    def name(self) -> str:
        """``head``, or ``block0..block6``."""
        return first_to_last(self.first, self.last)


class BalancedStages(NamedTuple):
    """Stages that one balance setting produces."""

    balance: str
    stages: list[range]
    imbalance: float
    """Time of the slowest stage over the mean."""
    step: float
    """Simulated step time over that of a step without bubble and imbalance."""
    chosen: bool


def first_to_last(first: str, last: str) -> str:
    """Format a run of layers: ``head``, or ``block0..block6``."""
    return first if first == last else f"{first}..{last}"


def stage_costs(
    layer_costs: Sequence[LayerCost], stages: Sequence[range], *, least_s: float = 0.0
) -> list[Costs]:
    """Return each stage's costs in seconds: sums over its layers, or ``least_s`` instead of none.

    The halves of a split backward count as equal.
    """
    costs = []
    for stage in stages:
        forward_s = sum(layer_costs[layer].forward.time_s for layer in stage) or least_s
        backward_s = sum(layer_costs[layer].backward.time_s for layer in stage) or least_s
        costs.append(Costs(f=forward_s, b=backward_s, i=backward_s / 2, w=backward_s / 2))
    return costs


def imbalance(times_s: Sequence[float], stages: Sequence[range]) -> float:
    """Return the time of the slowest stage over the mean: 1 if all are equal."""
    of_stage = [sum(times_s[layer] for layer in stage) for stage in stages]
    return max(of_stage) * len(stages) / sum(of_stage) if sum(of_stage) else 1.0


def simulated_step(blueprint: Blueprint, stages: Sequence[range]) -> float:
    """Simulate a step with free messages;
    return its time over that without any bubble or imbalance.
    """
    costs = blueprint.layer_costs
    busy_s = sum(cost.time_s for cost in costs) * blueprint.schedule.chunks / blueprint.schedule.pp
    spans = simulate(blueprint.schedule, stage_costs(costs, stages)).spans
    return max(span.end for span in spans) / busy_s if busy_s else 1.0


def cuts(blueprint: Blueprint) -> list[BalancedStages]:
    """Return the stages that each value of ``pipeline.balance`` would give,
    and those of the user's own list if any.
    """
    costs, chosen = blueprint.layer_costs, blueprint.config.pipeline.balance
    times_s = [cost.time_s for cost in costs]
    by_balance = {
        balance: partition(layer_weights(costs, balance), len(blueprint.stages))
        for balance in BALANCES
    }
    if isinstance(chosen, list):
        by_balance[str(chosen)] = blueprint.stages
    return [
        BalancedStages(
            balance,
            stages,
            imbalance(times_s, stages),
            simulated_step(blueprint, stages),
            balance == str(chosen),
        )
        for balance, stages in by_balance.items()
    ]


def rows(blueprint: Blueprint) -> list[BalanceRow]:
    """Return the rows of all layers, first to last;
    neighbouring layers of one stage with equal cost share a row.
    """
    placed = [
        (blueprint.layer_costs[layer], stage)
        for stage, run in enumerate(blueprint.stages)
        for layer in run
    ]
    table = []
    for (cost, stage), alike in groupby(
        placed, key=lambda each: (each[0]._replace(name=""), each[1])
    ):
        names = [layer.name for layer, _ in alike]
        table.append(BalanceRow(names[0], names[-1], len(names), cost, stage))
    return table


def describe(blueprint: Blueprint) -> str:
    """Return the report as text."""
    config = blueprint.config
    by = reference(config.train.device, config.train.dtype)
    shared = len(blueprint.stages) > config.parallel.pp
    return "\n".join(
        [
            (
                f"model  {config.model.builder}, {len(blueprint.layer_costs)} layers, "
                f"{blueprint.num_parameters:,} parameters"
            ),
            (
                "costs  of one micro-batch through one layer, forward and backward, the loss in the"
                " last"
            ),
            (
                f"       time as on {by.name}, {by.flops_per_s / 1e12:,.3g} TFLOP/s and"
                f" {by.bytes_per_s / 1e9:,.4g} GB/s"
            ),
            "",
            *format_table(_layer_lines(blueprint), "<<>>>>>"),
            "",
            *format_table(_stage_lines(blueprint, shared), "<<<>>" if shared else "<<>>"),
            "",
            *format_table(_balance_lines(blueprint), "<>><"),
            (
                f"step: simulated, of {blueprint.schedule.name} with {blueprint.schedule.chunks}"
                " micro-batches, over one without bubble and imbalance"
            ),
        ]
    )


def _layer_lines(blueprint: Blueprint) -> list[tuple[str, ...]]:
    """Format one line per group of equal neighbouring layers; all figures are of one layer."""
    total_s = sum(cost.time_s for cost in blueprint.layer_costs)
    lines: list[tuple[str, ...]] = [
        ("layer", "", "parameters", "FLOPs", "bytes", "of the time", "stage")
    ]
    for row in rows(blueprint):
        lines.append(
            (
                row.name,
                f"{row.num_layers} x" if row.num_layers > 1 else "",
                f"{row.cost.num_parameters:,}",
                format_count(row.cost.forward.flops + row.cost.backward.flops),
                format_size(round(row.cost.forward.bytes + row.cost.backward.bytes)),
                _share(row.cost.time_s, total_s),
                str(row.stage),
            )
        )
    return lines


def _stage_lines(blueprint: Blueprint, shared: bool) -> list[tuple[str, ...]]:
    """Format one line per stage. ``shared``: ranks hold several stages,
    so each line names its pipeline rank.
    """
    total_s = sum(cost.time_s for cost in blueprint.layer_costs)
    lines = [("stage", *(["pp_rank"] if shared else []), "layers", "parameters", "of the time")]
    for stage, layers in enumerate(blueprint.stages):
        names = [blueprint.layer_costs[layer].name for layer in layers]
        parameters = {
            blueprint.model.canonical(name)
            for name, _ in blueprint.stage_layers(stage).named_parameters()
        }
        lines.append(
            (
                str(stage),
                *([str(blueprint.schedule.rank_of(stage))] if shared else []),
                first_to_last(names[0], names[-1]) + (f" ({len(names)})" if len(names) > 1 else ""),
                (
                    f"{sum(torch.Size(blueprint.infos[name].global_shape).numel() for name in parameters):,}"
                ),
                _share(sum(blueprint.layer_costs[layer].time_s for layer in layers), total_s),
            )
        )
    return lines


def _balance_lines(blueprint: Blueprint) -> list[tuple[str, ...]]:
    """Format one line per balance: imbalance, relative step time, layers of its stages."""
    lines: list[tuple[str, ...]] = [
        ("pipeline.balance", "slowest stage / mean", "step", "layers of the stages")
    ]
    for cut in cuts(blueprint):
        runs = [
            (size, len(list(alike))) for size, alike in groupby(len(stage) for stage in cut.stages)
        ]
        sizes = ", ".join(
            f"{size}" if count == 1 else f"{count} stages of {size}" for size, count in runs
        )
        lines.append(
            (
                f"{cut.balance}{' (chosen)' * cut.chosen}",
                f"{cut.imbalance:.3f}",
                f"{cut.step:.3f}",
                sizes,
            )
        )
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"
