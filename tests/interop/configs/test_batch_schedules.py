"""Megatron-LM's schedule of batch sizes: a ramp where one has the same samples in every step, else refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config import Batch, phases
from meshwright.errors import ConfigError
from meshwright_interop.configs import convert_file
from meshwright_interop.configs.megatron_batch import ramp_of
from tests.interop.configs import dumps
from tests.interop.configs.test_formats import LOW
from tests.support.errors import has_code


def size_in_megatron(entries: list[tuple[int, int]], consumed: int) -> int:
    """As ``StepBatchsizeNumMicroBatchesCalculator`` of Megatron-LM has it: the last threshold that is reached."""
    return [size for threshold, size in entries if threshold <= consumed][-1]


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(-2, 2),
    st.booleans(),
)
def test_a_schedule_that_a_ramp_expresses_has_the_samples_of_every_step(
    start: int, increment: int, gaps: list[int], off: int, is_even: bool
) -> None:
    gaps = [max(1, gaps[0] + (off if i == 1 else 0)) for i in range(len(gaps))] if is_even else gaps
    entries = [(0, start)]
    for gap in gaps:
        entries.append((entries[-1][0] + gap, entries[-1][1] + increment))
    sizes, seen = [], 0
    while seen < entries[-1][0] + 3 * entries[-1][1]:
        sizes.append(size_in_megatron(entries, seen))
        seen += sizes[-1]

    def sizes_of(ramp: tuple[int, int, int]) -> list[int]:
        found = phases(Batch(micro_batch_size=1, chunks=1, global_batch=entries[-1][1], ramp=ramp))
        return [[each for each in found if each.first_step <= step][-1].global_batch for step in range(len(sizes))]

    ramp = ramp_of(entries)
    if ramp is not None:
        assert sizes_of((ramp[0], ramp[1], ramp[2])) == sizes
    else:
        longest = len(gaps) * (gaps[0] + start)
        assert all(sizes_of((start, increment, samples)) != sizes for samples in range(1, longest + 1))


def test_a_schedule_of_megatron_is_a_ramp_where_it_rises_evenly(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    flags = LOW.replace("--train-iters 9", "--train-samples 64")
    tokens = f"0:2 {8 * 32 / 1000}K:4, {16 * 32}:6 {24 * 32}:8"
    path.write_text(f"{flags} --micro-batch-size 1 --step-batch-size-schedule '{tokens}'")
    config = convert_file(path).config
    assert config.batch.ramp == (2, 2, 24) and config.batch.global_batch == 8
    assert config.train.steps == 12  # steps of 2, 2, 2, 2, 4, 4, 6, 6, 8, 8, ...: 8 after 4, 28 after 8
    path.write_text(f"{flags} --micro-batch-size 1 --step-batch-size-schedule 0:8")
    assert convert_file(path).config.batch.ramp is None and convert_file(path).config.batch.global_batch == 8
    path.write_text(f"{flags} --micro-batch-size 1 --global-batch-size 8 --step-batch-size-schedule '{tokens}'")
    assert convert_file(path).config.batch.ramp == (2, 2, 24)
    found = convert_file(path, without={"step-batch-size-schedule"})
    assert found.config.batch.ramp is None and found.config.batch.global_batch == 8


def test_a_schedule_in_a_functional_test(tmp_path: Path) -> None:
    path, schedule = tmp_path / "model_config.yaml", f"  --step-batch-size-schedule: 0:4 {50 * 64}:8"
    path.write_text(dumps.MODEL_CONFIG.replace("  --global-batch-size: 8", schedule))
    config = convert_file(path).config
    assert config.batch.global_batch == 8 and config.batch.ramp is not None
    assert config.batch.ramp[:2] == (4, 4) and [each.first_step for each in phases(config.batch)] == [0, 13]


def test_a_schedule_of_megatron_bridge_has_no_unit(tmp_path: Path) -> None:
    path, schedule = tmp_path / "run_config.yaml", "step_batch_size_schedule: 0:4 500:8\n  rampup_batch_size: null"
    path.write_text(dumps.BRIDGE.replace("rampup_batch_size: null", schedule))
    with pytest.raises(ConfigError, match="its thresholds are samples or tokens", check=has_code("MW-INTEROP-089")):
        convert_file(path)
    found = convert_file(path, without={"train.step_batch_size_schedule"})
    assert found.config.batch.ramp is None and found.config.batch.global_batch == 8
