"""Launcher of this process (none, torchrun, srun or mpirun),
and the environment variables that torch needs in a rank.

started by        sets                                   becomes
torchrun          RANK WORLD_SIZE LOCAL_RANK MASTER_*    (as it is)
srun              SLURM_PROCID SLURM_STEP_NUM_TASKS ...  RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
mpirun            OMPI_COMM_WORLD_RANK ... (see mpi.py)  RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
no launcher       nothing                                the launcher starts the ranks itself (local.py)
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from meshwright.errors import MeshError
from meshwright.system.bounded import shortened
from meshwright.system.host import NODES, interface_towards
from meshwright.system.numbers import (
    MAX_PORT,
    MAX_RANKS,
    environment_number,
    job_restarts,
    whole_number,
)
from meshwright_launch.mpi import FIRST_PORT, NUM_PORTS, mpi_place, mpi_variables

STEPS_PER_JOB = 16
MAX_NODES = 2**17
"""Maximum number of nodes in a list of Slurm's, twice as many as it manages by default."""
MAX_VARIABLE_CHARS = 2**16
"""Maximal length of the variable with the names of the nodes:
Linux starts no process with one above 128 KiB.
"""
_BRACKETS = r"\[[^\[\]]*+\]"
_HOSTS = re.compile(rf"(?:[^,\[\]]++|{_BRACKETS})++")
_PARTS = re.compile(rf"{_BRACKETS}|[^\[\]]++")
_NODELIST = re.compile(rf"(?:(?:[^,\[\]]++|{_BRACKETS})*+,?+)*+")


class Launcher(StrEnum):
    """Program that starts the ranks."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    MPI = "mpi"


class RankPlace(NamedTuple):
    """Rank in the world and on its node, with both sizes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on each node; 0 if the nodes differ or the number is unknown."""


def launch_environment(env: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher of this process.

    ``SLURM_*`` alone is not enough: a batch script and the shell of ``salloc`` also have
    SLURM_PROCID = 0 and the job's number of tasks. Only srun sets SLURM_STEP_ID. The daemons of
    mpirun may be tasks of srun themselves, so that its processes have their SLURM_PROCID; under
    ``srun --mpi=pmi2`` MPI's variables have the same numbers as Slurm's.

    Raises:
        MeshError: only one of RANK and WORLD_SIZE is set, or a variable of Slurm's or of an MPI
            launcher is no number.
    """
    present = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    if len(present) == 2:
        return Launcher.TORCHRUN
    if present:
        raise MeshError(
            "MW-LAUNCH-025",
            f"the environment has {present[0]} = {env[present[0]]!r} alone: torchrun sets RANK and"
            " WORLD_SIZE together. Unset it to start the ranks of this machine, or start with"
            " torchrun or srun",
        )
    # read again by rank 0 alone, where an error would leave the other ranks waiting
    job_restarts(env)
    is_slurm = bool(env.get("SLURM_PROCID") and env.get("SLURM_STEP_ID")) and _slurm_tasks(env) > 1
    mpi = mpi_place(env)
    if mpi is not None and not (
        is_slurm and (str(mpi.rank), mpi.size) == (env["SLURM_PROCID"], _slurm_tasks(env))
    ):
        return Launcher.MPI
    return Launcher.SLURM if is_slurm else Launcher.NONE


def rank_variables(launcher: Launcher, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that torch needs in a rank of this launcher,
    as far as it has not set them.

    Raises:
        MeshError: the rank's place, or the host of rank 0, is unknown.
    """
    if launcher is Launcher.SLURM:
        return torch_variables(env)
    mpi = mpi_place(env) if launcher is Launcher.MPI else None
    return {} if mpi is None else mpi_variables(mpi, env)


def read_place(env: Mapping[str, str] = os.environ) -> RankPlace:
    """Return this rank's place from the variables of torchrun (under srun see
    :func:`torch_variables`).
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = RankPlace(*(environment_number(name, 0, high=MAX_RANKS, env=env) for name in names))
    if place.rank >= place.world_size:
        raise MeshError(
            "MW-LAUNCH-027",
            f"the environment has RANK = {place.rank} and WORLD_SIZE = {place.world_size}: ranks"
            " count from 0",
        )
    return place


