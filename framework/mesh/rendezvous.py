"""Rendezvous of the ranks for launchers without a store of their own: a TCPStore on rank 0. Names missing ranks.

torchrun, meshwright's own launcher     their agents hold a store, and start ranks only when all agents are there
srun                                    rank 0 holds it here: whether all nodes can be reached is unchecked
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.errors import CommunicationError, MeshError
from meshwright.mesh.network import NODES, node_name, open_listener

LONGER_S = 30.0
"""Extra seconds that the other ranks wait, so that rank 0 times out first and reports the missing ranks."""


class NotAllCame(MeshError):
    """Rendezvous timeout. It may be transient: the job may be restarted, on other nodes."""

    exit_code = 1

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        self.nodes = nodes
        """Nodes without any rank at the rendezvous, if the fault seems to be theirs."""
        super().__init__(message)


def needs_meeting() -> bool:
    """Return True if the ranks need a rendezvous of their own; an elastic agent brings a store for them."""
    return "TORCHELASTIC_RUN_ID" not in os.environ and bool(os.environ.get("MASTER_ADDR"))


def meet(rank: int, world_size: int, limit_s: float) -> Any:
    """Return the store that all ranks share, once all have joined. Every rank calls it; blocks.

    Raises:
        NotAllCame: on rank 0, ranks are missing. On other ranks, rank 0 cannot be reached from here.
        CommunicationError: rank 0 has given up.
        MeshError: rank 0 cannot listen at MASTER_ADDR and MASTER_PORT, or the port is not a number.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "29500")
    if not port.isdecimal():
        raise MeshError(f"MASTER_PORT = {port!r} is not a port: set it to a free one (1024 to 65535), or unset it")
    mine = node_name()
    patience_s = limit_s if rank == 0 else limit_s + LONGER_S
    try:
        store = _store(host, int(port), world_size, rank == 0, timedelta(seconds=patience_s))
        store.set(f"came/{rank}", mine)
        if store.add("came", 1) == world_size:
            store.set("all came", "")
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        if rank == 0:
            raise MeshError(
                f"rank 0 on {mine} cannot listen at {host}:{port}: {reason}. MASTER_ADDR must be this node, and "
                f"MASTER_PORT free on it"
            ) from None
        raise NotAllCame(
            f"{mine} cannot reach rank 0 at {host}:{port}: {reason}. Look at the network of {mine} and of {host}; "
            f"another port: MASTER_PORT",
            (mine,),
        ) from None
    try:
        store.wait(["all came"], timedelta(seconds=patience_s))
        return store
    except RuntimeError:
        if rank == 0:
            raise _missing(store, world_size, limit_s) from None
    raise CommunicationError(f"rank {rank} on {mine}: rank 0 at {host}:{port} has left, or does not answer")


def _store(host: str, port: int, world_size: int, holds: bool, limit: timedelta) -> Any:
    """Create a TCPStore client. ``holds``: also the server, bound to the address of ``host`` alone if that is known."""
    listener = open_listener(host, port) if holds else None
    bound = {} if listener is None else {"master_listen_fd": listener.detach()}
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, world_size, holds, limit, wait_for_workers=False, **bound)


def _missing(store: Any, world_size: int, limit_s: float) -> NotAllCame:
    there = {rank: store.get(f"came/{rank}").decode() for rank in range(world_size) if store.check([f"came/{rank}"])}
    missing = [rank for rank in range(world_size) if rank not in there]
    known = [node for node in os.environ.get(NODES, "").split(",") if node]
    nodes = tuple(node for node in known if node not in there.values())
    silent = f": nobody from {in_short(nodes)}" if nodes else ""
    return NotAllCame(
        f"{len(there)} of {world_size} ranks have come within {limit_s:g} s, not rank{'s' * (len(missing) > 1)} "
        f"{in_short(missing)}{silent}. Is the node up, and does its network reach {os.environ['MASTER_ADDR']}?",
        nodes if 2 * len(nodes) < len(known) else (),  # if most nodes are missing, the fault is not theirs
    )


def in_short(items: Sequence[object], most: int = 8) -> str:
    """Return the items as text, such as ``2, 3``; beyond ``most`` items only the number of further ones."""
    return f"{', '.join(map(str, items[:most]))}{f' and {len(items) - most} more' if len(items) > most else ''}"
