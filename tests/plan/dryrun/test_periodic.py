"""A dry run with few micro-batches, lengthened, equals the one with all of them;
a long one reports its progress.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.schedule.action import Action
from meshwright_plan.dryrun import progress
from meshwright_plan.dryrun.fake_step import profile_rank
from meshwright_plan.dryrun.job import dry_run_job
from meshwright_plan.dryrun.periodic import few_chunks, lengthen
from meshwright_plan.dryrun.rank_profile import Peak
from meshwright_plan.dryrun.templates import ReplayError
from tests.plan.dryrun.jobs import configured
from tests.support.marks import long_row

AFTER = {"0REDUCE", "1REDUCE", "STEP", "going from one step to the next"}
SCALARS = 128
"""Bytes of the losses of all micro-batches, which are released somewhere in these activities."""


@pytest.mark.parametrize(
    "parallel",
    [
        long_row({"dp": 2, "zero": 2}),
        long_row({"dp": 2, "zero": 3}),
        pytest.param(
            {"dp": 2, "tp": 2, "sequence": True, "zero": 3, "offload": True, "model": "llama"},
            marks=pytest.mark.torture,
        ),
        pytest.param({"dp": 2, "pp": 2, "zero": 2}, marks=pytest.mark.torture),
        pytest.param(
            {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb_v", "num_layers": 3},
            marks=pytest.mark.torture,
        ),
    ],
    ids=str,
)
def test_a_lengthened_step_equals_the_whole_dry_run(parallel: dict[str, Any]) -> None:
    reported: list[str] = []
    chunks = 25 if "pp" in parallel else 8
    config = configured(chunks=chunks, **parallel)
    job = dry_run_job(config, reported.append)
    assert not any("runs all micro-batches" in line for line in reported)
    assert few_chunks(job.blueprint.schedule) < chunks
    for played in job.profiles:
        whole = profile_rank(config, played.rank)
        assert [str(peak.activity) for peak in played.peaks] == [
            str(peak.activity) for peak in whole.peaks
        ]
        pairs = zip(played.peaks, whole.peaks, strict=True)
        off = {
            str(ours.activity): ours.num_bytes - theirs.num_bytes
            for ours, theirs in pairs
            if ours != theirs
        }
        assert off.keys() <= AFTER and all(0 <= each < SCALARS for each in off.values()), off
        assert (played.peak_bytes, played.held, str(played.peak_in)) == (
            whole.peak_bytes,
            whole.held,
            str(whole.peak_in),
        )
        assert [(str(a), call) for a, call in played.communication] == [
            (str(a), call) for a, call in whole.communication
        ]


def test_storages_of_one_operation_are_told_apart() -> None:
    """One is released at once, the other never; so each micro-batch adds to the memory."""
    reported: list[str] = []
    config = configured(chunks=8, dp=2, zero=2)
    builder = "tests.plan.dryrun.keeping:build"
    job = dry_run_job(config.replace(model={"builder": builder}), reported.append)
    assert job.profiles and any("runs all micro-batches" in line for line in reported)


@pytest.mark.long
def test_micro_batches_that_differ_are_not_repeated() -> None:
    config = configured(chunks=11, dp=2, zero=2)
    schedule = dry_run_job(config).blueprint.schedule
    short = profile_rank(configured(chunks=6, dp=2, zero=2), 0)
    assert len(lengthen(short, schedule, 5).peaks) > len(short.peaks)
    peaks = [
        Peak(
            activity,
            num_bytes + (activity.microbatch or 0) ** 2
            if isinstance(activity, Action)
            else num_bytes,
        )
        for activity, num_bytes in short.peaks
    ]
    with pytest.raises(ReplayError, match="its micro-batches differ"):
        lengthen(replace(short, peaks=peaks), schedule, 5)


def test_a_long_dry_run_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    reported: list[str] = []
    dry_run_job(configured(), reported.append)
    assert any(line.startswith("pipeline rank 0 of 1: 0F1 after ") for line in reported)
