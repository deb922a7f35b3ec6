"""Default model of verify: shrunk to laptop size, with an odd vocabulary and dropout on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.config import Model, RunConfig
from meshwright.config.combinations.layout import Layout
from meshwright.model.builder import find_builder
from meshwright.verify.layouts import layout_config, refusal
from meshwright.verify.rank import open_verify_source
from meshwright.verify.reference import PlainRun

DROPOUT = 0.1
"""Dropout probability where the configuration has dropout at 0."""
WITH_DROPOUT = "meshwright.verify.smaller:with_dropout"
WITHOUT_DROPOUT = "meshwright.verify.smaller:without_dropout"
NUM_EXPERTS = 12
"""Experts of a small mixture, where its groups allow it: 3 on a rank of ep 4,
which 2 shards do not divide.
"""
ODD_VOCABULARY = 499
"""Vocabulary size that no tp degree divides, so that every one of them has padded rows."""


def shrink(options: dict[str, Any], tp: int = 1) -> dict[str, Any]:
    """Return builder options with the same proportions at a small size: at most 4 layers, 8 heads
    of at most 8 elements, about 12 experts, ranks of a latent attention in proportion to the hidden
    size, and an odd vocabulary below 1,000.

    Options are recognised by their names in meshwright's own models; all other options stay
    unchanged. ``tp``: degree of the run. If it exceeds the key-value heads, which its ranks then
    share, 2 are left: ranks of tp 4 share them too.
    """
    small = dict(options)
    for key, most in (("num_layers", 4), ("num_decoder_layers", 4), ("head_dim", 8)):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], most)
    if isinstance(small.get("sliding_window"), int):
        # shorter than a sample: it has an effect
        small["sliding_window"] = min(small["sliding_window"], 12)
    heads = small.get("num_heads")
    hidden = small.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        kv_heads = small.get("num_kv_heads") or heads
        per_group = max(1, heads // kv_heads)
        new_kv = min(kv_heads, 2 if tp > kv_heads else 4)
        new_heads = new_kv * min(per_group, 2)
        head_size = min(hidden // heads, 8)
        small["num_heads"] = new_heads
        if small.get("num_kv_heads"):
            small["num_kv_heads"] = new_kv
        small["hidden_size"] = new_heads * head_size
        scale = small["hidden_size"] / hidden
        if isinstance(small.get("ffn_size"), int):
            small["ffn_size"] = _scaled(small["ffn_size"], scale)
        if isinstance(small.get("moe"), Mapping):
            small["moe"] = _shrink_experts(small["moe"], scale)
        if isinstance(small.get("mla"), Mapping):
            small["mla"] = _shrink_latent(small["mla"], scale)
    vocab_size = small.get("vocab_size")
    if isinstance(vocab_size, int):
        small["vocab_size"] = (
            ODD_VOCABULARY if vocab_size > 1000 else vocab_size - (vocab_size % 2 == 0)
        )
    return small


def _scaled(width: int, scale: float) -> int:
    """Return a width times ``scale``, rounded up to a multiple of 8."""
    return 8 * math.ceil(width * scale / 8)


def _shrink_experts(moe: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a small table ``moe``: about 12 experts,
    at least 2 in each group and for each token that had so many.
    """
    small = dict(moe)
    experts, top_k, num_groups = (
        small.get(key, 1) for key in ("num_experts", "top_k", "num_groups")
    )
    if all(isinstance(value, int) and value > 0 for value in (experts, top_k, num_groups)):
        small["num_experts"] = fewer = min(experts, num_groups * max(2, NUM_EXPERTS // num_groups))
        small["top_k"] = min(top_k, max(2, round(top_k * fewer / experts)))
    for key in ("expert_ffn_size", "shared_ffn_size"):
        if isinstance(small.get(key), int):
            small[key] = _scaled(small[key], scale)
    if isinstance(small.get("first_dense"), int):
        small["first_dense"] = min(small["first_dense"], 1)
    return small


def _shrink_latent(mla: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a small table ``mla``: heads of at most 8 elements and 4 rotated ones."""
    small = dict(mla)
    for key, most in (("nope_dim", 8), ("rope_dim", 4), ("v_dim", 8)):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], most)
    for key in ("kv_rank", "q_rank"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], _scaled(small[key], scale))
    return small


class PreparedModel(NamedTuple):
    """Configuration as verify trains it, and sentences that describe the changes."""

    config: RunConfig
    notes: list[str]


def make_small(config: RunConfig, sequence_length: int) -> PreparedModel:
    """Shrink model and samples. An odd vocabulary or a small table
    that the model refuses becomes as it was.
    """
    options = config.model.options
    length = min(config.data.sequence_length, sequence_length)
    shorter = config.replace(data={"sequence_length": length})
    smaller = shrink(options, config.parallel.tp)
    tables = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    even = {"vocab_size": smaller["vocab_size"] + 1} if "vocab_size" in smaller else {}
    candidates = [
        {**smaller, **kept, **vocabulary} for kept in ({}, tables) for vocabulary in ({}, even)
    ]
    small = next(
        (each for each in candidates if not refusal(_with_options(shorter, each), Layout(), 1)),
        smaller,
    )
    changes = list(_changes(options, small))
    if length != config.data.sequence_length:
        changes.append(f"sequence_length {config.data.sequence_length} -> {length}")
    note = (
        "shrunk for this machine, on random tokens (--whole for full size):"
        f" {', '.join(changes) or 'nothing'}"
    )
    return PreparedModel(_with_options(shorter, small), [note])


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield what changed, option by option, those of tables with their table's name."""
    for name, value in before.items():
        if isinstance(value, Mapping):
            yield from _changes(value, after[name], f"{place}{name}.")
        elif after[name] != value:
            yield f"{place}{name} {value} -> {after[name]}"


def _with_options(config: RunConfig, options: dict[str, Any]) -> RunConfig:
    return config.replace(model={"options": options})


def with_dropout(builder: str, options: dict[str, Any], p: float) -> nn.Sequential:
    """Return a builder's model with each ``nn.Dropout(0.0)`` set to probability ``p``."""
    layers: nn.Sequential = find_builder(builder)(**options)
    for module in _dropouts(layers):
        if module.p == 0.0:
            module.p = p
    return layers


def without_dropout(builder: str, options: dict[str, Any]) -> nn.Sequential:
    """Return a builder's model with the probability of each ``nn.Dropout`` at 0."""
    layers: nn.Sequential = find_builder(builder)(**options)
    for module in _dropouts(layers):
        module.p = 0.0
    return layers


def _dropout_options(builder: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric options named ``*dropout*`` of a builder,
    with its defaults for those that are not given.
    """
    parameters = inspect.signature(find_builder(builder)).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    found = {**defaults, **options}
    return {
        name: value
        for name, value in found.items()
        if "dropout" in name.lower() and _is_number(value)
    }


def turn_dropout_off(config: RunConfig) -> RunConfig | None:
    """Set builder options named ``*dropout*`` and all ``nn.Dropout`` modules to probability 0.

    Returns None if the builder does not return a model then.
    """
    builder, options = config.model.builder, dict(config.model.options)
    if builder == WITH_DROPOUT:
        builder, options = options["builder"], dict(options["options"])
    try:
        options |= {
            name: 0.0 for name, value in _dropout_options(builder, options).items() if value
        }
        modules = [module.p for module in _dropouts(find_builder(builder)(**options))]
    except Exception:  # such as options that exclude a probability of 0
        return None
    quiet = config.replace(model={"builder": builder, "options": options}, adapter={"dropout": 0.0})
    if not any(modules):
        return quiet
    return quiet.replace(
        model={"builder": WITHOUT_DROPOUT, "options": {"builder": builder, "options": options}}
    )


def get_option(model: Model, name: str) -> Any:
    """Return an option of the user's builder, also of one that verify has wrapped;
    None without it.
    """
    options = model.options
    return (options["options"] if model.builder == WITH_DROPOUT else options).get(name)


def with_option(config: RunConfig, name: str, value: Any) -> RunConfig:
    """Return the configuration with another value for an option of the user's builder."""
    options = config.model.options
    if config.model.builder == WITH_DROPOUT:
        return _with_options(config, {**options, "options": {**options["options"], name: value}})
    return _with_options(config, {**options, name: value})


def _dropouts(layers: nn.Module) -> Iterator[nn.Dropout]:
    return (module for module in layers.modules() if type(module) is nn.Dropout)


def turn_dropout_on(config: RunConfig) -> PreparedModel:
    """Turn on dropout that is 0: builder options named ``*dropout*``,
    else ``nn.Dropout(0.0)`` modules.

    Without dropout the comparison could not show that its masks match those of one process. Dropout
    stays off if the model with dropout does not run in plain torch, or draws random numbers by
    other means than ``nn.Dropout``.
    """
    if config.batch.padding == "trim":
        return PreparedModel(config, ['dropout stays off: batch.padding = "trim" excludes it'])
    builder, options = config.model.builder, config.model.options
    off = [name for name, value in _dropout_options(builder, options).items() if value == 0]
    candidates = []
    if off:
        candidates.append(
            (_with_options(config, {**options, **dict.fromkeys(off, DROPOUT)}), ", ".join(off))
        )
    try:
        modules = [module.p for module in _dropouts(find_builder(builder)(**options))]
    except Exception:  # the next build of the model raises the error for it
        return PreparedModel(config, [])
    if modules and not any(modules):
        wrapped = {
            "builder": WITH_DROPOUT,
            "options": {"builder": builder, "options": options, "p": DROPOUT},
        }
        candidates.append((config.replace(model=wrapped), "nn.Dropout.p"))
    reason = None
    for changed, what in candidates:
        reason = dropout_refusal(changed)
        if reason is None:
            return PreparedModel(changed, [f"dropout turned on: {what} 0 -> {DROPOUT}"])
    return PreparedModel(config, [f"dropout stays off: {reason}"] if reason else [])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def dropout_refusal(config: RunConfig) -> str | None:
    """Return the reason why a model cannot be verified with its dropout on, or None."""
    reason = refusal(config, Layout(), 1)  # on one rank
    if reason is not None:
        return reason
    plain = layout_config(config, Layout(), 1, "float32")
    try:
        run = PlainRun(plain, open_verify_source(plain, True), torch.float32, 1)
        with run.dropout.installed():
            run.loss_sum(*run.microbatches(range(1))[0])
            drawn = run.dropout.has_foreign_draws()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "the model draws from torch's generator outside of nn.Dropout" if drawn else None
