"""Rates of one device: the planner's formulas give the measured seconds back,
and the file holds all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright_plan.planner import calibrate_device
from meshwright_plan.planner.calibrate import to_toml
from meshwright_plan.planner.calibrate_device import Sizes, data_sheet, measure_hardware
from meshwright_plan.planner.hardware import Hardware, read_hardware
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import PerformanceModel

SMALL = Sizes(side=256, heads=2, tokens=256, elements=2**14, aim_s=0.005)


def as_gpu() -> Hardware:
    """This machine's rates under the name of a GPU: the formulas are then those of a GPU."""
    return measure_hardware(torch.device("cpu"), SMALL).model_copy(update={"kind": "cuda"})


def test_formulas_give_the_measured_times_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device slow enough for no share to reach 1: 3 s an attention, 1 s a product,
    0.01 s an elementwise pass.
    """
    monkeypatch.setattr(calibrate_device, "attention_s", lambda *_: (3.0, 6.0))
    monkeypatch.setattr(calibrate_device, "call_s", lambda *_: 1.0)
    monkeypatch.setattr(calibrate_device, "data_sheet", lambda _: read_hardware("h100"))
    found = measure_hardware(torch.device("cpu"), SMALL).model_copy(update={"kind": "cuda"})
    model, side = PerformanceModel.of(found), SMALL.side
    start_s = model.fractions.operation_s
    product = Work(WorkKind.PRODUCT, 2.0 * side**3, 1.0, (1, side, side, side))
    assert model.work_s(product, "bfloat16", backward=False) - start_s == pytest.approx(1.0)
    half = 2.0 * SMALL.heads * SMALL.tokens**2 * 128
    attention = Work(WorkKind.ATTENTION, half, 1.0, (SMALL.heads, SMALL.tokens, SMALL.tokens, 128))
    assert model.work_s(attention, "bfloat16", backward=False) - start_s == pytest.approx(3.0)
    backward = attention._replace(flops=2.5 * half)
    assert model.work_s(backward, "bfloat16", backward=True) - start_s == pytest.approx(6.0)
    # of four passes of a second each, three of 4 bytes and one of 10
    mean_bytes = 4 / (3 / 4.0 + 1 / 10.0)
    copy = Work(WorkKind.MEMORY, 0.0, mean_bytes * SMALL.elements, (0, 0, 0, 0))
    assert model.work_s(copy, "bfloat16", backward=False) - start_s == pytest.approx(1.0)


def test_a_measured_file_is_read_as_written(tmp_path: Path) -> None:
    file, found = tmp_path / "gpu.toml", as_gpu()
    file.write_text(to_toml(found))
    again = read_hardware(str(file))
    assert again.measured and again.kind == "cuda" and again.reserved_bytes == found.reserved_bytes
    for key in (
        "product_share",
        "attention_share",
        "attention_backward_share",
        "memory_bytes_per_s",
    ):
        assert getattr(again, key) == pytest.approx(getattr(found, key), rel=1e-3), key


def test_a_device_gets_the_peak_of_its_own_data_sheet() -> None:
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100 PCIe",
        "NVIDIA L4",
    )
    found = [sheet and sheet.name for sheet in map(data_sheet, names)]
    assert found == [*(read_hardware(each).name for each in ("h100", "h200", "a100")), None, None]


def test_what_is_not_measured_comes_from_the_data_sheet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sheet = read_hardware("gb200")
    monkeypatch.setattr(calibrate_device, "data_sheet", lambda _: sheet)
    found = measure_hardware(torch.device("cpu"), SMALL).model_copy(update={"kind": "cuda"})
    assert found.devices_per_domain == 72 and found.torch_attention_shares is None
    file = tmp_path / "gpu.toml"
    file.write_text(to_toml(found))
    again = read_hardware(str(file))
    for name in ("devices_per_domain", "node_link", "cluster_link", "host_memory_bytes"):
        assert getattr(again, name) == getattr(sheet, name), name
