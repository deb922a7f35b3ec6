"""AdamW with its states in bfloat16, rounded stochastically: 4 instead of 8 bytes per element.

    widen     state.to(float32)           update in float32 by torch's formula
    round     bits of float32 + r, r uniform in 0 .. 2^16 - 1, then the lower 16 bits are dropped

Rounded to nearest, a second moment would stop changing: with beta2 = 0.999 a step changes it by about a thousandth, and
neighbouring bfloat16 numbers differ by 1/256 to 1/128. Stochastic rounding is unbiased.

NOTE [random bits of an element]: r is a pure function of (seed, step, parameter name, index of the element in the whole
parameter), as dropout masks are. Every layout draws the same bits, wherever it cuts, and so does a resumed run.

    key  = BLAKE2b-64(seed, "rounding", name, step)[63 bits]        step counts from 0
    bits = mix(index * GOLDEN + key)                                mix: splitmix64's finaliser
    r    = bits 0 .. 15 for exp_avg, bits 16 .. 31 for exp_avg_sq
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import device_kind
from meshwright.optimizer.pieces import ParameterwiseOptimizer
from meshwright.parameters import ParameterInfo
from meshwright.seeding import derive, drawn_bits

TOGETHER = {"cpu": 2**18, "cuda": 2**24}
"""Elements updated at a time, by device; each needs about 40 bytes of temporaries."""
STATES = ("exp_avg", "exp_avg_sq")


class ShardPlace(NamedTuple):
    """Position of a flat shard in its bucket, and those of the bucket's weights."""

    slots: tuple[tuple[ParameterInfo, int], ...]
    """(weight, index of its first element in the bucket), for all weights of the bucket."""
    offset: int
    """Index of the shard's first element in the bucket."""
    seed: int

    def bits(self, start: int, stop: int, step: int, device: torch.device) -> Tensor:
        """Return random bits of elements [start, stop) of the shard, (stop - start,) int64; zero in padding."""
        found = torch.zeros(stop - start, dtype=torch.int64, device=device)
        low, high = self.offset + start, self.offset + stop
        for info, first in self.slots:
            begin, end = max(first, low), min(first + math.prod(info.local_shape), high)
            if begin < end:
                positions = whole_positions(info, torch.arange(begin - first, end - first, device=device))
                key = derive(self.seed, "rounding", info.name, step)
                found[begin - low : end - low] = drawn_bits(key, positions)
        return found


def whole_positions(info: ParameterInfo, positions: Tensor) -> Tensor:
    """Map flat row-major positions in this rank's slice of a parameter to those in the whole parameter, int64."""
    if info.slice is None:
        return positions
    dim, padded, ranges = info.slice.dim, info.slice.padded, info.slice.ranges
    inner = math.prod(info.global_shape[dim + 1 :])
    outer, rest = positions // (padded * inner), positions % (padded * inner)
    shift, at = torch.full_like(rest, ranges[0][0] * inner), 0
    for start, stop in ranges:
        if at:
            shift = torch.where(rest >= at * inner, (start - at) * inner, shift)
        at += stop - start
    return outer * (info.global_shape[dim] * inner) + shift + rest


def round_stochastically(wide: Tensor, random: Tensor) -> Tensor:
    """Round (n,) numbers to bfloat16: away from zero with the probability of the dropped bits.

    ``random``: (n,) int64, of which the lower 16 bits are used.
    """
    bits = wide.float().view(torch.int32)
    return ((bits + (random & 0xFFFF).to(torch.int32)) & -65536).view(torch.float32).bfloat16()


class RoundedAdamW(ParameterwiseOptimizer):
    """AdamW with both moments in bfloat16."""

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], places: Mapping[Tensor, ShardPlace]
    ) -> None:
        """Build the optimizer. ``groups``: each with "lr", "weight_decay", "eps". ``places``: parameter -> place."""
        super().__init__(groups, {"betas": betas})
        self._places = places

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, rate, (beta1, beta2), step = self.state[parameter], group["lr"], group["betas"], 0
        if state:
            step = state["step"]
        else:
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in STATES}
        state["step"] = step + 1
        size, largest_root = rate / (1 - beta1 ** (step + 1)), (1 - beta2 ** (step + 1)) ** 0.5
        together = TOGETHER.get(device_kind(parameter), TOGETHER["cpu"])
        for start in range(0, parameter.numel(), together):
            part = slice(start, min(start + together, parameter.numel()))
            weights, gradients = parameter.view(-1)[part], gradient.view(-1)[part]
            first, second = (state[name].view(-1)[part] for name in STATES)
            mean = first.to(weights.dtype).lerp_(gradients, 1 - beta1)
            square = second.to(weights.dtype).mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
            bits = self._places[parameter].bits(part.start, part.stop, step, weights.device)
            first.copy_(round_stochastically(mean, bits))
            second.copy_(round_stochastically(square, bits >> 16))
            weights.mul_(1 - rate * group["weight_decay"])
            weights.addcdiv_(mean, square.sqrt_().div_(largest_root).add_(group["eps"]), value=-size)
