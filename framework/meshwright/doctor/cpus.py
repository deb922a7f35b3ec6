"""CPUs that each rank may use: a launcher may bind several ranks, or all threads of one,
to a single core.

srun of Slurm 22.05 and later does not take over ``--cpus-per-task`` of its job, and with
task/affinity it binds each task to one core then. mpirun may bind each process to a core or a
socket.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from meshwright.mesh.mesh import Mesh
from meshwright.system.numbers import whole_number
from meshwright.terminal.output import abridge

ASKED = "SLURM_CPUS_PER_TASK"
MAX_CPUS = 2**20
REMEDY = (
    "give srun --cpus-per-task (it takes none over from sbatch), mpirun --bind-to none, or start"
    " without taskset"
)


class RankCpus(NamedTuple):
    """CPUs of one rank, and its need of them."""

    mask: str
    """Bit mask of the CPUs in hexadecimal: 1,024 CPUs in 256 characters."""
    threads: int
    """Threads that compute, ``launch.threads``."""
    asked: int
    """CPUs that the job gives to each task; 0: unknown."""
    num_of_node: int
    is_cuda: bool

    @property
    def cpus(self) -> list[int]:
        """Numbers of the CPUs."""
        bits = int(self.mask, 16)
        return [cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1]

    @property
    def is_bound(self) -> bool:
        """True if this rank may use only some of its node's CPUs."""
        return len(self.cpus) < self.num_of_node

    @property
    def needed(self) -> int:
        """CPUs without which threads wait for each other: on a GPU,
        NCCL and reading have threads of their own.
        """
        return max(self.threads, self.asked, 2 if self.is_cuda else 1)


def own_cpus(threads: int, device: str, env: Mapping[str, str] = os.environ) -> RankCpus | None:
    """Return the CPUs of this process; None where the system does not show them."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    asked = whole_number(env.get(ASKED, ""), 0, MAX_CPUS) or 0
    return RankCpus(
        mask_of(os.sched_getaffinity(0)), threads, asked, os.cpu_count() or 1, device == "cuda"
    )


def mask_of(cpus: Collection[int]) -> str:
    """Return the bit mask of CPUs in hexadecimal."""
    return f"{sum(1 << cpu for cpu in cpus):x}"


def find_cpu_warnings(mesh: Mesh, threads: int) -> list[str]:
    """Return on rank 0 a warning for each kind of fault in the binding of ranks.
    Collective over all ranks; blocks.
    """
    every = mesh.world.gather_objects(own_cpus(threads, mesh.device.type), RankCpus)
    if mesh.rank != 0:
        return []
    known = {rank: found for rank, found in enumerate(every) if found is not None}
    return cpu_warnings(mesh.nodes, known)


def cpu_warnings(nodes: Sequence[str], found: Mapping[int, RankCpus]) -> list[str]:
    """Return the warnings; ``found``: rank -> its CPUs.
    Ranks that are bound to nothing are left alone.
    """
    few = [rank for rank, each in found.items() if each.is_bound and len(each.cpus) < each.needed]
    warnings = []
    if few:
        first = found[few[0]]
        needs = f"{first.threads} threads (launch.threads)"
        if first.asked > first.threads:
            needs = f"a job that gives each task {first.asked} ({ASKED})"
        elif first.needed > first.threads:
            needs = "a GPU, whose communication and reading have threads of their own"
        warnings.append(
            f"rank {few[0]} on {nodes[few[0]]} may use {_cpus(first.cpus)} of {first.num_of_node},"
            f" with {needs}{_others(few)}: {REMEDY}"
        )
    shared = [ranks for ranks in _sharing(nodes, found) if _is_crowded(found, ranks)]
    if shared:
        ranks = shared[0]
        cpus = sorted({cpu for rank in ranks for cpu in found[rank].cpus})
        others = f", and {len(shared) - 1} more groups of ranks alike" if len(shared) > 1 else ""
        of_node = f"{_cpus(cpus)} of {found[ranks[0]].num_of_node}"
        warnings.append(
            f"ranks {abridge(ranks)} on {nodes[ranks[0]]} share {of_node}{others}, fewer than their"
            f" threads: {REMEDY}"
        )
    return warnings


def _cpus(cpus: Sequence[int]) -> str:
    return f"CPU{'s' * (len(cpus) > 1)} {abridge(cpus)}"


def _others(ranks: Sequence[int]) -> str:
    if len(ranks) > 1:
        return f", and {len(ranks) - 1} more rank{'s' * (len(ranks) > 2)} alike"
    return ""


def _is_crowded(found: Mapping[int, RankCpus], ranks: Sequence[int]) -> bool:
    """Return True if these ranks have more threads than CPUs."""
    cpus = {cpu for rank in ranks for cpu in found[rank].cpus}
    return len(ranks) > 1 and sum(found[rank].threads for rank in ranks) > len(cpus)


def _sharing(nodes: Sequence[str], found: Mapping[int, RankCpus]) -> list[list[int]]:
    """Return the groups of bound ranks of one node whose CPUs overlap,
    directly or through others.
    """
    groups: dict[str, list[tuple[set[int], list[int]]]] = defaultdict(list)
    for rank, each in found.items():
        if not each.is_bound:
            continue
        cpus, ranks = set(each.cpus), [rank]
        apart = []
        for group in groups[nodes[rank]]:
            if group[0] & cpus:
                cpus |= group[0]
                ranks = [*group[1], *ranks]
            else:
                apart.append(group)
        groups[nodes[rank]] = [*apart, (cpus, ranks)]
    return [sorted(ranks) for of_node in groups.values() for _, ranks in of_node]
