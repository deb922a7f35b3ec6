"""Functions that the ranks run: contenders timed in turns inside one world,
or one alone under the observer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from contenders import Contender, Ours, Shown
from observe import Observer

Ranks = tuple[int, ...]
"""Group of ranks: its global ranks, in order."""

Builder = Callable[[], Contender | None]
"""Function called on every rank; None from a rank that takes no part."""

STEPS_SHOWN = 3
"""Untimed steps at the start, which warm up and whose losses are compared."""


class Block(NamedTuple):
    """Consecutive steps of one contender, measured on one rank, per step."""

    wall_s: float
    cpu_s: float
    """CPU seconds of all threads of this rank."""
    main_thread_s: float
    """CPU seconds of the thread that runs Python, without the transport's own threads."""
    machine_cpu_s: float
    """CPU seconds of all processes of this machine, the ranks included."""
    loopback_bytes: float
    """Bytes that all processes received on loopback: messages between the ranks,
    and those of other processes.
    """


class RankTimes(NamedTuple):
    """Measurements of one rank in a comparison."""

    shown: dict[str, list[Shown]]
    """First steps of each contender that has a part on this rank."""
    blocks: list[dict[str, Block]]
    """Blocks by contender, for each repeat."""


class RankObserved(NamedTuple):
    """Observations of one rank in one untimed step of one contender."""

    peak_bytes: int
    wire_bytes: dict[Ranks, float]
    """Bytes on the wire by group, from the observer."""
    counted_bytes: dict[Ranks, float]
    """Bytes by group, from the counters of this framework's mesh; empty for other contenders."""


def machine_cpu_s() -> float:
    """Return the CPU seconds of all processes since this machine started;
    0 if the kernel does not report them.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / 100


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received so far;
    0 if the kernel does not report them.
    """
    devices = Path("/proc/net/dev")
    for line in devices.read_text().splitlines() if devices.exists() else []:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def race(
    rank: int, world_size: int, builders: Mapping[str, Builder], repeats: int, steps: int
) -> RankTimes:
    """Build all contenders, then repeat a few steps of each in turns;
    the order reverses from repeat to repeat.
    """
    contenders = {name: builder() for name, builder in builders.items()}
    shown = {
        name: [contender.step() for _ in range(STEPS_SHOWN)] if contender else []
        for name, contender in contenders.items()
    }
    blocks: list[dict[str, Block]] = []
    for repeat in range(repeats):
        order = list(contenders)[:: 1 if repeat % 2 == 0 else -1]
        blocks.append({name: _timed(contenders[name], steps) for name in order})
    return RankTimes(shown, blocks)


def _timed(contender: Contender | None, steps: int) -> Block:
    """Measure some steps, from the moment that all ranks are ready (barrier)
    until all are done (barrier).
    """
    dist.barrier()
    before = (
        machine_cpu_s(),
        loopback_bytes(),
        time.process_time(),
        time.thread_time(),
        time.perf_counter(),
    )
    if contender is not None:
        for _ in range(steps):
            contender.step()
        contender.settle()
    cpu_s, main_thread_s = time.process_time() - before[2], time.thread_time() - before[3]
    dist.barrier()
    wall_s = time.perf_counter() - before[4]
    totals = wall_s, cpu_s, main_thread_s, machine_cpu_s() - before[0], loopback_bytes() - before[1]
    return Block(*(total / steps for total in totals))


def observe(rank: int, world_size: int, builder: Builder) -> RankObserved:
    """Observe one step of one contender, after two steps that allocate its buffers
    and its optimizer state.
    """
    with Observer() as observer:
        contender = builder()
        if contender is None:
            return RankObserved(0, {}, {})
        for _ in range(2):
            contender.step()
        contender.settle()
        if isinstance(contender, Ours):
            contender.mesh.traffic.reset()
        observer.restart()
        contender.step()
        contender.settle()
    counted: dict[Ranks, float] = {}
    if isinstance(contender, Ours):
        mesh = contender.mesh
        ranks_of = {
            group.name: group.ranks for group in (mesh.pp, mesh.replicas, mesh.tp, mesh.world)
        }
        for (name, _), (_, wire_bytes) in mesh.traffic.counts.items():
            ranks = ranks_of[name]  # with one axis in use, it and the world are the same ranks
            counted[ranks] = counted.get(ranks, 0.0) + wire_bytes
    return RankObserved(observer.peak_bytes, dict(observer.wire_bytes), counted)
