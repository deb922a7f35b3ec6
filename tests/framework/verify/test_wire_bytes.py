"""Bytes on the wire of one step: the formulas, the mesh's own count,
and a count of torch's collectives agree.

n ranks, a message of M bytes:   all-reduce 2 M (n-1)/n    all-gather, reduce-scatter M (n-1)/n    send M
b micro-batch, s sequence, h hidden size, t = tp, d = dp
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from meshwright.build import build
from meshwright.config import RunConfig, parse
from meshwright.data_parallel.buckets import ALIGNED_ELEMENTS
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright.tensor_parallel.layers import vocab_slice
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import LATER, Size, config_of, model_config
from tests.support.marks import all_layouts_row, marked_rows

SIZE = Size(heads=4, sequence_length=8, num_blocks=2, global_batch=8)
B, S, H, V, FLOAT = 2, 8, 16, 61, 4


class Measured(NamedTuple):
    """What one rank has counted in its second step."""

    own: dict[tuple[str, str], tuple[int, float]]
    """(group, operation) -> calls and wire bytes, as the mesh counts them."""
    torch: dict[tuple[int, str], tuple[int, float]]
    """(group size, operation) -> the same, counted at torch's dispatcher."""
    bucket_bytes: list[int]
    """Bytes of the gradients of each bucket, padding included."""
    partial_bytes: float
    """Bytes of the shards that are summed over tp once per step."""
    tied_bytes: float
    """Bytes of the shards that are summed between stages once per step."""
    shared_bytes: int
    """Of weights that several modules of a stage use, in float32."""
    expert_bytes: int = 0
    """Of the gradients of experts that ranks share, padding included; part of ``bucket_bytes``."""


OPERATIONS = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    # on CPU the slices are exchanged and summed where they arrive
    "c10d.alltoall_base_": ("reduce_scatter", 1),
    "c10d.send": ("send", 0),
    "c10d.broadcast_": ("broadcast", 0),
}
"""What torch calls it -> what we call it, and which argument is the whole message."""

SILENT = {"c10d.recv_", "c10d.barrier"}


