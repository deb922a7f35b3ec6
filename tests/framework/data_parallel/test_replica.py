"""A stage as one of the replicas: what accumulates in what, what is posted when,
what the weights become.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshwright.data_parallel.members import members_of
from meshwright.data_parallel.replica import BucketReplica
from meshwright.data_parallel.sharding import StageParameter
from meshwright.mesh.comm import Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.holders import Holders, Tie
from meshwright.mesh.mesh import Mesh, open_mesh
from meshwright.mesh.traffic import OperationCount
from meshwright.optimizer.offload import HostMemory
from meshwright.parameters import ParameterInfo
from meshwright_launch.pool import RankPool
from tests.framework.data_parallel.apart import Apart, as_by_nccl

ALONE = Group("dp", (0,), 0)
WIDTH = 8


def layers_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three linears, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(
        OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in ("a", "b", "c"))
    ).to(dtype)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def replica_of(
    layers: nn.Sequential,
    dp: Group = ALONE,
    *,
    partial_over: tuple[Group, ...] = (),
    copies: Group = ALONE,
    bucket_bytes: int = 2**20,
    keeps_gradient: bool = True,
    host: HostMemory | None = None,
    tied: Tie | None = None,
) -> BucketReplica:
    holders = Holders(shard_group=dp, copies_group=copies, partial_over=partial_over, tied=tied)
    members = [
        StageParameter(ParameterInfo(name, tuple(parameter.shape)), parameter, layer, holders)
        for name, parameter, layer in members_of(layers)
    ]
    return BucketReplica(
        members, bucket_bytes=bucket_bytes, keeps_gradient=keeps_gradient, host=host
    )


def sample(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def gradients_of(replica: BucketReplica) -> dict[str, Tensor]:
    """What lies in the buckets, by name."""
    return {
        place.member.info.name: bucket.gradient_of(place)
        for bucket in replica.buckets
        for place in bucket.slots
    }


def plain_gradients(seed: int, dtype: torch.dtype, names: str = "abc") -> dict[str, Tensor]:
    """Of one micro-batch alone."""
    layers = layers_of(dtype)
    run(layers, sample(seed, dtype), names)
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in layers.named_parameters()
    }


def run(layers: nn.Sequential, x: Tensor, names: str = "abc") -> None:
    """Forward and backward through the named layers."""
    for name in names:
        x = torch.tanh(layers.get_submodule(name)(x))
    x.sum().backward()


# ------------------------------------------------------------------------------------------------------------
# one rank


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """Each micro-batch's gradient is rounded to bfloat16 once, as it comes;
    the sum of them never is.
    """
    layers = layers_of(torch.bfloat16)
    replica = replica_of(layers)
    replica.begin_step()
    expected: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for seed in range(6):
        if seed == 5:
            replica.reduce_during_backward()
        run(layers, sample(seed, torch.bfloat16))
        for name, gradient in plain_gradients(seed, torch.bfloat16).items():
            expected[name] = expected.get(name, torch.zeros(gradient.shape)) + gradient.float()
            rounded[name] = rounded.get(name, torch.zeros_like(gradient)) + gradient
        assert all(parameter.grad is None for parameter in layers.parameters()), (
            "no second copy is kept"
        )
    replica.finish_reduction()
    for name, gradient in gradients_of(replica).items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, expected[name]), name
        assert not torch.equal(gradient, rounded[name].float()), "the test cannot tell"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_accumulate_where_they_lie(dtype: torch.dtype) -> None:
    layers = layers_of(dtype)
    replica = replica_of(layers)
    for step in range(2):  # also the second step begins from zero
        replica.begin_step()
        seeds = [10 * step, 10 * step + 1]
        for seed in seeds:
            run(layers, sample(seed, dtype))
        replica.finish_reduction()
        for name, gradient in gradients_of(replica).items():
            expected = sum(plain_gradients(seed, dtype)[name] for seed in seeds)
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
            parameter = layers.get_parameter(name)
            assert parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr()


def test_gradients_that_somebody_set_to_none_come_home() -> None:
    """``model.zero_grad()`` in a hook of the user's must not lose what was accumulated."""
    layers = layers_of()
    replica = replica_of(layers)
    replica.begin_step()
    run(layers, sample(0))
    layers.zero_grad(set_to_none=True)
    run(layers, sample(1))
    replica.finish_reduction()
    for name, gradient in gradients_of(replica).items():
        expected = plain_gradients(0, torch.float64)[name] + plain_gradients(1, torch.float64)[name]
        torch.testing.assert_close(gradient, expected)


