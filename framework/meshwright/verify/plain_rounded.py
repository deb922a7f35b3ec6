"""AdamW with bfloat16 states of the plain reference run, on whole parameters, from the published definition.

Written from the note in :mod:`meshwright.optimizer.rounded`, with numpy's unsigned integers; it shares no code with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.optimizer import peak_rate
from meshwright.verify.dropout import GOLDEN, mix


def random_bits(seed: int, name: str, step: int, numel: int) -> np.ndarray:
    """Return 64 random bits for each element of a parameter, (numel,) uint64, by (seed, name, step, index)."""
    text = "\x1f".join([str(seed), "rounding", name, str(step)])
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") // 2
    with np.errstate(over="ignore"):
        return mix(np.arange(numel, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))


def to_bfloat16(wide: Tensor, random: np.ndarray) -> Tensor:
    """Return a tensor rounded stochastically to values of bfloat16, in its own dtype, with 16 of the random bits."""
    bits = wide.float().numpy().view(np.uint32) + (random.reshape(wide.shape) & np.uint64(0xFFFF)).astype(np.uint32)
    return torch.from_numpy((bits & np.uint32(0xFFFF0000)).view(np.float32)).to(wide.dtype)


class PlainRoundedAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded stochastically to bfloat16 after each step; the step uses the unrounded ones."""

    def __init__(
        self, groups: list[dict[str, Any]], config: Optimizer, parameters: Mapping[str, nn.Parameter], seed: int
    ) -> None:
        super().__init__(groups, {"lr": peak_rate(config), "eps": config.eps})
        self._betas, self._seed, self._taken = config.betas, seed, 0
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in self._names}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        beta1, beta2 = self._betas
        for group in self.param_groups:
            for p in group["params"]:
                m, v = self._moments[p]
                m, v = beta1 * m + (1 - beta1) * p.grad, beta2 * v + (1 - beta2) * p.grad**2
                random = random_bits(self._seed, self._names[p], self._taken, p.numel())
                self._moments[p] = to_bfloat16(m, random), to_bfloat16(v, random >> np.uint64(16))
                m, v = m / (1 - beta1 ** (self._taken + 1)), v / (1 - beta2 ** (self._taken + 1))
                p -= group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p)
        self._taken += 1
