"""Measured rates of this machine as a hardware file. min(cores, ranks)
processes measure at the same time, as in a run.

products    (n, n) x (n, n), small to large                    FLOPs -> FLOPs per second
copies      x + y, gelu, softmax, layer norm, of tensors       bytes -> bytes per second
            larger than any cache
operations  a small network, forward and backward              start-up seconds of an operation
a layer     forward and backward, predicted and measured       fraction of the rates that it reaches
messages    each kind, each after a computation                latency, bytes per second
"""

from __future__ import annotations

import gc
import os
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.config.keys import toml_value
from meshwright.mesh.comm import Group, Transfer
from meshwright_plan.planner.hardware import Hardware, Link, Message, Rate
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.operations import WorkKind, WorkRecorder
from meshwright_plan.planner.profile import LayerProfiler, counting_group
from meshwright_plan.planner.rates import PerformanceModel

SIDES = (16, 32, 64, 128, 256, 512, 1024)
COPIED = tuple(4**power for power in range(5, 12))
"""Numbers of elements of the tensors in elementwise measurements."""
POOL_BYTES = 2**27
"""Total size of the tensors that elementwise measurements use in turn: larger than caches,
as activations are.
"""
MAX_IN_POOL = 2000
ROW = 256
"""Elements per row of softmax and layer norm."""
ELEMENTWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x + 1.0,
    torch.nn.functional.gelu,
    lambda x: x.view(-1, ROW).softmax(-1),
    lambda x: torch.nn.functional.layer_norm(x.view(-1, ROW), (ROW,)),
)
"""Measured elementwise operations, limited by memory bandwidth or by computation;
all have equal weight.
"""
AIM_S = 0.06
"""Seconds of one timed run."""
REPEATS = 5
SUMMED = 2**19
"""Number of elements of the message that measures a link's rate."""
MESSAGES = 20
BEFORE_SIDE = 384
"""Side of the square product before each message, which takes about a millisecond."""


class DeviceRates(NamedTuple):
    """Rates measured by one process."""

    products: list[Rate]
    copies: list[Rate]
    operation_s: float


def fastest_s(run: Callable[[], object], aim_s: float = AIM_S) -> float:
    """Return the seconds of one call: the fastest of ``REPEATS`` runs of about ``aim_s``,
    as other load only slows.
    """
    run()
    # timeit turns the garbage collector off, a run does not
    timer = timeit.Timer(run, setup=gc.enable)
    times = max(1, int(aim_s / max(timer.timeit(1), 1e-7)))
    return min(timer.repeat(REPEATS, times)) / times


