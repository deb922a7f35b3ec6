"""Command ``meshwright calibrate``: rates of this machine, of one GPU, or of the rings of a job's ranks."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.system.atomic import write_out
from meshwright.system.host import node_name
from meshwright.terminal.output import put
from meshwright_launch.environment import (
    Launcher,
    RankPlace,
    check_rendezvous,
    launch_environment,
    rank_variables,
    read_place,
)
from meshwright_launch.pool import RankPool
from meshwright_launch.rank import DUPLICATE_ERROR_DELAY_S, set_threads
from meshwright_plan.planner.calibrate import (
    DeviceRates,
    build_hardware,
    cores,
    measure_block,
    measure_device,
    measure_links,
    to_toml,
)
from meshwright_plan.planner.calibrate_device import measure_hardware
from meshwright_plan.planner.hardware import Hardware, Link, Message, hardware_text, read_hardware
from meshwright_plan.planner.rings import Rings, check_nodes, measure_rings, rings_to_toml


def calibrate(options: argparse.Namespace, _: list[str]) -> int:
    """Measure this machine, or a job's rings, and write a hardware file for ``--cluster``.

    Raises:
        UserError: ``--rings`` without ``--cluster`` or outside of a job, or an invalid hardware file.
    """
    if options.rings:
        return _calibrate_rings(options.cluster, options.device, options.out)
    if options.cluster is not None:
        raise UserError(
            "MW-LAUNCH-087", "calibrate --cluster names the hardware of --rings: add --rings, or leave it out"
        )
    out, ranks = options.out, options.ranks
    if options.device == "cuda":
        return _calibrate_gpu(out)
    with RankPool(max(2, min(cores(), ranks))) as pool:
        measured = pool.run(measure_core, min(cores(), ranks), timeout_s=600)
        links = pool.run(measure_all_links, max(2, min(cores(), ranks)), timeout_s=600)[0]
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = build_hardware(measured, links, memory_bytes, ranks)
        shares = pool.run(measure_block_share, min(cores(), ranks), found, timeout_s=600)
    found = found.model_copy(update={"whole_share": sorted(shares)[len(shares) // 2]})
    write_out(out, f"# Measured by `meshwright calibrate`.\n\n{to_toml(found)}")
    largest, link = found.products[-1], found.node_link
    put(
        f"{found.name}: products reach {largest.per_s / 1e9:,.1f} GFLOP/s on a core, copies "
        f"{found.memory_bytes_per_s / 1e9:,.1f} GB/s; an operation takes {found.operation_s * 1e6:.1f} us besides; "
        f"links {link.bytes_per_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:.0f} us\nwritten: {out}"
    )
    return 0


def _calibrate_rings(cluster: str | None, device: str, out: Path) -> int:
    """Measure the rings of this job, as one of its ranks; rank 0 writes ``cluster``'s file and the rings to ``out``."""
    launcher = launch_environment()
    os.environ.update(rank_variables(launcher))
    place = RankPlace(0, 1, 0, 1) if launcher is Launcher.NONE else read_place()
    try:
        if cluster is None:
            raise UserError(
                "MW-LAUNCH-088", "calibrate --rings adds to a hardware file: name it, such as --cluster h100"
            )
        check_rendezvous()
        text, known = hardware_text(cluster), read_hardware(cluster)
        if known.node_rings or known.cluster_rings:
            raise UserError("MW-LAUNCH-089", f"--cluster {cluster} has rings already: name a file without them")
        set_threads(1)
        mesh = open_mesh(Grid(1, place.world_size, 1), device)
        rings = measure_rings(device, place.world_size, check_nodes(mesh.world.gather_objects(node_name())))
    except UserError:
        if place.rank != 0:  # all ranks have the same error: rank 0 prints it, and the launcher ends the others
            time.sleep(DUPLICATE_ERROR_DELAY_S)
        raise
    if mesh.rank == 0:
        tables = "\n".join(rings_to_toml(rings))
        write_out(out, f"{text.rstrip()}\n\n# Measured by `meshwright calibrate --rings`.\n{tables}\n")
        put(_describe(rings) + f"\nwritten: {out}")
    close_mesh(mesh)
    return 0


def _describe(rings: Rings) -> str:
    """Return a line for each ring."""
    kinds = {"node_rings": "ranks of a node", "cluster_rings": "nodes"}
    return "\n".join(
        f"all-reduce over {ring.size} {kinds[name]}: {ring.bytes_per_s / 1e9:,.2f} GB/s a rank, "
        f"{ring.latency_s * 1e6:,.0f} us a hop"
        for name, found in rings.items()
        for ring in found
    )


def _calibrate_gpu(out: Path) -> int:
    """Measure the first GPU of this machine and write the hardware file."""
    found = measure_hardware(torch.device("cuda", 0))
    write_out(out, f"# Measured by `meshwright calibrate --device cuda`.\n\n{to_toml(found)}")
    peak = found.flops_per_s["bfloat16"]
    put(
        f"{found.name}: products reach {found.product_share:.1%} of {peak / 1e12:,.0f} TFLOP/s "
        f"in bfloat16, copies {found.memory_bytes_per_s / 1e9:,.0f} GB/s, host memory "
        f"{found.host_link.bytes_per_s / 1e9:,.1f} GB/s\nwritten: {out}"
    )
    return 0


def measure_core(rank: int, world_size: int) -> dict[str, DeviceRates]:
    """Measure this rank's core in float32 and bfloat16, while the other ranks do the same."""
    torch.set_num_threads(1)
    return {str(dtype).removeprefix("torch."): measure_device(dtype) for dtype in (torch.float32, torch.bfloat16)}


def measure_block_share(rank: int, world_size: int, hardware: Hardware) -> float:
    """Return the share (0..1) of the rates in ``hardware`` that a whole block reaches, with all ranks busy at once."""
    torch.set_num_threads(1)
    return measure_block(hardware)


def measure_all_links(rank: int, world_size: int) -> dict[Message, Link]:
    """Measure the links between all ranks. Collective over dp."""
    torch.set_num_threads(1)
    mesh = open_mesh(Grid(1, world_size, 1), "cpu")
    return measure_links(mesh.replicas)
