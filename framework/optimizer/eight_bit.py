"""AdamW whose moments take 8 bits each, in blocks with a scale of their own (Dettmers et al. 2021, arXiv:2110.02861).

    moment     | 256 elements ..... | 256 elements ..... |     one byte each: the number of a level in [-1, 1]
    scales     | largest            | largest            |     what the levels of a block are multiplied by

The levels are the paper's dynamic tree, close together near 1 and seven decades deep, here with 1 itself in both
directions: what was saved and read again is the same bytes. Of the second moment the square root is kept, which has
half as many decades, and nothing but zero becomes zero: a step is never divided by a second moment that was lost.

A block lies inside one row of a matrix, wherever this is cut: so all layouts round alike. Vectors, and matrices whose
rows are no whole blocks, are kept as torch keeps them. See :func:`with_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.errors import ConfigError
from meshwright.parameters import ParameterInfo

DECADES = 7
SMALLEST = 8
"""Elements of a block, which is a multiple of this."""
_TOGETHER = 2**20
"""Elements that are widened at a time: what this takes besides is some numbers of each of them."""


def signed_levels() -> Tensor:
    """(255,) float64, rising from -1 to 1: of decade d from above 2^(6-d) in each direction, and zero."""
    positive = _decades(lambda d: 2 ** (DECADES - 1 - d))
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])


def unsigned_levels() -> Tensor:
    """(255,) float64, rising from 0 to 1: of decade d from above 2^(7-d), and zero."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), _decades(lambda d: 2 ** (DECADES - d))])


def _decades(levels_of: Callable[[int], int]) -> Tensor:
    found = [
        10.0**-d * torch.linspace(0.1, 1.0, levels_of(d) + 1, dtype=torch.float64)[1:] for d in reversed(range(DECADES))
    ]
    return torch.cat(found)