def measure_device(dtype: torch.dtype) -> DeviceRates:
    """Measure the rates of this process while the other processes run."""
    products = []
    for side in SIDES:
        a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
        flops = 2.0 * side**3
        products.append(Rate(size=flops, per_s=flops / fastest_s(partial(torch.matmul, a, b))))
    copies = []
    for elements in COPIED:
        tensor_bytes = elements * dtype.itemsize
        number = min(MAX_IN_POOL, max(2, POOL_BYTES // tensor_bytes))
        pool = cycle(torch.ones(number, elements, dtype=dtype))
        seconds = [
            fastest_s(partial(_run_on_next, operation, pool), AIM_S / 4)
            for operation in ELEMENTWISE
        ]
        moved = 2.0 * tensor_bytes
        copies.append(Rate(size=moved, per_s=moved * len(ELEMENTWISE) / sum(seconds)))
    return DeviceRates(products, copies, _operation_s(dtype, products, copies))


def _run_on_next(
    operation: Callable[[torch.Tensor], torch.Tensor], pool: Iterator[torch.Tensor]
) -> torch.Tensor:
    return operation(next(pool))


class _Block(nn.Module):
    """Transformer layer of common proportions, (B, S, D) -> (B, S, D)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def measure_block(hardware: Hardware) -> float:
    """Return the fraction of the rates in ``hardware`` that a whole transformer layer reaches,
    0..1.
    """
    block, x = _Block(256, 8), torch.randn(4, 256, 256, requires_grad=True)
    meta = torch.empty_like(x, device="meta").requires_grad_()
    profiler = LayerProfiler(
        counting_group(1), _no_loss, ExecutionOptions(fuses_any_attention=False)
    )
    (profile,) = profiler.profile([("block", block)], meta, None)
    performance = PerformanceModel.of(hardware)
    seconds = sum(
        work.times * performance.work_s(work, "float32", backward=False)
        for work in (*profile.forward, *profile.backward)
    )
    gradient = torch.ones_like(x)
    return min(1.0, seconds / fastest_s(lambda: block(x).backward(gradient), 4 * AIM_S))


def _no_loss(output: object, labels: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def _operation_s(dtype: torch.dtype, products: Sequence[Rate], copies: Sequence[Rate]) -> float:
    """Return the overhead in seconds per operation, from a tiny network: (time - computation)
    / operations.
    """
    layers = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
            for _ in range(8)
        )
    ).to(dtype)
    x = torch.randn(4, 16).to(dtype)

    def step() -> None:
        layers(x).sum().backward()

    step()
    with WorkRecorder(counting_group(1)) as recorder:
        step()
    measured_s = fastest_s(step)
    computed_s = sum(
        (
            products[0].size / products[0].per_s
            if op.kind is WorkKind.PRODUCT
            else copies[0].size / copies[0].per_s
        )
        for op in recorder.ops
    )
    return max(0.0, (measured_s - computed_s) / len(recorder.ops))


def measure_links(group: Group) -> dict[Message, Link]:
    """Measure each kind of message between the ranks of ``group``. Collective and blocking.

    Each collective follows a matrix product, as in a run: the same cores carry it, and it waits for
    the slowest rank. The products' own time is subtracted. A "send" is timed alone, around a ring.
    """
    factor, n = torch.randn(BEFORE_SIDE, BEFORE_SIDE), group.size
    following, previous = (group.rank + 1) % n, (group.rank - 1) % n

    def send_around(whole: torch.Tensor) -> None:
        transfers = [
            Transfer(whole, following, True),
            Transfer(torch.empty_like(whole), previous, False),
        ]
        for handle in group.exchange(transfers, lambda: "a message"):
            handle.wait()

    # kind -> (function, fraction of the tensor on the wire, hops)
    messages: dict[Message, tuple[Callable[[torch.Tensor], object], float, int]] = {
        "all_reduce": (lambda whole: group.all_reduce(whole).wait(), 2 * (n - 1) / n, 2 * (n - 1)),
        "all_gather": (
            lambda whole: group.all_gather(whole, whole[: len(whole) // n].clone()).wait(),
            (n - 1) / n,
            n - 1,
        ),
        "reduce_scatter": (
            lambda whole: group.reduce_scatter(torch.empty(len(whole) // n), whole).wait(),
            (n - 1) / n,
            n - 1,
        ),
        "send": (send_around, 1.0, 1),
    }

    def timed(
        send: Callable[[torch.Tensor], object] | None, elements: int, *, computes: bool = True
    ) -> float:
        seconds = []
        for _ in range(REPEATS):
            whole = torch.zeros(elements)
            group.barrier()
            start = time.perf_counter()
            for _ in range(MESSAGES):
                if computes:
                    factor @ factor
                if send is not None:
                    send(whole)
            seconds.append((time.perf_counter() - start) / MESSAGES)
        return median_high(seconds)

    links: dict[Message, Link] = {}
    products_s = timed(None, n)
    for name, (send, on_wire, hops) in messages.items():
        computes = name != "send"
        small_s, large_s = (
            timed(send, elements, computes=computes) - computes * products_s
            for elements in (n, SUMMED // n * n)
        )
        rate = SUMMED // n * n * 4 * on_wire / max(large_s - small_s, 1e-6)
        links[name] = Link(bytes_per_s=rate, latency_s=max(small_s, 1e-7) / hops)
    return links


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_hardware(
    measured: Sequence[dict[str, DeviceRates]],
    links: dict[Message, Link],
    memory_bytes: int,
    ranks: int,
) -> Hardware:
    """Build the hardware description from the medians over processes. ``ranks``:
    number of ranks per node in it.
    """

    def median_curve(curves: Sequence[list[Rate]]) -> list[Rate]:
        by_size = zip(*curves, strict=True)
        return [
            Rate(size=same[0].size, per_s=median_high(rate.per_s for rate in same))
            for same in by_size
        ]

    first = next(iter(measured[0]))
    copies = median_curve([each[first].copies for each in measured])
    products = {
        dtype: median_curve([each[dtype].products for each in measured]) for dtype in measured[0]
    }
    return Hardware(
        name=f"this machine, {cores()} cores",
        kind="cpu",
        devices_per_node=ranks,
        memory_bytes=memory_bytes // ranks,
        processors=cores(),
        memory_bytes_per_s=copies[-1].per_s,
        flops_per_s={dtype: max(rate.per_s for rate in curve) for dtype, curve in products.items()},
        node_link=links["all_reduce"],
        cluster_link=links["all_reduce"],
        host_link=Link(bytes_per_s=copies[-1].per_s, latency_s=0.0),
        operation_s=median_high(each[first].operation_s for each in measured),
        products=products[first],
        other_products={dtype: curve for dtype, curve in products.items() if dtype != first},
        copies=copies,
        messages=links,
    )


def to_toml(hardware: Hardware) -> str:
    """Return the hardware file as TOML text."""
    values = hardware.model_dump(exclude_none=True)
    return "".join(
        f"{key} = {_toml(value)}\n" for key, value in values.items() if value not in ([], {})
    )


def _toml(value: Any, digits: int = 4) -> str:
    """Format a value of the file: a measured number by its digits, a curve with a line per size."""
    if isinstance(value, dict):
        parts = (f"{key} = {_toml(each, 6 if key == 'size' else 4)}" for key, each in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        return "[\n" + "".join(f"  {_toml(each)},\n" for each in value) + "]"
    return f"{value:.{digits}g}" if isinstance(value, float) else toml_value(value)