class CountCollectives(TorchDispatchMode):
    """Sees each collective as torch is about to run it, whoever asked for it.
    Knows nothing of the mesh.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[int, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name.startswith("c10d.") and name not in SILENT:
            # a collective that nobody has counted is a KeyError
            operation, position = OPERATIONS[name]
            if name == "c10d.alltoall_base_" and args[4]:  # the sizes of unequal runs
                operation = "all_to_all"
            group = next(
                arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)
            )
            n = dist.ProcessGroup.unbox(group).size()
            message = sum(t.numel() * t.element_size() for t in tree_flatten(args[position])[0])
            factor = {"all_reduce": 2 * (n - 1) / n, "send": 1.0}.get(operation, (n - 1) / n)
            calls, wire_bytes = self.counts[n, operation]
            self.counts[n, operation] = (calls + 1, wire_bytes + factor * message)
        return func(*args, **(kwargs or {}))


def _is_group(argument: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(argument._type())


def measure(rank: int, world_size: int, config_json: str) -> Measured:
    """Measure the second step of a layout: the first may say things that are said once."""
    config = parse(config_json)
    parallel = config.parallel
    mesh = open_mesh(Grid.of(parallel.degrees), "cpu")
    parts = build(config, mesh, (open_verify_source(config, True), {}))
    take_step(parts)
    for replica in parts.replicas.values():
        replica.wait_for_weights()
    mesh.traffic.reset()
    with CountCollectives() as counter:
        take_step(parts)
        for replica in parts.replicas.values():
            replica.wait_for_weights()
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    uses = Counter(
        id(parameter)
        for stage in parts.executor.stages.values()
        for _, parameter in stage.layers.named_parameters(remove_duplicate=False)
    )
    return Measured(
        {key: (counted.calls, counted.wire_bytes) for key, counted in mesh.traffic.counts.items()},
        dict(counter.counts),
        [bucket.numel * bucket.shard_gradient.element_size() for bucket in buckets],
        sum(
            b.shard_gradient.numel() * b.shard_gradient.element_size()
            for b in buckets
            if b.holders.partial_over
        ),
        sum(
            b.shard_gradient.numel() * b.shard_gradient.element_size()
            for b in buckets
            if b.holders.tied is not None
        ),
        sum(
            b.numel * FLOAT
            for b in buckets
            if any(uses[id(place.member.parameter)] > 1 for place in b.slots)
        ),
        sum(bucket.numel * FLOAT for bucket in buckets if bucket.holders.slices.name == "ep"),
    )


def measured(
    config: RunConfig, layout: str, pool: RankPool, dtype: str = "float32"
) -> list[Measured]:
    """Return each rank's counts. The own one is first held against torch's: calls and bytes,
    operation by operation.
    """
    parsed = parse_layout(layout)
    text = layout_config(config, parsed, SIZE.global_batch, dtype).model_dump_json()
    ranks: list[Measured] = pool.run(measure, parsed.size, text)
    for found in ranks:
        own: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        seen: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for counts, total in ((found.own, own), (found.torch, seen)):
            for (_, operation), (calls, wire_bytes) in counts.items():
                total[operation] = (total[operation][0] + calls, total[operation][1] + wire_bytes)
        assert dict(own) == {
            operation: pytest.approx(count, rel=1e-12) for operation, count in seen.items()
        }
    return ranks


def wire_bytes(found: Measured, group: str) -> float:
    """Of all operations of one group."""
    return sum(count for (name, _), (_, count) in found.own.items() if name == group)


# ------------------------------------------------------------------------------------------------------
# data parallel


@pytest.mark.parametrize(
    "layout", ["dp2,zero0", "dp2,zero1", "dp4,zero0,mbs2", "dp4,zero1,mbs2", "dp3,zero1"]
)
def test_replicas_say_twice_their_gradients_per_step(layout: str, pool: RankPool) -> None:
    """2 M (d-1)/d for DDP and for ZeRO-1 alike, whatever the number of micro-batches; M:
    bytes of all gradients.
    """
    parsed = parse_layout(layout)
    size = SIZE if parsed.dp != 3 else SIZE._replace(global_batch=6)
    config = config_of(
        "tests.support.builders:plain", {"vocab_size": 61, "width": 16, "depth": 3}, S
    )
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"bucket_bytes": 3000})}
    )
    d, num_parameters, elements = parsed.dp, 9, 61 * 16 + 3 * (16 * 16 + 16) + 16 * 61 + 61
    text = layout_config(config, parsed, size.global_batch, "float32").model_dump_json()
    for found in pool.run(measure, parsed.size, text):
        message = sum(found.bucket_bytes)
        padding = ALIGNED_ELEMENTS * (num_parameters + len(found.bucket_bytes) * d) * FLOAT
        assert elements * FLOAT <= message < elements * FLOAT + padding
        assert len(found.bucket_bytes) > 2
        assert wire_bytes(found, "dp") == pytest.approx(2 * message * (d - 1) / d, rel=1e-12)
        operations = ["reduce_scatter", "all_gather"] if parsed.zero else ["all_reduce"]
        assert {key: calls for key, (calls, _) in found.own.items() if key[0] == "dp"} == {
            ("dp", operation): len(found.bucket_bytes) for operation in operations
        }


def test_hybrid_sharding_says_across_the_pairs_only_a_shard_of_it(pool: RankPool) -> None:
    """Among f neighbours 2 M (f-1)/f, and across r = d/f groups 2 (M/f) (r-1)/r:
    the links between nodes carry less.
    """
    config = config_of(
        "tests.support.builders:plain", {"vocab_size": 61, "width": 16, "depth": 3}, S
    )
    text = layout_config(
        config, parse_layout("dp4,shard2,mbs2"), SIZE.global_batch, "float32"
    ).model_dump_json()
    for found in pool.run(measure, 4, text):
        message = sum(found.bucket_bytes)
        assert wire_bytes(found, "dp_shard") == pytest.approx(message, rel=1e-12)
        assert wire_bytes(found, "dp_replicate") == pytest.approx(message / 2, rel=1e-12)
        assert wire_bytes(found, "dp") == 0


def test_sharded_gradients_are_said_after_each_micro_batch(pool: RankPool) -> None:
    """chunks M (d-1)/d, and M (d-1)/d of weights; or, reduced once, what ZeRO-1 says."""
    config = config_of(
        "tests.support.builders:plain", {"vocab_size": 61, "width": 16, "depth": 3}, S
    )
    for text, times in (("dp2,zero2", SIZE.global_batch // 2), ("dp2,zero2,step", 1)):
        for found in measured(config, text, pool):
            message = sum(found.bucket_bytes)
            assert found.own["dp", "reduce_scatter"][1] == pytest.approx(
                times * message / 2, rel=1e-12
            )
            assert found.own["dp", "all_gather"][1] == pytest.approx(message / 2, rel=1e-12)


def test_sharded_weights_are_said_twice_for_each_micro_batch(pool: RankPool) -> None:
    """3 chunks M (d-1)/d, or with sums once in a step (2 chunks + 1) M (d-1)/d;
    M with rows up to a multiple of d.
    """
    config = config_of(
        "tests.support.builders:plain", {"vocab_size": 61, "width": 16, "depth": 3}, S
    )
    rows = [(61, 16)] + 3 * [(16, 16), (16, 1)] + [(61, 16), (61, 1)]
    for text, times in (("dp2,zero3", SIZE.global_batch // 2), ("dp2,zero3,step", 1)):
        for found in measured(config, text, pool):
            message = sum(found.bucket_bytes)
            assert message == FLOAT * sum((number + number % 2) * size for number, size in rows)
            chunks = SIZE.global_batch // 2
            assert found.own["dp", "all_gather"][1] == pytest.approx(
                2 * chunks * message / 2, rel=1e-12
            )
            assert found.own["dp", "reduce_scatter"][1] == pytest.approx(
                times * message / 2, rel=1e-12
            )


def test_a_weight_that_layers_share_is_gathered_once_in_a_step(pool: RankPool) -> None:
    """And reduced once in a micro-batch: ZeRO-3 on a GPT whose head is its embedding."""
    config = model_config("gpt2", SIZE, tied=True)
    for found in measured(config, "dp2,zero3", pool):
        assert found.shared_bytes > 0
        message, chunks = sum(found.bucket_bytes), SIZE.global_batch // 2
        gathered = (2 * chunks * (message - found.shared_bytes) + found.shared_bytes) / 2
        assert found.own["dp", "all_gather"][1] == pytest.approx(gathered, rel=1e-12)
        assert found.own["dp", "reduce_scatter"][1] == pytest.approx(
            chunks * message / 2, rel=1e-12
        )


@pytest.mark.parametrize(
    ("layout", "dtype", "group"),
    [
        ("dp2", "float32", "dp"),
        all_layouts_row("dp2,tp2,zero3", "float32", "dp_tp"),
        all_layouts_row("dp4,tp2,shard2", "bfloat16", "dp_tp"),
    ],
)
def test_matrices_are_said_twice_per_step(
    layout: str, dtype: str, group: str, pool: RankPool
) -> None:
    """The mean over n holders is 2 b (P/n) (n-1)/n for P elements of b bytes: to their homes,
    and back.
    """
    config = model_config("llama", SIZE)
    config = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"name": "muon"})}
    )
    parsed = parse_layout(layout)
    # qkv, out, gate, up and down
    elements = SIZE.num_blocks * (2 * H * H + H * H + 3 * H * 6 * SIZE.heads)
    holders = parsed.dp // (2 if "shard2" in layout else 1) * parsed.tp
    ranks = measured(config, layout, pool, dtype)
    assert all(found.own[group, "all_to_all"][0] == 2 for found in ranks)
    mean = sum(found.own[group, "all_to_all"][1] for found in ranks) / len(ranks)
    item = 2 if dtype == "bfloat16" else 4
    assert mean == pytest.approx(2 * item * elements / holders * (holders - 1) / holders, rel=1e-12)


def test_bfloat16_reduces_float32_and_gathers_bfloat16(pool: RankPool) -> None:
    """M (d-1)/d of gradients, and half of that of weights."""
    for found in measured(
        config_of("tests.support.builders:plain", {"vocab_size": 16}, S), "dp2", pool, "bfloat16"
    ):
        message = sum(found.bucket_bytes)
        assert found.own["dp", "reduce_scatter"][1] == message / 2
        assert found.own["dp", "all_gather"][1] == message / 4


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        all_layouts_row("gpt2", "dp2,pp2,tp2"),
        ("llama", "dp4,tp2,zero0"),
        LATER("llama", "dp2,pp2,tp2,sequence,gpipe"),
        LATER("gpt2", "dp2,pp4,zero0"),
        LATER("llama", "dp2,pp2,tp2"),
        LATER("gpt2", "dp2,pp2,tp2,sequence,gpipe"),
        LATER("gpt2", "dp4,tp2,zero0"),
        LATER("llama", "dp2,pp4,zero0"),
    ],
)
def test_also_beside_the_other_axes(model: str, layout: str, pool: RankPool) -> None:
    """The own count equals torch's in each of them;
    each rank says 2 M (d-1)/d over dp for what it holds.
    """
    d = parse_layout(layout).dp
    for found in measured(model_config(model, SIZE), layout, pool):
        assert wire_bytes(found, "dp") == pytest.approx(
            2 * sum(found.bucket_bytes) * (d - 1) / d, rel=1e-12
        )
        assert wire_bytes(found, "tied") == pytest.approx(2 * found.tied_bytes / 2, rel=1e-12)


# ----------------------------------------------------------------------------------------------------
# tensor parallel


@marked_rows("all_layouts", "gpt2-plain-2", "gpt2-sequence-2", "llama-sequence-2")
@pytest.mark.parametrize("tp", [2, LATER(4)])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_layer_says_eight_activations_per_microbatch(
    model: str, sequence: bool, tp: int, pool: RankPool
) -> None:
    """8 b s h (t-1)/t elements per block and micro-batch:
    two all-reduces forward and two backward of 2 b s h each.

    Under sequence parallelism each all-reduce is a reduce-scatter and an all-gather, as many bytes,
    and backward gathers the inputs of both column-parallel linears again instead of keeping them: 2
    b s h (t-1)/t more.
    """
    layout = f"tp{tp},mbs{B}" + (",sequence" if sequence else "")
    chunks = SIZE.global_batch // B
    share = (tp - 1) / tp
    unit = B * S * H * FLOAT * share  # one all-gather or reduce-scatter of an activation
    blocks = chunks * SIZE.num_blocks * unit * (10 if sequence else 8)
    # embedding forward, head backward; with sequence each has two halves, and the head gathers
    # again
    ends = chunks * unit * (5 if sequence else 4)
    # largest logit; sum of exponentials and the label's logit
    losses = chunks * (1 + 2) * B * S * FLOAT * 2 * share
    for found in measured(model_config(model, SIZE), layout, pool):
        once_per_step = 2 * found.partial_bytes * share
        assert (found.partial_bytes > 0) == sequence
        assert wire_bytes(found, "tp") == pytest.approx(
            blocks + ends + losses + once_per_step, rel=1e-12
        )
        assert wire_bytes(found, "dp") == wire_bytes(found, "pp") == 0
    assert vocab_slice(V, 0, tp).padded * tp > V


# ----------------------------------------------------------------------------------------------------
# context parallel


@pytest.mark.parametrize(
    "layout",
    [
        "cp2,mbs2",
        all_layouts_row("cp4,contiguous"),
        all_layouts_row("cp2,tp2,sequence,heads"),
        LATER("cp2,tp2,mbs2"),
    ],
)
def test_an_attention_exchanges_keys_or_heads(layout: str, pool: RankPool) -> None:
    """Keys: 2 b s g d (c-1)/c elements each way, in groups of heads gathered twice; heads: (2 n + 2
    g) b s/c d (c-1)/c each way; n, g: of a tp rank.
    """
    parsed = parse_layout(layout)
    c, attentions = parsed.cp, SIZE.global_batch // parsed.micro_batch_size * SIZE.num_blocks
    n, g, d = 2 * SIZE.heads // parsed.tp, SIZE.heads // parsed.tp, H // (2 * SIZE.heads)
    unit = attentions * parsed.micro_batch_size * S * d * FLOAT * (c - 1) / c
    for found in measured(model_config("llama", SIZE), layout, pool):
        if parsed.exchange == "heads":
            expected = {"all_to_all": (4 * attentions, 2 * unit * (2 * n + 2 * g) / c)}
        else:
            groups = {"cp4,contiguous": 2}.get(layout, 1)
            gathers = attentions * (2 if groups > 1 else 1)
            expected = {
                "all_gather": (gathers * groups, gathers / attentions * unit * 2 * g),
                "reduce_scatter": (attentions * groups, unit * 2 * g),
            }
        assert {key[1]: found.own[key] for key in found.own if key[0] == "cp"} == expected


# ----------------------------------------------------------------------------------------------------
# expert parallel


@pytest.mark.parametrize(
    "layout",
    [
        "dp4,ep2,mbs2",
        all_layouts_row("dp2,tp2,ep4,sequence,zero2"),
        LATER("cp2,ep2"),
        LATER("dp4,ep4,full"),
    ],
)
def test_rows_go_to_their_experts_and_back(layout: str, pool: RankPool) -> None:
    """2 k T D (e-1)/e elements each way of a rank in the mean, for T tokens of it,
    and E integers of counts.

    Gradients of other weights are summed over dp x cp, those of experts over the ranks with the
    same ones.
    """
    num_experts, top_k, parsed = 4, 2, parse_layout(layout)
    e, replicas, chunks = (
        parsed.ep,
        parsed.dp * parsed.cp,
        SIZE.global_batch // parsed.dp // parsed.micro_batch_size,
    )
    calls = chunks * SIZE.num_blocks
    tokens, again = (
        parsed.micro_batch_size * S // parsed.tp // parsed.cp,
        parsed.recompute == "full",
    )
    rows = (4 + 2 * again) * top_k * tokens * H * FLOAT + (1 + again) * num_experts * 8
    moe = {"num_experts": num_experts, "top_k": top_k}
    ranks = measured(model_config("llama", SIZE, moe=moe), layout, pool)
    assert {found.own["ep", "all_to_all"][0] for found in ranks} == {calls * (5 + 3 * again)}
    assert (
        sum(wire_bytes(found, "ep") for found in ranks) / len(ranks) == calls * rows * (e - 1) / e
    )
    for found in ranks:
        same, times = replicas * parsed.tp // e, chunks + 1 if parsed.zero == 2 else 2
        others = sum(found.bucket_bytes) - found.expert_bytes
        assert wire_bytes(found, "experts") == pytest.approx(
            times * found.expert_bytes * (same - 1) / same, rel=1e-12
        )
        assert wire_bytes(found, "dp") == pytest.approx(
            times * others * (replicas - 1) / replicas, rel=1e-12
        )
        assert (
            found.expert_bytes * e >= SIZE.num_blocks * num_experts * 3 * H * 6 * SIZE.heads * FLOAT
        )


# -----------------------------------------------------------------------------------------------------------
# pipeline


@pytest.mark.parametrize(
    "layout",
    [
        "pp2",
        "pp4,gpipe,mbs2",
        all_layouts_row("pp2,tp2"),
        all_layouts_row("pp2,tp2,sequence"),
        all_layouts_row("dp2,pp4"),
    ],
)
def test_a_border_says_one_activation_each_way(layout: str, pool: RankPool) -> None:
    """b s h elements per micro-batch, border and direction;
    under sequence parallelism each tp rank its part.
    """
    parsed = parse_layout(layout)
    config = model_config("llama", SIZE)
    microbatches = SIZE.global_batch // (parsed.dp * parsed.micro_batch_size)
    message = parsed.micro_batch_size * S * H * FLOAT / (parsed.tp if parsed.sequence else 1)
    grid = Grid(pp=parsed.pp, dp=parsed.dp, tp=parsed.tp)
    for rank, found in enumerate(measured(config, layout, pool)):
        pp_rank = grid.coordinates(rank).pp_rank
        directions = (pp_rank > 0) + (pp_rank < parsed.pp - 1)
        assert found.own["pp", "send"] == (
            directions * microbatches,
            directions * microbatches * message,
        )


def test_integers_and_what_skips_a_stage_are_sent_too(pool: RankPool) -> None:
    """Forward all tensors of the value, backward the gradients of those that need one."""
    config = config_of(
        "tests.support.builders:carrying", {"vocab_size": 16, "width": 8, "depth": 2}, S
    )
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"balance": [2, 3]})}
    )
    first, last = measured(config, "pp2", pool)
    x, ids, mask = S * 8 * FLOAT, S * 8, S * 8
    assert first.own["pp", "send"] == (8 * 4, 8 * (2 * x + ids + mask))
    assert last.own["pp", "send"] == (8 * 2, 8 * 2 * x)


# ----------------------------------------------------------------------------------------------------------
# the rest


def test_one_rank_says_nothing(pool: RankPool) -> None:
    [found] = measured(model_config("gpt2", SIZE), "pp1", pool)
    assert found.own == {} and found.torch == {}


def test_all_ranks_together_sum_a_few_numbers_per_step(pool: RankPool) -> None:
    """Loss, labels, norm, a time, six flags, and a time per pipeline rank: one float64 message."""
    for found in measured(model_config("gpt2", SIZE), "dp2,pp2", pool):
        assert found.own["world", "all_reduce"] == (1, 2 * 8 * (10 + 2) * 3 / 4)
