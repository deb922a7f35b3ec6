"""Initial weights of a large stage, drawn by all its ranks together:
each draws some parameters and broadcasts them.

    rank 0      draws w0, w3      w0 -> all    w1 <- 1      w2 <- 2      w3 -> all
    rank 1      draws w1          w0 <- 0      w1 -> all    w2 <- 2      w3 <- 0
    rank 2      draws w2          w0 <- 0      w1 <- 1      w2 -> all    w3 <- 0

A parameter is drawn on one CPU thread, seeded by its name. Its values do not depend on the rank
that draws it. So n ranks take 1/n of the time, with the same bits as one. Each rank draws a small
stage by itself, without messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.mesh.comm import Group
from meshwright.parameters import ParameterInfo

SHARED_FROM = 2**24
"""Elements of a stage from which on its ranks share the drawing: that many take about 0.1 s,
a message 0.1 ms.
"""


def assign_draws(numels: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return the rank that draws each parameter: largest first,
    each to the rank with the fewest elements.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    found = {}
    for name, numel in sorted(numels.items(), key=lambda item: (-item[1], item[0])):
        load, rank = heapq.heappop(loads)
        found[name] = rank
        heapq.heappush(loads, (load + numel, rank))
    return found


StageRanks = tuple[Group, Group, torch.device]
"""Ranks that hold the same stage: this rank's group along dp, that along tp,
and the device of their messages.
"""


def initial_values(
    infos: Mapping[str, ParameterInfo],
    initial: Callable[[str], Tensor],
    dtype: torch.dtype,
    ranks: StageRanks | None,
    *,
    by_one_rank: bool = False,
) -> Callable[[ParameterInfo], Tensor]:
    """Return the function from a parameter to this rank's slice of its initial weights;
    a large stage is drawn now.

    Collective over ``ranks``, and so is each call of the result. Both block. Wire: each parameter
    once along each axis, in ``dtype``. Beside the weights, memory holds this rank's draws on the
    host and one full parameter on the device.

    Args:
        infos: the stage's parameters by canonical name. The result is called once for each, on all
            ranks in one order.
        initial: draws a full tensor, float32 on CPU, by its name.
        ranks: None: this rank draws all it needs by itself.
        by_one_rank: the first rank draws all of a large stage, where one value costs as much as all
            of them.
    """
    numels = {name: math.prod(info.global_shape) for name, info in infos.items()}
    if ranks is None or ranks[0].size * ranks[1].size == 1 or sum(numels.values()) < SHARED_FROM:
        return lambda info: info.take(initial(info.name))
    dp, tp, device = ranks
    drawer = assign_draws(numels, 1 if by_one_rank else dp.size * tp.size)
    drawn = {
        name: initial(name).to(dtype).contiguous()
        for name in infos
        if drawer[name] == dp.rank * tp.size + tp.rank
    }

    def local_of(info: ParameterInfo) -> Tensor:
        dp_rank, tp_rank = divmod(drawer[info.name], tp.size)
        mine = drawn.pop(info.name, None)
        if mine is None:
            full = torch.empty(info.global_shape, dtype=dtype, device=device)
        else:
            full = mine.to(device)
        if tp.rank == tp_rank:
            dp.broadcast(full, dp_rank).wait()
        tp.broadcast(full, tp_rank).wait()
        return info.take(full)

    return local_of
