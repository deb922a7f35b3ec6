"""Checks that the nodes of a run share the run's directory and agree on the time."""

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

MAX_CLOCK_S = 60.0
"""Largest accepted clock difference. The run's lock and "newest file" rely on timestamps
of different nodes.
"""


def check_nodes(mesh: Mesh, directory: Path) -> None:
    """Check the shared directory and the clocks before anything is written.

    Collective over all ranks; blocks. Does nothing on a single node.

    Raises:
        ConfigError: the same on every rank; a node does not see the directory, or its clock is far
            off.
    """
    if len(set(mesh.nodes)) == 1:
        return
    gathered = mesh.world.gather_objects(
        (sees_directory(mesh, directory), clock_ahead_s(mesh, rounds=1))
    )
    problems = []
    unshared = [node for node, (sees, _) in zip(mesh.nodes, gathered, strict=True) if not sees]
    if unshared:
        problems.append(unshared_directory(unshared))
    ahead = {node: clock_s for node, (_, clock_s) in zip(mesh.nodes, gathered, strict=True)}
    problems += [wrong.text for wrong in wrong_clocks(ahead, MAX_CLOCK_S)]
    if problems:
        raise ConfigError("MW-WATCH-007", "; ".join(problems))


def sees_directory(mesh: Mesh, directory: Path) -> bool:
    """Check whether this rank sees a file that rank 0 writes to the directory.
    Collective over all ranks; blocks.

    The directory need not exist. If rank 0 cannot write to it, the result is False on all ranks.
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
    """Return the seconds by which this rank's clock is ahead of rank 0's.
    Collective over all ranks; blocks.

    It is the median over ``rounds`` barriers. Its error is the time between two ranks' returns from
    a barrier.
    """
    ahead = []
    for _ in range(rounds):
        mesh.world.barrier()
        times = mesh.world.gather_objects(time.time())
        ahead.append(times[mesh.rank] - times[0])
    return float(statistics.median(ahead))


def unshared_directory(nodes: Sequence[str]) -> str:
    """Return the message, with its remedy, that these nodes do not see the run's directory."""
    names = list(dict.fromkeys(nodes))
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"{listed} do{'es' * (len(names) == 1)} not see the run's directory as rank 0 does:"
        " run.directory must be on a file system that all nodes share"
    )


class WrongClock(NamedTuple):
    """Message about a clock that is off, and its node; no node when only two clocks disagree."""

    text: str
    nodes: tuple[str, ...]


def wrong_clocks(ahead_s: Mapping[str, float], most_s: float) -> list[WrongClock]:
    """Return the clocks that are more than ``most_s`` seconds from the median clock.

    ``ahead_s``: node -> seconds ahead of rank 0. Of two nodes only the difference is judged.
    """
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
