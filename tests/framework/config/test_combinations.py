"""The table of pairs: every refused pair is refused with its code, every other row is possible."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import describe, draw_blueprint
from meshwright.config import RunConfig, load, resolve
from meshwright.config.combinations.axes import AXES
from meshwright.config.combinations.features import (
    BOTH,
    LAYOUT,
    MODEL,
    SETTINGS,
    features_of,
)
from meshwright.config.combinations.layout import Layout, layout_of, parse_layout
from meshwright.config.combinations.proven import FEATURES, SHARED, SHARED_BY_EXPERTS
from meshwright.config.combinations.refused import (
    REFUSED,
    REFUSED_TRAITS,
    RefusedPair,
    RefusedTrait,
    find_excluding,
)
from meshwright.errors import UserError
from meshwright.traits import traits_of
from meshwright.verify import layout_config
from meshwright.verify.layouts import is_possible
from meshwright.verify.rank import run_layout
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import config_of
from tests.support.errors import raises

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "configs/demo.toml"
ONE_RANK = ("--parallel.dp=1", "--parallel.pp=1", "--parallel.tp=1", "--pipeline.schedule=1f1b")

ASKS: dict[str, tuple[str, ...]] = {
    "shards": ("--parallel.dp=4", "--parallel.shard_factor=2"),
    "no ZeRO": ("--parallel.zero=0",),
    "reduce = microbatch": ("--parallel.dp=2", "--parallel.reduce=microbatch"),
    "whole gradients": ("--parallel.zero=1",),
    "offload directory": ("--parallel.offload_directory=folder",),
    "no offload": ("--parallel.offload=false",),
    "offload": ("--parallel.offload",),
    "units of layers": ("--parallel.unit_layers=2",),
    "kept weights": ("--parallel.keep_gathered",),
    "replicated weights": ("--parallel.zero=1",),
    "dualpipe_v": ("--parallel.pp=2", "--pipeline.schedule=dualpipe_v"),
    "trimmed rows": ("--batch.padding=trim", "--data.packing=documents"),
    "cp": ("--parallel.cp=2",),
    "cp head groups": ("--parallel.cp=2", "--parallel.cp_head_groups=2"),
    "cp heads": ("--parallel.cp=2", "--parallel.cp_exchange=heads"),
    "cp documents": ("--parallel.cp=2", "--parallel.cp_order=documents"),
    "documents without boundaries": ("--data.document_boundaries=false",),
    "ep": ("--parallel.dp=2", "--parallel.ep=2"),
    "whole-parameter optimizer": ("--optimizer.name=adafactor",),
    "optimizer without offload": ("--optimizer.name=muon",),
    "own optimizer": ("--optimizer.builder=torch.optim:RAdam",),
    "averaged weights": ("--optimizer.name=schedule_free_adamw",),
    "rate schedule": ("--optimizer.schedule=cosine",),
    "selective": ("--pipeline.recompute=selective",),
    "pointwise": ("--pipeline.recompute=pointwise",),
    "compile": ("--train.compile",),
    "fp8": ("--train.linear=fp8",),
    "float16": ("--train.dtype=float16",),
    "GPU without bfloat16": ("--train.device=cuda", "--train.dtype=float32"),
    "shared GPUs": ("--launch.share_devices",),
    "GPU list": ("--launch.devices=0,1",),
    "schedule file": ("--pipeline.schedule_file=rows.txt",),
    "batch ramp": ("--batch.ramp=[8,8,64]",),
    "CPU": ("--train.device=cpu",),
}
"""Overrides that ask for a feature, for a run of one rank."""
NEEDED = {
    "reduce = microbatch": ("--parallel.zero=2",),
    "offload directory": ("--parallel.offload",),
    "cp documents": ("--data.document_boundaries",),
    "units of layers": ("--parallel.zero=3",),
    "kept weights": ("--parallel.zero=3",),
    "averaged weights": ("--optimizer.schedule=constant", "--optimizer.min_learning_rate=none"),
    "shared GPUs": ("--train.device=auto",),
    "GPU list": ("--train.device=auto",),
    "fp8": ("--train.dtype=bfloat16",),
}
"""Overrides without which a feature is refused for other reasons, or in any case."""
NEEDED_BY_BOTH = {
    "dualpipe_v": ("--parallel.zero=3",),
    "own optimizer": ("--parallel.offload",),
    "rate schedule": ("--optimizer.min_learning_rate=none",),
}
"""Overrides without which the pair is refused for another reason."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.first} with {row.second}")
def test_a_refused_pair_is_refused_with_its_code(row: RefusedPair) -> None:
    """Either of the two alone is allowed: the pair is what is refused."""
    asked = (*ONE_RANK, *NEEDED_BY_BOTH.get(row.second, ()), *ASKS[row.first], *ASKS[row.second])
    with raises(row.code, *(key.partition(".")[2] for key in row.keys[:1])) as caught:
        load(DEMO, asked)
    assert [problem.code for problem in caught.value.problems] == [row.code]
    for name in (row.first, row.second):
        load(DEMO, (*ONE_RANK, *ASKS[name], *NEEDED.get(name, ())))


