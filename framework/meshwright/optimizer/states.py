"""States and evaluation weights of a flat optimizer, shard by shard, for checkpoints and callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.optimizer.choice import saved_states_of
from meshwright.optimizer.flat import FlatOptimizer
from meshwright.optimizer.own_states import is_state_name
from meshwright.optimizer.shard_states import Factor


def state_names(optimizer: FlatOptimizer, index: int) -> tuple[str, ...]:
    """Return the names of the state of shard ``index``."""
    return optimizer.states.names_of(optimizer.parameters[index])


def read_states(optimizer: FlatOptimizer, index: int) -> tuple[dict[str, Tensor], int]:
    """Return (states of shard ``index`` by name, (numel,) each; steps taken).
    Before the first step they are zero.

    Raises:
        KeyError: after a step the optimizer has no such state.
    """
    return optimizer.states.read(optimizer.parameters[index]), optimizer.num_steps


def restore_states(
    optimizer: FlatOptimizer, index: int, states: Mapping[str, Tensor], steps: int
) -> None:
    """Set the states of shard ``index``; inverse of :func:`read_states`.
    May keep the tensors without a copy.
    """
    optimizer.num_steps = steps
    optimizer.states.restore(optimizer.parameters[index], states, steps)


def factors_of(optimizer: FlatOptimizer, index: int) -> Iterator[Factor]:
    """Yield the states of a shard's weights with less than one number per element; to restore them,
    copy into their tensors.
    """
    yield from optimizer.states.factors(optimizer.parameters[index])


@contextmanager
def evaluating(optimizer: FlatOptimizer) -> Iterator[None]:
    """Put the weights of evaluation in place within the context, where they are others.
    Collective over the shard groups, also on exit.

    Holds a copy of the shards meanwhile.
    """
    if not optimizer.config.spec.averages_weights:
        yield
        return
    kept = [optimizer.parameters[index].detach().clone() for index in optimizer.order]
    _replace(optimizer, (evaluated_weights(optimizer, index) for index in optimizer.order))
    try:
        yield
    finally:
        _replace(optimizer, kept)


@torch.no_grad()
def _replace(optimizer: FlatOptimizer, values: Iterable[Tensor]) -> None:
    """Copy ``values`` to the shards one by one, and post the all-gather of each."""
    for index, value in zip(optimizer.order, values, strict=True):
        shard = optimizer.shards[index]
        shard.wait()
        shard.weights.copy_(value)
        shard.after_step()


def evaluated_weights(optimizer: FlatOptimizer, index: int) -> Tensor:
    """Return the evaluation weights of shard ``index``: an average, or the weights."""
    averaged = optimizer.states.averaged(optimizer.parameters[index])
    return optimizer.shards[index].weights if averaged is None else averaged


def add_state(optimizer: FlatOptimizer, name: str) -> list[Tensor]:
    """Add a state with one number per weight, which checkpoints hold under ``name``; for callbacks.

    Returns:
        one flat tensor per shard of the optimizer, now a copy of its weights. A resume fills it
        from the checkpoint, or with the weights if the checkpoint has no such state.

    Raises:
        ValueError: the name is taken, or a checkpoint cannot hold it.
    """
    if not is_state_name(name) or name in (*saved_states_of(optimizer.config), *optimizer.added):
        raise ValueError(
            f"state {name!r}: choose another name, of at most 64 letters, digits and underscores"
        )
    optimizer.added[name] = [shard.weights.clone() for shard in optimizer.shards]
    return optimizer.added[name]
