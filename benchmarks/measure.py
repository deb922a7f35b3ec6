"""What the ranks run: contenders timed in turns inside one world, or one of them alone under the observer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from contenders import Contender, Ours, Shown
from observe import Observer

Ranks = tuple[int, ...]
"""A group: its global ranks, in order."""

Builder = Callable[[], Contender | None]
"""Called on every rank; None: this rank has no part in it."""

STEPS_SHOWN = 3
"""Untimed steps at the start: they warm up, and their losses are compared."""


class Block(NamedTuple):
    """Some steps of one contender in a row, as one rank saw them, per step."""

    wall_s: float
    cpu_s: float
    """Of all threads of this rank."""
    main_thread_s: float
    """CPU time of the thread that runs Python: all but the transport's own threads."""
    machine_cpu_s: float
    """Of all processes of this machine, ours included."""
    loopback_bytes: float
    """Received on the loopback interface by all processes: what really went between the ranks, and others' messages."""


class RankTimes(NamedTuple):
    """One rank's part of a comparison."""

    shown: dict[str, list[Shown]]
    """The first steps of each contender that has a part here."""
    blocks: list[dict[str, Block]]
    """Per repeat."""


class RankObserved(NamedTuple):
    """One rank of one contender in one step that nobody timed."""

    peak_bytes: int
    wire_bytes: dict[Ranks, float]
    """By group, seen from below."""
    counted_bytes: dict[Ranks, float]
    """By group, as our own mesh counts them; empty for others."""


def machine_cpu_s() -> float:
    """CPU seconds that this machine has spent in all processes since it started; 0 where the kernel does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / 100


def loopback_bytes() -> int:
    """Bytes that this machine's loopback interface has received since it started; 0 where the kernel does not tell."""
    devices = Path("/proc/net/dev")
    for line in devices.read_text().splitlines() if devices.exists() else []:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def race(rank: int, world_size: int, builders: Mapping[str, Builder], repeats: int, steps: int) -> RankTimes:
    """Build all, then repeat: a few steps of each, in turns; the order is turned round from repeat to repeat."""
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
    """From the moment that all ranks are ready to the moment that all are done."""
    dist.barrier()
    before = machine_cpu_s(), loopback_bytes(), time.process_time(), time.thread_time(), time.perf_counter()
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
    """One step of one contender, after two that let its buffers and its optimizer's state come into being."""
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
        ranks_of = {group.name: group.ranks for group in (mesh.pp, mesh.dp, mesh.tp, mesh.world)}
        for (name, _), (_, wire_bytes) in mesh.traffic.counts.items():
            ranks = ranks_of[name]  # with one axis in use, it and the world are the same ranks
            counted[ranks] = counted.get(ranks, 0.0) + wire_bytes
    return RankObserved(observer.peak_bytes, dict(observer.wire_bytes), counted)
