"""The names that people know, and a line that brings back every bit."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.tracking.observer import peak_flops
from meshwright.tracking.record import METRICS, StepRecord, from_json, metrics, perplexity, to_json

NAMES = [
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "train/samples",
    "train/skipped",
    "train/restarts",
    "train/recoveries",
    "optimizer/loss_scale",
    "perf/step_s",
    "perf/data_s",
    "perf/tokens_per_sec",
    "perf/tokens_per_sec_per_device",
    "perf/devices",
    "perf/tflops_per_device",
    "perf/mfu",
    "perf/mfu_causal",
    "perf/bubble_share",
    "perf/save_s",
    "perf/recovery_s",
    "perf/validation_s",
    "perf/straggler_rank",
    "perf/straggler_share",
    "memory/peak_gib",
    "validation/loss",
    "validation/perplexity",
]

STRAGGLER = {"straggler": "rank 5 on h2", "straggler_rank": 5, "straggler_share": 0.5}

anything = st.floats(allow_nan=True, allow_infinity=True)
whole = st.integers(min_value=0, max_value=2**62)


def test_names_are_the_ones_people_know(record) -> None:
    measured = {
        "tflops_per_device": 0.5,
        "mfu": 0.25,
        "bubble_share": 0.125,
        "validation_loss": 2.0,
        "save_s": 1.5,
        "recoveries": 2,
        "recovery_s": 2.5,
    }
    measured |= {"mfu_causal": 0.125, "validation_s": 0.75}
    measured["validation_perplexity"] = perplexity(2.0)
    whole_record = record(3, skipped=True, restarts=1, loss_scale=512.0, **measured, **STRAGGLER)
    found = metrics(whole_record)
    assert list(found) == NAMES == list(METRICS)
    assert found["train/loss"] == whole_record.loss
    assert found["train/lr"] == 3e-4
    assert found["train/tokens"] == 6144
    assert found["train/samples"] == 48
    assert found["perf/tokens_per_sec"] == 4096
    assert found["perf/tokens_per_sec_per_device"] == 512
    assert found["perf/mfu"] == 0.25
    assert found["memory/peak_gib"] == 1.5
    assert found["validation/perplexity"] == pytest.approx(math.e**2)


def test_every_field_reaches_a_metric(record) -> None:
    """A field that no metric reads would be measured for nobody."""
    measured = {
        "tflops_per_device": 0.5,
        "mfu": 0.25,
        "bubble_share": 0.125,
        "save_s": 1.5,
        "recoveries": 2,
        "recovery_s": 2.5,
        "loss_scale": 8.0,
    }
    measured |= {"mfu_causal": 0.125, "validation_s": 0.75}
    plain = record(3, validation_loss=2.0, validation_perplexity=7.0, **measured, **STRAGGLER)
    assert from_json(to_json(plain)) == plain
    for field in dataclasses.fields(StepRecord):
        value = getattr(plain, field.name)
        changed = (
            {"a": 7.0}
            if field.name == "extra"
            else f"{value}7"
            if isinstance(value, str)
            else value + 7
        )
        other = dataclasses.replace(plain, **{field.name: changed})
        assert to_json(other) != to_json(plain), field.name


def test_metrics_of_callbacks_survive_and_what_is_none_is_left_out(record) -> None:
    plain = record(1, extra={"ema/decay": 0.1, "b": 3.0})
    line = json.loads(to_json(plain))
    assert line["ema/decay"] == 0.1 and from_json(json.dumps(line)) == plain
    strange = {
        "<b>": 1,
        "c": "text",
        "d": True,
        "e": [1],
        "perf/straggler": "",
        **{f"n{i}": i for i in range(200)},
    }
    found = from_json(json.dumps(line | strange)).extra
    assert set(found) == {"ema/decay", "b", *(f"n{i}" for i in range(98))}
    assert (
        from_json(json.dumps(line | strange | {"gpu/power_w": 687.5})).extra["gpu/power_w"] == 687.5
    )


def test_what_was_not_measured_is_left_out(record) -> None:
    assert not {
        "perf/mfu",
        "perf/tflops_per_device",
        "validation/loss",
        "validation/perplexity",
    } & set(metrics(record(1)))


@given(
    loss=anything,
    norm=anything,
    validation=st.none() | anything,
    mfu=st.none() | anything,
    tokens=whole,
)
def test_a_line_brings_every_bit_back(loss, norm, validation, mfu, tokens) -> None:
    before = StepRecord(
        7, 1, tokens, loss, norm, 1e-3, 0.1, 0.0, 5.0, 2, 123_456_789, None, mfu, None, validation
    )
    line = to_json(before)
    after = from_json(line)
    assert repr(after) == repr(before)  # repr: NaN equals itself, and -0.0 is not 0.0
    found = json.loads(line)
    assert repr(float.fromhex(found["train/loss_hex"])) == repr(loss)


@pytest.mark.parametrize(
    ("loss", "written"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1.5, 1.5)],
)
def test_a_line_is_strict_json(record, loss, written) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = to_json(record(1, loss=loss, validation_loss=loss))
    found = json.loads(line, parse_constant=refuse)
    assert found["train/loss"] == found["validation/loss"] == written
    assert "\n" not in line


def test_perplexity_of_a_huge_loss_is_infinite(record) -> None:
    assert perplexity(1e6) == math.inf


def test_a_validation_loss_that_is_no_cross_entropy_has_no_perplexity(record) -> None:
    assert "validation/perplexity" not in metrics(record(1, validation_loss=2.0))


@pytest.mark.parametrize(
    "line", ['{"step": 1', "7", "{}", '{"step": 1, "train/loss": null}', "", "[" * 100_000]
)
def test_what_is_no_record_is_refused(line) -> None:
    with pytest.raises(ValueError):
        from_json(line)


@pytest.mark.parametrize("value", [math.inf, 10**400])
@pytest.mark.parametrize(
    "name", ["step", "train/samples", "train/tokens", "perf/devices", "memory/peak_gib"]
)
def test_a_count_that_no_chart_can_hold_is_no_record(record, name, value) -> None:
    with pytest.raises(ValueError, match="not a whole record"):
        from_json(json.dumps(json.loads(to_json(record(1))) | {name: value}))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2450e12),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_the_peak_of_a_device_goes_by_whole_words_of_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bfloat16") == peak
    assert peak_flops(torch.device("cuda"), "float32") is None


def test_a_line_of_another_format_is_refused(record) -> None:
    """A newer one could mean something else by a name; lines of before the key have format 1."""
    line = json.loads(to_json(record(1)))
    assert line.pop("format") == 1 and from_json(json.dumps(line)) == record(1)
    with pytest.raises(ValueError, match="format 2, this meshwright reads 1"):
        from_json(json.dumps({"format": 2, **line}))
