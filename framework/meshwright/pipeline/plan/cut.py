"""Cut of a model's layers into stages by the costs of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import ConfigError
from meshwright.pipeline.partition import partition, partition_explicit
from meshwright.pipeline.plan.costs import LayerCost


def cut_layers(
    balance: str | list[int], costs: Sequence[LayerCost], num_stages: int, pp: int
) -> list[range]:
    """Return the layers of each stage, by ``pipeline.balance``.

    Raises:
        ConfigError: fewer layers than stages, or a balance for another number of stages or layers.
    """
    if isinstance(balance, list):
        if len(balance) != num_stages:
            raise ConfigError(
                "MW-RUN-005",
                f"pipeline.balance = {balance} is for {len(balance)} stages, but there are"
                f" {num_stages}",
            )
        return partition_explicit(balance, len(costs))
    return partition(layer_weights(costs, balance), num_stages, num_stages // pp)


def layer_weights(costs: Sequence[LayerCost], balance: str) -> list[float]:
    """Return the weight of each layer under ``pipeline.balance``: its time,
    its number of parameters, or 1.
    """
    if balance == "layers":
        return [1.0] * len(costs)
    return [
        float(cost.num_parameters) if balance == "parameters" else cost.time_s for cost in costs
    ]
