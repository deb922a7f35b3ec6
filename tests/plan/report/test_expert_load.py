"""Load of the experts: figures of a step, lines of the file, and the maps of the report."""

from __future__ import annotations

import json
import math
import struct
from base64 import b64decode
from pathlib import Path

import pytest
import torch

from meshwright.tracking.expert_load import choice_metrics, counts_of, load_metrics
from meshwright.tracking.record import EXPERT_LOAD
from meshwright_plan.report.experts import (
    MAX_LAYERS,
    MAX_ROWS,
    MAX_STEPS,
    evenly,
    heat_maps,
    read_loads,
)


def test_figures_of_a_step() -> None:
    sums = {"block0.mlp.router.counts": torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64)}
    sums |= {"block1.mlp.router.counts": torch.full((4,), 2.0), "norm.running_mean": torch.zeros(4)}
    counts = counts_of(sums)
    assert counts == {"block0.mlp.router": [3, 1, 0, 0], "block1.mlp.router": [2, 2, 2, 2]}
    found = load_metrics(counts)
    assert found["experts/skew"] == 3.0 and found["experts/idle_share"] == 0.25
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found["experts/entropy"] == pytest.approx((entropy + 1) / 2)
    assert load_metrics({}) == load_metrics({"a": [0, 0]}) == {}


def test_figures_of_the_choices_of_a_step() -> None:
    sums = {"a.counts": torch.tensor([6.0, 2.0]), "a.dropped": torch.tensor([2.0, 0.0])}
    sums |= {"b.counts": torch.tensor([4.0, 4.0]), "a.entropy": torch.tensor([3.0, 4.0])}
    sums |= {"b.entropy": torch.tensor([1.0, 4.0]), "c.entropy": torch.zeros(2)}
    found = choice_metrics({name: each.double() for name, each in sums.items()})
    assert found == {"experts/token_entropy": 0.5, "experts/dropped_share": 0.25}, (
        "b has no capacity, c no tokens"
    )
    assert choice_metrics({}) == {} and counts_of(sums, ".dropped") == {"a": [2, 0]}


def test_maps_of_a_run(tmp_path: Path) -> None:
    assert heat_maps(tmp_path) == []
    line = {"step": 1, "counts": {f"block{i}.mlp.router": [4, 0, *[2] * 62] for i in range(9)}}
    steps = [json.dumps(line | {"step": step}) for step in range(100)]
    (tmp_path / EXPERT_LOAD).write_text(
        "\n".join([*steps, steps[3], "torn", '{"step": 5, "counts": {"a": [-1]}}', ""])
    )
    assert len(read_loads(tmp_path)) == 100
    maps = heat_maps(tmp_path)
    assert len(maps) == MAX_LAYERS and maps[0].title == "block0.mlp.router: 64 experts"
    assert maps[0].last_expert == 63 and maps[0].rows == MAX_ROWS
    assert (maps[0].steps[0], maps[0].steps[-1], len(maps[0].steps)) == (0, 99, MAX_STEPS)
    assert maps[0].label.endswith("expert 0 is the busiest, with 2.00 x the mean")
    data = json.loads(maps[0].data)
    assert (data["experts"], data["group"], data["steps"]) == (64, 2, maps[0].steps)
    loads = struct.unpack(f"<{MAX_ROWS * MAX_STEPS}H", b64decode(data["loads"]))
    assert loads[:MAX_ROWS] == (200, *[100] * 31), "of two neighbours the busier, in hundredths"
    assert evenly(range(4), 6) == [0, 1, 2, 3]
    assert evenly([1], 5) == [0] and evenly([], 5) == [] and evenly(range(10), 3) == [0, 4, 9]
