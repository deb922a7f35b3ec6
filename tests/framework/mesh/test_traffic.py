"""Bytes on the wire by the formulas, the devices that ranks pick, and lists in messages."""

from __future__ import annotations

import os

import pytest
import torch

from meshwright.mesh.comm import Group
from meshwright.mesh.device import ALLOCATOR_VARIABLES, RECORDER_VARIABLES, pick_device
from meshwright.mesh.traffic import WIRE_FACTORS, Traffic
from meshwright.system import host
from meshwright.terminal.output import abridge
from tests.support.errors import raises


@pytest.mark.parametrize("size", [2, 3, 8])
def test_wire_bytes_of_each_operation(size: int) -> None:
    """Of a ring: an all-reduce is a reduce-scatter and an all-gather."""
    once = (size - 1) / size
    expected = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "broadcast"), once)
    expected |= {"all_reduce": 2 * once, "send": 1.0}
    assert {name: factor(size) for name, factor in WIRE_FACTORS.items()} == pytest.approx(expected)


def test_traffic_is_summed_by_group() -> None:
    traffic = Traffic()
    for group, operation, size, message_bytes in (
        ("dp", "all_gather", 2, 100),
        ("dp", "all_gather", 2, 300),
        ("dp", "send", 2, 7),
        ("dp_shard", "all_gather", 4, 1000),
        ("aa", "send", 2, 5),
    ):
        traffic.add(group, operation, size, message_bytes)
    assert traffic.counts["dp", "all_gather"] == (2, 200.0)
    assert (traffic.counts["dp", "send"], traffic.counts["dp_shard", "all_gather"]) == (
        (1, 7.0),
        (1, 750.0),
    )


def test_a_sum_of_one_rank_is_finished_too() -> None:
    done: list[str] = []
    Group("dp", (0,), 0).all_reduce(torch.ones(2), finish=lambda: done.append("once")).wait()
    assert done == ["once"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that torch believes to have GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("SLURM_PROCID", *ALLOCATOR_VARIABLES, *RECORDER_VARIABLES):
        monkeypatch.setenv(name, "")  # what is set in a test is gone after it
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_rank_picks_the_device_of_its_number(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    assert str(pick_device("auto", 3)) == str(pick_device("cuda", 3)) == "cuda:3"
    assert str(pick_device("cpu", 3)) == "cpu"
    with raises("MW-MESH-011", "local rank 4", "4 visible"):
        pick_device("auto", 4)
    assert [str(pick_device("auto", each, share=True)) for each in (3, 4, 9)] == [
        "cuda:3",
        "cuda:0",
        "cuda:1",
    ]


def test_a_rank_that_sees_one_device_picks_that_under_slurm_alone(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    with raises("MW-MESH-011", "1 visible"):
        pick_device("cuda", 3)
    gpus.setenv("SLURM_PROCID", "3")
    assert str(pick_device("cuda", 3)) == "cuda:0"
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    assert str(pick_device("cuda", 3)) == "cuda:3"


def test_segments_grow_unless_the_user_has_set_the_allocator(gpus: pytest.MonkeyPatch) -> None:
    """In the environment before the rank's first call that makes a context,
    and in no rank on CPU.
    """
    seen: list[dict[str, str]] = []
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.setattr(torch.cuda, "set_device", lambda device: seen.append(allocator_settings()))
    pick_device("cpu", 0)
    assert allocator_settings() == {} == dict(seen)
    for device in ("cuda", "auto"):
        gpus.delenv("PYTORCH_ALLOC_CONF", raising=False)
        pick_device(device, 0)
        assert seen.pop() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR_VARIABLES:
        gpus.delenv("PYTORCH_ALLOC_CONF", raising=False)
        gpus.setenv(name, "max_split_size_mb:512")
        pick_device("cuda", 0)
        assert seen.pop() == {name: "max_split_size_mb:512"}
        gpus.delenv(name)


def test_the_flight_recorder_is_on_unless_the_user_has_set_it(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.setattr(torch.cuda, "set_device", lambda device: None)
    pick_device("cpu", 0)
    assert not any(name in os.environ for name in RECORDER_VARIABLES)
    pick_device("cuda", 0)
    assert os.environ[RECORDER_VARIABLES[0]] == "2000"
    gpus.delenv(RECORDER_VARIABLES[0])
    gpus.setenv(RECORDER_VARIABLES[1], "0")
    pick_device("cuda", 0)
    assert RECORDER_VARIABLES[0] not in os.environ and os.environ[RECORDER_VARIABLES[1]] == "0"


def allocator_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}


def test_lists_in_messages() -> None:
    assert abridge([2, 3]) == "2, 3"
    assert abridge(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_no_interface_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(host, "interface_towards", lambda host: None)
    assert host.own_address("node1") is None