@pytest.mark.parametrize(
    ("axis", "option"),
    [(axis, option) for axis in AXES for option in axis.options],
    ids=lambda each: getattr(each, "name", "") or each.key,
)
def test_an_option_of_an_axis_of_one_rank_is_refused(axis: Any, option: Any) -> None:
    values = {"cp_order": "contiguous", "cp_exchange": "heads", "cp_head_groups": 2}
    asked = f"--parallel.{option.key}={values.get(option.key, 'true')}"
    with raises(option.code, option.key, f"parallel.{axis.name} = 1"):
        load(DEMO, (*ONE_RANK, asked))
    load(DEMO, (*ONE_RANK, f"--parallel.{axis.name}=2", asked))


def test_a_search_looks_at_pairs_of_layouts_alone() -> None:
    """GPUs that a configuration names, and keys that the configuration of a layout sets anew."""
    gpus = ("--launch.devices=0,1", "--launch.share_devices", "--parallel.dp=1")
    groups = ("--parallel.cp=2", "--parallel.cp_head_groups=2")
    files = ("--parallel.offload", "--parallel.offload_directory=folder")
    config = load(DEMO, (*ONE_RANK, *gpus, *groups, *files))
    for text in ("dp2", "cp2,heads", "dp2,offload"):
        found = layout_config(config, parse_layout(text), 32, "float32").parallel
        assert (found.cp_head_groups, found.offload_directory is None) == (None, "off" not in text)
        alone = layout_config(config, Layout(), 32, "float32")
        traits = traits_of(alone)
        assert is_possible(parse_layout(text), traits, 32, config.data.sequence_length)
    for text, code in (("sequence", "MW-CONFIG-040"), ("heads", "MW-CONFIG-085")):
        with raises(code):
            layout_config(config, parse_layout(text), 32, "float32")


def test_other_forms_of_a_refused_pair() -> None:
    with raises("MW-CONFIG-096", 'train.dtype = "float64"'):
        load(DEMO, ("--train.linear=fp8", "--train.device=cuda", "--train.dtype=float64"))
    with raises("MW-CONFIG-069", "999999999 or 1000000002"):  # at once: divisors are not listed
        load(DEMO, (*ONE_RANK, "--parallel.cp=3", "--data.sequence_length=1000000000"))


def test_every_name_of_the_table_is_a_feature() -> None:
    names = {*LAYOUT, *SETTINGS, *MODEL, *BOTH}
    rows = (*REFUSED, *REFUSED_TRAITS)
    used = {name for row in rows for name in (row.first, row.second)}
    assert used | set(FEATURES) <= names
    assert {*SETTINGS, *MODEL} - used <= {"dropout"}, "a feature that no row names"
    assert len({(row.first, row.second) for row in rows}) == len(rows)
    assert all(row.keys for row in REFUSED)


def test_no_pair_is_both_refused_and_proven() -> None:
    refused = {
        pair
        for row in (*REFUSED, *REFUSED_TRAITS)
        for pair in ((row.first, row.second), (row.second, row.first))
    }
    proven = {
        pair
        for shared in (*SHARED, *SHARED_BY_EXPERTS)
        for pair in itertools.product(shared.some, shared.others)
    }
    assert not refused & proven


# ---------------------------------------------------------------------------------------------------
# pairs with a trait of the model

BUILDERS = "tests.framework.config.combined:"
SUPPORT = "tests.support.builders:"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp ruled out": (f"{SUPPORT}declared", {"axis": "tp"}),
    "sequence ruled out": (f"{SUPPORT}declared", {"axis": "sequence"}),
    "cp ruled out": (f"{SUPPORT}declared", {"axis": "cp"}),
    "no sharding plan": (f"{SUPPORT}plain", {}),
    "no attention core": (f"{BUILDERS}without_core", {}),
    "multi-token prediction": (f"{BUILDERS}several_heads", {}),
    "no document starts": (f"{BUILDERS}small", {}),
    "no experts": (f"{BUILDERS}small", {}),
    "no selective parts": (f"{SUPPORT}plain", {}),
    "single-number parameter": (f"{BUILDERS}with_scalar", {}),
    "BatchNorm statistics": (f"{BUILDERS}normed", {}),
    "SyncBatchNorm": (f"{BUILDERS}synchronised", {}),
    "SyncBatchNorm and other coupling": (f"{BUILDERS}synchronised_and_coupled", {}),
    "other running buffers": (f"{BUILDERS}counting", {}),
    "dropout": (f"{BUILDERS}small", {"dropout": 0.1}),
}
"""A model with each trait: builder and options."""
WORDS = {
    "tp": "tp2",
    "sequence": "tp2,sequence",
    "cp": "cp2",
    "cp documents": "cp2,documents",
    "ep": "dp2,ep2",
    "selective": "selective",
    "full": "full",
    "ZeRO-3": "dp2,zero3",
    "dp": "dp2",
    "dp or cp": "dp2",
    "16 bits": "",
    "balance by work": "",
    "trimmed rows": "",
}
"""Smallest layout with a feature."""
LENGTH, GLOBAL_BATCH = 8, 4


