"""Each prediction has the error of the published runs that are most like it."""

from __future__ import annotations

import pytest

from meshwright_plan.planner.error_bars import (
    ERRORS,
    MEASURED_ERROR_SHARE,
    KindError,
    RunKind,
    error_bar,
    generation_of,
    nearest_error,
)
from meshwright_plan.planner.hardware import known, read_hardware


def test_every_cluster_file_has_a_generation() -> None:
    found = {name: generation_of(read_hardware(name).name) for name in known()}
    assert "" not in found.values(), found
    assert (found["gb200"], found["h200"], found["a100-40gb"]) == ("Blackwell", "Hopper", "Ampere")
    assert generation_of("RTX 4090") == "" and generation_of("MB200X") == ""


@pytest.mark.parametrize("each", ERRORS, ids=lambda each: str(each.kind))
def test_a_kind_with_published_runs_has_their_error(each: KindError) -> None:
    assert nearest_error(each.kind) is each


def test_an_unknown_device_has_the_worst_error_of_the_known_ones() -> None:
    worst = nearest_error(RunKind("", has_experts=True, is_float8=False))
    of_experts = [each.share for each in ERRORS if each.kind[1:] == (True, False)]
    assert worst.share == max(of_experts) and len(of_experts) > 1


def test_another_precision_comes_before_another_device() -> None:
    nearest = nearest_error(RunKind("Ampere", has_experts=False, is_float8=True))
    assert nearest.kind == RunKind("Ampere", has_experts=False, is_float8=False)


def test_experts_are_predicted_worse_than_dense_models() -> None:
    dense, mixture = (
        error_bar(read_hardware("h100"), has_experts=each, is_float8=False)
        for each in (False, True)
    )
    assert dense.share < 0.06 < 0.15 < mixture.share
    assert "85 published runs of this kind (dense, Hopper)" in dense.text


def test_measured_rates_have_an_error_of_their_own() -> None:
    measured = read_hardware("h100").model_copy(update={"measured": True})
    bar = error_bar(measured, has_experts=False, is_float8=False)
    assert bar.share == MEASURED_ERROR_SHARE
