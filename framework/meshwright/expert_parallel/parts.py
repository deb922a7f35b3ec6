"""Tokens that all ranks of a tp group have, as without sequence parallelism: each rank sends a part
of them to the experts, and gathers the results.

    forward     take_part  (N, D) of every rank          -- own rows -->    (M, D)
                join_parts (M, D)                        -- all-gather -->  (N, D)
    backward    take_part  gradient (N, D), of all rows  <-- all-gather --  (M, D)
                join_parts gradient (M, D)               <-- own rows --    (N, D), the same on every rank

So each expert gets each token once, as with sequence parallelism, and its gradient is that of all
tokens. Bytes on the wire of a rank in forward: N D b (n-1)/n, with b bytes an element; in backward
N (D + k) b (n-1)/n.

Shapes: N tokens of the ranks, n ranks of tp, M = N/n rounded up tokens of a part, D features, k
experts of a token. The last parts are filled up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.mesh.comm import Group


@torch.compiler.disable  # type: ignore[untyped-decorator]
def take_part(whole: Tensor, group: Group, fill: int = 0) -> Tensor:
    """Return this rank's rows: (N, D) -> (M, D), the last ones with ``fill``. Its backward is
    collective over tp, and blocks.
    """
    part: Tensor = _TakePart.apply(whole, group, fill)  # type: ignore[no-untyped-call]
    return part


@torch.compiler.disable  # type: ignore[untyped-decorator]
def join_parts(part: Tensor, group: Group, length: int) -> Tensor:
    """All-gather the rows of all ranks: (M, D) -> (N, D), ``length`` rows. Collective over tp;
    blocks.
    """
    whole: Tensor = _JoinParts.apply(part, group, length)  # type: ignore[no-untyped-call]
    return whole


def _own_rows(whole: Tensor, group: Group, fill: int) -> Tensor:
    rows = -(-len(whole) // group.size)
    part = whole[group.rank * rows : (group.rank + 1) * rows]
    missing = rows - len(part)
    if missing:
        part = torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])
    return part.contiguous()


def _all_rows(part: Tensor, group: Group, length: int) -> Tensor:
    whole = part.new_empty(len(part) * group.size, *part.shape[1:])
    group.all_gather(whole, part.contiguous()).wait()
    return whole[:length]


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, fill: int) -> Tensor:
        ctx.group, ctx.length = group, len(whole)
        return _own_rows(whole, group, fill)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(g, ctx.group, ctx.length), None, None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, length: int) -> Tensor:
        ctx.group = group
        return _all_rows(part, group, length)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(g, ctx.group, 0), None, None