def test_frozen_parameters_lie_in_no_bucket() -> None:
    layers = layers_of()
    layers.get_parameter("b.weight").requires_grad_(False)
    replica = replica_of(layers)
    assert [member.info.name for member in replica.frozen] == ["b.weight"]
    trained = {place.member.info.name for bucket in replica.buckets for place in bucket.slots}
    assert trained == {"a.weight", "a.bias", "b.bias", "c.weight", "c.bias"}


def test_a_weight_used_by_two_layers_is_one_member_of_the_first() -> None:
    layers = layers_of()
    layers.get_submodule("c").weight = layers.get_parameter("a.weight")
    assert [(name, layer) for name, _, layer in members_of(layers)][:2] == [
        ("a.weight", "a"),
        ("a.bias", "a"),
    ]
    assert "c.weight" not in [name for name, _, _ in members_of(layers)]


# -----------------------------------------------------------------------------------------------------------
# real ranks


class How(NamedTuple):
    """What the replicas share, and when; ``calls``:
    of each bucket in a step of four micro-batches.
    """

    shard_factor: int | None
    calls: dict[tuple[str, str], int]
    keeps_gradient: bool = True
    each: bool = False


HOWS = {
    "zero0": How(1, {("dp", "all_reduce"): 1}),
    "zero1": How(None, {("dp", "reduce_scatter"): 1}),
    "zero1 in pairs": How(
        2, {("dp_shard", "reduce_scatter"): 1, ("dp_replicate", "all_reduce"): 1}
    ),
    "zero2": How(None, {("dp", "reduce_scatter"): 4}, keeps_gradient=False, each=True),
    "zero2 in pairs": How(
        2,
        {("dp_shard", "reduce_scatter"): 4, ("dp_replicate", "all_reduce"): 1},
        keeps_gradient=False,
        each=True,
    ),
    "zero2 once": How(None, {("dp", "reduce_scatter"): 1}, keeps_gradient=False),
}


def reduced(
    rank: int, dp: int, how: str, bucket_bytes: int, last_names: list[str]
) -> list[dict[str, Any]]:
    """Four micro-batches on each replica, two steps;
    in the last one a replica runs only ``last_names[rank]``.
    """
    mesh = open_mesh(Grid(dp=dp), "cpu")
    layers = layers_of()
    factor, _, keeps_gradient, each = HOWS[how]
    shard, copies = mesh.split(mesh.replicas, factor or dp)
    replica = replica_of(
        layers,
        shard,
        copies=copies,
        bucket_bytes=bucket_bytes,
        keeps_gradient=keeps_gradient,
    )
    found = []
    for _ in range(2):
        replica.begin_step()
        mesh.traffic.reset()
        before_last: dict[Any, OperationCount] = {}
        left = 0
        for m in range(4):
            if m == 3:
                before_last = dict(mesh.traffic.counts)
            if m == 3 or each:
                replica.reduce_during_backward()
            run(layers, sample(100 * rank + m), last_names[rank] if m == 3 else "abc")
            if each and m < 3:
                replica.reduce_remaining()
                left = max(
                    left, sum(bucket.flat_gradient is not None for bucket in replica.buckets)
                )
        replica.finish_reduction()
        left = max(left, sum(bucket.flat_gradient is not None for bucket in replica.buckets))
        whole = {}
        for bucket in replica.buckets:
            flat = bucket.shard_gradient
            if bucket.is_sharded:
                flat = torch.empty(bucket.numel, dtype=flat.dtype)
                shard.all_gather(flat, bucket.shard_gradient.clone()).wait()
            for place in bucket.slots:
                whole[place.member.info.name] = flat[place.start : place.stop].clone()
        calls = {
            key: counted.calls
            for key, counted in mesh.traffic.counts.items()
            if key[1] != "all_gather"
        }
        found.append(
            {
                "gradients": whole,
                "calls": calls,
                "early": before_last,
                "buckets": len(replica.buckets),
                "left": left,
            }
        )
    return found


