"""Units of a column linear that several tp ranks share, when there are more ranks than units:
kv heads, gated blocks.

    model.shared_units = {"block*.attention.qkv": ((2 * d, d, d), 2, "heads_per_group")}

    rows of a unit       | q0 | q1 | k | v |                 tp = 2 x units: n = 2 ranks share each unit
    weight of rank 0     | q0 | first half of k | of v |     every row is on one rank, as in any column linear
    output of rank 0     | q0 | k | v |                      the last 2 parts are copied to all n ranks

Each rank computes its share of the copied parts, and the n ranks exchange the shares. The weights
have no copies: gradient sums, norms, optimizer state and checkpoints are those of a column linear.
A rank's query heads contribute a part of the gradient of k and v. Backward exchanges these parts
and sums them.

Shapes: B samples, S tokens, F features of a rank's output, C of them copied.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.mesh.comm import Group
from meshwright.parameters import Slice
from meshwright.placement.patterns import entry_for, fits, matching
from meshwright.tensor_parallel.layers import ColumnLinear
from meshwright.tensor_parallel.regions import outside_graphs


class SharedUnits(NamedTuple):
    """Rows of each part of a unit, and the number of parts at its end that all ranks
    of the unit get in full.

    ``attribute``: attribute of the parent module that counts heads per unit, divided by the
        sharers; "": none.
    """

    rows: tuple[int, ...]
    copied: int
    attribute: str = ""

    @property
    def most_sharers(self) -> int:
        """Number that the ranks per unit must divide: gcd of the rows,
        or of a head's rows and each part's heads.
        """
        if not self.copied:
            return math.gcd(*self.rows)
        head = self.rows[-1]
        return math.gcd(head, *(rows // head for rows in self.rows[: -self.copied]))

    def sharers(self, num_rows: int, tp: int) -> int:
        """Return the number of ranks that share a unit of a weight of ``num_rows`` rows; 1:
        a rank has whole units.
        """
        return max(1, tp * sum(self.rows) // num_rows)

    def slice_of(self, num_rows: int, rank: int, tp: int) -> Slice:
        """Return the rows of a rank: an equal range of each part of one unit."""
        sharers = self.sharers(num_rows, tp)
        unit, sharer = divmod(rank, sharers)
        ranges, first = [], unit * sum(self.rows)
        for rows in self.rows:
            start = first + sharer * (rows // sharers)
            ranges.append((start, start + rows // sharers))
            first += rows
        several = tuple(ranges) if len(ranges) > 1 else ()
        return Slice(0, ranges[0][0], ranges[-1][1], num_rows // tp, several)


def entry_of(name: str, shared: Mapping[str, Any]) -> SharedUnits | None:
    """Return the entry of a module in ``model.shared_units`` by the first pattern that matches;
    None: no match.
    """
    entry = entry_for(name, shared)
    return None if entry is None else SharedUnits(*entry)


class SharedColumnLinear(ColumnLinear):
    """Column linear with this rank's rows of each part of a unit: x (B, S, I) -> (B, S, F),
    copied parts in full.

    Forward and backward: an all-to-all among the ranks of the unit, which blocks, besides a
    column's collectives.
    """

    def __init__(
        self,
        plain: nn.Linear,
        group: Group,
        sequence: bool,
        gathered: bool = False,
        *,
        units: SharedUnits,
    ) -> None:
        self.units = units
        self.sharers = units.sharers(plain.out_features, group.size)
        super().__init__(plain, group, sequence, gathered)

    def slice_of(self, plain: nn.Linear, group: Group) -> Slice:
        """Return the output rows that this rank holds."""
        return self.units.slice_of(plain.out_features, group.rank, group.size)

    def share_count(self, parent: nn.Module) -> None:
        """Divide the attribute of ``parent`` that counts heads per unit
        by the number of sharers.
        """
        if self.units.attribute:
            setattr(
                parent, self.units.attribute, getattr(parent, self.units.attribute) // self.sharers
            )

    def forward(self, input: Tensor) -> Tensor:
        return self.of_outputs(super().forward(input))

    def of_outputs(self, y: Tensor) -> Tensor:
        """Exchange the copied parts of this rank's output: (..., O/tp) -> (..., F). Blocks."""
        if not self.units.copied:
            return y
        return copy_parts(y, self.group, self.sharers, self.units.copied, self.units.rows[-1])


def share_counts(model: nn.Module) -> None:
    """Divide the head counts of the parents of shared columns by the ranks that share a unit,
    in place.
    """
    for name, module in model.named_modules():
        if isinstance(module, SharedColumnLinear):
            module.share_count(model.get_submodule(name.rpartition(".")[0]))


@outside_graphs
def copy_parts(y: Tensor, group: Group, sharers: int, copied: int, size: int) -> Tensor:
    """Complete the last ``copied`` parts of y, from size / sharers features each to ``size``: (...,
    O/tp) -> (..., F).

    The ``sharers`` neighbouring tp ranks exchange theirs. Blocks, also in backward. Bytes on the
    wire per rank, each
    way: (sharers - 1) m, m = bytes of this rank's shares. Traffic counts it as sharers m (tp-1)/tp.
    """
    return _CopiedParts.apply(y, group, sharers, copied, size)  # type: ignore[no-untyped-call,no-any-return]


