"""The measured bubble of a step, against the simulated one where the measured times are those
of the simulation.
"""

from __future__ import annotations

from unittest import mock

import pytest

from meshwright.build import build
from meshwright.config import parse
from meshwright.config.combinations.layout import Layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.pipeline.timing import RowTimes
from meshwright.schedule.action import COMPUTE
from meshwright.schedule.analysis import Costs, bubble_share, simulate
from meshwright.step import take_step
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import config_of

SCHEDULES = ("gpipe", "1f1b", "zb_v")


def measured(rank: int, world_size: int, configs: list[str]) -> list[tuple[float, float]]:
    """Return (bubble share of a step whose actions take the simulated times,
    simulated bubble share) per schedule.
    """
    mesh = open_mesh(Grid(pp=2, dp=2), "cpu")
    found = []
    for text in configs:
        config = parse(text)
        parts = build(config, mesh, (open_verify_source(config, True), {}))
        timeline = simulate(parts.blueprint.schedule, Costs(f=1.0, b=2.0))
        spans = [
            span
            for span in timeline.spans
            if span.rank == mesh.at.pp_rank and span.action.kind in COMPUTE
        ]
        times = sum(span.end - span.start for span in spans), max(span.end for span in spans)
        with mock.patch.object(RowTimes, "computing", lambda self, times=times: times):
            found.append((take_step(parts).bubble_share, bubble_share(timeline)))
    return found


def test_the_measured_bubble_is_that_of_the_whole_pipeline(pool: RankPool) -> None:
    """A rank whose row ends early is idle until the last one ends: 1f1b, pp=2, chunks=4: 1/5,
    not 1/7.
    """
    options = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "max_sequence_length": 4,
    }
    config = config_of("meshwright_models.gpt2:build", options, 4)
    configs = [
        layout_config(config, Layout(dp=2, pp=2, schedule=schedule), 8, "float32").model_dump_json()
        for schedule in SCHEDULES
    ]
    for ranks in pool.run(measured, 4, configs):
        assert [share for share, _ in ranks] == pytest.approx([simulated for _, simulated in ranks])
        assert ranks[1][0] == pytest.approx(1 / 5)
