"""Heads of multi-token prediction in any layout: the numbers of one process,
in series and in parallel; and faults.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright.build
import meshwright.pipeline.values
from meshwright.pipeline.values import IGNORED_LABEL
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import RankFindings, run_layout
from meshwright_launch.pool import RankPool
from meshwright_models.multi_token import MtpModule
from tests.framework.verify.cases import (
    LATER,
    References,
    assert_agrees,
    config_of,
    model_config,
    problems_of,
    size_for,
)
from tests.support.errors import raises
from tests.support.marks import all_layouts_row, long_row, mark_all_rows_but, marked_rows

IN_SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"mtp_layers": 2, "mtp_loss_weight": 0.3, "tied": True}),
    "smoothed": (
        "llama",
        {"mtp_layers": 1, "label_smoothing": 0.1, "z_loss": 0.01, "dropout": 0.1, "qk_norm": True},
    ),
}
LAYOUTS = ["dp2,pp2,tp2,sequence", "pp4,interleaved_1f1b", "dp2,tp2,zero3", "pp2,tp2,zb_v"]
LAYOUTS += [
    "pp4,zb_h1",
    "dp4,zero2,mbs2",
    "dp2,pp2,zero3,full",
    "tp2,sequence,selective",
    "pp8",
    "pp2,zb_h2,tp2,sequence",
]
FIRST = {("llama", layout) for layout in LAYOUTS[:4]} | {
    ("smoothed", layout) for layout in LAYOUTS[:1]
}


@marked_rows(
    "long",
    "llama-dp2,pp2,tp2,sequence",
    "llama-pp4,interleaved_1f1b",
    "llama-dp2,tp2,zero3",
    "llama-pp2,tp2,zb_v",
    "smoothed-dp2,pp2,tp2,sequence",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (pytest.param if (name, layout) in FIRST else LATER)(name, layout, id=f"{name}-{layout}")
        for name in IN_SERIES
        for layout in LAYOUTS
    ],
)
def test_modules_in_series(name: str, layout: str, pool: RankPool, references: References) -> None:
    model, options = IN_SERIES[name]
    chosen = parse_layout(layout)
    size = size_for(chosen)
    config = model_config(model, size, **options)
    assert_agrees(config, chosen, pool, references, global_batch=size.global_batch, steps=3)


@pytest.mark.parametrize(
    ("heads", "layout"),
    [
        all_layouts_row(None, "dp2,pp2,tp2,sequence"),
        ("whole", "tp2,zero2,dp2"),
        all_layouts_row("first", "tp4"),
        LATER([[0, 0.5], [3, 1], [40, 2.0]], "pp4,zb_h1"),
        LATER(None, "tp2,pp2,interleaved_1f1b"),
    ],
)
def test_heads_in_parallel(heads: Any, layout: str, pool: RankPool, references: References) -> None:
    """A head that looks 40 tokens ahead of 8 has no label."""
    config = config_of("tests.support.parallel_heads:build", {"heads": heads}, 8)
    assert_agrees(config, layout, pool, references, global_batch=8, steps=2)


@pytest.mark.parametrize(
    "layout",
    [long_row("dp2,pp2,tp2,sequence"), LATER("dp4,zero3,mbs2"), LATER("pp4,interleaved_1f1b")],
)
def test_documents_within_samples(layout: str, pool: RankPool, references: References) -> None:
    chosen = parse_layout(layout)
    size = size_for(chosen)
    config = model_config("llama", size, **IN_SERIES["llama"][1])
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"document_boundaries": True})}
    )
    assert_agrees(config, chosen, pool, references, global_batch=size.global_batch, steps=2)


def test_the_loss_of_each_head_is_recorded_over_its_own_labels(pool: RankPool) -> None:
    config = config_of("tests.support.parallel_heads:build", {}, 8)
    text = layout_config(config, parse_layout("pp2"), 8, "float64").model_dump_json()
    findings: list[RankFindings] = pool.run(run_layout, 2, text, 2, True)
    assert findings[0].metrics == findings[1].metrics
    step, validation, *_ = findings[0].metrics
    assert list(step) == list(validation) == ["head_loss/0", "head_loss/1", "head_loss/2"]
    assert all(3 < each < 6 for each in step.values())  # log(61) = 4.1, before any training
    assert findings[0].validation[0] == pytest.approx(validation["head_loss/0"], rel=1e-13)
    whole = sum(loss / (1 + shift) for shift, loss in enumerate(step.values()))
    # the later heads have fewer labels, and the mean is over those of the first
    assert findings[0].losses[0] < whole


# ----------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([[1, 1.0], [0, 1.0], [2, 1.0]], "MW-MODEL-034"),
        ([[0, 0.0], [1, 1.0], [2, 1.0]], "MW-MODEL-034"),
        ([[0, 1.0], [1, -1.0], [2, 1.0]], "MW-MODEL-034"),
        ([[0, 1.0], [0.5, 1.0], [2, 1.0]], "MW-MODEL-034"),
        ([[0, 1.0], 1, 2], "MW-MODEL-034"),
        (7, "MW-MODEL-019"),
        ([[0, 1.0], [1, 1.0]], "MW-PIPELINE-035"),
        ([], "MW-PIPELINE-035"),
    ],
)
def test_heads_that_mean_nothing(heads: Any, said: str) -> None:
    config = config_of("tests.support.parallel_heads:build", {"heads": heads}, 8)
    with raises(said) as caught:
        meshwright.build.draw_blueprint(layout_config(config, parse_layout("dp1"), 8, "float64"))
    assert heads == [] or "loss_heads" in str(caught.value)


def test_heads_beside_a_loss_of_the_model() -> None:
    config = config_of("tests.support.parallel_heads:with_own_loss", {}, 8)
    with raises("MW-MODEL-034"):
        meshwright.build.draw_blueprint(layout_config(config, parse_layout("dp1"), 8, "float64"))


def test_a_head_that_would_see_a_part_of_the_sequence() -> None:
    config = config_of("tests.support.parallel_heads:build", {"heads": "first"}, 8)
    with raises("MW-RUN-003"):
        meshwright.build.draw_blueprint(
            layout_config(config, parse_layout("tp2,sequence"), 8, "float64")
        )


# ------------------------------------------------------------------------------------------------------
# seeded faults


def rolled_across_samples(patch: pytest.MonkeyPatch) -> None:
    """The last positions of a sample get the first labels of the next one."""

    def rolled(labels: Tensor, shift: int) -> Tensor:
        return labels.flatten().roll(-shift).view(labels.shape)

    patch.setattr(meshwright.pipeline.values, "shift_labels", rolled)


def weights_missing(patch: pytest.MonkeyPatch) -> None:
    """All heads count alike."""
    with_heads = meshwright.build.with_heads

    def equal(loss: Any, heads: Any, **more: Any) -> Any:
        return with_heads(loss, [(shift, 1.0) for shift, _ in heads], **more)

    patch.setattr(meshwright.build, "with_heads", equal)


def mean_of_each_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Each head's loss is scaled to the labels that it has in this micro-batch,
    as in Megatron-LM.
    """
    shift_labels, with_heads = meshwright.pipeline.values.shift_labels, meshwright.build.with_heads

    def scaled(loss: Any, heads: Any, **more: Any) -> Any:
        def scaled_loss(output: Any, labels: Tensor) -> Tensor:
            counts = [
                int((shift_labels(labels, shift) != IGNORED_LABEL).sum()) for shift, _ in heads
            ]
            own = [
                (shift, w * counts[0] / max(n, 1))
                for (shift, w), n in zip(heads, counts, strict=True)
            ]
            return with_heads(loss, own, **more)(output, labels)  # type: ignore[no-any-return]

        return scaled_loss

    patch.setattr(meshwright.build, "with_heads", scaled)


def embedding_of_this_token(patch: pytest.MonkeyPatch) -> None:
    """A module sees the token that the trunk has seen already."""
    forward = MtpModule.forward

    def late(module: MtpModule, value: Any) -> Any:
        x, ids, *more = value
        return (lambda y, _, *rest: (y, ids, *rest))(
            *forward(module, (x, torch.roll(ids, 1, 1), *more))
        )

    patch.setattr(MtpModule, "forward", late)


FAULTS = {
    fault.__name__: fault
    for fault in (
        rolled_across_samples,
        weights_missing,
        mean_of_each_microbatch,
        embedding_of_this_token,
    )
}


@mark_all_rows_but("all_layouts", "embedding_of_this_token")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, pool: RankPool, references: References) -> None:
    layout = "dp2,mbs2"
    size = size_for(parse_layout(layout))
    config, batch = model_config("llama", size, **IN_SERIES["llama"][1]), size.global_batch
    broken = FAULTS[fault]
    problems = "\n".join(
        problems_of(config, layout, broken, pool, references, global_batch=batch, steps=2)
    )
    assert (
        "loss of step 1" in problems
        and "gradients of step 1" in problems
        and "initial" not in problems
    ), problems
