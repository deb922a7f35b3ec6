"""Python calls of a step, counted: the same on every machine,
so that no action becomes dearer unseen.

The limits are what was counted and a tenth more. A capability that needs more calls raises them, if
it is in use here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import meshwright.pipeline.executor
from meshwright.build import build
from meshwright.config import parse
from meshwright.config.combinations.layout import Layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import config_of
from tests.support.marks import long_row

ROOT = Path(meshwright.pipeline.executor.__file__).parents[1]
ROOMS = (
    "pipeline",
    "mesh",
    "data_parallel",
    "tensor_parallel",
    "optimizer",
    "step.py",
    "parameters.py",
)
CHUNKS = 8


def calls_of_a_step(rank: int, world_size: int, text: str) -> dict[str, int]:
    """Calls of this rank in its third step, by room."""
    config = parse(text)
    parts = build(
        config,
        open_mesh(Grid.of(config.parallel.degrees), "cpu"),
        (open_verify_source(config, True), {}),
    )
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename.removeprefix(f"{ROOT}/").partition("/")[0]] += 1

    for _ in range(2):
        take_step(parts)
    sys.setprofile(count)
    try:
        take_step(parts)
    finally:
        sys.setprofile(None)
    return {room: found[room] for room in ROOMS}


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        long_row(Layout(dp=2), 950),
        (Layout(dp=2, zero=2), 1_780),
        long_row(Layout(tp=2), 2_600),
        long_row(Layout(pp=2), 970),
        long_row(Layout(pp=2, schedule="zb_v"), 2_880),
    ],
    ids=str,
)
def test_a_step_makes_few_python_calls(layout: Layout, most: int, pool: RankPool) -> None:
    options = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "max_sequence_length": 4,
    }
    config = config_of("meshwright_models.gpt2:build", options | {"dropout": 0.0}, 4)
    config = layout_config(config, layout, CHUNKS * layout.dp, "float32")
    ranks = pool.run(calls_of_a_step, layout.size, config.model_dump_json())
    assert sum(sum(found.values()) for found in ranks) <= most * layout.size, ranks
