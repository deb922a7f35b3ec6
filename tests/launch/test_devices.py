"""launch.devices: which GPUs the ranks get; CUDA itself is asked in tests/gpu."""

from __future__ import annotations

import os

import pytest
import torch

from meshwright.config import RunConfig, load
from meshwright.errors import ConfigError
from meshwright_launch.devices import ORDER, VISIBLE, check_devices, choose_devices, num_devices
from meshwright_launch.forking import preload
from tests.support.errors import has_code, raises

CONFIG = "configs/demo.toml"
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def config_of(devices: str, device: str = "auto") -> RunConfig:
    return load(CONFIG, [f"--launch.devices={devices}", f"--train.device={device}"])


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of devices; what is set in a test is gone after it."""
    for name in (VISIBLE, ORDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_in_the_order_given_and_by_the_numbers_of_the_bus() -> None:
    choose_devices(config_of("2,0").launch)
    assert (os.environ[VISIBLE], os.environ[ORDER]) == ("2,0", "PCI_BUS_ID")


def test_nothing_said_leaves_all_but_numbers_them_by_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_devices(config_of("").launch)
    assert VISIBLE not in os.environ and os.environ[ORDER] == "PCI_BUS_ID"
    monkeypatch.setenv(ORDER, "FASTEST_FIRST")  # what a user has said stays
    choose_devices(config_of("").launch)
    assert os.environ[ORDER] == "FASTEST_FIRST"


def test_numbers_are_places_in_what_the_environment_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "7, GPU-8a2f,3")
    choose_devices(config_of("2,1").launch)
    assert os.environ[VISIBLE] == "3,GPU-8a2f"


@pytest.mark.parametrize(("visible", "number", "left"), [("7,3", "2", 2), ("", "2", 0)])
def test_the_environment_is_never_gone_past(
    monkeypatch, visible: str, number: str, left: int
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(
        ConfigError,
        match=f"device {number}, and {VISIBLE}={visible} has {left}",
        check=has_code("MW-LAUNCH-014"),
    ):
        choose_devices(config_of("2").launch)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    check_devices(config_of("2,0").launch, 2)
    check_devices(config_of("").launch, 0)
    with pytest.raises(
        ConfigError, match="'5' names 1 GPU, and torch sees no GPU", check=has_code("MW-LAUNCH-015")
    ):
        check_devices(config_of("5").launch, 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ConfigError,
        match="'2,0' names 2 GPUs, and torch sees the first 1 of them",
        check=has_code("MW-LAUNCH-015"),
    ):
        num_devices(config_of("2,0").launch, "auto")


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("0,0", "names device 0 twice"),
        ("0,,1", "launch.devices"),
        ("gpu1", "launch.devices"),
        ("-1", "launch.devices"),
        ("\uff12", "launch.devices"),
    ],
)
def test_what_is_no_list_of_devices(devices: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said, check=has_code("MW-CONFIG-020", "MW-CONFIG-039")):
        config_of(devices)


def test_devices_on_cpu() -> None:
    with raises("MW-CONFIG-098", 'launch.devices = "0"', 'train.device = "cpu"'):
        config_of("0", "cpu")


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("0", "0")])
def test_the_fork_server_checks_for_gpus_by_nvml(
    given: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA cannot be used in the forks of a process that it was initialised in."""
    monkeypatch.setenv(NVML_CHECK, "")
    monkeypatch.delenv(NVML_CHECK)
    if given is not None:
        monkeypatch.setenv(NVML_CHECK, given)
    monkeypatch.setattr("meshwright_launch.forking.PRELOADED", ())  # slow imports are left out
    monkeypatch.setattr("meshwright.tensor_parallel.megatron.load_mappings", lambda device: None)
    seen, is_available = [], torch.cuda.is_available

    def recorded() -> bool:
        seen.append(os.environ.get(NVML_CHECK))
        return is_available()

    monkeypatch.setattr("torch.cuda.is_available", recorded)
    preload()
    assert seen and set(seen) == {wanted}