def config_with(trait: str) -> RunConfig:
    """Return the configuration of a model with a trait."""
    if trait == "one label per sample":
        return load(ROOT / "examples/vision/config.toml", ["--model.options.sharded=true"])
    return config_of(*MODELS[trait], LENGTH)


def asked_of(config: RunConfig, first: str) -> RunConfig:
    """Return the configuration of the smallest layout with a feature."""
    dtype = "bfloat16" if first == "16 bits" else "float32"
    layout = parse_layout(WORDS[first])
    if first == "balance by work":
        model = {"builder": "tests.framework.verify.synchronised:build_of_documents"}
        data, batch = {"document_boundaries": True}, {"balance": "work"}
        config = config.replace(model=model, data=data, batch=batch)
    if first == "trimmed rows":
        config = config.replace(batch={"padding": "trim"})
    return layout_config(config, layout, config.batch.global_batch or GLOBAL_BATCH, dtype)


@pytest.mark.parametrize(
    "row",
    [row for row in REFUSED_TRAITS if row.code not in ("MW-DP-001", "MW-CP-010")],
    ids=lambda row: f"{row.first} with {row.second}",
)
def test_a_pair_with_a_trait_of_the_model_is_refused_with_its_code(row: RefusedTrait) -> None:
    config = config_with(row.second)
    asked = asked_of(config, row.first)
    traits = traits_of(asked)
    assert {row.first, row.second} <= features_of(layout_of(asked), traits)
    assert find_excluding(row.first, traits) is not None
    with raises(row.code):
        draw_blueprint(resolve(asked, layout_of(asked).size))


def test_tokens_cannot_be_dealt_by_documents_that_samples_do_not_have() -> None:
    """Samples of a builder: a corpus without boundaries is refused by its configuration."""
    config = config_of(f"{BUILDERS}small", {}, LENGTH)
    config = config.replace(data={"train": "", "builder": f"{BUILDERS}tokens"})
    asked = layout_config(config, parse_layout("cp2,documents"), GLOBAL_BATCH, "float32")
    assert find_excluding("cp documents", traits_of(asked)) is not None
    with raises("MW-CP-010"):
        draw_blueprint(resolve(asked, 2))


def test_a_single_number_cannot_be_sharded(pool: RankPool) -> None:
    """RefusedPair by the ranks, when they shard the weights."""
    config = config_with("single-number parameter")
    assert find_excluding("ZeRO-3", traits_of(config)) is not None
    layout = parse_layout("dp2,zero3")
    asked = layout_config(config, layout, GLOBAL_BATCH, "float32")
    with raises("MW-DP-001", "1.scale"):
        pool.run(run_layout, 2, asked.model_dump_json(), 1, True)


SIMPLE = (
    *("dp2", "dp2,zero0", "dp2,zero3", "pp2", "tp2", "tp2,sequence", "cp2", "cp2,heads", "dp2,ep2"),
    *("selective", "full", "offload", "pp2,zb_v", "dp4,shard2"),
)
"""Layouts of one or two words."""


@pytest.mark.parametrize("trait", [*MODELS, "one label per sample", "experts"])
def test_the_table_and_the_blueprint_agree(trait: str) -> None:
    """What the table leaves is possible, and what it excludes is refused."""
    if trait == "experts":
        config = config_of(f"{BUILDERS}mixture", {}, LENGTH)
    else:
        config = config_with(trait)
    global_batch = config.batch.global_batch or GLOBAL_BATCH
    alone = layout_config(config, Layout(), global_batch, "float32")
    traits, whole = traits_of(alone), describe(alone)
    for text in SIMPLE:
        layout = parse_layout(text)
        by_table = is_possible(layout, traits, global_batch, config.data.sequence_length)
        refused = ""
        try:
            asked = layout_config(config, layout, global_batch, "float32")
            copied = whole._replace(plain=copy.deepcopy(whole.plain))
            draw_blueprint(resolve(asked, layout.size), whole=copied)
        except UserError as error:
            refused = error.message
        if layout.zero == 3 and traits.has_scalar:  # refused when the weights are sharded
            assert not by_table and not refused
            continue
        assert by_table == (not refused), (text, refused)
