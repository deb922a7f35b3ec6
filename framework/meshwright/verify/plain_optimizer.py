"""Optimizer of the plain reference run: torch's or the user's, on whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer, ParameterGroup
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.optimizer import default_decay, peak_rate
from meshwright.verify.plain_formulas import PlainLion, PlainScheduleFree
from meshwright.verify.plain_muon import PlainMuon
from meshwright.verify.plain_states import StoredState, in_blocks, rounded


class Plain(NamedTuple):
    """Arguments of the optimizer of the plain run."""

    parameters: Mapping[str, nn.Parameter]
    groups: list[dict[str, Any]]
    """With "weight_decay", "eps" and the factors of parameter groups."""
    config: Optimizer
    matrices: Mapping[str, tuple[int, ...]]
    """Canonical name -> rows of the parts of a weight that is stepped as matrices."""
    dtype: torch.dtype
    """Compute dtype of the run."""
    seed: int
    """Seed of the run, for stochastic rounding."""


def _adamw(plain: Plain) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`."""
    return torch.optim.AdamW(
        plain.groups, lr=peak_rate(plain.config), betas=plain.config.betas, foreach=False
    )


def _sgd(plain: Plain) -> torch.optim.Optimizer:
    """Return `torch.optim.SGD`."""
    keys = plain.config
    return torch.optim.SGD(plain.groups, lr=peak_rate(keys), momentum=keys.momentum, foreach=False)


def _muon(plain: Plain) -> torch.optim.Optimizer:
    """Return the formulas of the papers, in loops over whole matrices."""
    rows_of = {plain.parameters[name]: rows for name, rows in plain.matrices.items()}
    return PlainMuon(plain.groups, rows_of, plain.config, plain.dtype)


def _lion(plain: Plain) -> torch.optim.Optimizer:
    """Return algorithm 2 of Chen et al. 2023."""
    return PlainLion(plain.groups, plain.config)


def _schedule_free(plain: Plain) -> torch.optim.Optimizer:
    """Return the authors' reference implementation, written out."""
    return PlainScheduleFree(plain.groups, plain.config)


def _adafactor(plain: Plain) -> torch.optim.Optimizer:
    """Return `torch.optim.Adafactor`."""
    keys = plain.config
    groups = [{**group, "eps": (group["eps"], 1e-3)} for group in plain.groups]
    return torch.optim.Adafactor(
        groups,
        lr=peak_rate(keys),
        beta2_decay=keys.beta2_decay,
        d=keys.clip_threshold,
        foreach=False,
    )


TWINS: dict[str, Callable[[Plain], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw,
    "sgd": _sgd,
    "muon": _muon,
    "lion": _lion,
    "schedule_free_adamw": _schedule_free,
    "adafactor": _adafactor,
}
"""Name -> function that builds the optimizer on whole parameters: torch's, or the formulas of its
paper, without the layouts' code.
"""


STORED: dict[str, Callable[[StoredState, Optimizer, int], Tensor]] = {
    "bfloat16": rounded,
    "8bit": in_blocks,
}
"""Format -> function of (state, keys, seed of the run) that returns the numbers of a state after it
was stored.
"""
IN_TORCH = {"momentum": "momentum_buffer"}
"""Name of a state in checkpoints -> in torch, where they differ."""


def plain_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    own_groups: Mapping[str, ParameterGroup],
    matrices: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
) -> torch.optim.Optimizer:
    """Return the optimizer of the plain run, torch's or the user's, on whole parameters.

    Args:
        own_groups: canonical parameter name -> its group of ``model.parameter_groups``.
        matrices: see :class:`Plain`, as ``dtype`` and ``seed``.
    """
    every = _groups(parameters, config, own_groups)
    groups = [group for group in every if group["params"]] or every[:1]
    if config.builder is not None:
        return _user_optimizer(groups, config, peak_rate(config))
    for group in groups:
        group["eps"] = config.eps * group.get("eps_factor", 1.0)
    plain = Plain(parameters, groups, config, matrices, dtype, seed)
    twin = TWINS[config.name](plain)
    if config.state_format != "float32":
        twin.register_step_post_hook(partial(_store, parameters, config, seed, count()))
    return twin


@torch.no_grad()
def _store(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    seed: int,
    steps: Iterator[int],
    twin: torch.optim.Optimizer,
    *_: object,
) -> None:
    """Replace the states by what ``optimizer.state_dtype`` leaves of them, after a step that used
    the numbers before.
    """
    step = next(steps)
    for name, parameter in parameters.items():
        for index, state in enumerate(config.spec.states):
            numbers = twin.state[parameter].get(IN_TORCH.get(state.name, state.name))
            if numbers is not None and state.is_stored_as(config.state_format):
                stored = StoredState(numbers, state.form, index, name, step)
                numbers.copy_(STORED[config.state_format](stored, config, seed))


def _groups(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    own_groups: Mapping[str, ParameterGroup],
) -> list[dict[str, Any]]:
    """Return the groups of a torch optimizer: matrices, vectors,
    and a group for each parameter of ``own_groups``, with "rate_factor" and "eps_factor".
    """
    decay = default_decay(config)
    others = [p for name, p in parameters.items() if name not in own_groups]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    for name, wanted in own_groups.items():
        if (parameter := parameters.get(name)) is None:
            continue
        own_decay = wanted.weight_decay
        if own_decay is None:
            own_decay = decay if parameter.dim() >= 2 else 0.0
        groups.append(
            {
                "params": [parameter],
                "weight_decay": own_decay,
                "rate_factor": wanted.learning_rate_factor,
                "eps_factor": wanted.eps_factor,
            }
        )
    return groups


def _user_optimizer(
    groups: list[dict[str, Any]], config: Optimizer, rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer of ``optimizer.builder``, whose own groups may be others."""
    assert config.builder is not None
    factor_of = {p: group.get("rate_factor", 1.0) for group in groups for p in group["params"]}
    build = find_function(config.builder, "optimizer.builder", "a function", ModelError)
    optimizer: torch.optim.Optimizer = build(
        [{"lr": rate, **group} for group in groups], **config.options
    )
    for group in optimizer.param_groups:
        group["rate_factor"] = factor_of[group["params"][0]]
    return optimizer
