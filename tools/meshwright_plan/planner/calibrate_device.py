"""Measured rates of one GPU as a hardware file: ``meshwright calibrate --device cuda``.

products    bfloat16 and float32, (n, n) x (n, n) on random numbers     FLOPs per second
attention   causal, forward, and backward alone                         share of the peak
copies      elementwise operations on more than any cache holds          bytes per second
host        copies from pinned memory                                    bytes per second

Peaks and links between devices come from the device's data sheet if it is known: one process cannot
measure them. Otherwise the peaks are the measured products, and all links are the one to the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from meshwright.errors import ConfigError
from meshwright_plan.planner.hardware import Hardware, Link, known, read_hardware
from meshwright_plan.planner.rates import MEASURED_ON_GPU, PerformanceModel

REPEATS = 3
ROW = 4096
"""Elements of a row of the measured norm."""
LATENCY_S = 10e-6
"""Assumed latency of a copy from host memory."""
OF_SHEET = (
    "node_link",
    "cluster_link",
    "node_send",
    "cluster_send",
    "devices_per_domain",
    "host_memory_bytes",
    "host_memory_bytes_per_s",
)
"""Fields of a data sheet that one process cannot measure."""


class Sizes(NamedTuple):
    """Sizes of the measured operations."""

    side: int = 8192
    """Side of the products; half of it in float32."""
    heads: int = 32
    tokens: int = 8192
    elements: int = 2**28
    """Elements of the tensors in elementwise operations and copies."""
    aim_s: float = 0.5
    """Seconds of one timed run: long enough for the clock of a loaded device."""


class DeviceFacts(NamedTuple):
    """Properties of a device that torch reports."""

    name: str
    num_devices: int
    """Devices of this node."""
    memory_bytes: int
    reserved_bytes: int
    """Memory used before the first tensor."""
    processors: int


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a device. Call it before any large tensor is allocated.

    Raises:
        ConfigError: there is no GPU.
    """
    if device.type == "cpu":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceFacts("this machine", 1, memory_bytes, 0, os.cpu_count() or 1)
    if not torch.cuda.is_available():
        raise ConfigError(
            "MW-PLANNER-007",
            "calibrate --device cuda: torch sees no GPU here: measure the cores with --device cpu,"
            " or use a CUDA build of torch",
        )
    torch.zeros(1, device=device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    found = torch.cuda.get_device_properties(device)
    count = torch.cuda.device_count()
    return DeviceFacts(
        found.name, count, total_bytes, total_bytes - free_bytes, found.multi_processor_count
    )


def data_sheet(name: str) -> Hardware | None:
    """Return the known hardware that a device's name contains, such as ``h200`` in "NVIDIA H200";
    None without one.
    """
    words = name.lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(words):  # slower variants under the same name
        return None
    return next((read_hardware(each) for each in known() if each in words), None)


def call_s(call: Callable[[], object], device: torch.device, aim_s: float) -> float:
    """Return the median seconds of a call over runs of about ``aim_s``;
    the device is synchronised around each run.
    """

    def run(times: int) -> float:
        _settle(device)
        start_s = time.perf_counter()
        for _ in range(times):
            call()
        _settle(device)
        return (time.perf_counter() - start_s) / times

    run(2)
    times = max(1, int(aim_s / max(run(1), 1e-6)))
    return median(run(times) for _ in range(REPEATS))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_rate(device: torch.device, dtype: torch.dtype, side: int, aim_s: float) -> float:
    """Return the FLOP/s of a square product of random numbers."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / call_s(lambda: a @ b, device, aim_s)


def attention_s(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return (forward, backward) seconds of causal attention in bfloat16 with head dim 128."""
    shape = (1, sizes.heads, sizes.tokens, 128)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    y = forward()
    gradient = torch.ones_like(y)
    backward_s = call_s(
        lambda: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True), device, sizes.aim_s
    )
    return call_s(forward, device, sizes.aim_s), backward_s


