"""A search and a dry run state the same seconds and MFU for the same layout,
whatever the search has shortened.
"""

from __future__ import annotations

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.planner.choice import Choice, choice_of, with_choice
from meshwright_plan.planner.estimates import compute_schedule, lowered_schedule
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import evaluate
from tests.plan.planner.small import config, hardware


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_plan_and_a_dry_run_agree(schedule: str) -> None:
    device, base = hardware(), config(samples=32)
    choice = Choice(
        2, 2, 2, schedule, 1, 1, 16, 1, 2, sequence=True, recompute="none", offload=False
    )
    whole = with_choice(base, choice)
    dry = evaluate(
        ModelCache(whole, execution_options(whole.train, device)), device, whole, choice_of(whole)
    )
    cache = ModelCache(base, execution_options(base.train, device))
    for schedule_of in (compute_schedule, lowered_schedule):
        shortened = schedule_of(cache, choice)
        assert shortened.chunks < dry.layout.schedule.chunks
        plan = evaluate(cache, device, whole, choice, shortened)
        assert plan.time.total == pytest.approx(dry.time.total, rel=1e-9)
        assert plan.mfu == pytest.approx(dry.mfu, rel=1e-9)
    flops = draw_blueprint(whole).flops_per_step  # of metrics.jsonl
    peak = device.flops_per_s["bfloat16"] * dry.layout.grid.size
    assert dry.mfu == pytest.approx(flops / dry.time.total / peak, rel=1e-9)
