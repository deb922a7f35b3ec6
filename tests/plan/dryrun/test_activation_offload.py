"""Memory of activation offload in a dry run, and the planner's formula for it."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import RunConfig, resolve
from meshwright.errors import ModelError
from meshwright_plan.dryrun.fake_step import profile_rank
from meshwright_plan.dryrun.rank_profile import RankProfile
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.memory.reduction import GLOO
from meshwright_plan.planner.model_cache import ModelCache


def configured(layers: int, offloaded: list[str], **pipeline: Any) -> RunConfig:
    options = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "ffn_size": 256,
    }
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "meshwright_models.llama:build",
                "options": options | {"num_layers": layers},
            },
            "data": {"train": "in memory", "sequence_length": 256},
            "batch": {"micro_batch_size": 2, "chunks": 2},
            "pipeline": {"offload_activations": offloaded, "balance": "layers", **pipeline},
            "train": {"device": "cpu"},
        }
    )
    return resolve(config, 1)


def activations(config: RunConfig) -> tuple[int, RankProfile]:
    """Return the device bytes of a step at its peak that are not those of weights,
    and the profile.
    """
    profile = profile_rank(config, 0)
    return profile.peak_bytes - sum(profile.at_rest.values()), profile


@pytest.mark.long
def test_memory_of_more_layers_is_on_the_host() -> None:
    """The device holds two layers, of however many: the one that runs, and one on its way."""
    (four, profile), (eight, larger) = (
        activations(configured(layers, ["block*"])) for layers in (4, 8)
    )
    kept, _ = activations(configured(8, []))
    group = (larger.offloaded_bytes - profile.offloaded_bytes) // 4
    # the last group stays: its backward comes next
    assert 3 * group <= profile.offloaded_bytes < 3.1 * group
    assert abs(eight - four) < 0.02 * group
    assert 0.98 * 6 * group < kept - eight < 1.02 * 6 * group


@pytest.mark.long
@pytest.mark.parametrize(("recompute", "close"), [("none", 0.02), ("pointwise", 0.15)])
def test_the_planner_counts_the_bytes(recompute: str, close: float) -> None:
    config = configured(6, ["block*"], recompute=recompute)
    _, profile = activations(config)
    layout = ModelCache(config, ExecutionOptions()).layout(config)
    memory = layout.memory(0, GLOO)
    assert memory.total == pytest.approx(profile.peak_bytes, rel=close)
    assert memory.host * 5 / 6 == pytest.approx(
        profile.offloaded_bytes, rel=0.16
    )  # the last group stays, see footprint


def test_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(
        ModelError,
        match=r"pipeline.offload_activations: 'blok\*' matches no layer .* block0.*MW-PLACEMENT-001",
    ):
        profile_rank(configured(2, ["blok*"]), 0)
