"""Optimizers by ``optimizer.name``: construction of the torch optimizer over flat shards, and names of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.mesh.comm import Group
from meshwright.optimizer.eight_bit import AdamW8bit
from meshwright.optimizer.factored import COLUMNS, ROWS, SQUARES, ShardedAdafactor
from meshwright.optimizer.lion import ShardedLion
from meshwright.optimizer.matrix import ShardedMuon
from meshwright.optimizer.matrix_plan import MatrixShard
from meshwright.optimizer.own import build_own
from meshwright.optimizer.own_defaults import peak_rate
from meshwright.optimizer.own_trial import element_states
from meshwright.optimizer.rounded import RoundedAdamW, ShardPlace
from meshwright.optimizer.schedule_free import GRADIENT_POINT, ShardedScheduleFree

MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = {
    "adamw": MOMENTS,
    "adamw8bit": MOMENTS,
    "sgd": ("momentum",),
    "muon": (*MOMENTS, "momentum"),
    "lion": ("exp_avg",),
    "schedule_free_adamw": ("exp_avg_sq", "z"),
    "adafactor": (),
}
"""Optimizer name -> names of its states with one number per element, as in checkpoints."""
IN_TORCH = {"momentum": "momentum_buffer"}
"""Name of a state in checkpoints -> its name in torch, where they differ."""


class ShardLayout(NamedTuple):
    """Layout of the weights in a flat shard, for optimizers whose updates depend on indices or on whole weights."""

    place: ShardPlace | None = None
    """Position of the shard in its bucket (bfloat16 states, Adafactor)."""
    matrices: MatrixShard | None = None
    """Matrices of the shard (Muon)."""
    holders: Group | None = None
    """Ranks with parts of the shard's weights (Adafactor)."""
    tied: Group | None = None
    """Ranks with copies of the shard's weight if it is tied across stages (Adafactor)."""


def states_of(config: Optimizer, *, is_matrix: bool | None = None) -> tuple[str, ...]:
    """Return the names of the optimizer's states; with ``is_matrix`` those of weights that are matrices, or are not."""
    if config.builder is not None:
        return element_states(config).names
    if config.name == "muon" and is_matrix is not None:
        return ("momentum",) if is_matrix else MOMENTS
    return STATES[config.name] if config.name != "sgd" or config.momentum else ()


def saved_states_of(config: Optimizer, *, is_matrix: bool | None = None) -> tuple[str, ...]:
    """Return the names of the states in a checkpoint: those of :func:`states_of`, and ``y`` of schedule-free AdamW.

    ``is_matrix``: see there; None also returns Adafactor's states.
    """
    names = states_of(config, is_matrix=is_matrix)
    if config.builder is None and config.name == "adafactor" and is_matrix is None:
        return (ROWS, COLUMNS, SQUARES)
    return (*names, GRADIENT_POINT) if config.builder is None and config.name == "schedule_free_adamw" else names


def state_dtype(config: Optimizer, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states beside master weights of ``dtype``."""
    return torch.bfloat16 if config.state_dtype == "bfloat16" else dtype


def build_optimizer(
    groups: list[dict[str, Any]],
    config: Optimizer,
    allocate: Callable[[int, torch.dtype], Tensor] | None,
    layouts: Mapping[Tensor, ShardLayout],
) -> torch.optim.Optimizer:
    """Build the configured torch optimizer.

    Args:
        groups: torch parameter groups, each with "lr", "eight_bit" and the fields of GroupSettings (parameters.py).
        allocate: function (numel, dtype) that allocates zeros for 8-bit state; None: on the device of the weights.
        layouts: parameter, which is a flat shard -> its layout.
    """
    if config.builder is not None:
        element_states(config)  # raises for an optimizer that is not element-wise
        return build_own(groups, config)
    places = {parameter: layout.place for parameter, layout in layouts.items() if layout.place is not None}
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=peak_rate(config), momentum=config.momentum, fused=True)
    groups = [{**group, "eps": config.eps * group["eps_factor"]} for group in groups]
    if config.name == "adamw8bit":
        return AdamW8bit(groups, config.block_size, allocate, betas=config.betas, fused=True)
    if config.name == "muon":
        matrices = {parameter: layout.matrices for parameter, layout in layouts.items() if layout.matrices is not None}
        return ShardedMuon(groups, matrices, config)
    if config.name == "adafactor":
        holders = {parameter: layout.holders for parameter, layout in layouts.items() if layout.holders is not None}
        tied = {parameter: layout.tied for parameter, layout in layouts.items() if layout.tied is not None}
        return ShardedAdafactor(groups, config, places, holders, tied)
    if config.name == "lion":
        return ShardedLion(groups, config.betas)
    if config.name == "schedule_free_adamw":
        return ShardedScheduleFree(groups, config)
    if config.state_dtype == "bfloat16":
        return RoundedAdamW(groups, config.betas, places)
    return torch.optim.AdamW(groups, betas=config.betas, fused=True)