class _CopiedParts(torch.autograd.Function):
    """Exchange of the last parts of y among the sharers;
    backward sums their gradients of this rank's shares.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group, sharers: int, copied: int, size: int) -> Tensor:
        ctx.group, ctx.parts = group, (copied, sharers, size // sharers)
        ctx.own = y.shape[-1] - copied * size // sharers
        share = y[..., ctx.own :]
        # (sharers, B, S, C/sharers)
        shares = _exchange(share.expand(sharers, *share.shape).contiguous(), group)
        whole = shares.view(*shares.shape[:-1], copied, -1).movedim(0, -2).flatten(-3)  # (B, S, C)
        return torch.cat((y[..., : ctx.own], whole), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = (
            gradient[..., ctx.own :]
            .reshape(*gradient.shape[:-1], *ctx.parts)
            .movedim(-2, 0)
            .flatten(-2)
        )
        share = _exchange(parts.contiguous(), ctx.group).sum(0)  # (B, S, C/sharers)
        return torch.cat((gradient[..., : ctx.own], share), dim=-1), None, None, None, None


def _exchange(parts: Tensor, group: Group) -> Tensor:
    """Exchange parts (sharers, ...), one for each rank of this rank's unit, by an all-to-all;
    same shape. Blocks.
    """
    if parts.is_meta:
        group.begin_collective("all_to_all", parts)
        return torch.empty_like(parts)
    received, sharers = torch.empty_like(parts), len(parts)
    sizes = [
        parts[0].numel() * (rank // sharers == group.rank // sharers) for rank in range(group.size)
    ]
    group.all_to_all(received.flatten(), parts.flatten(), sizes, sizes).wait()
    return received


def unit_problems(
    modules: Mapping[str, nn.Module],
    columns: Collection[str],
    divisible: Mapping[str, int],
    shared: Mapping[str, Any],
    tp: int,
) -> Iterator[str]:
    """Yield problems of units (heads, groups of kv heads) that tp may not cut,
    and of entries that do not fit.

    tp must divide the number of units or, for a column linear with shared units, be a multiple of
    it. ``columns``: names of the modules of kind column.
    """
    units_of = {f"divisible[{pattern!r}]": (pattern, units) for pattern, units in divisible.items()}
    for pattern, entry in shared.items():
        found = matching([pattern], modules)
        if problem := _misfit(entry, modules, columns, found):
            yield f"shared_units[{pattern!r}] = {entry!r} {problem}"
            return
        if found and not fits(found[0], *divisible):
            units = modules[found[0]].out_features // sum(entry[0])
            units_of[f"shared_units[{pattern!r}]"] = (pattern, units)
    for key, (pattern, units) in units_of.items():
        name = next(iter(matching([pattern], modules)), None)
        if name is None:
            continue
        may_share = entry_of(name, shared)
        if may_share is not None and may_share.most_sharers == 1:
            may_share = None
        degrees = [degree for degree in range(1, units + 1) if units % degree == 0]
        if may_share is not None:
            most = may_share.most_sharers
            degrees += [units * sharers for sharers in range(2, most + 1) if most % sharers == 0]
        if tp not in degrees:
            why = f"parallel.tp = {tp} does not divide {units}"
            if may_share is not None:
                why += (
                    f", nor do equal groups of its ranks share a unit of {list(may_share.rows)}"
                    " rows"
                )
            yield (
                f"{name} ({key}) has {units} units (heads or groups of heads) that must stay whole,"
                f" and {why}: use a tp of {', '.join(map(str, degrees))}"
            )


def _misfit(
    entry: Any, modules: Mapping[str, nn.Module], columns: Collection[str], found: list[str]
) -> str | None:
    """Return why an entry of ``model.shared_units`` does not fit the modules
    that its pattern names.
    """
    is_entry = (
        isinstance(entry, tuple)
        and len(entry) in (2, 3)
        and isinstance(entry[0], tuple)
        and bool(entry[0])
    )
    numbers = (*entry[0], entry[1] + 1) if is_entry and type(entry[1]) is int else (0,)
    if not all(type(number) is int and number > 0 for number in numbers) or entry[1] > len(
        entry[0]
    ):
        return (
            "is no (rows of the parts of a unit, number of copied parts), such as ((128, 64,"
            " 64), 2)"
        )
    rows, copied, *attribute = entry
    size = rows[-1]
    if copied and (
        any(each != size for each in rows[-copied:]) or any(each % size for each in rows)
    ):
        return f"has copied parts of unequal rows, or others that are no multiple of {size} rows"
    for name in found:
        module, parent = modules[name], modules.get(name.rpartition(".")[0])
        if name not in columns or not isinstance(module, nn.Linear):
            return f"names {name}, which is no nn.Linear of kind column"
        if module.out_features % sum(rows):
            return f"names {name}, which has {module.out_features} rows, no multiple of {sum(rows)}"
        if attribute and attribute[0] and type(getattr(parent, attribute[0], None)) is not int:
            return f"names {name}, whose parent has no number {attribute[0]!r}"
    return None
