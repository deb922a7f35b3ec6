"""Experts that ranks share have the numbers of one process;
each mistake that loses them is seen and named.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import meshwright.build
import meshwright.expert_parallel.plan
from meshwright.config import RunConfig, parse
from meshwright.data_parallel.buckets import Bucket
from meshwright.expert_parallel.dispatch import Route
from meshwright.expert_parallel.exchange import _Combine, _move
from meshwright.mesh import Grid
from meshwright.mesh.holders import Holders
from meshwright.mesh.mesh import open_mesh
from meshwright.optimizer.flat import OptimizerShard
from meshwright.parameters import ParameterInfo, Slice
from meshwright.verify import (
    default_layouts,
    layout_config,
    parse_layout,
    traits_of,
    turn_dropout_on,
)
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, References, config_of, problems_of, prove
from tests.support.errors import raises
from tests.support.marks import marked_rows
from tests.support.run import Break

LENGTH = 8
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "top_k": 2},
    "deepseek": (
        {
            "num_experts": 8,
            "top_k": 3,
            "expert_ffn_size": 12,
            "shared_ffn_size": 24,
            "first_dense": 1,
        }
        | {
            "router": "sigmoid",
            "scaling": 2.5,
            "num_groups": 4,
            "groups_per_token": 2,
            "balance": "bias",
        }
    ),
    "all": {"num_experts": 4, "top_k": 4},
    "sparse": {"num_experts": 16, "top_k": 1, "normalise": False},
}
"""Name -> its options. The third sends each token to all experts,
the last leaves some experts without a token.
"""


def model(name: str, num_layers: int = 2) -> RunConfig:
    """Return a Llama of 4 heads whose feed-forward networks are a mixture of experts."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_layers": num_layers,
        "max_sequence_length": LENGTH,
    }
    sizes |= {
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 24,
        "dropout": 0.1,
        "moe": MIXTURES[name],
    }
    return config_of("meshwright_models.llama:build", sizes, LENGTH)


LAYOUTS = [
    ("mixtral", "dp2,ep2"),
    ("sparse", "dp4,ep4,zero2"),
    ("deepseek", "dp2,pp2,ep2,zb_v,zero0"),
    ("mixtral", "tp2,ep2,sequence"),
    ("deepseek", "dp2,tp2,ep4,sequence,full"),
    ("mixtral", "dp4,ep2,zero3"),
    ("mixtral", "tp2,ep2"),
    LATER("deepseek", "dp2,tp2,ep4,zero2"),
    LATER("all", "pp2,tp2,ep2,zb_h1"),
    LATER("sparse", "tp4,ep4,full"),
    LATER("mixtral", "dp2,pp2,tp2,ep2,dualpipe_v"),
    LATER("mixtral", "cp2,tp2,ep2,zero3"),
    ("all", "cp2,ep2,mbs2"),
    LATER("all", "dp2,ep2,pp2,zb_h1"),
    LATER("deepseek", "dp4,pp2,ep2,zb_h1,zero3"),
    LATER("mixtral", "dp2,tp2,ep2,sequence,full,zero3"),
    LATER("mixtral", "dp4,ep2,zero3,offload"),
    LATER("mixtral", "dp4,pp2,ep2,zb_v,zero3,step"),
    LATER("all", "dp8,ep2,zero3"),
]


@marked_rows(
    "all_layouts",
    "sparse-dp4,ep4,zero2",
    "deepseek-dp2,pp2,ep2,zb_v,zero0",
    "mixtral-tp2,ep2,sequence",
    "deepseek-dp2,tp2,ep4,sequence,full",
    "mixtral-dp4,ep2,zero3",
    "all-cp2,ep2,mbs2",
)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_layouts_agree(name: str, layout: str, pool: RankPool, references: References) -> None:
    row = prove(
        model(name), parse_layout(layout), pool, references, global_batch=8, steps=2, twice=False
    )
    assert row.problems == []


def elements_at_rest(rank: int, world_size: int, config_json: str) -> tuple[int, int]:
    """Return this rank's elements of experts, and of other weights: of shards,
    without those that are gathered.
    """
    config = parse(config_json)
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu", ep_across_nodes=True)
    source = open_verify_source(config, True)
    (replica,) = meshwright.build.build(config, mesh, (source, {})).replicas.values()
    sizes = {True: 0, False: 0}
    for bucket in replica.buckets:
        sizes[bucket.slots[0].member.info.sliced_over == "ep"] += (
            bucket.master.numel() if bucket.flat is None else bucket.flat.numel()
        )
    return sizes[True], sizes[False]


@pytest.mark.parametrize(
    ("text", "share"), [("dp4,ep2,zero3", 2), LATER("dp2,ep2,zero3", 1), LATER("dp8,ep2,zero3", 1)]
)
def test_zero_3_keeps_a_share_of_the_experts_of_a_rank(
    text: str, share: int, pool: RankPool
) -> None:
    """Half of them with two replicas; all if no other rank has them,
    or 4 shards do not divide the 2 of a rank.
    """
    sizes = {}
    for words in (text, text.replace("zero3", "zero2")):
        layout = parse_layout(words)
        given = layout_config(model("mixtral"), layout, 8, "float64").model_dump_json()
        (sizes[words],) = set(pool.run(elements_at_rest, layout.size, given))
    whole = 2 * 2 * 3 * 24 * 16  # layers, experts of a rank, three matrices of 24 x 16
    (sharded, dense), (kept, whole_dense) = sizes.values()
    assert kept == whole and sharded == whole // share and dense < whole_dense


# ------------------------------------------------------------------------------------------------------------
# mistakes


