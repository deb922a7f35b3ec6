"""Launchers of MPI: mpirun, mpiexec, jsrun, aprun, flux.
A process that one of them has started is one rank of its job.

MPI itself is not used. The launcher's variables give rank and size; the ranks meet at MASTER_ADDR,
which follows by itself on one host only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.errors import MeshError
from meshwright.system.bounded import shortened
from meshwright.system.host import interface_towards, loopback
from meshwright.system.numbers import MAX_RANKS, environment_number

DEFAULT_PORT = 29500
"""Port of torch, for a job whose launcher gives it no name."""
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports for the rendezvous of jobs, below the ephemeral ports of Linux (32768 and up)."""


class MpiLauncher(NamedTuple):
    """Names of the variables that one launcher sets in each process."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS = (
    MpiLauncher(
        "mpirun",
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    MpiLauncher(
        "mpirun",
        *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    MpiLauncher(
        "jsrun", *(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    MpiLauncher(
        "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_LOCAL_SIZE"
    ),
    MpiLauncher(
        "mpiexec of PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    ),
    MpiLauncher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    MpiLauncher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    MpiLauncher("mpirun", "MPI_RANKID", "MPI_NRANKS", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI, MVAPICH2, Spectrum LSF, Flux, HPE Cray, MPICH and Intel MPI, Cray's PMI,
Platform MPI.
"""
JOB_NAMES = (
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "FLUX_JOB_ID", "JSM_NAMESPACE"),
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
)
"""Variables that name the job, equal in all its processes."""


class MpiPlace(NamedTuple):
    """Place of this process in the job of an MPI launcher."""

    launcher: MpiLauncher
    rank: int
    size: int

    @property
    def description(self) -> str:
        """The launcher and what it has set, for messages."""
        return f"{self.launcher.name} ({self.launcher.size} = {self.size})"


def mpi_place(env: Mapping[str, str]) -> MpiPlace | None:
    """Return this process's place in a job of more than one process; None:
    no MPI launcher has started it.

    Raises:
        MeshError: a variable is no number, or the size of the job is unknown.
    """
    for launcher in LAUNCHERS:
        if env.get(launcher.rank) and env.get(launcher.size):
            rank, size = (
                environment_number(name, 0, high=MAX_RANKS, env=env) for name in launcher[1:3]
            )
            place = MpiPlace(launcher, rank, size)
            return place if place.size > 1 else None
    if (
        "PMIX_NAMESPACE" in env
        and env.get("PMIX_RANK", "0") != "0"
        and not env.get("SLURM_STEP_ID")
    ):
        raise MeshError(
            "MW-LAUNCH-100",
            f"an MPI launcher started this process (PMIX_RANK = {shortened(env['PMIX_RANK'], 20)}),"
            " and no variable has the number of processes: start with Open MPI's mpirun, with"
            " torchrun, or one process alone",
        )
    return None


def mpi_variables(place: MpiPlace, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch needs in a rank under an MPI launcher.

    Values set by the user are kept: MASTER_ADDR, MASTER_PORT, LOCAL_RANK, GLOO_SOCKET_IFNAME,
    NCCL_SOCKET_IFNAME.

    Raises:
        MeshError: the processes may be on several hosts and MASTER_ADDR is not set, or the local
            rank is unknown.
    """
    launcher = place.launcher
    local_size = environment_number(launcher.local_size, 0, high=MAX_RANKS, env=env)
    is_one_host = local_size == place.size or (
        launcher.name == "flux run" and env.get("FLUX_JOB_NNODES") == "1"
    )
    if not is_one_host and not env.get("MASTER_ADDR"):
        raise MeshError(
            "MW-LAUNCH-101",
            f"{place.description} started this process, and the ranks cannot find each other: they"
            " may be on several hosts. Set MASTER_ADDR to the host of rank 0 for all of them"
            " (mpirun -x MASTER_ADDR=HOST; mpiexec -genv MASTER_ADDR HOST), start with torchrun or"
            " srun, or without a launcher for the ranks of this machine",
        )
    local_rank = env.get("LOCAL_RANK") or env.get(launcher.local_rank)
    if local_rank is None:
        raise MeshError(
            "MW-LAUNCH-102",
            f"{place.description} started this process without {launcher.local_rank}, its number on"
            " this host: set LOCAL_RANK in each process, or start with torchrun or srun",
        )
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": env.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": env.get("MASTER_PORT") or str(_port_of_job(env)),
    }
    # on one host nothing leaves it; on several, gloo may resolve the name of its own host to a
    # loopback
    interface = interface_towards(env["MASTER_ADDR"]) if env.get("MASTER_ADDR") else loopback()
    if interface is not None:
        variables |= {
            name: env.get(name) or interface
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
    return variables


def _port_of_job(env: Mapping[str, str]) -> int:
    """Return the rendezvous port that follows from the name of the job,
    or torch's default without a name.
    """
    job = next((env[name] for name in JOB_NAMES if env.get(name)), None)
    return (
        DEFAULT_PORT
        if job is None
        else FIRST_PORT + zlib.crc32(job.encode(errors="replace")) % NUM_PORTS
    )
