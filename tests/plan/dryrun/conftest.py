"""A job that is planned once for this folder."""

from __future__ import annotations

import pytest

from meshwright_plan.dryrun.job import dry_run_job
from tests.plan.dryrun.jobs import Planned, configured


@pytest.fixture(scope="session")
def planned() -> Planned:
    """16 ranks: 4 pipeline ranks of which two are alike, 5 micro-batches,
    on every axis somebody to speak with.
    """
    reported: list[str] = []
    config = configured(chunks=5, pp=4, dp=2, tp=2, model="llama", num_layers=4, sequence=True)
    return Planned(dry_run_job(config, reported.append), reported)