def copy_rate(device: torch.device, sizes: Sizes) -> float:
    """Return the bytes per second that the elementwise operations of a step read and write:
    their harmonic mean.

    Rows are those of a large model: with rows of 256 elements an H200's norm and softmax moved less
    than half of it.
    """
    x = torch.ones(sizes.elements, device=device, dtype=torch.bfloat16)
    total = torch.zeros(sizes.elements, device=device)
    row = min(ROW, sizes.elements)
    operations: list[tuple[float, Callable[[], object]]] = [
        (4.0, lambda: x + 1.0),
        (4.0, lambda: F.silu(x)),
        (4.0, lambda: F.rms_norm(x.view(-1, row), (row,))),
        (10.0, lambda: total.add_(x)),
    ]
    rates = [
        num_bytes * sizes.elements / call_s(call, device, sizes.aim_s / 4)
        for num_bytes, call in operations
    ]
    return len(rates) / sum(1.0 / rate for rate in rates)


def host_rate(device: torch.device, sizes: Sizes) -> float:
    """Return the bytes per second of a copy from host memory, pinned for a GPU."""
    source = torch.ones(sizes.elements, dtype=torch.int8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return sizes.elements / call_s(
        lambda: target.copy_(source, non_blocking=True), device, sizes.aim_s / 4
    )


def measure_hardware(device: torch.device, sizes: Sizes | None = None) -> Hardware:
    """Measure a device and return its hardware description; takes seconds on a GPU.

    Raises:
        ConfigError: there is no GPU.
    """
    sizes, facts = sizes or Sizes(), device_facts(device)
    sheet = data_sheet(facts.name)
    rates = {
        "bfloat16": product_rate(device, torch.bfloat16, sizes.side, sizes.aim_s),
        "float32": product_rate(device, torch.float32, sizes.side // 2, sizes.aim_s),
    }
    peaks = rates if sheet is None else dict(sheet.flops_per_s)
    host = Link(bytes_per_s=host_rate(device, sizes), latency_s=LATENCY_S)
    of_sheet: dict[str, Any] = {"node_link": host, "cluster_link": host}
    if sheet is not None:  # what is not measured
        of_sheet = {name: getattr(sheet, name) for name in OF_SHEET}
    found = Hardware(
        name=facts.name,
        kind=device.type,
        measured=True,
        devices_per_node=facts.num_devices,
        memory_bytes=facts.memory_bytes,
        reserved_bytes=facts.reserved_bytes,
        processors=facts.processors,
        memory_bytes_per_s=copy_rate(device, sizes),
        flops_per_s=peaks,
        host_link=host,
        **of_sheet,
    )
    return found.model_copy(
        update=_shares(found, rates["bfloat16"] / peaks["bfloat16"], sizes, device)
    )


def _shares(
    found: Hardware, product_share: float, sizes: Sizes, device: torch.device
) -> dict[str, float]:
    """Return the shares of the peak for which the planner's formulas reproduce the measured
    seconds.
    """
    whole = {"attention_share": 1.0, "attention_backward_share": 1.0}
    ideal = PerformanceModel(found.model_copy(update=whole), MEASURED_ON_GPU)
    forward_s, backward_s = attention_s(device, sizes)
    forward_flops = 2.0 * sizes.heads * sizes.tokens**2 * 128  # the causal half
    peak = found.flops_per_s["bfloat16"]
    forward_share = (
        forward_flops
        / forward_s
        / peak
        / ideal.attention_share(sizes.heads * sizes.tokens, backward=False)
    )
    shares = {
        "product_share": (
            product_share / ideal.product_share((1, sizes.side, sizes.side, sizes.side))
        ),
        "attention_share": forward_share,
        "attention_backward_share": 2.5 * forward_flops / backward_s / peak,
    }
    return {name: min(1.0, share) for name, share in shares.items()}
