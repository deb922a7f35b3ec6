"""Predicted step times with rows of unequal work: the simulation with unequal micro-batches, and
the gain of ``batch.balance = "work"``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from meshwright.data.sources import open_sources
from meshwright.schedule.action import Kind, Schedule
from meshwright.schedule.analysis import Costs
from meshwright.schedule.build import build
from meshwright_plan.planner.choice import Choice, with_choice
from meshwright_plan.planner.context import scale_attention
from meshwright_plan.planner.cost import step_time
from meshwright_plan.planner.fast_simulation import simulate_fast
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.page import page
from meshwright_plan.planner.plan import RankedLayout, evaluate
from meshwright_plan.planner.rates import PerformanceModel
from meshwright_plan.planner.row_work import DealtTimes, row_lines, row_times
from meshwright_plan.planner.search import search
from meshwright_plan.planner.text import describe
from tests.plan.planner.small import cache, hardware

LENGTH, SAMPLES = 1024, 16
# a GPU's host would launch so small operations too slowly for any attention to show
DEVICES = hardware(kind="cpu", flops_per_s={"bfloat16": 1e12})
MODEL = PerformanceModel.of(DEVICES)


def corpus_at(folder: Path, lengths: list[int]) -> Path:
    builder = IndexedDatasetBuilder(str(folder / "mixed.bin"), dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.ones(length, dtype=torch.int64), [length])
    builder.finalize(str(folder / "mixed.idx"))
    return folder / "mixed"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one long document, and rows of many short ones."""
    draw, lengths = random.Random(5), []
    for _ in range(150):
        lengths += draw.choice([[LENGTH], [LENGTH // 2] * 2, [LENGTH // 32] * 32])
    return corpus_at(tmp_path_factory.mktemp("mixed"), lengths)


def bench(corpus: Path, **data: object) -> ModelCache:
    found = cache(samples=SAMPLES)
    data = {"train": str(corpus), "sequence_length": LENGTH, "document_boundaries": True} | data
    found.config = found.config.replace(data=data)
    return found


def choice(dp: int, pp: int = 1, zero: int = 1, size: int = 1) -> Choice:
    chunks = SAMPLES // dp // size
    return Choice(pp, dp, 1, "1f1b", 1, size, chunks, zero, dp, False, "none", False)


def evaluated(of: ModelCache, chosen: Choice) -> RankedLayout:
    return evaluate(of, DEVICES, with_choice(of.config, chosen), chosen)


def predicted(of: ModelCache, chosen: Choice) -> DealtTimes | None:
    return row_times(of, MODEL, evaluated(of, chosen))


def ends(schedule: Schedule, by_microbatch: list[list[Costs]]) -> float:
    """Return the longest path through the computations, by relaxation until nothing moves."""
    end: dict[tuple[Kind, int, int], float] = {}
    last = schedule.num_stages - 1
    while True:
        before = dict(end)
        for row in schedule.rows:
            clock = 0.0
            for kind, stage, m in row:
                inputs = {Kind.F: [(Kind.F, stage - 1, m)], Kind.B: [(Kind.B, stage + 1, m)]}[kind]
                inside = [each for each in inputs if 0 <= each[1] <= last]
                clock = max(clock, *(end.get(each, 0.0) for each in inside), 0.0)
                clock += by_microbatch[m][stage].of(kind)
                end[kind, stage, m] = clock
        if end == before:
            return max(end.values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_unequal_micro_batches_take_their_own_time(name: str) -> None:
    schedule = build(name, 4, 8, 2 if name == "interleaved_1f1b" else 1)
    draw = random.Random(2)
    costs = [
        [Costs(f=draw.random(), b=2 * draw.random()) for _ in range(schedule.num_stages)]
        for _ in range(schedule.chunks)
    ]
    found = simulate_fast(schedule, costs[0], costs)
    assert max(span.end for span in found.spans) == pytest.approx(ends(schedule, costs))
    assert simulate_fast(schedule, costs[0], [costs[0]] * 8) == simulate_fast(schedule, costs[0])


@pytest.mark.parametrize(("zero", "size"), [(1, 1), (1, 2), (2, 1)])
def test_a_step_ends_with_its_slowest_replica(mixed: Path, zero: int, size: int) -> None:
    """By index, worked out from the starts that the model reads."""
    of, chosen = bench(mixed), choice(4, zero=zero, size=size)
    found, even = predicted(of, chosen), evaluated(of, chosen)
    assert found is not None and len(found.seconds["index"]) == 8
    source, _ = open_sources(of.config)
    starts = source.read(range(8 * SAMPLES))[0]["starts"]
    place = torch.arange(LENGTH)
    begin = torch.where(starts, place, 0).cummax(1).values
    keys = (place - begin + 1).sum(1).double()
    loads = keys.view(8, 4, -1, size).sum(3) / (keys[:16].mean() * size)  # (step, dp, chunks)
    # seconds of the attention of one micro-batch at load 1: time that a scaled layout takes more
    layers = tuple(scale_attention(each, 3.0) for each in even.layout.layers)
    more = step_time(replace(even.layout, layers=layers), MODEL)
    attention_s = (more.pipeline - even.time.pipeline) / 2 / loads.shape[2]
    by_step = loads.amax(1).sum(1) if zero == 2 else loads.sum(2).amax(1)
    expected = even.time.total + attention_s * (by_step - loads.shape[2])
    assert torch.allclose(torch.tensor(found.seconds["index"]).double(), expected, rtol=1e-6)
    assert attention_s > 0.1 * even.time.total / loads.shape[2]
    assert found.ratio < 1 and fmean(found.excess["work"]) < fmean(found.excess["index"])


def test_pipelines_have_bubbles_of_unequal_micro_batches(mixed: Path) -> None:
    """So rows by work gain more than by their replicas' sums, also in a single replica."""
    of = bench(mixed)
    found, even = predicted(of, choice(2, 2)), evaluated(of, choice(2, 2)).time.total
    assert found is not None
    assert fmean(found.seconds["index"]) > fmean(found.seconds["work"]) > 0.9 * even
    alone = predicted(of, choice(1, 2, size=2))
    assert alone is not None and alone.ratio < 1 and set(alone.excess["index"]) == {0.0}


def test_where_rows_are_equal_nothing_is_gained(tmp_path: Path, mixed: Path) -> None:
    of = bench(corpus_at(tmp_path, [LENGTH // 4] * 200))
    for chosen in (choice(4), choice(2, 2), choice(2, zero=3)):
        found, even = predicted(of, chosen), evaluated(of, chosen).time.total
        assert found is not None and found.ratio == pytest.approx(1, abs=1e-9)
        assert found.seconds["work"] == pytest.approx([even] * 8)
    assert predicted(bench(mixed, document_boundaries=False), choice(4)) is None
    assert predicted(bench(tmp_path / "nowhere"), choice(4)) is None
    assert predicted(bench(mixed), choice(1)) is None


def test_a_plan_says_it_of_its_first_layout(mixed: Path) -> None:
    of = bench(mixed).replaced(pins={"pp": 1, "tp": 1})
    found = search(of, DEVICES, 1, best=2)
    first = found.best[0]
    assert first.choice.dp > 1
    times = row_times(of, MODEL, first)
    assert times is not None
    text = describe(of, found)
    assert f"rows       {fmean(times.seconds['index']):.4g} s a step dealt by index" in text
    assert f"{fmean(times.seconds['work']):.4g} s by work ({1 - times.ratio:.1%} less" in text
    assert " ".join(row_lines(of, DEVICES, first)).partition(";")[0] in page(of, found)
