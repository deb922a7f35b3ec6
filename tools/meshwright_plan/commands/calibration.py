"""Command ``meshwright calibrate``: rates of this machine, or of one GPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.system.atomic import write_out
from meshwright.terminal.output import put
from meshwright_launch.pool import RankPool
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
from meshwright_plan.planner.hardware import Hardware, Link, Message


def calibrate(options: argparse.Namespace, _: list[str]) -> int:
    """Measure this machine, or its first GPU, and write a hardware file for ``--cluster``."""
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
        f"{found.name}: products reach {largest.per_s / 1e9:,.1f} GFLOP/s on a core, copies"
        f" {found.memory_bytes_per_s / 1e9:,.1f} GB/s; an operation takes"
        f" {found.operation_s * 1e6:.1f} us besides; links {link.bytes_per_s / 1e9:,.2f} GB/s,"
        f" {link.latency_s * 1e6:.0f} us\nwritten: {out}"
    )
    return 0


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
    return {
        str(dtype).removeprefix("torch."): measure_device(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }


def measure_block_share(rank: int, world_size: int, hardware: Hardware) -> float:
    """Return the share (0..1) of the rates in ``hardware`` that a whole block reaches,
    with all ranks busy at once.
    """
    torch.set_num_threads(1)
    return measure_block(hardware)


def measure_all_links(rank: int, world_size: int) -> dict[Message, Link]:
    """Measure the links between all ranks. Collective over dp."""
    torch.set_num_threads(1)
    mesh = open_mesh(Grid(dp=world_size), "cpu")
    return measure_links(mesh.replicas)