CASES = [
    (2, 2**20, ["abc", "abc"]),
    (2, 1, ["abc", "abc"]),  # a bucket for each parameter
    (2, 1, ["abc", "ac"]),  # the last backward does not reach b on one replica
    (3, 600, ["a", "abc", "c"]),
    (4, 1, ["b", "a", "c", "abc"]),
]
"""(dp, bytes of a bucket, layers that the last backward of each replica reaches)"""


@pytest.mark.parametrize(
    ("how", "dp", "bucket_bytes", "last_names"),
    [(how, *case) for how in HOWS for case in CASES if "pairs" not in how or case[0] == 4],
)
def test_each_bucket_is_reduced_as_often_as_it_should_and_is_whole(
    how: str, dp: int, bucket_bytes: int, last_names: list[str], pool: RankPool
) -> None:
    """Unused parameters too: no replica waits for another's bucket, and no earlier micro-batch is
    lost. Once in a step; with ZeRO-2 after each micro-batch, and no whole gradient is left then.
    """
    ranks = pool.run(reduced, dp, how, bucket_bytes, last_names)
    expected: dict[str, Tensor] = {}
    for rank in range(dp):
        for m in range(4):
            names = last_names[rank] if m == 3 else "abc"
            for name, gradient in plain_gradients(100 * rank + m, torch.float64, names).items():
                expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient
    for steps in ranks:
        for step in steps:
            assert step["calls"] == {
                key: calls * step["buckets"] for key, calls in HOWS[how].calls.items()
            }
            assert bool(step["early"]) == HOWS[how].each, "nothing is said before the last backward"
            assert step["left"] == (step["buckets"] if HOWS[how].keeps_gradient else 0)
            for name, gradient in step["gradients"].items():
                torch.testing.assert_close(
                    gradient.view_as(expected[name]), expected[name], rtol=1e-12, atol=1e-12
                )


def posted_during_backward(rank: int, dp: int) -> list[tuple[str, int]]:
    """(layer whose forward input's gradient has just been computed, reductions posted by then)."""
    mesh: Mesh = open_mesh(Grid(dp=dp), "cpu")
    layers = layers_of()
    replica = replica_of(layers, mesh.replicas, bucket_bytes=1)
    replica.begin_step()
    replica.reduce_during_backward()
    seen: list[tuple[str, int]] = []
    x = sample(rank).requires_grad_()
    for name in "abc":
        x = x * 1.0
        x.register_hook(
            lambda gradient, name=name: seen.append(
                (name, mesh.traffic.counts["dp", "reduce_scatter"].calls)
            )
        )
        x = torch.tanh(layers.get_submodule(name)(x))
    x.sum().backward()
    replica.finish_reduction()
    return seen


def test_reductions_overlap_the_last_backward(pool: RankPool) -> None:
    """When backward comes to a layer, the buckets of the layers behind it are
    on their way already.
    """
    for seen in pool.run(posted_during_backward, 2):
        assert [name for name, _ in seen] == ["c", "b", "a"]
        assert seen[1][1] >= 2 and seen[2][1] >= 4, seen


class Copies(NamedTuple):
    """Those to the host in one step of three micro-batches, by bucket."""

    before_the_last: list[int]
    in_it: list[int]
    while_reducing: list[int]
    in_the_step: list[int]
    behind_messages: bool
    """Whether those within the last backward were posted together with the sum."""
    right: bool
    """The host has the gradient that the device has."""


