"""Optimizer of the plain reference run: torch's or the user's, on whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.config import Optimizer, ParameterGroup
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.optimizer import AdamW8bit, default_decay, peak_rate
from meshwright.verify.plain_formulas import PlainLion, PlainScheduleFree
from meshwright.verify.plain_muon import PlainMuon
from meshwright.verify.plain_rounded import PlainRoundedAdamW

FORMULAS = {"lion": PlainLion, "schedule_free_adamw": PlainScheduleFree}


def plain_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    own_groups: Mapping[str, ParameterGroup],
    matrices: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
) -> torch.optim.Optimizer:
    """Return torch's or the user's optimizer on whole parameters; for ``adamw8bit`` the framework's.

    ``matrices``: canonical name -> rows of the parts of a weight that Muon steps. ``dtype``: compute dtype of the run.
    ``seed``: seed of the run, for stochastic rounding.

    ``own_groups``: canonical parameter name -> its group of ``model.parameter_groups``. Those parameters come last, in
    one torch group each, with "rate_factor" and "eps_factor" beside "lr"; AdamW's also have their "eps".
    """
    rate, decay_of_matrices = peak_rate(config), default_decay(config)
    others = [p for name, p in parameters.items() if name not in own_groups]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": decay_of_matrices},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    for name, wanted in own_groups.items():
        if (parameter := parameters.get(name)) is not None:
            decay = decay_of_matrices if parameter.dim() >= 2 else 0.0
            decay = decay if wanted.weight_decay is None else wanted.weight_decay
            factors = {"rate_factor": wanted.learning_rate_factor, "eps_factor": wanted.eps_factor}
            groups.append({"params": [parameter], "weight_decay": decay, **factors})
    if config.builder is not None:
        filled = [{"lr": rate, **group} for group in groups if group["params"]]
        factor_of = {id(p): group.get("rate_factor", 1.0) for group in groups for p in group["params"]}
        own: torch.optim.Optimizer = find_function(config.builder, "optimizer.builder", "a function", ModelError)(
            filled, **config.options
        )
        for each in own.param_groups:
            each["rate_factor"] = factor_of[id(each["params"][0])]
        return own
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, foreach=False)
    for group in groups[2:]:
        group["eps"] = config.eps * group["eps_factor"]
    if config.name == "muon":
        rows_of = {parameters[name]: rows for name, rows in matrices.items()}
        return PlainMuon([group for group in groups if group["params"]], rows_of, config, dtype)
    if config.name == "adafactor":
        return _adafactor(groups, config, rate)
    if config.name in FORMULAS:
        return FORMULAS[config.name]([group for group in groups if group["params"]], config)
    if config.state_dtype == "bfloat16":
        return PlainRoundedAdamW([group for group in groups if group["params"]], config, parameters, seed)
    options: dict[str, Any] = {"lr": rate, "betas": config.betas, "eps": config.eps, "foreach": False}
    if config.name == "adamw8bit":
        narrow = [p for p in groups[0]["params"] if p[0].numel() % config.block_size == 0]
        wide = [p for p in groups[0]["params"] if p[0].numel() % config.block_size]
        both = [{**groups[0], "params": narrow, "eight_bit": True}, {**groups[0], "params": wide}]
        for single in groups[2:]:
            (p,) = single["params"]
            single["eight_bit"] = p.dim() >= 2 and p[0].numel() % config.block_size == 0
        return AdamW8bit([*both, *groups[1:]], config.block_size, **options)
    return torch.optim.AdamW(groups, **options)


def _adafactor(groups: list[dict[str, Any]], config: Optimizer, rate: float) -> torch.optim.Optimizer:
    groups = [{**group, "eps": (group.get("eps", config.eps), 1e-3)} for group in groups]
    return torch.optim.Adafactor(
        groups, lr=rate, beta2_decay=config.beta2_decay, d=config.clip_threshold, foreach=False
    )
