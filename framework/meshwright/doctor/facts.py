"""Facts about the machine of one rank, and about the disk that the run will write to."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.doctor.nodes import clock_ahead_s, sees_directory
from meshwright.mesh.mesh import Mesh
from meshwright.system.process import versions

WRITTEN_BYTES = 2**26
CLOCK_ROUNDS = 5


class Facts(NamedTuple):
    """Facts about one rank's machine."""

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    device: str
    device_bytes: int
    """Memory of the device; on CPU that of the machine."""
    free_bytes: int
    """Unused part of that memory."""
    num_cpus: int
    load: float
    """Load average of the last minute: processes that want a CPU."""
    clock_s: float
    """Seconds that this clock is ahead of rank 0's."""
    sees_directory: bool
    """True if a file that rank 0 has just written into the run's directory is visible here."""
    write_bytes_per_s: float | None
    """Rate of a 64 MiB write with fsync into the run's directory; None if it failed,
    or not the host's first rank.
    """
    disk_problem: str | None


def gather_facts(mesh: Mesh, directory: Path) -> list[Facts]:
    """Gather the facts of all ranks over the world group.
    Every rank calls it and gets the same list; blocks.

    ``directory`` must exist on rank 0.
    """
    first_of_host = mesh.nodes.index(mesh.nodes[mesh.rank]) == mesh.rank
    clock_s = clock_ahead_s(mesh, CLOCK_ROUNDS)
    sees = sees_directory(mesh, directory)
    speed, problem = _write(directory) if first_of_host else (None, None)
    total, free = _memory(mesh.device)
    mine = Facts(
        mesh.rank,
        mesh.nodes[mesh.rank],
        tuple(versions().items()),
        torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
        total,
        free,
        os.cpu_count() or 1,
        os.getloadavg()[0],
        clock_s,
        sees,
        speed,
        problem,
    )
    found: list[Facts] = mesh.world.gather_objects(mine, Facts)
    return found


def _write(directory: Path) -> tuple[float | None, str | None]:
    """Write a test file and return (bytes per second, error text); one of the two is None."""
    place = directory / f".doctor-{socket.gethostname()}-{os.getpid()}"
    data = os.urandom(2**20)
    try:
        place.unlink(missing_ok=True)  # a link of this name would be written through
        begin_s = time.perf_counter()
        with place.open("xb") as file:
            for _ in range(WRITTEN_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - begin_s), None
    except OSError as error:
        return None, f"{error.strerror} (errno {error.errno})"
    finally:
        place.unlink(missing_ok=True)


def _memory(device: torch.device) -> tuple[int, int]:
    """Return (total, free) memory in bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
