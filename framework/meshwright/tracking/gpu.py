"""GPU metrics by NVML, the library behind nvidia-smi: utilization, memory, power, temperature,
SM clock, throttling.

    each rank    thread 1      NVML -> the newest sample of its device; a query may block or raise
                 thread 2      newest sample -> store; on rank 0 the samples of all ranks -> min, mean, max
    rank 0       after_step    the newest folded samples, once each -> metrics of the step's record

The threads are daemons, and a step reads one attribute: no query and no other rank can block it. A
sample older than STALE_PERIODS periods is left out: if NVML blocks on one device, only that
device's metrics end. Without nvidia-ml-py or NVML there are no metrics, and one line with the
reason.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch

from meshwright.mesh.mesh import Mesh
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.system.bounded import parse_json
from meshwright.terminal.format import GIB
from meshwright.terminal.output import Warn
from meshwright.tracking.tracker import never_raising, warn_on_stderr

PERIOD_S, RANKS_PER_S = 2.0, 2_000
"""Seconds between samples; the ranks together write at most RANKS_PER_S of them
per second into the store.
"""
STALE_PERIODS, JOIN_S = 5, 1.0
"""Periods after which a sample is too old to report;
seconds to wait at the end for a thread that blocks in NVML.
"""
EXTREMES: Mapping[str, tuple[Callable[[list[float]], float], tuple[str, ...]]] = {
    "min": (min, ("utilization_share", "power_w", "sm_clock_mhz")),
    "max": (max, ("memory_gib", "power_w", "temperature_c")),
}
"""Metrics over all devices besides the means: prefix -> (function, quantities)."""
POWER_CAP, SLOWDOWNS = 0x4, 0x8 | 0x20 | 0x40 | 0x80
"""Clock event reasons: power limit, as usual under load; hardware slowdown, thermal (two kinds)
and power brake.
"""


class NvmlDevice:
    """NVML handle of one device. ``nvml``: the module ``pynvml`` of nvidia-ml-py; ``uuid``:
    as torch gives it.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def sample(self) -> dict[str, float]:
        """Return the quantities that the device has. Blocks for NVML.

        Raises:
            NVMLError: it has none of them; the error of the last query.
        """
        nvml, handle = self._nvml, self._handle

        def has_reason(bits: int) -> bool:
            return bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & bits)

        queries: dict[str, Callable[[], float]] = {
            "utilization_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,  # %
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_capped_share": lambda: has_reason(POWER_CAP),
            "throttled_share": lambda: has_reason(SLOWDOWNS),
        }
        found: dict[str, float] = {}
        for name, query in queries.items():
            try:
                found[name] = float(query())
            except nvml.NVMLError as error:  # most often: not supported by this device
                last = error
        if not found:
            raise last
        return found


def open_device(device: torch.device) -> NvmlDevice:
    """Return a CUDA device in NVML. Raises ImportError without nvidia-ml-py,
    NVMLError without NVML or the device.
    """
    import pynvml as nvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

    nvml.nvmlInit()
    return NvmlDevice(nvml, str(torch.cuda.get_device_properties(device).uuid))


def fold(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics ``gpu/...`` over the samples of several devices,
    with the number of devices.
    """
    found = {"gpu/devices": float(len(samples))}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        found[f"gpu/{name}"] = sum(values) / len(values)
        found |= {
            f"gpu/{word}_{name}": of(values)
            for word, (of, names) in EXTREMES.items()
            if name in names
        }
    return found


class _TimedValue(NamedTuple):
    at_s: float  # time.monotonic()
    value: Any


class GpuMetrics(Observer):
    """Observer that samples this rank's GPU in the background;
    rank 0 adds the metrics of all GPUs to the record.
    """

    def __init__(
        self,
        opened: Callable[[torch.device], NvmlDevice] = open_device,
        period_s: float = PERIOD_S,
        warn: Warn = warn_on_stderr,
    ) -> None:
        self._open_device, self._period_s, self._warn = opened, period_s, never_raising(warn)
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._note = '{"number": 0}'
        """Newest sample of this rank, or the reason why there is none, as JSON with its number."""
        self._notes: dict[int, _TimedValue] = {}  # on rank 0, by rank
        self._folded: _TimedValue | None = None  # on rank 0: metrics that are not yet recorded
        self._has_warned = False

    def before_step(self, parts: Parts) -> None:
        """Start the threads before the first step."""
        if not self._threads:
            self._period_s = max(self._period_s, parts.mesh.grid.size / RANKS_PER_S)
            for run in (self._sample, self._exchange):
                self._threads.append(threading.Thread(target=run, args=(parts.mesh,), daemon=True))
                self._threads[-1].start()

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Add the newest metrics to the step's, on rank 0,
        unless an earlier step has them or they are too old.
        """
        folded, self._folded = self._folded, None
        if folded is not None and self._is_fresh(folded):
            for name, value in folded.value.items():
                event.metrics.setdefault(name, value)

    def after_training(self, parts: Parts) -> None:
        """End the threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def on_error(self, parts: Parts, error: Exception) -> None:
        """End the threads."""
        self.after_training(parts)

    def _is_fresh(self, timed: _TimedValue) -> bool:
        return time.monotonic() - timed.at_s <= STALE_PERIODS * self._period_s

    def _sample(self, mesh: Mesh) -> None:
        """Run the thread that uses NVML."""
        device: NvmlDevice | None = None
        for number in count(1):
            try:
                device = device or self._open_device(mesh.device)
                self._note = json.dumps({"number": number, "sample": device.sample()})
            except Exception as error:
                self._note = json.dumps({"number": number, "why": _reason(error)})
            if device is None or self._ended.wait(self._period_s):
                return

    def _exchange(self, mesh: Mesh) -> None:
        """Run the thread that uses the store. Its errors end the metrics."""
        try:
            store = mesh.open_store()
            names = {f"gpu/{rank}": rank for rank in range(mesh.grid.size)}
            while not self._ended.wait(self._period_s):
                if store is not None:
                    store.put(f"gpu/{mesh.rank}", self._note)
                if mesh.rank == 0:
                    notes = store.read(list(names)) if store is not None else {"gpu/0": self._note}
                    self._receive({names[name]: note for name, note in notes.items()}, mesh.nodes)
        except Exception as error:
            if mesh.rank == 0 and not self._ended.is_set():
                self._warn(f"the metrics of GPUs end here, the run continues: {_reason(error)}")

    def _receive(self, notes: Mapping[int, str], nodes: list[str]) -> None:
        """Take the notes of all ranks, and fold the samples if a new one is among them."""
        new = {
            rank: note
            for rank, note in notes.items()
            if rank not in self._notes or self._notes[rank].value != note
        }
        self._notes |= {rank: _TimedValue(time.monotonic(), note) for rank, note in new.items()}
        samples: list[dict[str, float]] = []
        why: dict[int, str] = {}
        for rank, each in self._notes.items():
            content = parse_json(each.value)
            if not self._is_fresh(each):
                why[rank] = f"NVML has not answered for {time.monotonic() - each.at_s:.2g} s"
            elif "why" in content:
                why[rank] = content["why"]
            elif "sample" in content:
                samples.append(content["sample"])
        if why and not self._has_warned:
            self._has_warned, rank = True, min(why)
            where = f"rank {rank} on {nodes[rank]}" if nodes else f"rank {rank}"
            self._warn(
                f"no metrics of the GPU of {where}, the run continues: {why[rank]}. "
                "tracking.gpu_metrics = false leaves them out"
            )
        if new and samples:
            self._folded = _TimedValue(time.monotonic(), fold(samples))


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