def torch_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that torch, NCCL and gloo need in a rank under srun: rendezvous,
    and network interface.

    Values set by the user are kept: MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME,
    NCCL_SOCKET_IFNAME.
    """
    variables = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": str(_slurm_tasks(env)),
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_of_each_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env),
        "MASTER_PORT": (
            env.get("MASTER_PORT")
            or str(port_of_job(env.get("SLURM_JOB_ID", "0"), env["SLURM_STEP_ID"]))
        ),
    }
    nodes = ",".join(_hosts(env))
    if 0 < len(nodes) <= MAX_VARIABLE_CHARS:
        variables[NODES] = nodes
    interface = interface_towards(variables["MASTER_ADDR"])
    if interface is not None:
        variables |= {
            name: env.get(name) or interface
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
    return variables


def port_of_job(job: str, step: str) -> int:
    """Return a job step's rendezvous port, a function of its ids, so equal on all ranks.
    Repeats every 750 job ids.
    """
    job_number, step_number = whole_number(job), whole_number(step)
    if job_number is None:
        raise MeshError(
            "MW-LAUNCH-095", f"SLURM_JOB_ID = {job[:80]!r} is not a number: start with srun"
        )
    number = job_number * STEPS_PER_JOB + (step_number or 0) % STEPS_PER_JOB
    return FIRST_PORT + number % NUM_PORTS


def expand_hosts(nodelist: str) -> list[str]:
    """Expand Slurm's short form of host names.

    >>> expand_hosts("login,n[08-10,20],r[1-2]c[1-2]-ib")
    ['login', 'n08', 'n09', 'n10', 'n20', 'r1c1-ib', 'r1c2-ib', 'r2c1-ib', 'r2c2-ib']
    """
    if _NODELIST.fullmatch(nodelist) is None:
        raise MeshError(
            "MW-LAUNCH-097",
            f"{shortened(nodelist, 80)!r} is no list of nodes as Slurm writes them: check"
            " SLURM_NODELIST",
        )
    hosts: list[str] = []
    for name in _HOSTS.findall(nodelist):
        parts = [
            _numbers(part[1:-1]) if part[0] == "[" else [part] for part in _PARTS.findall(name)
        ]
        if len(hosts) + math.prod(map(len, parts)) > MAX_NODES:
            raise _too_many_nodes(nodelist)
        hosts += ["".join(combined) for combined in itertools.product(*parts)]
    return hosts


def check_port(text: str) -> int:
    """Return the port in MASTER_PORT if this process can listen there;
    otherwise torch would block for minutes.

    Raises:
        MeshError: not a port, or another process uses it.
    """
    port = whole_number(text, 1, MAX_PORT)
    if port is None:
        raise MeshError(
            "MW-LAUNCH-028",
            f"MASTER_PORT = {shortened(text, 80)!r} is not a port: set it to a free one (1024 to"
            " 65535), or unset it",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise MeshError(
                "MW-LAUNCH-029",
                f"the ranks cannot rendezvous at port {port} (MASTER_PORT): {error.strerror}. Set"
                " MASTER_PORT to a free port, or end the process that uses it (`ss -ltnp`"
                " names it)",
            ) from None
    return port


def check_rendezvous(env: Mapping[str, str] = os.environ) -> None:
    """Refuse a MASTER_PORT that is no port, or 0, which torchrun passes on to the ranks:
    they would never meet.

    Raises:
        MeshError: MASTER_PORT is set, and is no number from 1 to 65535; several ranks lack
            MASTER_ADDR.
    """
    if env.get("MASTER_PORT") == "0":
        raise MeshError(
            "MW-LAUNCH-030",
            "MASTER_PORT = 0: the ranks cannot rendezvous there. For any free port on one machine"
            " give torchrun --standalone instead of --master-port=0, or else a port (1024 to"
            " 65535)",
        )
    environment_number("MASTER_PORT", 0, 1, MAX_PORT, env)
    world_size = environment_number("WORLD_SIZE", 1, 1, MAX_RANKS, env)
    if world_size > 1 and not env.get("MASTER_ADDR"):
        raise MeshError(
            "MW-LAUNCH-105",
            f"the environment has RANK = {env.get('RANK')} and WORLD_SIZE = {world_size} without"
            " MASTER_ADDR, the host of rank 0: start with torchrun or srun, which set it, or unset"
            " RANK and WORLD_SIZE",
        )


def _slurm_tasks(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return environment_number(name, 1, 1, MAX_RANKS, env)


def _tasks_of_each_node(text: str) -> int:
    """Return the tasks per node: ``"4(x2)"`` -> 4; ``"4(x2),1"`` -> 0, since the nodes differ."""
    found = re.fullmatch(r"([0-9]+)(?:\(x[0-9]+\))?", text)
    return (whole_number(found[1], 1, MAX_RANKS) or 0) if found else 0


def _first_host(env: Mapping[str, str]) -> str:
    """Return the node of task 0: the first of the step's own nodes,
    which may be fewer than the job's.
    """
    hosts = _hosts(env)
    if not hosts:
        raise MeshError(
            "MW-LAUNCH-031",
            "srun started this rank, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST names"
            " its nodes: set MASTER_ADDR to the host of rank 0",
        )
    return hosts[0]


def _hosts(env: Mapping[str, str]) -> list[str]:
    """Return all nodes of the step, or of the job if the step has no list."""
    return expand_hosts(
        env.get("SLURM_STEP_NODELIST")
        or env.get("SLURM_JOB_NODELIST")
        or env.get("SLURM_NODELIST")
        or ""
    )


def _numbers(text: str) -> list[str]:
    """Expand ``"08-10,20"`` into 08 09 10 20,
    with as many digits as the first number of each range.
    """
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        start, stop = (whole_number(each, 0, 999_999) for each in (first, last or first))
        if start is None or stop is None or start > stop or part.endswith("-"):
            raise MeshError(
                "MW-LAUNCH-096",
                f"a list of nodes has [{text[:80]}], which is no range: check SLURM_NODELIST",
            )
        if len(numbers) + stop - start >= MAX_NODES:
            raise _too_many_nodes(text)
        numbers += [str(number).zfill(len(first)) for number in range(start, stop + 1)]
    return numbers


def _too_many_nodes(text: str) -> MeshError:
    return MeshError(
        "MW-LAUNCH-098",
        f"{shortened(text, 80)!r} names more than {MAX_NODES:,} nodes: check SLURM_NODELIST",
    )
