"""What the nodes of a run must have in common: the run's directory, and the time."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright.mesh.mesh import Mesh

MOST_CLOCK_S = 60.0
"""Clocks that differ more than this are refused: who holds a run's lock, and what is newest, are told by times."""


def check_nodes(mesh: Mesh, directory: Path) -> None:
    """Before anything is written. Every rank calls it; on one node it does nothing.

    Raises:
        ConfigError: the same on every rank: a node does not see the directory, or its clock is far off.
    """
    if len(set(mesh.nodes)) == 1:
        return
    everyone = mesh.world.gather_objects((sees_directory(mesh, directory), clock_ahead_s(mesh, rounds=1)))
    problems = []
    blind = [node for node, (sees, _) in zip(mesh.nodes, everyone, strict=True) if not sees]
    if blind:
        problems.append(unseen(blind))
    ahead = {node: clock_s for node, (_, clock_s) in zip(mesh.nodes, everyone, strict=True)}
    problems += [wrong.text for wrong in wrong_clocks(ahead, MOST_CLOCK_S)]
    if problems:
        raise ConfigError("; ".join(problems))


def sees_directory(mesh: Mesh, directory: Path) -> bool:
    """Whether a file that rank 0 writes there is there for this rank too. Every rank calls it.

    The directory need not be there. Where rank 0 itself cannot write, the answer is what it finds: no.
    """
    place = directory / str(mesh.world.gather_objects(f".seen-{secrets.token_hex(4)}")[0])
    if mesh.rank == 0:
        with contextlib.suppress(OSError):
            place.touch()
    mesh.world.barrier()
    found = place.exists()
    mesh.world.barrier()
    if mesh.rank == 0:
        place.unlink(missing_ok=True)
    return found


def clock_ahead_s(mesh: Mesh, rounds: int) -> float:
    """How far this clock is ahead of rank 0's, as exactly as a barrier ends everywhere at once. Every rank calls it."""
    ahead = []
    for _ in range(rounds):
        mesh.world.barrier()
        times = mesh.world.gather_objects(time.time())
        ahead.append(times[mesh.rank] - times[0])
    return float(statistics.median(ahead))


def unseen(nodes: Sequence[str]) -> str:
    """That these nodes do not see the run's directory, and what to do."""
    names = list(dict.fromkeys(nodes))
    told = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"{told} do{'es' * (len(names) == 1)} not see the run's directory as rank 0 does: run.directory must be on a "
        f"file system that all nodes share"
    )


class WrongClock(NamedTuple):
    """What is wrong, and whose it is; of two clocks that cannot be told."""

    text: str
    nodes: tuple[str, ...]


def wrong_clocks(ahead_s: Mapping[str, float], most_s: float) -> list[WrongClock]:
    """Clocks that are further than that from the middle one, of nodes by name."""
    if len(ahead_s) == 2:
        (one, first_s), (other, second_s) = ahead_s.items()
        apart_s = abs(first_s - second_s)
        text = f"the clocks of {one} and {other} are {apart_s:,.1f} s apart: set them (NTP)"
        return [WrongClock(text, ())] if apart_s > most_s else []
    middle = statistics.median(ahead_s.values())
    return [
        WrongClock(
            f"the clock of {node} is {abs(clock_s - middle):,.1f} s "
            f"{'ahead of' if clock_s > middle else 'behind'} the others': set it (NTP)",
            (node,),
        )
        for node, clock_s in ahead_s.items()
        if abs(clock_s - middle) > most_s
    ]
