"""Pairs of F and B that take turns between exchanges of experts have the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.mesh.turns import Save, Turns
from meshwright.verify import compare, layout_config, parse_layout
from meshwright.verify.rank import RankFindings, merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, References, prove
from tests.framework.verify.test_expert_parallel import model
from tests.support.marks import marked_rows

LAYOUTS = [
    ("mixtral", "dp2,pp2,ep2,dualpipe_v,full"),
    ("mixtral", "dp2,pp2,tp2,ep4,sequence,dualpipe_v"),
    LATER("deepseek", "dp2,pp2,ep2,dualpipe_v,zero2"),
    LATER("all", "dp2,pp2,ep2,dualpipe_v,selective,zero0"),
    LATER("deepseek", "dp4,pp2,ep2,dualpipe_v,zero3"),
    LATER("sparse", "dp4,pp2,ep4,dualpipe_v,zero3,full"),
    LATER("mixtral", "pp2,cp2,ep2,dualpipe_v"),
    LATER("deepseek", "dp2,pp4,ep2,dualpipe_v,full"),
    LATER("mixtral", "dp2,pp2,tp2,ep4,sequence,dualpipe_v,full,step"),
]


@marked_rows("all_layouts", "mixtral-dp2,pp2,tp2,ep4,sequence,dualpipe_v")
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_layouts_agree(name: str, layout: str, pool: RankPool, references: References) -> None:
    parsed = parse_layout(layout)
    config = model(name, 2 * parsed.pp)
    row = prove(
        config,
        parsed,
        pool,
        references,
        global_batch=(2 * parsed.pp + 1) * parsed.dp,
        steps=2,
        twice=False,
    )
    assert row.problems == []


MISTAKEN = "dp2,pp2,ep2,dualpipe_v,full"


def run_mistaken(rank: int, world_size: int, config_json: str) -> tuple[RankFindings, int]:
    """Samples of the present micro-batch, which dropouts read,
    stay as the other computation has left them.
    """
    pauses, pause, run = 0, Turns.pause, Turns.run

    def counted(turns: Turns) -> None:
        nonlocal pauses
        pauses += turns._num_left == 2
        pause(turns)

    def forget(
        turns: Turns, first: Callable[[], None], second: Callable[[], None], save: Save
    ) -> None:
        run(turns, first, second, lambda: lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "run", forget)
        patch.setattr(Turns, "pause", counted)
        return run_layout(rank, world_size, config_json, 1, True), pauses


@pytest.mark.long
def test_verify_sees_samples_that_are_mixed_up(pool: RankPool, references: References) -> None:
    config, layout = model("mixtral", 4), parse_layout(MISTAKEN)
    expected = references.expected(config, 10, 1, "float64")
    text = layout_config(config, layout, 10, "float64").model_dump_json()
    found = pool.run(run_mistaken, layout.size, text)
    said = compare(
        MISTAKEN, merge([each for each, _ in found]), None, expected.findings, TOLERANCES["float64"]
    ).problems
    assert any("gradients of step 1 differ" in each for each in said), said
    assert min(pauses for _, pauses in found) > 10
