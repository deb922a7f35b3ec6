"""Which parameters lie together, and where: decided without a word to another rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from meshwright.data_parallel.buckets import Bucket
from meshwright.data_parallel.members import plan_buckets
from meshwright.data_parallel.sharding import StageParameter, accumulation_dtype
from meshwright.mesh.comm import Group
from meshwright.mesh.holders import Holders, Tie
from meshwright.parameters import ParameterInfo, Slice

TP = Group("tp", (0, 1), 0)
TIED = Tie("embedding.weight", Group("tied", (0, 4), 0), True)


def lonely(rank: int = 0, size: int = 1) -> Group:
    """Return a place among replicas that cannot talk."""
    return Group("dp", tuple(range(size)), rank)


def sharded(
    members: list[StageParameter], zero: int, rank: int = 0, size: int = 1
) -> list[StageParameter]:
    """Over all of them, or not at all."""
    replicas = lonely(rank, size)
    holders = Holders(shard_group=replicas) if zero else Holders(copies_group=replicas)
    return [each._replace(holders=holders) for each in members]


def member(
    name: str,
    shape: tuple[int, ...],
    *,
    sliced: bool = False,
    partial: bool = False,
    tied: Tie | None = None,
    tp: Group = TP,
    dtype: torch.dtype = torch.float32,
) -> StageParameter:
    """Return a parameter of layer ``name.split(".")[0]``, filled with numbers of its own."""
    numel = torch.Size(shape).numel()
    values = torch.arange(numel, dtype=torch.float32).view(shape) + 1000 * (len(name) % 7 + 1)
    whole = (shape[0] * 2, *shape[1:]) if sliced else shape
    info = ParameterInfo(name, whole, Slice(0, 0, shape[0], shape[0]) if sliced else None, partial)
    holders = Holders(
        copied_over=() if sliced else (tp,), partial_over=(tp,) if partial else (), tied=tied
    )
    return StageParameter(info, nn.Parameter(values.to(dtype)), name.split(".")[0], holders)


def every_kind() -> list[StageParameter]:
    """Return two parameters of each combination of what may differ."""
    members = []
    for i, (decays, sliced, partial) in enumerate(itertools.product((True, False), repeat=3)):
        if sliced and partial:
            continue
        shape = (4, 3) if decays else (4,)
        members += [
            member(f"layer{j}.weight{i}", shape, sliced=sliced, partial=partial) for j in range(2)
        ]
    members.append(member("embedding.weight", (4, 3), sliced=True, tied=TIED))
    members.append(member("other.weight", (4, 3), sliced=True, tied=TIED))
    return members


def test_a_bucket_holds_one_kind_only() -> None:
    buckets = plan_buckets(every_kind(), 2**20)
    assert sorted(m.info.name for group in buckets for m in group) == sorted(
        m.info.name for m in every_kind()
    )
    for group in buckets:
        kind = group[0].kind
        for found in group:
            assert found.info.decays == kind.decays
            assert found.holders == kind.holders
    kinds = [group[0].kind for group in buckets if group[0].holders.tied is None]
    assert len(kinds) == len(set(kinds)) == 6, "as few buckets as there are kinds"


def test_a_tied_weight_lies_alone() -> None:
    """Another stage has it among other neighbours:
    only alone do the same elements meet in the sum.
    """
    groups = plan_buckets(every_kind(), 2**20)
    alone = [group for group in groups if group[0].holders.tied is not None]
    assert sorted([m.info.name for m in group] for group in alone) == [
        ["embedding.weight"],
        ["other.weight"],
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 48, 100, 144, 1000])
def test_buckets_keep_to_their_size(bucket_bytes: int) -> None:
    """48 bytes of gradient each: no bucket is larger than asked, unless one parameter alone is;
    none is split off while it would have fitted.
    """
    buckets = plan_buckets([member(f"layer{i}.weight", (4, 3)) for i in range(7)], bucket_bytes)
    sizes = [sum(m.parameter.numel() * 4 for m in group) for group in buckets]
    assert all(size <= max(bucket_bytes, 48) for size in sizes)
    assert all(size + 48 > bucket_bytes for size in sizes[:-1])


def test_the_bytes_are_those_of_the_gradients() -> None:
    """bfloat16 parameters have float32 gradients: 48 bytes each, not 24."""
    members = [member(f"layer{i}.weight", (4, 3), dtype=torch.bfloat16) for i in range(4)]
    assert [len(group) for group in plan_buckets(members, 96)] == [2, 2]


def test_the_last_layer_comes_first() -> None:
    """As backward reaches them."""
    members = [member(f"layer{i}.weight", (4, 3)) for i in range(5)]
    names = [[m.layer for m in group] for group in plan_buckets(members, 96)]
    assert names == [["layer4", "layer3"], ["layer2", "layer1"], ["layer0"]]


def test_buckets_come_as_backward_completes_them() -> None:
    """The biases of all layers fit into one, which is begun first but one and complete last:
    nobody waits for it.
    """
    members = [
        member(f"layer{i}.{what}", shape)
        for i in range(4)
        for what, shape in (("a", (4, 3)), ("b", (4,)))
    ]
    names = [[m.info.name for m in group] for group in plan_buckets(members, 96)]
    biases = [f"layer{i}.b" for i in (3, 2, 1, 0)]
    assert names == [["layer3.a", "layer2.a"], biases, ["layer1.a", "layer0.a"]]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("zero", [0, 1])
def test_shards_cover_the_bucket_once(dp: int, zero: int) -> None:
    """3 elements, 5 to the next aligned place, 8: each replica steps an equal part, all of it with
    ZeRO-0; what is nobody's is zero. A shard or a parameter that began anywhere would be slow on a
    GPU.
    """
    covered = torch.zeros(56, dtype=torch.int64)
    for rank in range(dp):
        members = [member("a.weight", (2, 4)), member("b.weight", (3, 1))]
        [group] = plan_buckets(sharded(members, zero, rank, dp), 2**20)
        bucket = Bucket(group)
        shards = dp if zero else 1
        assert [(place.start, place.stop) for place in bucket.slots] == [(0, 3), (8, 16)]
        assert bucket.numel % (8 * shards) == 0 and 16 <= bucket.numel < 16 + 8 * shards
        start, stop = bucket.shard_range
        assert start % 8 == 0
        covered[start:stop] += 1
        assert (
            bucket.shard_gradient.numel()
            == bucket.master.numel()
            == stop - start
            == bucket.numel // shards
        )
        assert not bucket.flat[3:8].any() and not bucket.flat[16:].any()
        assert bucket.is_sharded == (zero == 1 and dp > 1)
    assert covered[:16].tolist() == [dp if zero == 0 else 1] * 16


def test_the_model_computes_with_the_bucket_s_own_memory() -> None:
    """Stepping the flat tensor steps the parameters; nothing is copied."""
    members = [member("a.weight", (2, 4)), member("b.weight", (3, 1))]
    before = [m.parameter.detach().clone() for m in members]
    [group] = plan_buckets(sharded(members, 1), 2**20)
    bucket = Bucket(group)
    for place in bucket.slots:
        assert place.member.parameter.data_ptr() == bucket.flat[place.start :].data_ptr()
    for m, values in zip(members, before, strict=True):
        assert torch.equal(m.parameter, values)
    bucket.flat.add_(1)
    for m, values in zip(members, before, strict=True):
        assert torch.equal(m.parameter, values + 1)
    bucket.gradient_of(bucket.slots[0]).fill_(3)
    assert int((bucket.flat_gradient == 3).sum()) == bucket.slots[0].member.parameter.numel()


@pytest.mark.parametrize("zero", [0, 1])
def test_bfloat16_has_master_weights_in_float32(zero: int) -> None:
    """The optimizer steps float32; what is too small for bfloat16 is kept until it counts."""
    one = member("a.weight", (2, 4), dtype=torch.bfloat16)
    with torch.no_grad():
        one.parameter.fill_(1.0)
    [group] = plan_buckets(sharded([one], zero), 2**20)
    bucket = Bucket(group)
    assert (
        bucket.master.dtype == bucket.flat_gradient.dtype == torch.float32
        and bucket.flat.dtype == torch.bfloat16
    )
    for _ in range(8):
        bucket.master.add_(2**-10)  # an eighth of bfloat16's step at 1
        bucket.gather()
    assert one.parameter.unique().tolist() == [1 + 2**-7]


def test_float32_and_float64_have_none() -> None:
    for dtype in (torch.float32, torch.float64):
        [group] = plan_buckets(sharded([member("a.weight", (2, 4), dtype=dtype)], 1), 2**20)
        bucket = Bucket(group)
        assert (
            bucket.master.data_ptr() == bucket.flat.data_ptr()
            and accumulation_dtype(dtype) == dtype
        )
    assert accumulation_dtype(torch.bfloat16) == torch.float32


@pytest.mark.parametrize(
    ("replicated", "tied_rank", "tp_rank", "owns"),
    [
        (True, None, 0, True),
        (True, None, 1, False),
        (False, None, 1, True),
        (False, 0, 1, True),
        (False, 1, 1, False),
    ],
)
def test_one_rank_counts_a_weight(
    replicated: bool, tied_rank: int | None, tp_rank: int, owns: bool
) -> None:
    tied = (
        None
        if tied_rank is None
        else Tie("a.weight", Group("tied", (0, 4), tied_rank), tied_rank == 0)
    )
    tp = Group("tp", (0, 1), tp_rank)
    found = member("a.weight", (2, 4), sliced=not replicated, tied=tied, tp=tp)
    assert found.holders.is_counted is owns
    later = found.holders._replace(shard_group=lonely(1, 2))
    assert not later.is_saved and later.is_counted is owns, "each shard counts"
    copy = found.holders._replace(copies_group=lonely(1, 2))
    assert not copy.is_counted, "of equal shards one counts"


@pytest.mark.parametrize("num_shards", [1, 3])
def test_no_shard_and_no_parameter_begins_inside_a_block(num_shards: int) -> None:
    """Where the optimizer keeps blocks: of 24 elements here,
    in matrices of 12 rows of 24 and of 5.
    """
    members = [member("a.weight", (12, 24)), member("b.weight", (5, 24))]
    members = [each._replace(info=each.info._replace(is_eight_bit=True)) for each in members]
    for rank in range(num_shards):
        [group] = plan_buckets(sharded(members, 1, rank, num_shards), 2**20)
        bucket = Bucket(group, block_size=24)
        assert bucket.kind.is_eight_bit and bucket.numel % (24 * num_shards) == 0
        assert all(place.start % 24 == 0 for place in bucket.slots)
        assert bucket.shard_range[0] % 24 == 0
