"""AdamW with 8-bit moments, quantised in blocks with one scale each (Dettmers et al. 2021, arXiv:2110.02861).

    moment     | 256 elements ..... | 256 elements ..... |     one byte each: the number of a level in [-1, 1]
    scales     | largest            | largest            |     factor of the levels of a block

The levels are the paper's dynamic tree: seven decades, with most levels in the largest. Unlike the paper's they contain
both 1 and -1, so that saving and loading gives the same bytes. The second moment is kept as its square root, which
spans half as many decades. Only an exact zero of it is stored as zero, so that no step divides by a second moment
that was rounded to zero.

A block lies inside one row of a matrix, wherever the matrix is cut, so all layouts round alike. Vectors, and matrices
whose rows are no multiple of the block size, keep torch's own state. See :func:`with_blocks`.
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
from meshwright.kernels import adamw_8bit, device_kind
from meshwright.kernels.adamw_8bit import StepNumbers
from meshwright.parameters import ParameterInfo

DECADES = 7
SMALLEST = 8
"""Block sizes, in elements, are multiples of this."""
_TOGETHER = {"cpu": 2**20, "cuda": 2**26}
"""Elements dequantised at a time, by device: few fit into a CPU's cache; on CUDA each piece costs 38 kernel launches.

It bounds the temporary memory of a step, a few numbers per element.
"""


def signed_levels() -> Tensor:
    """Return the signed levels: (255,) float64, rising from -1 to 1.

    Each sign has 2^(6-d) levels in decade d; zero is a level too.
    """
    positive = _decades(lambda d: 2 ** (DECADES - 1 - d))
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])


def unsigned_levels() -> Tensor:
    """Return the unsigned levels: (255,) float64, rising from 0 to 1.

    Decade d has 2^(7-d) levels; zero is a level too.
    """
    return torch.cat([torch.zeros(1, dtype=torch.float64), _decades(lambda d: 2 ** (DECADES - d))])


def _decades(levels_of: Callable[[int], int]) -> Tensor:
    found = [
        10.0**-d * torch.linspace(0.1, 1.0, levels_of(d) + 1, dtype=torch.float64)[1:] for d in reversed(range(DECADES))
    ]
    return torch.cat(found)


class QuantisedMoment(NamedTuple):
    """One quantised moment of a flat tensor of n elements."""

    codes: Tensor
    """(n,) uint8, the number of each element's level."""
    scales: Tensor
    """(blocks,) largest absolute value of each block, in float32 or the wider dtype of the weights."""

    def part(self, start: int, stop: int, block: int) -> QuantisedMoment:
        """Return views of elements [start, stop); ``start`` must be the first element of a block."""
        return QuantisedMoment(self.codes[start:stop], self.scales[start // block : -(-stop // block)])


class Quantiser:
    """Quantiser for one set of levels, on one device, in one dtype.

    The level of a number is looked up by the upper 16 bits of its float32. Numbers that share them have at most one
    border between two levels among them, so that one comparison remains. With a binary search a step took twice as
    long.
    """

    def __init__(self, levels: Tensor, device: torch.device, dtype: torch.dtype, *, is_signed: bool) -> None:
        self.levels = levels.to(device, dtype)
        borders = ((levels[1:] + levels[:-1]) / 2).to(dtype)
        if not is_signed:
            borders[0] = 0.0  # only zero is rounded to zero
        upper = torch.arange(2**16, dtype=torch.int32)
        first = (upper << 16).view(torch.float32)
        last = (upper << 16 | 0xFFFF).view(torch.float32)
        least, most = torch.minimum(first, last).to(dtype), torch.maximum(first, last).to(dtype)
        code = torch.bucketize(least.nan_to_num(0.0), borders)
        there = torch.cat([borders, torch.full((1,), torch.inf, dtype=dtype)])[code]
        self._code = code.to(device, torch.uint8)
        """(65536,) uint8, level of the smallest number with these upper 16 bits."""
        self._border = torch.where(there <= most, there, torch.inf).to(device)
        """(65536,) border above which a number with these upper bits has the next level; Inf if there is none."""

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Levels (255,), codes (65536,) and borders (65536,)."""
        return self.levels, self._code, self._border

    def widen(self, moment: QuantisedMoment, block: int) -> Tensor:
        """Decode (dequantise) a moment to (n,) numbers."""
        numbers = self.levels.index_select(0, moment.codes.int())
        whole = len(numbers) // block * block
        numbers[:whole].view(-1, block).mul_(moment.scales[: whole // block, None])
        numbers[whole:].mul_(moment.scales[whole // block :])
        return numbers

    def narrow(self, numbers: Tensor, into: QuantisedMoment, block: int) -> None:
        """Quantise (n,) numbers into ``into``: each to its nearest level, relative to the largest of its block."""
        blocks = pad(numbers, (0, -len(numbers) % block)).view(-1, block)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        into.scales.copy_(largest)
        shares = (blocks / largest.clamp_min(torch.finfo(largest.dtype).tiny)[:, None]).flatten()[: len(numbers)]
        upper = (shares.float().view(torch.int32) >> 16) & 0xFFFF
        above = shares > self._border.index_select(0, upper)
        torch.add(self._code.index_select(0, upper), above, out=into.codes)


class AdamW8bit(torch.optim.AdamW):
    """torch's AdamW, with both moments in 8 bits for the parameters of groups with ``"eight_bit": True``."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        block_size: int,
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Build the optimizer.

        Args:
            allocate: function (numel, dtype) that allocates zeros for the state; None: on the device of the parameters.
        """
        super().__init__(groups, **options)
        self._block = block_size
        self._allocate = allocate
        self._codes: dict[tuple[torch.device, torch.dtype], tuple[Quantiser, Quantiser]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient. The gradient may be overwritten."""
        for group in self.param_groups:
            for parameter in group["params"] if group.get("eight_bit") else ():
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad.flatten(), group)
                    parameter.grad = None
        super().step()

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter by torch's AdamW formula, some blocks at a time."""
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        state["step"] += 1
        rate, (beta1, beta2) = group["lr"], group["betas"]
        size, largest_root = rate / (1 - beta1 ** state["step"]), (1 - beta2 ** state["step"]) ** 0.5
        if adamw_8bit.takes(parameter, self._block):
            moments, tables = (*state["exp_avg"], *state["exp_avg_sq"]), (*signed.tables, *unsigned.tables)
            shrink = 1 - rate * group["weight_decay"]
            numbers = StepNumbers(1 - beta1, beta2, 1 - beta2, largest_root, group["eps"], shrink, -size)
            adamw_8bit.step_8bit(parameter.view(-1), gradient, moments, tables, numbers, self._block)
            return
        together, flat = max(_TOGETHER[device_kind(parameter)] // self._block, 1) * self._block, parameter.view(-1)
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
        """Return the dequantised moments of an 8-bit parameter, by the names of torch's AdamW."""
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        mean, root = signed.widen(state["exp_avg"], self._block), unsigned.widen(state["exp_avg_sq"], self._block)
        return {"exp_avg": mean, "exp_avg_sq": root.square_()}

    def set_moments(self, parameter: Tensor, moments: Mapping[str, Tensor], steps: int) -> None:
        """Set the moments from their dequantised form; inverse of :meth:`moments`.

        It is exact to the bit where the blocks begin at the same elements.
        """
        (signed, unsigned), state = self._code(parameter), self._state(parameter)
        state["step"] = steps
        signed.narrow(moments["exp_avg"], state["exp_avg"], self._block)
        unsigned.narrow(moments["exp_avg_sq"].sqrt(), state["exp_avg_sq"], self._block)

    def _code(self, like: Tensor) -> tuple[Quantiser, Quantiser]:
        key = like.device, _computed_in(like)
        if key not in self._codes:
            signed = Quantiser(signed_levels(), *key, is_signed=True)
            self._codes[key] = signed, Quantiser(unsigned_levels(), *key, is_signed=False)
        return self._codes[key]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            allocate = self._allocate or partial(_allocate_beside, parameter)
            blocks = -(-parameter.numel() // self._block)
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = QuantisedMoment(
                    allocate(parameter.numel(), torch.uint8), allocate(blocks, _computed_in(parameter))
                )
        return state


@cache
def table_bytes(wide: bool) -> int:
    """Return the bytes of the quantisers' lookup tables, which all parameters of a process share.

    ``wide``: for float64 weights; otherwise float32.
    """
    dtype, cpu = torch.float64 if wide else torch.float32, torch.device("cpu")
    codes = (
        Quantiser(signed_levels(), cpu, dtype, is_signed=True),
        Quantiser(unsigned_levels(), cpu, dtype, is_signed=False),
    )
    return sum(each.nbytes for code in codes for each in vars(code).values() if isinstance(each, Tensor))


def _computed_in(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _allocate_beside(parameter: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=parameter.device)


def is_in_blocks(shape: Sequence[int], block_size: int) -> bool:
    """Return whether a parameter of this global shape has 8-bit state: a matrix with rows of whole blocks."""
    return len(shape) >= 2 and math.prod(shape[1:]) % block_size == 0


def with_blocks(infos: Mapping[str, ParameterInfo], block_size: int) -> dict[str, ParameterInfo]:
    """Return ``infos`` with ``is_eight_bit`` set for the parameters that have 8-bit state.

    A cut along dim 0 keeps blocks intact.

    Raises:
        ConfigError: tp cuts the rows of a parameter in the middle of a block, so that this layout would round
            differently from others. Names the parameter, and the largest block size that fits.
    """
    found = {
        name: info._replace(is_eight_bit=is_in_blocks(info.global_shape, block_size)) for name, info in infos.items()
    }
    rows = {name: math.prod(info.local_shape[1:]) for name, info in found.items() if info.is_eight_bit}
    bad = next((name for name, row in rows.items() if row % block_size), None)
    if bad is not None:
        fits = next((size for size in range(block_size - SMALLEST, 0, -SMALLEST) if _fits(infos, size)), None)
        advice = "Choose another layout" if fits is None else f"Set optimizer.block_size = {fits}"
        raise ConfigError(
            "MW-OPTIM-001",
            f"optimizer.block_size = {block_size} does not divide a row of {bad}, of which tp leaves "
            f"{rows[bad]} elements on a rank: blocks would be others than in other layouts, and so would the "
            f'numbers. {advice}, or optimizer.name = "adamw"',
        )
    return found


def _fits(infos: Mapping[str, ParameterInfo], block_size: int) -> bool:
    """Return whether some parameters have 8-bit state with blocks of this size, and tp cuts no block."""
    kept = [info for info in infos.values() if is_in_blocks(info.global_shape, block_size)]
    return bool(kept) and not any(math.prod(info.local_shape[1:]) % block_size for info in kept)
