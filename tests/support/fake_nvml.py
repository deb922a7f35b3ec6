"""A module with the API of nvidia-ml-py's ``pynvml``,
whose answers are those of an H100 SXM under load.
"""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

UUID = "1f3c5c2e-9b51-6a0d-4d55-5c7a3b9c0e11"
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=54),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(
        total=85520809984, free=8211398656, used=77309411328
    ),
    "nvmlDeviceGetPowerUsage": 687412,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1605,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
}


class NVMLError(Exception):
    """Base class of NVML errors, as in pynvml."""


class FakeNvml(ModuleType):
    """Fake ``pynvml``. ``changes``: other answers, or exceptions. ``hangs_after``:
    samples before it blocks.
    """

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(
        self, uuid: str = f"GPU-{UUID}", hangs_after: int | None = None, **changes: Any
    ) -> None:
        super().__init__("pynvml")
        self.uuid, self.hangs_after, self.num_samples = uuid, hangs_after, 0
        self.answers = ANSWERS | changes
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self.num_samples += 1
        if self.hangs_after is not None and self.num_samples > self.hangs_after:
            threading.Event().wait()
        return self._answer("nvmlDeviceGetUtilizationRates", handle)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer("nvmlDeviceGetMemoryInfo", handle)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self._answer("nvmlDeviceGetPowerUsage", handle)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", handle)

    def nvmlDeviceGetClockInfo(self, handle: str, type: int) -> Any:
        assert type == self.NVML_CLOCK_SM
        return self._answer("nvmlDeviceGetClockInfo", handle)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", handle)

    def _answer(self, name: str, handle: str) -> Any:
        assert self.is_open and handle == "handle"
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer
