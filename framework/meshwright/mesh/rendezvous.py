"""Rendezvous of a run without an elastic agent: a store on rank 0.
Ranks that do not arrive in time are named.

torchrun, meshwright's own launcher     their agents host a store, and start the ranks when all agents are present
srun                                    rank 0 hosts the store here; nothing before it checks that nodes are reachable
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.errors import CommunicationError, MeshError, MissingRanksError
from meshwright.system.host import NODES, node_name, open_listener
from meshwright.system.numbers import MAX_PORT, environment_number
from meshwright.terminal.output import abridge

DEFAULT_PORT = 29_500
"""Port of the rendezvous without MASTER_PORT, as torchrun's."""
LONGER_S = 30.0
"""Extra seconds that other ranks wait, so that rank 0 prints first and names the missing ranks."""


def needs_rendezvous() -> bool:
    """Return True if the ranks must find each other
    because no elastic agent hosts a store for them.
    """
    return "TORCHELASTIC_RUN_ID" not in os.environ and bool(os.environ.get("MASTER_ADDR"))


def open_rendezvous(rank: int, world_size: int, limit_s: float) -> Any:
    """Wait for all ranks; return the store that they share. Collective; blocks.

    Raises:
        MissingRanksError: on rank 0, ranks are missing after ``limit_s``; on another rank, rank 0
            is unreachable.
        CommunicationError: rank 0 has left the rendezvous.
        MeshError: rank 0 cannot listen at MASTER_ADDR and MASTER_PORT.
    """
    host = os.environ["MASTER_ADDR"]
    port = environment_number("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)
    mine = node_name()
    patience_s = limit_s if rank == 0 else limit_s + LONGER_S
    try:
        store = _store(host, port, world_size, rank == 0, timedelta(seconds=patience_s))
        store.set(f"came/{rank}", mine)
        if store.add("came", 1) == world_size:
            store.set("all came", "")
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        if rank == 0:
            raise MeshError(
                "MW-MESH-014",
                f"rank 0 on {mine} cannot listen at {host}:{port}: {reason}. MASTER_ADDR must be"
                " this node, and MASTER_PORT free on it",
            ) from None
        raise MissingRanksError(
            "MW-MESH-015",
            f"{mine} cannot reach rank 0 at {host}:{port}: {reason}. Look at the network of {mine}"
            f" and of {host}; another port: MASTER_PORT",
            (mine,),
        ) from None
    try:
        store.wait(["all came"], timedelta(seconds=patience_s))
        return store
    except RuntimeError:
        if rank == 0:
            raise _missing(store, world_size, limit_s) from None
    raise CommunicationError(
        "MW-MESH-016",
        f"rank {rank} on {mine}: rank 0 at {host}:{port} has left, or does not answer",
    )


def _store(host: str, port: int, world_size: int, holds: bool, limit: timedelta) -> Any:
    """Return torch's TCPStore. Its host listens at the address of ``host`` only,
    if that can be determined.
    """
    listener = open_listener(host, port) if holds else None
    bound = {} if listener is None else {"master_listen_fd": listener.detach()}
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, world_size, holds, limit, wait_for_workers=False, **bound)


def _missing(store: Any, world_size: int, limit_s: float) -> MissingRanksError:
    there = {
        rank: store.get(f"came/{rank}").decode()
        for rank in range(world_size)
        if store.check([f"came/{rank}"])
    }
    missing = [rank for rank in range(world_size) if rank not in there]
    known = [node for node in os.environ.get(NODES, "").split(",") if node]
    nodes = tuple(node for node in known if node not in there.values())
    silent = f": nobody from {abridge(nodes)}" if nodes else ""
    return MissingRanksError(
        "MW-MESH-017",
        f"{len(there)} of {world_size} ranks have come within {limit_s:g} s, not"
        f" rank{'s' * (len(missing) > 1)} {abridge(missing)}{silent}. Is the node up, and does its"
        f" network reach {os.environ['MASTER_ADDR']}?",
        nodes if 2 * len(nodes) < len(known) else (),  # if most are missing, they are not to blame
    )