def norm_without_experts(patch: pytest.MonkeyPatch) -> None:
    """Slices of experts are counted on no rank."""

    def without_experts(shard: OptimizerShard) -> bool:
        holders = shard.layout.holders
        return holders.is_counted and holders.slices.name != "ep"

    patch.setattr(OptimizerShard, "is_counted", property(without_experts))


def gradient_times_ep(patch: pytest.MonkeyPatch) -> None:
    """A mean over the ep group is undone, though gradients are sums."""
    reduce = Bucket.reduce

    def scaled(bucket: Bucket, *, last: bool = True) -> None:
        if bucket.holders.slices.name == "ep":
            bucket.open_gradient().mul_(2)
        reduce(bucket, last=last)

    patch.setattr(Bucket, "reduce", scaled)


def summed_over_all_replicas(patch: pytest.MonkeyPatch) -> None:
    """Gradients of experts are summed over dp, in which other ranks have other experts."""
    open_holders = meshwright.build.open_holders

    def over_dp(*arguments: Any, **more: Any) -> dict[str | None, Holders]:
        found = open_holders(*arguments, **more)
        return found | {"ep": found[None]._replace(slices=found["ep"].slices, copied_over=())}

    patch.setattr(meshwright.build, "open_holders", over_dp)


def router_detached(patch: pytest.MonkeyPatch) -> None:
    """Weights are applied without their history."""
    forward = meshwright.expert_parallel.plan._forward
    patch.setattr(
        meshwright.expert_parallel.plan,
        "_forward",
        lambda m, x, ids, weights: forward(m, x, ids, weights.detach()),
    )


def slices_numbered_from_0(patch: pytest.MonkeyPatch) -> None:
    """Every rank takes its experts for the first ones."""
    part = meshwright.expert_parallel.plan._slice

    def first(*args: Any) -> Slice:
        found = part(*args)
        return found._replace(start=0, stop=found.padded)

    patch.setattr(meshwright.expert_parallel.plan, "_slice", first)


def experts_of_rank_0_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Every rank holds the values of the first experts under its own numbers."""
    take = ParameterInfo.take

    def first(info: ParameterInfo, full: Tensor) -> Tensor:
        if info.slice is not None and info.slice.over == "ep":
            info = info._replace(slice=info.slice._replace(start=0, stop=info.slice.padded))
        return take(info, full)

    patch.setattr(ParameterInfo, "take", first)


def order_lost_in_combine(patch: pytest.MonkeyPatch) -> None:
    """Rows stay in the order in which they come back."""

    def sorted_by_expert(ctx: Any, y: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _move(y, route, route.received, route.sent)

    patch.setattr(_Combine, "forward", staticmethod(sorted_by_expert))


LOSS, GRADIENTS, NORM = (
    "loss of step 1 is",
    "gradients of step 1 differ",
    "gradient norm of step 1 is",
)
INITIAL = "initial weights differ"
TRAPS: list[tuple[Break, tuple[str, ...], tuple[str, ...]]] = [
    (norm_without_experts, (NORM,), (LOSS, GRADIENTS)),
    (gradient_times_ep, (GRADIENTS, "it is 2 times the reference's"), (LOSS,)),
    (summed_over_all_replicas, (GRADIENTS,), (LOSS,)),
    (router_detached, (GRADIENTS, NORM), (LOSS,)),
    (slices_numbered_from_0, (INITIAL,), ()),
    (experts_of_rank_0_everywhere, (INITIAL,), ()),
    (order_lost_in_combine, (LOSS, GRADIENTS), (INITIAL,)),
]

DEFAULT = "dp2,pp2,tp1,cp2,ep2,zb_v,zero3,heads,full,shard2,mbs2"
"""One of the default layouts of the model with 4 blocks.
Its groups of ep differ from those of every axis.
"""


@marked_rows(
    "all_layouts",
    "norm_without_experts-dp2,ep2",
    "slices_numbered_from_0-dp2,ep2",
    "experts_of_rank_0_everywhere-dp2,ep2",
)
@pytest.mark.parametrize("layout", ["dp2,ep2", LATER(DEFAULT)])
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap[0].__name__)
def test_verify_sees_the_mistake(
    trap: tuple[Break, tuple[str, ...], tuple[str, ...]],
    layout: str,
    pool: RankPool,
    references: References,
) -> None:
    broken, said, unsaid = trap
    config = model("mixtral", 4 if layout == DEFAULT else 2)
    if broken in (gradient_times_ep, summed_over_all_replicas):  # FSDP sums the gradients of ZeRO-3
        layout = layout.replace("zero3", "zero2")
    told = "\n".join(problems_of(config, layout, broken, pool, references, global_batch=8, steps=1))
    for words in said:
        assert words in told, told
    for words in unsaid:
        assert words not in told, told


@pytest.mark.torture
def test_a_default_layout_is_the_one_that_sees_the_mistakes() -> None:
    config = turn_dropout_on(model("mixtral", 4)).config
    traits = traits_of(config)
    layouts = default_layouts(config, traits, 8).layouts
    assert parse_layout(DEFAULT) in layouts
    assert {layout.ep for layout in layouts} == {1, 2, 4}


def test_words_of_a_layout() -> None:
    layout = parse_layout("dp2,tp2,ep4,sequence")
    assert layout.ep == 4 and layout.size == 4
    assert (
        str(layout) == "dp2,pp1,tp2,ep4,1f1b,zero1,sequence,mbs1"
        and parse_layout(str(layout)) == layout
    )
    with raises("MW-CONFIG-077", "ep4", "dp 2 x tp 1 = 2"):
        layout_config(model("mixtral"), parse_layout("dp2,ep4"), 8, "float64")
    whole = model("mixtral").replace(optimizer={"name": "adafactor"})
    with raises("MW-CONFIG-091", "ep2"):
        layout_config(whole, parse_layout("dp2,ep2"), 8, "float64")
