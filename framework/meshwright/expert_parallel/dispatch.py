"""Route of the rows in one call of a layer of experts: their order on this rank,
and the counts sent to each rank.

    slots     t0: e3 e0   t1: e0 e2      a row for each token and each of its k experts, in the order of the tokens
    sorted    e0: t0 t1 | e2: t1 e3: t0  by expert, and so by rank; rows of one expert stay in the order of the tokens
              -> rank 0   -> rank 1      experts 0, 1 on rank 0, experts 2, 3 on rank 1

A rank receives the rows of its experts from rank 0, then from rank 1, ..: the order of an expert's
rows depends on the layout alone, not on arrival. A slot with the id E has no expert, because the
chosen one is at capacity: it is not sent.

Shapes: N tokens of this rank, k experts of a token, S = N k slots, T rows that it sends, S without
drops, R rows that it receives, E experts of the layer, n ranks of the ep group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.mesh.comm import Group


class Route(NamedTuple):
    """Indices and counts with which this rank's rows are sent to their experts and back."""

    group: Group
    top_k: int
    order: Tensor
    """(T,) slot of each sorted row."""
    inverse: Tensor
    """(S,) index of each slot among the sorted rows; slots without an expert come last."""
    sent: list[int]
    """(n,) rows to each rank."""
    received: list[int]
    """(n,) rows from each rank."""
    local_ids: Tensor
    """(R,) expert of each received row: 0 is the first expert of this rank."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def find_route(ids: Tensor, num_experts: int, group: Group) -> Route:
    """Sort the rows by expert and exchange their counts. ids: (N, k) int64.
    Collective over the ep group; blocks.

    A rank without rows takes part too. One all-to-all of E x 8 bytes. The host needs the counts to
    size the exchange of the rows: on CUDA it synchronises with the device, once per call.
    """
    chosen = ids.reshape(-1)
    experts_here = num_experts // group.size
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    # bincount would synchronise with the device
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    counts = counts[:num_experts]
    arriving = torch.empty_like(counts)
    equal = [experts_here] * group.size
    group.all_to_all(arriving, counts, equal, equal).wait()
    per_rank = torch.stack([counts, arriving]).view(2, group.size, experts_here).sum(-1)
    sent, received = group.host_counts(per_rank, len(chosen))
    local = torch.arange(experts_here, device=ids.device).repeat(group.size)
    local_ids = local.repeat_interleave(arriving, output_size=sum(received))
    return Route(
        group, ids.shape[-1], order[: sum(sent)], order.argsort(), sent, received, local_ids
    )
