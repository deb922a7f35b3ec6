"""Access to a flat optimizer's states by shard, for checkpoints, evaluation and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from meshwright.optimizer.choice import IN_TORCH, saved_states_of, state_dtype, states_of
from meshwright.optimizer.eight_bit import AdamW8bit
from meshwright.optimizer.factored import Factor, ShardedAdafactor
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.optimizer.own_states import is_state_name
from meshwright.optimizer.rounded import RoundedAdamW
from meshwright.optimizer.schedule_free import GRADIENT_POINT, GatheredShard, ShardedScheduleFree, exchanged_weights


def state_names(optimizer: FlatOptimizer, index: int) -> tuple[str, ...]:
    """Return the names of the state of shard ``index``."""
    if optimizer.own is not None:
        return optimizer.own.names
    return states_of(optimizer.config, is_matrix=optimizer.shards[index].layout.matrices is not None)


def read_states(optimizer: FlatOptimizer, index: int) -> tuple[dict[str, Tensor], int]:
    """Return (states of shard ``index`` by name, (numel,) each; steps taken). Before the first step they are zero.

    Raises:
        KeyError: after a step the optimizer has no such state, and a checkpoint would hold zeros in its place.
    """
    inner, parameter, weights = optimizer.inner, optimizer.parameters[index], optimizer.shards[index].weights
    if isinstance(inner, AdamW8bit) and optimizer.shards[index].is_eight_bit:
        return inner.moments(parameter), optimizer.num_steps
    kept = inner.state.get(parameter, {})
    found = {name: kept.get(_key(optimizer, name)) for name in state_names(optimizer, index)}
    if kept and (missing := [name for name, state in found.items() if state is None]):
        raise KeyError(f"{type(inner).__name__} has states {sorted(kept)}, and none for {missing} (IN_TORCH)")
    states = {n: torch.zeros_like(weights) if t is None else t.to(weights.dtype) for n, t in found.items()}
    if isinstance(inner, ShardedScheduleFree):
        states[GRADIENT_POINT] = weights
    return states, optimizer.num_steps


def restore_states(optimizer: FlatOptimizer, index: int, states: Mapping[str, Tensor], steps: int) -> None:
    """Set the states of shard ``index``; inverse of :func:`read_states`. May keep the tensors without a copy."""
    config, inner, weights = optimizer.config, optimizer.inner, optimizer.shards[index].weights
    optimizer.num_steps = steps
    parameter = optimizer.parameters[index]
    if isinstance(inner, ShardedAdafactor):
        inner.taken = steps
        return
    if isinstance(inner, AdamW8bit) and optimizer.shards[index].is_eight_bit:
        inner.set_moments(parameter, states, steps)
        return
    own = optimizer.own
    if own is not None and steps == 0:
        return  # it initialises its own state
    present, kept = inner.state.get(parameter, {}), dict[str, Any]()
    for name in state_names(optimizer, index):
        key, state = _key(optimizer, name), states[name].to(state_dtype(config, weights.dtype))
        if optimizer.allocate is not None:  # the state stays in the memory that was allocated first
            memory = present.get(key)
            state = (optimizer.allocate(weights.numel(), state.dtype) if memory is None else memory).copy_(state)
        kept[key] = state
    if own is not None:
        inner.state[parameter] = own.states_at(steps).fill(kept, weights.device)
        return
    if isinstance(inner, ShardedScheduleFree | RoundedAdamW):
        kept["step"] = steps
    elif "exp_avg_sq" in kept:
        kept["step"] = torch.tensor(float(steps), dtype=torch.float32, device=weights.device)
    inner.state[parameter] = kept


def _key(optimizer: FlatOptimizer, name: str) -> str:
    """Return torch's name of a state."""
    return name if optimizer.config.builder is not None else IN_TORCH.get(name, name)


def factors_of(optimizer: FlatOptimizer, index: int) -> Iterator[Factor]:
    """Yield the Adafactor states of a shard's weights, if any; to restore them, copy into their tensors."""
    if isinstance(optimizer.inner, ShardedAdafactor):
        yield from optimizer.inner.factors(optimizer.parameters[index])


def evaluating(optimizer: FlatOptimizer) -> AbstractContextManager[None]:
    """Return a context with the weights of evaluation in place. Collective over the shard groups, also on exit."""
    shards = zip(optimizer.parameters, optimizer.shards, strict=True)
    every = [GatheredShard(parameter, shard.wait, shard.after_step) for parameter, shard in shards]
    return exchanged_weights(optimizer.inner, [every[index] for index in optimizer.order])


def evaluated_weights(optimizer: FlatOptimizer, index: int) -> Tensor:
    """Return the evaluation weights of shard ``index``: the average for schedule-free AdamW, else the weights."""
    parameter, inner = optimizer.parameters[index], optimizer.inner
    return inner.averaged(parameter) if isinstance(inner, ShardedScheduleFree) else optimizer.shards[index].weights


def add_state(optimizer: FlatOptimizer, name: str) -> list[Tensor]:
    """Add a state with one number per weight, which checkpoints hold under ``name``; for callbacks.

    Returns:
        one flat tensor per shard of the optimizer, now a copy of its weights. A resume fills it from the checkpoint, or
        with the weights if the checkpoint has no such state.

    Raises:
        ValueError: the name is taken, or a checkpoint cannot hold it.
    """
    if not is_state_name(name) or name in (*saved_states_of(optimizer.config), *optimizer.added):
        raise ValueError(f"state {name!r}: choose another name, of at most 64 letters, digits and underscores")
    optimizer.added[name] = [shard.weights.clone() for shard in optimizer.shards]
    return optimizer.added[name]
