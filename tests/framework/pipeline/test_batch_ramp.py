"""Batch-size ramp: the losses of one process in plain torch on every layout,
and a resume in the middle of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.mesh.mesh import close_mesh
from meshwright.run.observers import total_loss
from meshwright.run.resume import resume
from meshwright.run.summary import summarise
from meshwright.schedule.load import format_schedule
from meshwright.step import take_step
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import RecordingSource, merge, open_verify_source, run_layout
from meshwright.verify.reference import run_reference
from meshwright.verify.tolerance import tolerance_of
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import save
from tests.framework.verify.cases import LATER, Size, model_config
from tests.framework.watch.spoiling import (
    LIMIT_S,
    held,
    opened,
    parts_for,
    quiet,
    same_bits,
    size_of,
)
from tests.support.errors import raises
from tests.support.marks import long_row, marked_rows

STEPS, GLOBAL_BATCH, RAMP = 8, 16, (4, 4, 40)
"""Megatron-LM's ``--rampup-batch-size 4 4 40`` with ``--global-batch-size 16``."""
SIZES = [4, 4, 4, 4, 8, 8, 12, 16]


def ramped(layout: str, dtype: str = "float64") -> RunConfig:
    base = model_config("gpt2", Size(8, 8, 4, GLOBAL_BATCH))
    return layout_config(base, parse_layout(layout), GLOBAL_BATCH, dtype).replace(
        batch={"ramp": RAMP}
    )


LAYOUTS = (
    "dp2,pp2,zero2",
    "tp2,dp2",
    LATER("dp2,zero3"),
    LATER("pp2,zb_h1,mbs2"),
    LATER("dp4"),
    LATER("pp2,zb_v,tp2,sequence"),
)


@marked_rows("long", "dp2,pp2,zero2", "tp2,dp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_plain_torch(pool: RankPool, layout: str) -> None:
    plain, config = ramped("dp1"), ramped(layout)
    expected = run_reference(plain, open_verify_source(plain, True), STEPS, torch.float64)
    assert [len(each) for each in expected.tokens] == [
        *SIZES[:1],
        GLOBAL_BATCH,
        *SIZES[1:],
        GLOBAL_BATCH,
    ]
    ranks = pool.run(
        run_layout, size_of(config), config.model_dump_json(), STEPS, True, timeout_s=LIMIT_S
    )
    row = compare(
        layout, merge(ranks), None, expected, tolerance_of("float64", parse_layout(layout))
    )
    assert not row.problems and not row.failure, row


def part_of_a_run(
    rank: int, world_size: int, config_json: str, saved: str, steps: int, resumes: bool
) -> tuple[list[tuple[int, float]], list[Tensor], dict[int, int], int]:
    """Steps until step ``steps``, from the start or a checkpoint;
    a validation after each changes nothing.
    """
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    recorder = parts.source = RecordingSource(parts.source)
    if resumes:
        resume(parts, Path(saved), quiet)
    found = []
    while parts.state.step < steps:
        stats = take_step(parts)
        found.append((stats.num_samples, stats.loss))
        data_s = parts.data_s
        total_loss(parts, parts.feeds(open_verify_source(config, True), [0]))
        assert parts.data_s == data_s > 0
    if not resumes:
        save(parts, saved)
    close_mesh(mesh)
    return found, held(parts), recorder.seen, parts.state.samples_seen


@pytest.mark.parametrize("stopped_after", [long_row(3), LATER(5)])
def test_a_resume_in_the_middle_goes_on_bit_equal(
    pool: RankPool, tmp_path: Path, stopped_after: int
) -> None:
    config = ramped("dp2,pp2", "float32").model_dump_json()
    size = 4

    def run(
        name: str, steps: int, resumes: bool
    ) -> list[tuple[list[tuple[int, float]], list[Tensor], dict[int, int], int]]:
        return pool.run(
            part_of_a_run, size, config, str(tmp_path / name), steps, resumes, timeout_s=LIMIT_S
        )

    whole, first, second = (
        run("whole", STEPS, False),
        run("cut", stopped_after, False),
        run("cut", STEPS, True),
    )
    assert [samples for samples, _ in whole[0][0]] == SIZES and whole[0][3] == sum(SIZES)
    for one, two, three in zip(whole, first, second, strict=True):
        assert one[0] == two[0] + three[0]
        assert same_bits(one[1], three[1])
    other = ramped("dp1,tp2", "float32").model_dump_json()
    elsewhere = pool.run(
        part_of_a_run, 2, other, str(tmp_path / "cut"), STEPS, True, timeout_s=LIMIT_S
    )
    assert [samples for samples, _ in elsewhere[0][0]] == SIZES[stopped_after:]
    expected = [loss for _, loss in whole[0][0][stopped_after:]]
    assert [loss for _, loss in elsewhere[0][0]] == pytest.approx(expected, rel=1e-5)
    seen = {index: value for _, _, of_rank, _ in second for index, value in of_rank.items()}
    assert elsewhere[0][2] == seen and sorted(seen) == list(
        range(sum(SIZES[:stopped_after]), sum(SIZES))
    )


def test_every_schedule_is_drawn_and_checked_before_the_first_step(tmp_path: Path) -> None:
    blueprint = draw_blueprint(ramped("pp2"))
    assert [schedule.chunks for schedule in blueprint.schedules] == [4, 8, 12, 16]
    other = draw_blueprint(ramped("pp2").replace(batch={"ramp": (8, 8, 40)}))
    assert (
        blueprint.digest() != other.digest()
        and len(draw_blueprint(ramped("pp2").replace(batch={"ramp": None})).schedules) == 1
    )
    assert "ramp: 4 samples, 8 from step 5, 12 from step 7, 16 from step 8" in summarise(
        blueprint, ["host"] * 2
    )
    file = tmp_path / "schedule.txt"
    file.write_text(format_schedule(blueprint.schedule))
    from_file = ramped("pp2").replace(pipeline={"schedule_file": str(file)})
    with raises("MW-SCHEDULE-015", "chunks=16", "parallel.pp = 2", "batch.chunks = 4"):
        draw_blueprint(from_file)
