"""Exchange of rows between the ranks that share experts: dispatch, and combine,
which is also dispatch's backward.

    dispatch   (N, D) of each rank   -- k copies, sorted, all-to-all -->      (R, D), rows for this rank's experts
    combine    (R, D)                -- all-to-all, in the order of slots --> (S, D), a row for each slot of this rank

Both block (on CUDA: the stream), and are collective over the ep group. While rows are on the wire,
the other computation of a pair may run (``Group.turns``, schedule dualpipe_v). Bytes on the wire of
a rank in forward, and as many in backward: 2 S D b (n-1)/n if rows are evenly distributed, with b
bytes an element.

No sum depends on the order in which rows arrive: rows are moved by indices without duplicates, and
the k gradients of a token are added in the order of its experts.

Shapes: see dispatch.py; D features of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.expert_parallel.dispatch import Route


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dispatch(x: Tensor, route: Route) -> Tensor:
    """Send each token to its experts: (N, D) -> (R, D), by source rank, then by expert.
    Collective over ep; blocks.
    """
    found: Tensor = _Dispatch.apply(x, route)  # type: ignore[no-untyped-call]
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def combine(y: Tensor, route: Route) -> Tensor:
    """Return the rows to their tokens: (R, D) -> (S, D), k rows for each token. Collective over ep;
    blocks.
    """
    found: Tensor = _Combine.apply(y, route)  # type: ignore[no-untyped-call]
    return found


def _slots(rows: Tensor, route: Route) -> Tensor:
    """Put sorted rows in the order of the slots, (T, D) -> (S, D),
    with zeros for slots without an expert.
    """
    lost = len(route.inverse) - len(rows)
    if lost:
        rows = torch.cat([rows, rows.new_zeros(lost, rows.shape[1])])
    return rows.index_select(0, route.inverse)


def _move(rows: Tensor, route: Route, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send ``sent`` rows to each rank and receive ``received``: (sum(sent), D) -> (sum(received),
    D). Blocks.
    """
    width = rows.shape[1]
    out = rows.new_empty(sum(received), width)
    received_elements = [num_rows * width for num_rows in received]
    sent_elements = [num_rows * width for num_rows in sent]
    posted = route.group.all_to_all(
        out.view(-1), rows.contiguous().view(-1), received_elements, sent_elements
    )
    route.group.turns.pause()  # the other computation of the pair runs while rows are on the wire
    posted.wait()
    return out


class _Dispatch(torch.autograd.Function):
    """Dispatch; backward sends the rows' gradients back and sums the k gradients of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        rows = x.index_select(0, route.order.div(route.top_k, rounding_mode="floor"))
        return _move(rows, route, route.sent, route.received)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        rows = _slots(_move(g, route, route.received, route.sent), route)
        return rows.view(-1, route.top_k, rows.shape[1]).sum(1), None


class _Combine(torch.autograd.Function):
    """Combine; backward sends the gradient of each row to its expert."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _slots(_move(y, route, route.received, route.sent), route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        return _move(g.index_select(0, route.order), route, route.sent, route.received), None
