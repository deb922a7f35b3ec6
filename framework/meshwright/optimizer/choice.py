"""Optimizers by ``optimizer.name``: construction over flat shards, and names of their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.config import Optimizer
from meshwright.optimizer.adamw import FlatAdamW
from meshwright.optimizer.codecs import NUMBERS, StateCodec
from meshwright.optimizer.eight_bit import BlockCodec
from meshwright.optimizer.factored import ShardedAdafactor
from meshwright.optimizer.layout import Shards
from meshwright.optimizer.lion import ShardedLion
from meshwright.optimizer.matrix import ShardedMuon
from meshwright.optimizer.own import build_own
from meshwright.optimizer.own_trial import element_states
from meshwright.optimizer.rounded import RoundedCodec
from meshwright.optimizer.schedule_free import ShardedScheduleFree
from meshwright.optimizer.sgd import FlatSGD

Groups = list[dict[str, Any]]
NO_SHARDS = Shards({})
BUILDERS: dict[str, Callable[[Groups, Optimizer, Shards], torch.optim.Optimizer]] = {
    "adamw": FlatAdamW.build,
    "adamw8bit": FlatAdamW.build,
    "sgd": FlatSGD.build,
    "muon": ShardedMuon.build,
    "lion": ShardedLion.build,
    "schedule_free_adamw": ShardedScheduleFree.build,
    "adafactor": ShardedAdafactor,
}
"""Name -> function of (parameter groups, keys, shards) that returns the optimizer, which is also a
:class:`~meshwright.optimizer.shard_states.ShardStates`.
"""

CODECS: dict[str, Callable[[Optimizer, Shards], StateCodec]] = {
    "float32": lambda keys, shards: NUMBERS,
    "bfloat16": lambda keys, shards: RoundedCodec(shards.of("place")),
    "8bit": lambda keys, shards: BlockCodec(keys.block_size),
}
"""Format -> function of (keys, shards) that returns its codec."""


def build_optimizer(groups: Groups, keys: Optimizer, shards: Shards) -> torch.optim.Optimizer:
    """Build the configured optimizer, built-in or the user's.

    Args:
        groups: torch parameter groups, each with "lr", "in_blocks" (its states may be stored in
            blocks) and the fields of GroupSettings (parameters.py).
    """
    if keys.builder is not None:
        element_states(keys)  # raises for an optimizer that is not element-wise
        own = [{name: group[name] for name in group if name != "in_blocks"} for group in groups]
        return build_own(own, keys)
    codec = codec_of(keys, shards)
    filled = []
    for group in groups:
        is_stored_so = group["in_blocks"] or not keys.has_blocks
        filled.append(
            {
                **group,
                "betas": keys.betas,
                "eps": keys.eps * group["eps_factor"],
                "codec": codec if is_stored_so else NUMBERS,
            }
        )
    return BUILDERS[keys.name](filled, keys, shards)


def codec_of(keys: Optimizer, shards: Shards = NO_SHARDS) -> StateCodec:
    """Return the codec of the states that can have one besides :data:`~.codecs.NUMBERS`.

    ``shards``: needed to encode, not to count bytes.
    """
    return CODECS[keys.state_format](keys, shards)


def states_of(config: Optimizer, *, is_matrix: bool | None = None) -> tuple[str, ...]:
    """Return the names of the optimizer's states;
    with ``is_matrix`` those of weights that are matrices, or are not.
    """
    if config.builder is not None:
        return element_states(config).names
    states = config.spec.matrix_states if is_matrix else config.states
    if is_matrix is None:
        states += config.spec.matrix_states
    return tuple(state.name for state in states)


def saved_states_of(config: Optimizer, *, is_matrix: bool | None = None) -> tuple[str, ...]:
    """Return the names of the states in a checkpoint: those of :func:`states_of`,
    and what else the optimizer has there.

    ``is_matrix``: see there; None also returns states with less than one number per element.
    """
    names = states_of(config, is_matrix=is_matrix)
    if config.spec.unit == "parameter" and is_matrix is not None:
        return names
    return (*names, *config.spec.saved_only)
