"""The default layouts cover each pair of features that share code,
as far as a model has a layout with both.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, load
from meshwright.config.combinations.features import Traits, features_of
from meshwright.config.combinations.layout import LAYOUT_WORDS, Layout, parse_layout
from meshwright.config.combinations.proven import FEATURES, SHARED, SHARED_BY_EXPERTS
from meshwright.errors import UserError
from meshwright.traits import left_out
from meshwright.verify import (
    default_layouts,
    layout_config,
    make_small,
    run_twice,
    shrink,
    traits_of,
    turn_dropout_on,
)
from meshwright.verify.defaults import KIND_OF, scaled_down
from meshwright.verify.layouts import is_possible
from meshwright.verify.pairs import LayoutChoice, candidates, choose, eps_of, is_full, wanted_pairs
from tests.framework.verify.cases import config_of
from tests.support.marks import marked_rows

ROOT = Path(__file__).parents[3]
GLOBAL_BATCH = 8


def prepared(name: str, *overrides: str) -> RunConfig:
    """Return a configuration as verify trains it."""
    config = load(str(ROOT / name), list(overrides))
    if config.data.builder is None:
        config = make_small(config, 32).config
    return turn_dropout_on(config).config


CONFIGS: dict[str, Any] = {
    "demo": lambda: prepared("configs/demo.toml"),
    "documents": lambda: prepared("configs/demo.toml", "--data.document_boundaries"),
    "untied": lambda: prepared("configs/llama3-8b.toml"),
    "two stacks": lambda: prepared("configs/t5-demo.toml"),
    "without a plan": lambda: config_of(
        "tests.support.builders:plain", {"vocab_size": 17, "width": 8}, 8
    ),
    "without a sequence": lambda: prepared(
        "examples/vision/config.toml", "--model.options.sharded=true"
    ),
    "running buffers": lambda: prepared("examples/vision/convnet.toml"),
    "experts": lambda: prepared("configs/moe-demo.toml"),
}


@functools.cache
def demo() -> tuple[RunConfig, Traits, LayoutChoice]:
    """Return the demo on samples of documents, and what is chosen for it."""
    config = CONFIGS["documents"]()
    traits = traits_of(config)
    return config, traits, default_layouts(config, traits, GLOBAL_BATCH)


SLOW = ("two stacks", "untied", "documents", "experts")


@marked_rows("long", "demo", "without a plan", "without a sequence", "running buffers")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.torture) if n in SLOW else n for n in CONFIGS]
)
def test_no_pair_is_missed_that_some_layout_has(name: str) -> None:
    """Counted anew, over all candidates: what the choice leaves is refused by the model,
    and said.
    """
    config = CONFIGS[name]()
    traits, length = traits_of(config), config.data.sequence_length
    choice, wanted = default_layouts(config, traits, GLOBAL_BATCH), wanted_pairs(traits)
    covered = {
        pair
        for layout in choice.layouts
        if is_full(layout, GLOBAL_BATCH)
        for pair in wanted
        if features_of(layout, traits).issuperset(pair)
    }
    sizes = (2,) if traits.couples_samples else (1, 2)
    possible = [
        layout
        for layout in candidates(8, sizes, eps_of(traits))
        if is_possible(layout, traits, GLOBAL_BATCH, length) and is_full(layout, GLOBAL_BATCH)
    ]
    said = "\n".join(choice.missing)
    for pair in wanted.keys() - covered:
        assert any(feature in said for feature in pair), pair
        for layout in [
            layout for layout in possible if features_of(layout, traits).issuperset(pair)
        ][:3]:
            with pytest.raises(UserError):
                draw_blueprint(layout_config(config, layout, GLOBAL_BATCH, "float64"))
    assert len(choice.layouts) <= 30 and all(layout.size <= 8 for layout in choice.layouts)


@pytest.mark.long
def test_the_demo_leaves_nothing_uncovered() -> None:
    config, traits, choice = demo()
    assert choice.missing == []
    assert default_layouts(config, traits, GLOBAL_BATCH).layouts == choice.layouts, (
        "the same ones each time"
    )


@pytest.mark.long
def test_the_table_is_sound() -> None:
    """Each feature of the table is one that some layout of the demo or of experts has;
    each pair has a reason.
    """
    _, traits, _ = demo()
    of_experts = traits_of(CONFIGS["experts"]())
    known: set[str] = set()
    for layout in candidates(8, (1, 2), (1, 2, 4)):
        known |= features_of(layout, traits) | features_of(layout, of_experts)
    assert known >= set(FEATURES)
    assert all(len(shared.why.split()) > 3 for shared in (*SHARED, *SHARED_BY_EXPERTS))
    experts = traits._replace(experts=(2,))
    assert not any("ep" in pair for pair in wanted_pairs(traits)) and (
        "ep",
        "zero3",
    ) in wanted_pairs(experts)


@pytest.mark.long
def test_ranks_share_experts_where_the_rules_let_them() -> None:
    """A multiple of tp that divides the ranks of a stage; with tp the sequence is cut too."""
    shared = {str(layout) for layout in candidates(4, (1,), (1, 2, 4)) if layout.ep > 1}
    assert {text.partition(",1f1b,zero1")[0] for text in shared} >= {
        "dp2,pp1,tp1,ep2",
        "dp4,pp1,tp1,ep4",
    }
    assert not any("tp2,ep" in text and "sequence" not in text for text in shared)
    assert not any(
        "tp4,ep2" in text or "tp2,ep4,1f1b,zero1,sequence" in text
        for text in shared
        if "dp1" in text
    )
    assert eps_of(traits_of(CONFIGS["experts"]())) == (1, 2, 4) and eps_of(demo()[1]) == (1,)


@pytest.mark.parametrize(
    "pair",
    [
        ("dp", "middle rank"),
        ("zero3", "tp"),
        ("zero3", "sequence"),
        ("dropout", "full"),
        ("dropout", "selective"),
        ("padded vocabulary", "tp > 2"),
        ("padded vocabulary", "sequence"),
        ("cp", "zero3"),
        ("cp", "V"),
        ("cp", "sequence"),
        ("cp", "full"),
        ("cp heads", "tp"),
        ("cp documents", "middle rank"),
    ],
)
def test_pairs_behind_which_faults_were_found_are_covered(pair: tuple[str, str]) -> None:
    _, traits, choice = demo()
    assert any(features_of(layout, traits).issuperset(pair) for layout in choice.layouts)


@pytest.mark.long
def test_heads_that_cannot_be_shared_are_refused_once() -> None:
    """One layout with each tp is drawn, and its reason stands beside the pairs."""
    config = CONFIGS["demo"]().replace(
        model={"options": {**CONFIGS["demo"]().model.options, "num_heads": 1}}
    )
    asked: list[Any] = []

    def refusal_of(layout: Any) -> str | None:
        asked.append(layout)
        return "one head" if layout.exchange == "heads" or layout.tp > 1 else None

    traits = traits_of(config)._replace(has_plan=False)
    choice = choose([], traits, GLOBAL_BATCH, 32, 8, (1,), refusal_of)
    assert len([layout for layout in asked if layout.exchange == "heads"]) == 1
    assert not any(layout.exchange == "heads" for layout in choice.layouts)
    assert any("cp heads" in line for line in choice.missing)


@pytest.mark.long
def test_what_experts_need_is_covered() -> None:
    """Turns of dualpipe_v; experts under ZeRO-3 with several copies,
    which its shards divide or do not.
    """
    config = CONFIGS["experts"]()
    traits = traits_of(config)
    layouts = [
        each
        for each in default_layouts(config, traits, GLOBAL_BATCH).layouts
        if is_full(each, GLOBAL_BATCH)
    ]
    for pair in (
        ("ep", "dualpipe_v"),
        ("copies of experts", "zero3"),
        ("expert shard groups", "zero3"),
    ):
        assert any(features_of(layout, traits).issuperset(pair) for layout in layouts), pair
    assert any("zero3, whole experts" in features_of(layout, traits) for layout in layouts)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (Layout(32, 1, 2, sequence=True), "dp2,pp1,tp2,1f1b,zero1,sequence,mbs1"),
        (
            Layout(16, 8, 8, "v_half", 3, True, 2, recompute="pointwise", shard=8),
            "dp2,pp2,tp2,v_half,zero3,sequence",
        ),
        (
            Layout(8, 4, 8, cp=2, order="contiguous", ep=8, sequence=True),
            "dp1,pp2,tp2,cp2,ep4,1f1b,zero1,contiguous",
        ),
    ],
)
def test_an_own_layout_of_many_ranks_is_scaled_down(own: Layout, expected: str) -> None:
    """Its axes, schedule and switches stay."""
    small = scaled_down(own, GLOBAL_BATCH, 8)
    assert str(small).startswith(expected) and small.size <= 8
    assert (small.recompute, small.schedule, small.order) == (
        own.recompute,
        own.schedule,
        own.order,
    )


@pytest.mark.parametrize(("global_batch", "max_ranks"), [(7, 8), (1, 8), (8, 4), (8, 2)])
def test_a_scaled_down_layout_fits_the_batch_and_the_ranks(
    global_batch: int, max_ranks: int
) -> None:
    small = scaled_down(Layout(16, 2, 4, cp=2, micro_batch_size=3), global_batch, max_ranks)
    assert small.size <= max_ranks and global_batch % (small.dp * small.micro_batch_size) == 0
    assert scaled_down(Layout(16), global_batch, max_ranks).dp == (1 if global_batch % 2 else 2)


def test_samples_without_documents_say_so() -> None:
    traits = traits_of(CONFIGS["demo"]())
    assert left_out(traits) == ["cp documents: the samples have no document starts"]
    assert not any("cp documents" in pair for pair in wanted_pairs(traits))


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tp", "sequence", "cp"])
def test_a_declared_axis_leaves_the_others(axis: str) -> None:
    """A model that rules out tp or sequence parallelism is still compared over context-parallel
    ranks.
    """
    config = CONFIGS["demo"]().replace(
        model={"builder": "tests.support.builders:declared", "options": {"axis": axis}}
    )
    traits = traits_of(config)
    chosen = default_layouts(config, traits, GLOBAL_BATCH).layouts
    assert any(layout.cp > 1 for layout in chosen) == (axis != "cp")
    assert any(layout.tp > 1 for layout in chosen) == (axis != "tp")
    assert any(layout.sequence for layout in chosen) == (axis == "cp")
    assert [reason for reason in left_out(traits) if "cp" not in reason or axis == "cp"] == [
        f"{axis}: a test"
    ]


def test_the_page_lists_every_word_of_a_layout() -> None:
    page = (ROOT / "docs/verify.md").read_text()
    table = page.partition("## Words of --layouts")[2].partition("\n## ")[0]
    words = [
        word
        for row in table.splitlines()
        for word in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")
    ]
    words.remove("module:function")
    usual = [word for word in words if parse_layout(word) == Layout()]
    assert usual == ["1f1b", "zero1"]
    listed = {
        re.sub(r"\d$", "N", word) if not word.startswith(("zero", "zb_h")) else word
        for word in words
    }
    assert listed == set(re.findall(r"\w+", re.sub(r"\([^)]*\)| or ", " ", LAYOUT_WORDS)))


def test_every_kind_of_schedule_zero_stage_and_switch_is_run_twice() -> None:
    layouts = demo()[2].layouts
    again = run_twice(layouts)
    kinds, of_again = (
        {KIND_OF.get(each.schedule, each.schedule) for each in some} for some in (layouts, again)
    )
    assert kinds == of_again
    assert {layout.zero for layout in again} == {layout.zero for layout in layouts}
    assert {True} <= {layout.offload for layout in again} & {layout.sequence for layout in again}
    assert len(again) < len(layouts) / 3


def test_small_layouts_are_run_twice_before_large_ones() -> None:
    """8 ranks add three features, 2 ranks one of them, and 4 ranks the others."""
    large, small, other = (
        parse_layout(text) for text in ("dp2,cp2,tp2,sequence", "tp2,sequence", "dp2,cp2")
    )
    assert large not in run_twice([Layout(), large, small, other])


def test_verify_turns_dropout_on_and_makes_the_vocabulary_odd() -> None:
    config = load(str(ROOT / "configs/demo.toml"), [])
    small = make_small(config, 32)
    assert (
        small.config.model.options["vocab_size"] == 499
        and "vocab_size 4096 -> 499" in small.notes[0]
    )
    on = turn_dropout_on(small.config)
    assert on.config.model.options["dropout"] == 0.1 and on.notes == [
        "dropout turned on: dropout 0 -> 0.1"
    ]
    assert turn_dropout_on(on.config).config == on.config, "what is on stays as it is"


def test_a_model_without_grouped_heads_is_made_small_as_one() -> None:
    """Python can say None, which TOML cannot."""
    options = {"num_heads": 16, "num_kv_heads": None, "hidden_size": 64}
    assert shrink(options) == {"num_heads": 4, "num_kv_heads": None, "hidden_size": 16}
    assert shrink({**options, "num_kv_heads": 8})["num_kv_heads"] == 4


def test_dropout_modules_without_an_option_are_turned_on() -> None:
    config = config_of("tests.framework.verify.models:quiet_dropout", {"vocab_size": 17}, 8)
    on = turn_dropout_on(config)
    assert (
        on.notes == ["dropout turned on: nn.Dropout.p 0 -> 0.1"]
        and traits_of(on.config).has_dropout
    )


def test_dropout_stays_off_where_the_model_then_draws_by_itself() -> None:
    config = config_of(
        "tests.framework.verify.models:noisy_dropout", {"vocab_size": 17, "dropout": 0.0}, 8
    )
    on = turn_dropout_on(config)
    assert on.config == config
    (said,) = on.notes
    assert (
        said.startswith("dropout stays off: layer ")
        and "draws from torch's random generator" in said
    )
