"""The rates of the machine at hand, measured by as many processes at once as will share it, as a hardware file.

products    (n, n) x (n, n), small to large                    FLOPs -> FLOPs a second
copies      z = x + y, from what a cache holds to what not     bytes -> bytes a second
operations  a small network, forward and backward              what each operation takes besides
links       sums and messages between processes                latency, bytes a second
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from framework.mesh.comm import Group
from framework.planner.hardware import Hardware, Link, Rate
from framework.planner.profile import paper_group
from framework.planner.tape import Kind, Tape

SIDES = (16, 32, 64, 128, 256, 512, 1024)
COPIED = tuple(4**power for power in range(5, 14))
"""Elements."""
AIM_S = 0.06
REPEATS = 5
SUMMED = 2**20
"""Elements of a sum that shows the rate of a link."""


class Measured(NamedTuple):
    """By one process."""

    products: list[Rate]
    copies: list[Rate]
    operation_s: float


def fastest_s(run: Callable[[], object], aim_s: float = AIM_S) -> float:
    """Seconds of one call: the median of several runs of as many as take a while."""
    run()
    start = time.perf_counter()
    run()
    times = max(1, int(aim_s / max(time.perf_counter() - start, 1e-7)))
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(times):
            run()
        found.append((time.perf_counter() - start) / times)
    return sorted(found)[REPEATS // 2]


def measure_device(dtype: torch.dtype) -> Measured:
    """This process, beside whatever else is running."""
    products = []
    for side in SIDES:
        a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
        products.append(Rate(size=2.0 * side**3, per_s=2.0 * side**3 / fastest_s(lambda a=a, b=b: a @ b)))  # type: ignore[misc]
    copies = []
    for elements in COPIED:
        x, y = torch.randn(elements).to(dtype), torch.randn(elements).to(dtype)
        moved = 3.0 * x.numel() * x.itemsize
        copies.append(Rate(size=moved, per_s=moved / fastest_s(lambda x=x, y=y: x + y)))  # type: ignore[misc]
    return Measured(products, copies, _operation_s(dtype, products, copies))


def _operation_s(dtype: torch.dtype, products: Sequence[Rate], copies: Sequence[Rate]) -> float:
    """Of a network so small that its operations are nothing but started: time over operations, less what they take."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(8))
    ).to(dtype)
    x = torch.randn(4, 16).to(dtype)

    def step() -> None:
        layers(x).sum().backward()

    step()
    with Tape(paper_group(1)) as tape:
        step()
    spent = fastest_s(step)
    computed = sum(
        (products[0].size / products[0].per_s if op.kind is Kind.PRODUCT else copies[0].size / copies[0].per_s)
        for op in tape.ops
    )
    return max(0.0, (spent - computed) / len(tape.ops))


def measure_link(group: Group) -> Link:
    """Between the processes of a group, which all call it: latency of the smallest sum, rate of a large one."""
    small, large = torch.zeros(1), torch.zeros(SUMMED)

    def timed(tensor: torch.Tensor, times: int) -> float:
        group.barrier()
        start = time.perf_counter()
        for _ in range(times):
            group.all_reduce(tensor).wait()
        return (time.perf_counter() - start) / times

    timed(small, 10)
    latency_s = sorted(timed(small, 50) for _ in range(REPEATS))[REPEATS // 2]
    seconds = sorted(timed(large, 3) for _ in range(REPEATS))[REPEATS // 2]
    n = group.size
    wire_bytes = 2 * (n - 1) / n * SUMMED * 4
    return Link(bytes_per_s=wire_bytes / max(seconds - latency_s, 1e-9), latency_s=latency_s / max(1, 2 * (n - 1)))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def put_together(measured: Sequence[dict[str, Measured]], link: Link, memory_bytes: int, ranks: int) -> Hardware:
    """The file's content: the median process. ``ranks``: that a node of this kind is to have."""

    def middle(rates: Sequence[list[Rate]]) -> list[Rate]:
        return [
            Rate(size=same[0].size, per_s=sorted(rate.per_s for rate in same)[len(same) // 2])
            for same in zip(*rates, strict=True)
        ]

    first = next(iter(measured[0]))
    products = middle([each[first].products for each in measured])
    copies = middle([each[first].copies for each in measured])
    operation_s = sorted(each[first].operation_s for each in measured)[len(measured) // 2]
    flops = {
        dtype: max(rate.per_s for rate in middle([each[dtype].products for each in measured])) for dtype in measured[0]
    }
    return Hardware(
        name=f"this machine, {cores()} cores",
        kind="cpu",
        devices_per_node=ranks,
        memory_bytes=memory_bytes // ranks,
        processors=cores(),
        memory_bytes_per_s=copies[-1].per_s,
        flops_per_s=flops,
        node_link=link,
        cluster_link=link,
        host_link=Link(bytes_per_s=copies[-1].per_s, latency_s=0.0),
        operation_s=operation_s,
        products=products,
        copies=copies,
    )


def to_toml(hardware: Hardware) -> str:
    """The file."""
    lines = [
        f'name = "{hardware.name}"',
        f'kind = "{hardware.kind}"',
        f"devices_per_node = {hardware.devices_per_node} # ranks",
        f"memory_bytes = {hardware.memory_bytes} # of a rank",
        f"processors = {hardware.processors} # cores, which the ranks of a node share",
        f"memory_bytes_per_s = {hardware.memory_bytes_per_s:.4g}",
        f"operation_s = {hardware.operation_s:.4g}",
        "",
        "[flops_per_s]",
        *(f"{dtype} = {rate:.4g}" for dtype, rate in hardware.flops_per_s.items()),
    ]
    for name in ("node_link", "cluster_link", "host_link"):
        link: Link = getattr(hardware, name)
        lines += ["", f"[{name}]", f"bytes_per_s = {link.bytes_per_s:.4g}", f"latency_s = {link.latency_s:.4g}"]
    for name in ("products", "copies"):
        for rate in getattr(hardware, name):
            lines += ["", f"[[{name}]]", f"size = {rate.size:.6g}", f"per_s = {rate.per_s:.4g}"]
    return "\n".join(lines) + "\n"
