"""States of the plain reference run's optimizer in the format of ``optimizer.state_dtype``.

bfloat16 is written from the note in :mod:`meshwright.optimizer.rounded`, with numpy's unsigned
integers, and shares no code with it. 8 bits have the framework's levels, on whole parameters.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.config import Optimizer
from meshwright.config.optimizers import Form
from meshwright.optimizer import BlockCodec
from meshwright.optimizer.codecs import Piece
from meshwright.verify.dropout import GOLDEN, mix


def random_bits(seed: int, name: str, step: int, numel: int) -> np.ndarray:
    """Return 64 random bits for each element of a parameter, (numel,) uint64, by (seed, name, step,
    index).
    """
    text = "\x1f".join([str(seed), "rounding", name, str(step)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2
    with np.errstate(over="ignore"):
        return mix(np.arange(numel, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))


def to_bfloat16(wide: Tensor, random: np.ndarray) -> Tensor:
    """Return a tensor rounded stochastically to values of bfloat16, in its own dtype,
    with 16 of the random bits.
    """
    bits = wide.float().numpy().view(np.uint32) + (
        random.reshape(wide.shape) & np.uint64(0xFFFF)
    ).astype(np.uint32)
    return torch.from_numpy((bits & np.uint32(0xFFFF0000)).view(np.float32)).to(wide.dtype)


class StoredState(NamedTuple):
    """A state of one parameter after a step, which is to be stored."""

    numbers: Tensor
    form: Form
    position: int
    """Position of the state among those of the optimizer."""
    name: str
    """Name of the parameter."""
    step: int
    """Steps taken before."""


def rounded(state: StoredState, config: Optimizer, seed: int) -> Tensor:
    """Return a state after it was stored in bfloat16."""
    random = random_bits(seed, state.name, state.step, state.numbers.numel())
    return to_bfloat16(state.numbers, random >> np.uint64(16 * state.position))


def in_blocks(state: StoredState, config: Optimizer, seed: int) -> Tensor:
    """Return a state after it was stored in 8 bits: matrices whose rows are whole blocks, by the
    framework's levels.
    """
    numbers, block_size = state.numbers, config.block_size
    has_blocks = numbers.dim() >= 2 and numbers[0].numel() % block_size == 0
    if not has_blocks:
        return numbers
    codec, flat = BlockCodec(block_size), numbers.flatten()
    stored = codec.allocate(flat, None)
    codec.load(flat, stored, state.form)
    whole = Piece(0, flat.numel())
    return codec.decode(stored, whole, state.form, flat.dtype).view(numbers.shape)
