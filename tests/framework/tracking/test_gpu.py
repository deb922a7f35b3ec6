"""Metrics of GPUs over a module with pynvml's API: their values, failures and queries that block;
and the real NVML.
"""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import meshwright
from meshwright.tracking import gpu
from meshwright.tracking.gpu import GpuMetrics, NvmlDevice, fold, open_device
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.observer import gpu_metrics
from tests.launch.test_python import made
from tests.support.fake_nvml import UUID, FakeNvml, NVMLError

PERIOD_S = 0.1
H100 = {
    "utilization_share": 0.97,
    "memory_gib": 72.0,
    "power_w": 687.412,
    "temperature_c": 61.0,
    "sm_clock_mhz": 1605.0,
    "power_capped_share": 1.0,
    "throttled_share": 0.0,
}
NAMES = {
    *("gpu/utilization_share", "gpu/min_utilization_share", "gpu/memory_gib", "gpu/max_memory_gib"),
    *(
        "gpu/power_w",
        "gpu/min_power_w",
        "gpu/max_power_w",
        "gpu/temperature_c",
        "gpu/max_temperature_c",
    ),
    *(
        "gpu/sm_clock_mhz",
        "gpu/min_sm_clock_mhz",
        "gpu/power_capped_share",
        "gpu/throttled_share",
        "gpu/devices",
    ),
}


def test_a_sample_has_the_units_of_its_names() -> None:
    assert NvmlDevice(FakeNvml(), UUID).sample() == pytest.approx(H100)
    assert NvmlDevice(FakeNvml(uuid=f"MIG-{UUID}"), UUID).sample() == pytest.approx(H100)


@pytest.mark.parametrize("reason", [0x8, 0x20, 0x40, 0x80])
def test_heat_and_faults_are_throttling_and_the_power_limit_is_not(reason: int) -> None:
    found = NvmlDevice(FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=reason), UUID).sample()
    assert (found["throttled_share"], found["power_capped_share"]) == (1, 0)
    idle = NvmlDevice(FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=0x1), UUID).sample()
    assert (idle["throttled_share"], idle["power_capped_share"]) == (0, 0)


def test_what_a_device_does_not_have_is_left_out() -> None:
    refused = NVMLError("Not Supported")
    found = NvmlDevice(FakeNvml(nvmlDeviceGetPowerUsage=refused), UUID).sample()
    assert set(found) == set(H100) - {"power_w"}
    with pytest.raises(NVMLError, match="Not Supported"):
        NvmlDevice(FakeNvml(**dict.fromkeys(FakeNvml().answers, refused)), UUID).sample()


def test_samples_are_folded_over_the_devices_that_have_them() -> None:
    found = fold(
        [H100, H100 | {"utilization_share": 0.5, "temperature_c": 80.0}, {"utilization_share": 0.0}]
    )
    assert set(found) == NAMES and found["gpu/devices"] == 3
    assert (
        found["gpu/utilization_share"] == pytest.approx(0.49)
        and found["gpu/min_utilization_share"] == 0
    )
    assert found["gpu/temperature_c"] == 70.5 and found["gpu/max_temperature_c"] == 80
    assert found["gpu/power_w"] == found["gpu/min_power_w"] == found["gpu/max_power_w"] == 687.412


def test_the_module_has_the_api_of_nvidia_ml_py() -> None:
    real = pytest.importorskip("pynvml")
    for name, function in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            parameters = list(inspect.signature(getattr(real, name)).parameters.values())
            given = list(inspect.signature(function).parameters)[1:]
            assert [
                each.name for each in parameters if each.default is inspect.Parameter.empty
            ] == given, name
    assert issubclass(real.NVMLError, Exception)
    assert (
        real.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
        and real.NVML_CLOCK_SM == FakeNvml.NVML_CLOCK_SM
    )
    assert real.nvmlClocksThrottleReasonSwPowerCap == gpu.POWER_CAP
    assert (
        real.nvmlClocksThrottleReasonHwSlowdown
        | real.nvmlClocksThrottleReasonSwThermalSlowdown
        | real.nvmlClocksThrottleReasonHwThermalSlowdown
        | real.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    ) == gpu.SLOWDOWNS


class Slow(meshwright.Observer):
    """Gives every step the time of two samples."""

    def before_step(self, parts: meshwright.Parts) -> None:
        time.sleep(2.5 * PERIOD_S)


class UntilOneIsLeft(meshwright.Observer):
    """Ends the run when samples of two devices were recorded, and later those of one."""

    def __init__(self) -> None:
        self.were_two = False

    def after_step(self, parts: meshwright.Parts, event: meshwright.StepEvent) -> None:
        devices = event.metrics.get("gpu/devices")
        self.were_two = self.were_two or devices == 2
        if self.were_two and devices == 1:
            parts.request_stop("one is left")


def run(config: meshwright.RunConfig, fake: Any) -> None:
    observer = GpuMetrics(fake, PERIOD_S)
    meshwright.run_training(config, [Slow(), observer])
    assert len(observer._threads) == 2