class Moment(NamedTuple):
    """One moment of a flat tensor of n elements."""

    codes: Tensor
    """(n,) uint8."""
    scales: Tensor
    """(blocks,) in the dtype of the weights."""

    def part(self, start: int, stop: int, block: int) -> Moment:
        """Of some elements, from the first of a block on; views."""
        return Moment(self.codes[start:stop], self.scales[start // block : -(-stop // block)])


class Code:
    """Numbers <-> levels of one kind, on one device, in one dtype.

    The level of a number is looked up by the upper half of its float32. Numbers that share it have at most one border
    between two levels among them, so that one comparison is left: with a binary search a step took twice as long.
    """

    def __init__(self, levels: Tensor, device: torch.device, dtype: torch.dtype, *, is_signed: bool) -> None:
        self.levels = levels.to(device, dtype)
        borders = ((levels[1:] + levels[:-1]) / 2).to(dtype)
        if not is_signed:
            borders[0] = 0.0  # what is not zero stays so
        upper = torch.arange(2**16, dtype=torch.int32)
        first = (upper << 16).view(torch.float32)
        last = (upper << 16 | 0xFFFF).view(torch.float32)
        least, most = torch.minimum(first, last).to(dtype), torch.maximum(first, last).to(dtype)
        code = torch.bucketize(least.nan_to_num(0.0), borders)
        there = torch.cat([borders, torch.full((1,), torch.inf, dtype=dtype)])[code]
        self._code = code.to(device, torch.uint8)
        """Of the smallest number with each upper half."""
        self._border = torch.where(there <= most, there, torch.inf).to(device)
        """Above which it is the next level."""

    def widen(self, moment: Moment, block: int) -> Tensor:
        """(n,) numbers."""
        numbers = self.levels.index_select(0, moment.codes.int())
        whole = len(numbers) // block * block
        numbers[:whole].view(-1, block).mul_(moment.scales[: whole // block, None])
        numbers[whole:].mul_(moment.scales[whole // block :])
        return numbers

    def narrow(self, numbers: Tensor, into: Moment, block: int) -> None:
        """The nearest level of each."""
        blocks = pad(numbers, (0, -len(numbers) % block)).view(-1, block)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        into.scales.copy_(largest)
        shares = (blocks / largest.clamp_min(torch.finfo(largest.dtype).tiny)[:, None]).flatten()[: len(numbers)]
        upper = (shares.float().view(torch.int32) >> 16) & 0xFFFF
        above = shares > self._border.index_select(0, upper)
        torch.add(self._code.index_select(0, upper), above, out=into.codes)


class AdamW8bit(torch.optim.AdamW):
    """torch's; of the parameters of groups with ``"eight_bit": True`` both moments are kept in 8 bits."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        block_size: int,
        room: Callable[[int, torch.dtype], Tensor] | None = None,
        **options: Any,
    ) -> None:
        """``room``: so many zeros of a dtype, where states belong; left out: beside the parameters."""
        super().__init__(groups, **options)
        self._block = block_size
        self._room = room
        self._codes: dict[tuple[torch.device, torch.dtype], tuple[Code, Code]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of whatever has a gradient, which may be used up."""
        for group in self.param_groups:
            for parameter in group["params"] if group.get("eight_bit") else ():
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad.flatten(), group)
                    parameter.grad = None
        super().step()

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """torch's formula, on some blocks at a time."""
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        state["step"] += 1
        rate, (beta1, beta2) = group["lr"], group["betas"]
        size, largest_root = rate / (1 - beta1 ** state["step"]), (1 - beta2 ** state["step"]) ** 0.5
        together, flat = max(_TOGETHER // self._block, 1) * self._block, parameter.view(-1)
        for start in range(0, parameter.numel(), together):
            weights = flat[start : start + together]
            gradients = gradient[start : start + together].to(_computed_in(parameter))
            first, second = (
                state[name].part(start, start + together, self._block) for name in ("exp_avg", "exp_avg_sq")
            )
            mean = signed.widen(first, self._block).lerp_(gradients, 1 - beta1)
            root = unsigned.widen(second, self._block)
            root.square_().mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2).sqrt_()
            signed.narrow(mean, first, self._block)
            unsigned.narrow(root, second, self._block)
            weights.mul_(1 - rate * group["weight_decay"])
            weights.addcdiv_(mean, root.div_(largest_root).add_(group["eps"]), value=-size)

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """What torch's AdamW would call them, widened, of a parameter that is kept in 8 bits."""
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        mean, root = signed.widen(state["exp_avg"], self._block), unsigned.widen(state["exp_avg_sq"], self._block)
        return {"exp_avg": mean, "exp_avg_sq": root.square_()}

    def take(self, parameter: Tensor, moments: Mapping[str, Tensor], steps: int) -> None:
        """Inverse of :meth:`moments`, bit for bit where the blocks begin at the same elements."""
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        state["step"] = steps
        signed.narrow(moments["exp_avg"], state["exp_avg"], self._block)
        unsigned.narrow(moments["exp_avg_sq"].sqrt(), state["exp_avg_sq"], self._block)

    def _code(self, like: Tensor) -> tuple[Code, Code]:
        key = like.device, _computed_in(like)
        if key not in self._codes:
            signed = Code(signed_levels(), *key, is_signed=True)
            self._codes[key] = signed, Code(unsigned_levels(), *key, is_signed=False)
        return self._codes[key]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            room = self._room or partial(_beside, parameter)
            blocks = -(-parameter.numel() // self._block)
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = Moment(room(parameter.numel(), torch.uint8), room(blocks, _computed_in(parameter)))
        return state


@cache
def table_bytes(wide: bool) -> int:
    """Of the tables that codes are looked up in, one for all parameters of a process."""
    dtype, cpu = torch.float64 if wide else torch.float32, torch.device("cpu")
    codes = Code(signed_levels(), cpu, dtype, is_signed=True), Code(unsigned_levels(), cpu, dtype, is_signed=False)
    return sum(each.nbytes for code in codes for each in vars(code).values() if isinstance(each, Tensor))


def _computed_in(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _beside(parameter: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=parameter.device)


def in_blocks(shape: Sequence[int], block_size: int) -> bool:
    """Whether a parameter of this global shape is kept in 8 bits: a matrix whose rows are whole blocks."""
    return len(shape) >= 2 and math.prod(shape[1:]) % block_size == 0


def with_blocks(infos: Mapping[str, ParameterInfo], block_size: int) -> dict[str, ParameterInfo]:
    """The same, told which of them are kept in 8 bits. Cut by rows, blocks stay whole.

    Raises:
        ConfigError: tp cuts the rows of one in the middle of a block, so that this layout would round in another way
            than the others do. Names the parameter, and the largest block that would do.
    """
    found = {name: info._replace(in_blocks=in_blocks(info.global_shape, block_size)) for name, info in infos.items()}
    rows = {name: math.prod(info.local_shape[1:]) for name, info in found.items() if info.in_blocks}
    bad = next((name for name, row in rows.items() if row % block_size), None)
    if bad is not None:
        fits = next((size for size in range(block_size - SMALLEST, 0, -SMALLEST) if _fits(infos, size)), None)
        advice = "Choose another layout" if fits is None else f"Set optimizer.block_size = {fits}"
        raise ConfigError(
            f"optimizer.block_size = {block_size} does not divide a row of {bad}, of which tp leaves "
            f"{rows[bad]} elements on a rank: blocks would be others than in other layouts, and so would the "
            f'numbers. {advice}, or optimizer.name = "adamw"'
        )
    return found


def _fits(infos: Mapping[str, ParameterInfo], block_size: int) -> bool:
    """Whether there are matrices that are kept in such blocks, and tp cuts none of these."""
    kept = [info for info in infos.values() if in_blocks(info.global_shape, block_size)]
    return bool(kept) and not any(math.prod(info.local_shape[1:]) % block_size for info in kept)
