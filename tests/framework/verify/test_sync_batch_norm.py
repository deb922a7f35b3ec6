"""Layouts of models with ``nn.SyncBatchNorm`` against the untouched model on batches of dp x
micro_batch_size samples; checkpoints go from each layout to the next.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.verify import (
    Verification,
    default_layouts,
    layout_config,
    parse_layout,
    traits_of,
)
from meshwright.verify.rank import merge, run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import config_of
from tests.support.errors import raises
from tests.support.marks import mark_all_rows_but

BUILDERS = "tests.framework.verify.synchronised:"
LAYOUTS = (
    "dp1,mbs4",
    "dp2,mbs2,zero2",
    "dp2,pp2,mbs2,zb_h1,full",
    "dp4,mbs1,zero3",
    "dp4,mbs1,zero0,pointwise",
    "dp2,pp2,mbs2,zero1",
    "pp2,mbs4,full",
    "dp2,pp2,mbs2,zb_v,zero2",
    "dp2,pp2,mbs2,dualpipe_v",
    "dp2,mbs4,zero3,full",
    "dp2,mbs8",
)
OF_LLAMA = ("dp2,cp2,mbs2,zero3", "tp2,mbs4", "dp2,tp2,mbs2,zero1", "cp2,heads,mbs4,full")
OPTIONS: dict[str, dict[str, Any]] = {
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "mean of all batches": {"momentum": None},
}


@functools.cache
def proof(builder: str, option: str = "") -> Verification:
    config = config_of(f"{BUILDERS}{builder}", OPTIONS.get(option, {}), 8)
    return Verification(config, global_batch=16, steps=3, random_tokens=True)


def check(of: Verification, text: str, pool: RankPool, *, is_repeated: bool = True) -> None:
    row = of.compare_layout(parse_layout(text), pool, is_repeated=is_repeated)
    assert row.passed, (row.problems, row.failure)


@mark_all_rows_but("long", "dp2,pp2,mbs2,zb_h1,full")
@pytest.mark.parametrize("text", LAYOUTS)
def test_layouts_are_one_process_on_the_samples_of_all_replicas(text: str, pool: RankPool) -> None:
    check(proof("build"), text, pool, is_repeated="zb_h1" not in text)


@mark_all_rows_but("long", "dp2,cp2,mbs2,zero3")
@pytest.mark.parametrize("text", OF_LLAMA)
def test_ranks_with_parts_of_the_tokens_and_of_the_features(text: str, pool: RankPool) -> None:
    check(proof("build_llama"), text, pool, is_repeated=text != "dp2,cp2,mbs2,zero3")


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_module(option: str, pool: RankPool) -> None:
    for text in ("dp2,mbs2", "dp2,pp2,mbs2,full"):
        check(proof("build", option), text, pool)


@pytest.mark.long
def test_layouts_of_equal_groups_have_equal_running_statistics(pool: RankPool) -> None:
    """Those of every micro-batch group of all steps, once."""
    config, found = proof("build").config, []
    for text in ("dp1,mbs4,full", "dp4,mbs1,full", "dp2,pp2,mbs1"):
        layout = parse_layout(text)
        alone = layout_config(config, layout, 16, "float64").model_dump_json()
        found.append(merge(pool.run(run_layout, layout.size, alone, 2, True)).weights)
    first, second, other = found
    for name in ("1.norm.running_mean", "1.norm.running_var"):
        torch.testing.assert_close(second[name], first[name], rtol=1e-9, atol=1e-11)
        assert not torch.allclose(other[name], first[name], rtol=1e-4), "groups of 2, not of 4"
    name = "1.norm.num_batches_tracked"
    assert [int(each[name]) for each in found] == [2 * 4, 2 * 4, 2 * 8]


def asked(builder: str, text: str, **sections: Any) -> RunConfig:
    config = config_of(f"{BUILDERS}{builder}", {}, 8).replace(**sections)
    return layout_config(config, parse_layout(text), 16, "float32")


def test_layouts_that_cannot_have_the_samples_together() -> None:
    with raises("MW-PIPELINE-048", "normed.norm", "parallel.sequence"):
        draw_blueprint(asked("build_llama", "tp2,sequence,mbs4"))
    with raises("MW-PIPELINE-049", "1.norm", "batch.balance"):
        work = {"document_boundaries": True}
        config = asked("build_of_documents", "dp2,mbs2", data=work, batch={"balance": "work"})
        draw_blueprint(config)
    with raises("MW-PIPELINE-050", "1.norm", "2.norm (BatchNorm1d)", "parallel.dp = 2"):
        draw_blueprint(asked("build_mixed", "dp2,mbs2"))
    draw_blueprint(asked("build_mixed", "pp2,mbs4"))


def test_one_value_per_channel_has_no_variance() -> None:
    """One sample of one replica; two replicas have two."""
    with raises("MW-PIPELINE-031", "layer 1"):
        draw_blueprint(asked("build_of_rows", "mbs1"))
    draw_blueprint(asked("build_of_rows", "dp2,mbs1"))


@mark_all_rows_but("long", "64-2-4")
@pytest.mark.parametrize(("dp", "size", "together"), [(1, 4, 4), (2, 4, 8), (64, 2, 4)])
def test_default_layouts_have_as_many_samples_together(dp: int, size: int, together: int) -> None:
    """As the run, or fewer than the 128 of many replicas."""
    sections = {"parallel": {"dp": dp}, "batch": {"micro_batch_size": size}}
    config = config_of(f"{BUILDERS}build", {}, 8).replace(**sections)
    chosen = default_layouts(config, traits_of(config), 8 * together, max_ranks=2).layouts
    assert {each.dp * each.micro_batch_size for each in chosen} == {together}
    assert {each.dp for each in chosen} == {1, 2}