def one_cooler_than_the_other(device: torch.device) -> NvmlDevice:
    """Rank 1's device is at 51 degrees, and rank 0's at 61."""
    return NvmlDevice(FakeNvml(nvmlDeviceGetTemperature=61 - 10 * int(os.environ["RANK"])), UUID)


def run_on_two(config: meshwright.RunConfig) -> None:
    run(config, one_cooler_than_the_other)


def rank_1_hangs(config: meshwright.RunConfig) -> None:
    def device(device: torch.device) -> NvmlDevice:
        return NvmlDevice(FakeNvml(hangs_after=10 if os.environ["RANK"] == "1" else None), UUID)

    def warn(message: str) -> None:
        with Path(config.run.directory, "told").open("a") as file:
            file.write(message + "\n")

    meshwright.run_training(
        config, [Slow(), GpuMetrics(device, 2 * PERIOD_S, warn), UntilOneIsLeft()]
    )


def records_of(directory: Path) -> list[dict[str, float]]:
    found = [dict(record.extra) for record in read_records(directory / "own/metrics.jsonl")]
    return [extra for extra in found if extra]


@pytest.mark.long
def test_metrics_of_two_ranks_reach_the_record_the_sinks_and_the_report(tmp_path: Path) -> None:
    tracking = {"sinks": ["tensorboard"]}
    meshwright.spawn(run_on_two, made(tmp_path, parallel={"dp": 2}, tracking=tracking))
    whole = [each for each in records_of(tmp_path) if each["gpu/devices"] == 2]
    assert whole and all(set(each) == NAMES for each in whole)
    for each in whole:
        assert each["gpu/temperature_c"] == 56 and each["gpu/max_temperature_c"] == 61
        assert each["gpu/utilization_share"] == 0.97 and each["gpu/power_capped_share"] == 1
    events = EventAccumulator(str(tmp_path / "own/tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.report.page import page
    from meshwright_plan.report.run import read_run

    drawn = page([read_run(tmp_path / "own")])
    assert drawn.count("gpu/max_temperature_c") and "gpu/throttled_share" in drawn


@pytest.mark.long
def test_a_query_that_blocks_ends_the_metrics_of_its_device_alone(tmp_path: Path) -> None:
    meshwright.spawn(rank_1_hangs, made(tmp_path, parallel={"dp": 2}, train={"steps": 200}))
    steps = [record.step for record in read_records(tmp_path / "own/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 200
    devices = [each["gpu/devices"] for each in records_of(tmp_path)]
    assert 2 in devices and devices[-1] == 1
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert (
        line.startswith("no metrics of the GPU of rank ") and "NVML has not answered for " in line
    )


def lines_of(directory: Path, fake: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines about GPUs of a run, which must take all its steps
    and record no metric of a GPU.
    """
    run(made(directory), fake)
    assert len(list(read_records(directory / "own/metrics.jsonl"))) == 6 and not records_of(
        directory
    )
    return [line for line in capsys.readouterr().err.splitlines() if "GPU" in line]


@pytest.mark.long
def test_an_nvml_that_raises_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = dict.fromkeys(FakeNvml().answers, NVMLError("GPU is lost"))
    (line,) = lines_of(tmp_path, lambda device: NvmlDevice(FakeNvml(**lost), UUID), capsys)
    assert "no metrics of the GPU of rank 0 on" in line and "NVMLError: GPU is lost" in line


@pytest.mark.long
def test_an_nvml_that_hangs_from_the_start_delays_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(tmp_path, lambda device: NvmlDevice(FakeNvml(hangs_after=0), UUID), capsys)
    assert "NVML has not answered for" in line
    assert all(record.step_s < 1 for record in read_records(tmp_path / "own/metrics.jsonl"))


@pytest.mark.long
def test_without_the_package_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    (line,) = lines_of(tmp_path, open_device, capsys)
    assert "pip install nvidia-ml-py" in line and "tracking.gpu_metrics = false" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_real_library_without_a_gpu_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pynvml")
    (line,) = lines_of(tmp_path, open_device, capsys)
    assert "NVMLError_LibraryNotFound: NVML Shared Library Not Found" in line


def test_an_observer_is_there_on_gpus_alone_and_unless_the_key_forbids_it() -> None:
    def observers(device: str, wanted: bool) -> int:
        config = meshwright.RunConfig.model_validate({"tracking": {"gpu_metrics": wanted}})
        parts: Any = SimpleNamespace(
            config=config, mesh=SimpleNamespace(device=torch.device(device))
        )
        return len(gpu_metrics(parts))

    assert (observers("cuda", True), observers("cuda", False), observers("cpu", True)) == (1, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu_has_all_quantities() -> None:
    pytest.importorskip("pynvml")
    found = open_device(torch.device("cuda", 0)).sample()
    assert set(found) >= {
        "utilization_share",
        "memory_gib",
        "power_w",
        "temperature_c",
        "sm_clock_mhz",
    }
    assert (
        0 <= found["utilization_share"] <= 1
        and 0 < found["memory_gib"] < 1000
        and 10 < found["power_w"] < 2000
    )
