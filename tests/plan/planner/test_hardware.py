"""What a cluster is made of: the files that are there, those of a user,
and what is wrong in them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright_plan.planner.calibrate import to_toml
from meshwright_plan.planner.hardware import Link, Rate, interpolated_seconds, known, read_hardware
from meshwright_plan.planner.operations import Work, WorkKind
from meshwright_plan.planner.rates import PerformanceModel
from tests.plan.planner.small import hardware
from tests.support.errors import has_code

CURVE = [Rate(size=1e3, per_s=1e9), Rate(size=1e6, per_s=1e10), Rate(size=1e9, per_s=4e10)]


def refused(name: str) -> str:
    """What is said."""
    with pytest.raises(ConfigError) as caught:
        read_hardware(name)
    return str(caught.value)


def written(tmp_path: Path, **other: object) -> tuple[Path, str]:
    """(a file, its text), ``other`` being text to be replaced."""
    file = tmp_path / "box.toml"
    text = to_toml(hardware(products=CURVE, **other))
    file.write_text(text)
    return file, text


@pytest.mark.parametrize("name", known())
def test_hardware_that_is_known_can_be_planned_with(name: str) -> None:
    found = read_hardware(name.upper())
    assert found.usable_bytes < found.memory_bytes
    assert {"bfloat16", "float32"} <= found.flops_per_s.keys()
    assert found.flops_per_s["bfloat16"] > found.flops_per_s["float32"]
    assert found.node_link.bytes_per_s > found.cluster_link.bytes_per_s
    assert found.node_link.latency_s < found.cluster_link.latency_s


def test_later_hardware_is_faster() -> None:
    assert {"a100", "b200", "h100", "h200"} <= set(known())
    a100, h100, h200, b200 = map(read_hardware, ("a100", "h100", "h200", "b200"))
    assert (
        a100.flops_per_s["bfloat16"] < h100.flops_per_s["bfloat16"] <= h200.flops_per_s["bfloat16"]
    )
    assert h200.flops_per_s["bfloat16"] < b200.flops_per_s["bfloat16"]
    assert h100.memory_bytes < h200.memory_bytes < b200.memory_bytes


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    said = refused("hx100")
    assert "did you mean h100?" in said
    assert all(name in said for name in known())
    assert "did you mean" not in refused("tpu-v5")


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    file, _ = written(tmp_path)
    assert read_hardware(str(file)) == hardware(products=CURVE)
    measured = {"whole_share": 0.8, "messages": {"send": Link(bytes_per_s=2e9, latency_s=1e-4)}}
    file, _ = written(tmp_path, **measured)
    assert read_hardware(str(file)) == hardware(products=CURVE, **measured)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (", latency_s = 4e-06", "", "node_link.latency_s is missing"),
        ("processors", "procesors", "procesors: there is no such key; did you mean processors?"),
        (
            "memory_bytes_per_s = 3.35e+12",
            "memory_bytes_per_s = -1",
            "memory_bytes_per_s: input should be greater",
        ),
        (
            "size = 1000,",
            "size = 1e7,",
            "products: value error, sizes have to rise, these are 1e+07, 1e+06, 1e+09",
        ),
        ('kind = "cuda"', 'kind = "abacus"', "kind: string should match pattern"),
        ('name = "box"', "name = [", "not TOML"),
        (
            'name = "box"',
            'name = "box"\nmessages = {sends = {bytes_per_s = 1.0, latency_s = 0.0}}',
            "messages.sends: there is no such key; did you mean send?",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, old: str, new: str, said: str) -> None:
    file, text = written(tmp_path)
    assert old in text
    file.write_text(text.replace(old, new, 1))
    found = refused(str(file))
    assert said in found
    assert all(line.startswith(str(file)) for line in found.splitlines())


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file; known are" in refused(str(tmp_path / "none.toml"))
    assert "no such file; did you mean h200?" in refused("H200.toml")
    assert "this is a folder" in refused(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"name = '\xff'")
    assert "not UTF-8" in refused(str(tmp_path / "latin.toml"))


def test_a_dtype_without_a_rate_is_refused() -> None:
    box = hardware(flops_per_s={"float32": 1e12})
    box.check_dtype("float32")
    with pytest.raises(
        ConfigError,
        match=r"no bfloat16.*it has float32.*--train.dtype=float32",
        check=has_code("MW-PLANNER-001"),
    ):
        box.check_dtype("bfloat16")


def test_a_curve_is_met_where_it_was_measured_and_rises_between() -> None:
    assert [interpolated_seconds(CURVE, rate.size) for rate in CURVE] == [
        rate.size / rate.per_s for rate in CURVE
    ]
    sizes = [10.0 ** (exponent / 4) for exponent in range(48)]
    times = [interpolated_seconds(CURVE, size) for size in sizes]
    assert times == sorted(times)
    assert times[0] == 1e-6  # of so little the time is to be started
    assert interpolated_seconds(CURVE, 4e9) == pytest.approx(0.1)  # at the rate of the last


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("memory_bytes_per_s = 3.35e+12", "memory_bytes_per_s = 1e-308", "memory_bytes_per_s"),
        ("memory_bytes = 1073741824", f"memory_bytes = {10**400}", "memory_bytes"),
        ("bfloat16 = 9.89e+14", "bfloat16 = 1e-308", "flops_per_s.bfloat16"),
        ("product_share = 1", "product_share = 1e-320", "product_share"),
        ("latency_s = 4e-06", "latency_s = 1e308", "node_link.latency_s"),
        ("bytes_per_s = 4.5e+11", "bytes_per_s = 1e-300", "node_link.bytes_per_s"),
        (
            "reserved_bytes = 0",
            "reserved_bytes = 1073741824",
            "reserved_bytes 1,073,741,824 leave nothing",
        ),
        ("devices_per_node = 4", "devices_per_node = 4294967296", "devices_per_node"),
    ],
)
def test_numbers_that_give_no_finite_time_are_refused(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    file, text = written(tmp_path)
    assert old in text
    file.write_text(text.replace(old, new, 1))
    said = refused(str(file))
    assert f"box.toml: {key}" in said and len(said) < 1000


def test_a_file_keeps_a_domain_and_the_curves_of_each_dtype(tmp_path: Path) -> None:
    slow = [Rate(size=1e3, per_s=1e8), Rate(size=1e9, per_s=4e9)]
    other = {
        "devices_per_domain": 72,
        "host_memory_bytes": 2**39,
        "node_send": Link(bytes_per_s=2e9, latency_s=1e-4),
    }
    file, _ = written(tmp_path, other_products={"bfloat16": slow}, **other)
    assert read_hardware(str(file)) == hardware(
        products=CURVE, other_products={"bfloat16": slow}, **other
    )


def test_a_product_takes_the_curve_of_its_dtype() -> None:
    slow = [Rate(size=rate.size, per_s=rate.per_s / 10) for rate in CURVE]
    model = PerformanceModel.of(
        hardware(kind="cpu", products=CURVE, other_products={"bfloat16": slow})
    )
    work = Work(WorkKind.PRODUCT, 1e9, 1.0, (1, 1000, 1000, 500))
    fast_s, slow_s = (
        model.work_s(work, dtype, backward=False) for dtype in ("float32", "bfloat16")
    )
    assert slow_s == pytest.approx(10 * fast_s)


def test_attention_has_the_peak_of_its_dtype() -> None:
    work = Work(WorkKind.ATTENTION, 1e13, 1.0, (64, 4096, 4096, 128))
    h100 = PerformanceModel.of(read_hardware("h100"))
    rates = h100.hardware.flops_per_s
    half_s, single_s = (
        h100.work_s(work, dtype, backward=False) for dtype in ("bfloat16", "float32")
    )
    assert single_s / half_s == pytest.approx(rates["bfloat16"] / rates["float32"], rel=0.01)
    v100 = PerformanceModel.of(hardware(flops_per_s={"float16": 1e14, "float32": 1.5e13}))
    assert (
        v100.work_s(work, "float32", backward=False)
        > v100.work_s(work, "float16", backward=False)
        > 0
    )
