"""What ranks really hold of micro-batches, in number and in bytes,
against what the schedule says beforehand.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest

from meshwright.build import build
from meshwright.config import parse
from meshwright.config.combinations.layout import Layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import Parts
from meshwright.pipeline.stage import Stage
from meshwright.schedule.action import Kind
from meshwright.schedule.analysis import peak_activations
from meshwright.step import take_step
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.pipeline.kept import KeptBytes
from tests.framework.verify.cases import config_of
from tests.support.marks import long_row

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v")
WHOLE = ("gpipe", "1f1b", "interleaved_1f1b")
"""Their backward is whole: what forward has saved lives until B, and then nothing of it does."""


class SavedBytes:
    """Told after each forward of a rank: (stage, micro-batch, bytes that it has added,
    bytes that are kept).
    """

    def __init__(self, parts: Parts) -> None:
        stages = parts.executor.stages.values()
        self.kept = KeptBytes(stage.layers for stage in stages)
        self.told: list[tuple[int, int, int, int]] = []
        self.stages, self.peak = stages, 0
        """Most micro-batches in flight at once, each counted once per stage."""
        for stage in stages:
            stage.forward = partial(self.forward, stage, stage.forward)  # type: ignore[method-assign]

    def forward(
        self, stage: Stage, forward: Any, microbatch: int, *args: Any, **kwargs: Any
    ) -> Any:
        before = self.kept.bytes()
        with self.kept.watching():
            found = forward(microbatch, *args, **kwargs)
        after = self.kept.bytes()
        self.peak = max(self.peak, sum(each.num_in_flight for each in self.stages))
        self.told.append((stage.index, microbatch, after - before, after))
        return found


class Held(NamedTuple):
    """What one rank found in one step of one schedule."""

    peak: int
    predicted: int
    told: list[tuple[int, int, int, int]]
    left: int
    rows: list[tuple[str, int]]
    """(kind, stage) of the computations of its row."""


def held(rank: int, pp: int, configs: list[str]) -> list[Held]:
    mesh = open_mesh(Grid(pp=pp), "cpu")
    found = []
    for text in configs:
        config = parse(text)
        parts = build(config, mesh, (open_verify_source(config, True), {}))
        saved = SavedBytes(parts)
        take_step(parts)
        schedule = parts.blueprint.schedule
        row = [
            (action.kind.value, action.stage)
            for _, action in schedule.actions(rank)
            if action.stage is not None
        ]
        predicted = peak_activations(schedule)[rank]
        found.append(Held(saved.peak, predicted, saved.told, saved.kept.bytes(), row))
    return found


def config_for(schedule: str, pp: int, chunks: int) -> str:
    options = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_layers": 2 * pp - 3 if pp > 2 else 1,
        "num_heads": 2,
    }
    options |= {"max_sequence_length": 4, "dropout": 0.1}
    config = config_of("meshwright_models.gpt2:build", options, 4)
    return layout_config(
        config, Layout(pp=pp, schedule=schedule), chunks, "float32"
    ).model_dump_json()


@pytest.mark.parametrize(("pp", "chunks"), [(2, 3), long_row(3, 4), long_row(4, 6)])
def test_what_a_rank_holds_is_what_its_schedule_says(pp: int, chunks: int, pool: RankPool) -> None:
    """Micro-batches at once, of each rank, exactly. Bytes: each forward of a stage adds the same,
    and the most that lives is the sum over what is held where the backward is whole; where it is
    split, I frees some of it early.
    """
    ranks = pool.run(held, pp, [config_for(schedule, pp, chunks) for schedule in SCHEDULES])
    for index, schedule in enumerate(SCHEDULES):
        for rank in range(pp):
            found = ranks[rank][index]
            where = f"{schedule} rank {rank}: {found}"
            assert found.peak == found.predicted, where
            assert found.left == 0, where
            of_one = {stage: added for stage, _, added, _ in found.told}
            assert all(added > 0 for added in of_one.values()), where
            measured = max(live for *_, live in found.told)
            if schedule in WHOLE:
                assert all(added == of_one[stage] for stage, _, added, _ in found.told), where
                assert measured == peak_bytes(found.rows, of_one), where
            else:
                assert measured <= peak_bytes(found.rows, of_one), where


def peak_bytes(row: list[tuple[str, int]], of_one: dict[int, int]) -> int:
    """Return the most that the row holds when each micro-batch costs that much from its F
    to its B or W.
    """
    now = most = 0
    for kind, stage in row:
        now += of_one[stage] * ((kind == Kind.F) - (kind in (Kind.B, Kind.W)))
        most = max(most, now)
    return most


@pytest.mark.long
def test_one_stage_of_gpt_holds_so_many_times_what_one_micro_batch_costs(pool: RankPool) -> None:
    """In bytes: GPipe's first rank all micro-batches, 1F1B's as many as there are ranks."""
    configs = [config_for(schedule, 3, 6) for schedule in ("gpipe", "1f1b")]
    ranks = pool.run(held, 3, configs)
    for rank, (gpipe, one_f_one_b) in enumerate(ranks):
        one = gpipe.told[0][2]
        assert max(live for *_, live in gpipe.told) == 6 * one
        assert max(live for *_, live in one_f_one_b.told) == (3 - rank) * one
