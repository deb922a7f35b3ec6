"""Where the ranks of a run meet, when nobody else sees to it: a store on rank 0. Who has not come in time is named.

torchrun, meshwright's own launcher     their agents hold a store, and start ranks only when all agents are there
srun                                    rank 0 holds it here: nobody has looked whether all nodes can be reached
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from framework.errors import CommunicationError, MeshError

NODES = "MESHWRIGHT_NODES"
"""In the environment: the names of all nodes of the job, where who has started the ranks knows them."""
LONGER_S = 30.0
"""So much longer than rank 0 waits who cannot reach it: it speaks first, and says who is missing."""


class NotAllCame(MeshError):
    """Ranks did not come within the limit. It may pass: the job may start again, on other nodes."""

    exit_code = 1

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        self.nodes = nodes
        """From which nobody has come."""
        super().__init__(message)


def needs_meeting() -> bool:
    """Whether the ranks must find each other by themselves: an elastic agent has a store for them."""
    return "TORCHELASTIC_RUN_ID" not in os.environ and bool(os.environ.get("MASTER_ADDR"))


def meet(rank: int, world_size: int, limit_s: float) -> Any:
    """The store that all ranks share, when all have come. Every rank calls it; blocks.

    Raises:
        NotAllCame: on rank 0: some have not. On others: rank 0 cannot be reached from here.
        CommunicationError: rank 0 has given up.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))
    mine = socket.gethostname()
    patience_s = limit_s if rank == 0 else limit_s + LONGER_S
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world_size, rank == 0, timedelta(seconds=patience_s), wait_for_workers=False
        )
        store.set(f"came/{rank}", mine)
        if store.add("came", 1) == world_size:
            store.set("all came", "")
    except RuntimeError as error:
        raise NotAllCame(
            f"{mine} cannot reach rank 0 at {host}:{port}: {str(error).strip().splitlines()[0]}. Look at the network "
            f"of {mine} and of {host}; another port: MASTER_PORT",
            (mine,),
        ) from None
    try:
        store.wait(["all came"], timedelta(seconds=patience_s))
        return store
    except RuntimeError:
        if rank == 0:
            raise _missing(store, world_size, limit_s) from None
    raise CommunicationError(f"rank {rank} on {mine}: rank 0 at {host}:{port} has left before all ranks had come")


def _missing(store: Any, world_size: int, limit_s: float) -> NotAllCame:
    there = {rank: store.get(f"came/{rank}").decode() for rank in range(world_size) if store.check([f"came/{rank}"])}
    missing = [rank for rank in range(world_size) if rank not in there]
    known = [node for node in os.environ.get(NODES, "").split(",") if node]
    nodes = tuple(node for node in known if node not in there.values())
    silent = f": nobody from {', '.join(nodes)}" if nodes else ""
    return NotAllCame(
        f"{len(there)} of {world_size} ranks have come within {limit_s:g} s, not {_in_short(missing)}{silent}. Is the "
        f"node up, and does its network reach {os.environ['MASTER_ADDR']}?",
        nodes,
    )


def _in_short(ranks: Sequence[int], most: int = 8) -> str:
    told = ", ".join(map(str, ranks[:most]))
    return f"rank{'s' * (len(ranks) > 1)} {told}{' ...' if len(ranks) > most else ''}"