def brought(rank: int, dp: int, how: str, kind: str, is_nccl: bool) -> list[Copies]:
    """Return two steps; ``kind``: of all parameters. Each parameter has a bucket of its own."""
    posted = Group.reduce_scatter
    with mock.patch.object(Group, "reduce_scatter", as_by_nccl(posted) if is_nccl else posted):
        return copies_of(rank, dp, how, kind)


def copies_of(rank: int, dp: int, how: str, kind: str) -> list[Copies]:
    mesh = open_mesh(Grid(dp=dp), "cpu")
    layers, host = layers_of(), Apart()
    factor, _, keeps_gradient, each = HOWS[how]
    shard, copies = mesh.split(mesh.replicas, factor or dp)
    special: dict[str, Any] = {
        "plain": {},
        "tied": {"tied": Tie("a.weight", ALONE, True)},
        "partial": {"partial_over": (mesh.tp,)},
    }[kind]
    replica = replica_of(
        layers,
        shard,
        copies=copies,
        bucket_bytes=1,
        keeps_gradient=keeps_gradient,
        host=host,
        **special,
    )
    places = [bucket.shard_gradient.data_ptr() for bucket in replica.buckets]

    def since(first: int) -> list[int]:
        return [places.index(place) for place, _ in host.brought[first:]]

    found = []
    for step in range(2):
        host.brought.clear()
        replica.begin_step()
        for m in range(2):
            if each:
                replica.reduce_during_backward(last=False)
            run(layers, sample(100 * rank + 10 * step + m))
            if each:
                replica.reduce_remaining()
        before = since(0)
        replica.reduce_during_backward(last=True)
        run(layers, sample(100 * rank + 10 * step + 2))
        in_it = since(len(before))
        behind = all(behind for _, behind in host.brought[len(before) :])
        replica.finish_reduction()
        reducing = since(len(before) + len(in_it))
        right = [
            torch.equal(bucket.fetch_gradient(), bucket.shard_gradient)
            for bucket in replica.buckets
        ]
        stepping = since(len(before) + len(in_it) + len(reducing))
        found.append(Copies(before, in_it, reducing, stepping, behind, all(right)))
    return found


ALL = list(range(6))


@pytest.mark.parametrize(
    ("how", "dp", "kind", "is_nccl", "in_it", "while_reducing", "behind_messages"),
    [
        ("zero0", 2, "plain", False, ALL, [], True),
        ("zero1", 2, "plain", True, ALL, [], True),
        # gloo's slices are summed when they are waited for
        ("zero1", 2, "plain", False, [], ALL, True),
        ("zero2 once", 2, "plain", True, ALL, [], True),
        ("zero2 once", 2, "plain", False, ALL[:-1], ALL[-1:], False),
        # each is added to the sums when the next is posted
        ("zero2", 2, "plain", True, ALL[:-1], ALL[-1:], False),
        ("zero2", 2, "plain", False, ALL[:-1], ALL[-1:], False),
        ("zero2", 2, "tied", True, [], [], True),
        ("zero2", 2, "partial", True, [], [], True),
        ("zero1 in pairs", 4, "plain", True, [], [], True),
        ("zero2 in pairs", 4, "plain", False, [], [], True),
    ],
)
def test_gradients_go_to_the_host_while_the_last_backward_runs(
    how: str,
    dp: int,
    kind: str,
    is_nccl: bool,
    in_it: list[int],
    while_reducing: list[int],
    behind_messages: bool,
    pool: RankPool,
) -> None:
    """Each once, when nothing will be added any more: what is, is fetched when it is stepped."""
    expected = Copies(
        [], in_it, while_reducing, [] if in_it or while_reducing else ALL, behind_messages, True
    )
    for steps in pool.run(brought, dp, how, kind, is_nccl):
        assert steps == [expected, expected]
