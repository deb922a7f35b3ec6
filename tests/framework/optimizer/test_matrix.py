"""Muon on flat shards: every cut of every weight against whole tensors in plain torch,
without a process.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright.optimizer.matrix
import meshwright.optimizer.matrix_plan
from meshwright.config import Optimizer
from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.optimizer import ShardLayout, read_states, restore_states, states_of
from meshwright.optimizer.flat import FlatOptimizer, OptimizerShard
from meshwright.optimizer.matrix import COEFFICIENTS, SCALES, MatrixExchange, newton_schulz
from meshwright.optimizer.matrix_plan import (
    Matrix,
    MatrixShard,
    MatrixSlot,
    find_homes,
    matrices_of,
    tp_part,
)
from meshwright.parameters import ParameterInfo, Slice

CONFIG = Optimizer(name="muon", learning_rate=1e-2, weight_decay=0.3)
ALONE = Group("dp", (0,), 0)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(info: ParameterInfo, part: int, index: int = 0) -> list[int]:
    """Return the rows of one matrix, one by one, from the words of the contract."""
    num_rows = info.global_shape[-2]
    parts = info.matrix or (num_rows,)
    of_unit = [which for which, rows in enumerate(parts) for _ in range(rows)]
    return [
        index * num_rows + row for row in range(num_rows) if of_unit[row % len(of_unit)] == part
    ]


# ------------------------------------------------------------------------------------------------
# ranks in one process


class Post:
    """What the ranks of a group send each other, exchanged when the last of them waits."""

    def __init__(self, size: int) -> None:
        self.calls: dict[int, tuple[Tensor, Tensor, Sequence[int], Sequence[int]]] = {}
        self.size = size

    def deliver(self) -> None:
        if len(self.calls) < self.size:
            return
        runs = {
            rank: torch.split(whole, list(sizes))
            for rank, (_, whole, _, sizes) in self.calls.items()
        }
        for rank, (out, _, out_sizes, _) in self.calls.items():
            got = [runs[other][rank] for other in range(self.size)]
            assert [len(run) for run in got] == list(out_sizes)
            out.copy_(torch.cat(got))
        self.calls = {}


class PostedGroup(Group):
    """A group whose ranks are objects of this process."""

    def __init__(self, post: Post, rank: int) -> None:
        super().__init__("dp", tuple(range(post.size)), rank)
        self.post = post

    def all_to_all(
        self, out: Tensor, whole: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> CollectiveHandle:
        self.post.calls[self.rank] = out, whole.clone(), out_sizes, sizes
        self.post.deliver()
        return CollectiveHandle()


Weights = dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, int | None]]
"""Name -> global shape, rows of the parts, and the dim that tp cuts."""
WEIGHTS: Weights = {
    "qkv": ((24, 5), (4, 2, 2), 0),
    "gate_up": ((16, 5), (2, 2), 0),
    "out": ((5, 8), (), 1),
    "odd": ((7, 3), (), 0),  # tp does not divide it: padded
}
EXPERTS: Weights = {"experts": ((3, 4, 5), (1, 3), None), "vectors": ((3, 1, 5), (), None)}
"""Batches of three weights, which tp does not cut: its ranks have buckets of their own for them."""


def infos_of(weights: Weights, tp_rank: int, tp: int) -> dict[str, ParameterInfo]:
    """Return the weights on one tp rank."""
    found = {}
    for name, (shape, matrix, dim) in weights.items():
        part = None
        if dim is not None and tp > 1:
            padded = -(-shape[dim] // tp)
            start = min(tp_rank * padded, shape[dim])
            part = Slice(dim, start, min(start + padded, shape[dim]), padded)
        found[name] = ParameterInfo(name, shape, part, matrix=matrix)
    return found


class Ranks:
    """All holders of one flat bucket of weights: shards x tp."""

    def __init__(
        self, weights: Weights, shards: int, tp: int, scale: str = "spectral", gap: int = 3
    ) -> None:
        self.shards, self.tp, post = shards, tp, Post(shards * tp)
        self.infos = [infos_of(weights, tp_rank, tp) for tp_rank in range(tp)]
        self.starts, end = {}, 0
        for name, info in self.infos[0].items():
            self.starts[name] = end
            end += math.prod(info.local_shape) + gap
        self.per_shard = -(-end // shards)
        self.groups = [PostedGroup(post, rank) for rank in range(shards * tp)]
        self.of_ranks = [self.shard(rank) for rank in range(shards * tp)]
        self.exchanges = [MatrixExchange([shard], scale) for shard in self.of_ranks]

    def shard(self, rank: int) -> MatrixShard:
        slots = tuple(
            MatrixSlot(info, self.starts[name]) for name, info in self.infos[rank % self.tp].items()
        )
        return MatrixShard(
            slots, self.per_shard * self.shards, self.groups[rank], self.tp, torch.float64
        )

    def flat(self, full: dict[str, Tensor], rank: int) -> Tensor:
        """Return the shard of one rank of whole tensors."""
        shard, tp_rank = divmod(rank, self.tp)
        flat = torch.zeros(self.per_shard * self.shards, dtype=torch.float64)
        for name, info in self.infos[tp_rank].items():
            local = info.take(full[name]).flatten()
            flat[self.starts[name] : self.starts[name] + len(local)] = local
        return flat[shard * self.per_shard : (shard + 1) * self.per_shard].clone()

    def whole(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Whole tensors of all ranks' shards."""
        found = {
            name: torch.full(info.global_shape, math.nan).double()
            for name, info in self.infos[0].items()
        }
        for tp_rank, infos in enumerate(self.infos):
            flat = torch.cat([flats[shard * self.tp + tp_rank] for shard in range(self.shards)])
            for name, info in infos.items():
                stop = self.starts[name] + math.prod(info.local_shape)
                local = info.unpadded(flat[self.starts[name] : stop].view(info.local_shape))
                to = found[name]
                if info.slice is not None:
                    to = to.narrow(
                        info.slice.dim, info.slice.start, info.slice.stop - info.slice.start
                    )
                to.copy_(local)
        return found


CUTS = [(1, 1), (2, 1), (3, 1), (7, 1), (1, 2), (2, 2), (3, 2), (1, 4), (2, 4)]


@pytest.mark.parametrize(("shards", "tp"), CUTS)
def test_each_matrix_comes_to_one_home_whole_and_goes_back(
    shards: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives is the matrix, element by element;
    an update that says where each element was comes back there.
    """
    seen: list[Tensor] = []

    def tripled(matrix: Tensor, steps: int) -> Tensor:
        seen.extend(matrix.clone().unbind() if matrix.dim() == 3 else [matrix.clone()])
        return 3 * matrix

    monkeypatch.setattr(meshwright.optimizer.matrix, "newton_schulz", tripled)
    # two of 1 x 5, and 3 x 5 alone
    monkeypatch.setattr(meshwright.optimizer.matrix_plan, "TOGETHER", 10)
    weights = WEIGHTS | (EXPERTS if tp == 1 else {})
    ranks = Ranks(weights, shards, tp)
    full = {
        name: drawn(*shape, seed=at) for at, (name, (shape, _, _)) in enumerate(weights.items())
    }
    flats = [ranks.flat(full, rank) for rank in range(shards * tp)]
    for exchange, flat in zip(ranks.exchanges, flats, strict=True):
        exchange.send([flat]).wait()
    for exchange in ranks.exchanges:
        exchange.orthogonalise(5).wait()
    updated = [torch.zeros_like(flat) for flat in flats]
    for exchange, weights in zip(ranks.exchanges, updated, strict=True):
        exchange.subtract([weights], [1.0])

    expected, update = [], {}
    for name, info in ranks.infos[0].items():
        update[name] = torch.zeros(info.global_shape, dtype=torch.float64)
        for matrix in matrices_of(info):
            rows, columns = rows_of(info, matrix.part, matrix.place), info.global_shape[-1]
            assert matrix.shape == (len(rows), columns)
            given, wanted = full[name].view(-1, columns), update[name].view(-1, columns)
            expected.append(given[rows])
            wanted[rows] = -3 * given[rows] * max(1, len(rows) / columns) ** 0.5
    assert len(seen) == len(expected) == (16 if tp == 1 else 7)
    assert all(any(torch.equal(found, each) for found in seen) for each in expected)
    for name, tensor in ranks.whole(updated).items():
        torch.testing.assert_close(tensor, update[name], rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6, 9), (3, 9, 6), (5, 16, 64)])
def test_a_batch_is_orthogonalised_as_its_matrices(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch = drawn(*shape, seed=3).to(dtype)
    batch[1] = 0
    together, alone = (
        newton_schulz(batch, 5),
        torch.stack([newton_schulz(each, 5) for each in batch]),
    )
    assert (together - alone).abs().max() <= 64 * torch.finfo(dtype).eps and together[
        0
    ].abs().max() > 0.1


@pytest.mark.parametrize("parts", [(-1, -1), (-3, -3), (-6,)])
@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
def test_transposed_experts_are_stepped_as_their_transposes(
    parts: tuple[int, ...], scale: str
) -> None:
    """Weights (inputs, outputs) with gate and up in alternate columns, in two blocks,
    or as one matrix.
    """
    ranks, full = (
        Ranks({"turned": ((3, 4, 6), parts, None)}, 2, 1, scale),
        {"turned": drawn(3, 4, 6, seed=2)},
    )
    flats = [ranks.flat(full, rank) for rank in range(2)]
    for exchange, flat in zip(ranks.exchanges, flats, strict=True):
        exchange.send([flat])
    for exchange in ranks.exchanges:
        exchange.orthogonalise(5)
    updated = [torch.zeros_like(flat) for flat in flats]
    for exchange, shard in zip(ranks.exchanges, updated, strict=True):
        exchange.subtract([shard], [1.0])
    expected = torch.zeros(3, 6, 4, dtype=torch.float64)
    for expert, turned in zip(expected, full["turned"].mT, strict=True):
        for part in range(len(parts)):
            rows = [row for row in range(6) if row % sum(map(abs, parts)) // abs(parts[0]) == part]
            expert[rows] = -SCALES[scale](len(rows), 4) * newton_schulz(turned[rows], 5)
    torch.testing.assert_close(ranks.whole(updated)["turned"], expected.mT, rtol=1e-12, atol=1e-14)


def test_matrices_of_experts_go_in_batches_of_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        meshwright.optimizer.matrix, "newton_schulz", lambda m, steps: sizes.append(m.shape) or m
    )
    exchange = Ranks(WEIGHTS | EXPERTS, 1, 1).exchanges[0]
    exchange.send([torch.zeros(Ranks(WEIGHTS | EXPERTS, 1, 1).per_shard, dtype=torch.float64)])
    exchange.orthogonalise(5)
    assert (
        sorted(size for size in sizes if len(size) == 3) == [(3, 3, 5), (6, 1, 5)]
        and len(sizes) == 9
    )


def test_runs_and_lengths_of_any_cut_are_those_of_counting() -> None:
    """Closed forms against the elements one by one, for units that a slice cuts anywhere."""
    dice = random.Random(0)
    for _ in range(300):
        parts = tuple(dice.randint(1, 3) for _ in range(dice.randint(1, 3)))
        shape = sum(parts) * dice.randint(1, 4), dice.randint(1, 4)
        tp, dim = dice.choice([1, 2, 3]), dice.choice([0, 1])
        if dim == 1 and shape[1] % tp:
            dim = 0  # only rows are padded
        weights: Weights = {"w": (shape, dice.choice([parts, ()]), dim)}
        for tp_rank, part in itertools.product(range(tp), range(3)):
            info = infos_of(weights, tp_rank, tp)["w"]
            if part >= len(matrices_of(info)):
                continue
            numbers = info.take(torch.arange(1, math.prod(shape) + 1).view(shape)).flatten()
            rows = set(rows_of(info, part))
            inside = [n > 0 and (int(n) - 1) // shape[1] in rows for n in numbers]
            piece = tp_part(Matrix(info, part), tp_rank, tp)
            first, stop = sorted(dice.randint(0, len(numbers)) for _ in range(2))
            runs = piece.runs(first, stop)
            assert [at for a, b in runs for at in range(a, b)] == [
                at for at in range(first, stop) if inside[at]
            ]
            assert piece.elements_before(stop) == sum(inside[:stop])
            assert math.prod(piece.shape) == sum(inside)


# -------------------------------------------------------------------------------------------------------------
# homes


def busiest(costs: Sequence[int], homes: Sequence[int]) -> int:
    return max(
        sum(cost for cost, home in zip(costs, homes, strict=True) if home == rank)
        for rank in set(homes)
    )


def test_places_beyond_2_to_the_31_elements_are_exact() -> None:
    """A weight of 80,000 x 40,000, 3.2e9 elements, of two parts, over 512 shards:
    counted without a tensor.
    """
    info = ParameterInfo("w", (80_000, 40_000), matrix=(30_000, 10_000))
    numel = 80_000 * 40_000
    shard = MatrixShard(
        (MatrixSlot(info, 0),), numel, Group("dp", tuple(range(512)), 0), 1, torch.float32
    )
    for matrix, rows in zip(matrices_of(info), (60_000, 20_000), strict=True):
        counts = [shard.count_of(matrix, 0, holder) for holder in range(512)]
        assert matrix.shape == (rows, 40_000) and sum(counts) == rows * 40_000 > 2**29
        for holder, count in enumerate(counts):
            first, stop, part = shard.share(matrix, 0, holder)
            runs = part.runs(first, stop)
            assert sum(b - a for a, b in runs) == count and all(
                first <= a < b <= stop for a, b in runs
            )
    last = tp_part(matrices_of(info)[1], 0, 1).runs(0, numel)[-1]
    assert last == (70_000 * 40_000, numel) and last[0] > 2**31


def test_homes_are_balanced_within_four_thirds_of_the_best() -> None:
    dice = random.Random(1)
    for _ in range(40):
        costs, ranks = [dice.randint(1, 20) for _ in range(dice.randint(1, 7))], dice.randint(1, 3)
        best = min(
            busiest(costs, homes) for homes in itertools.product(range(ranks), repeat=len(costs))
        )
        homes = find_homes(costs, ranks)
        assert busiest(costs, homes) <= 4 / 3 * best and set(homes) <= set(range(ranks))
    assert find_homes([7, 7, 7, 7], 2) == [0, 1, 0, 1]  # as many matrices for each
    assert find_homes([1, 9, 1], 2) == [1, 0, 1]


@pytest.mark.parametrize(("shards", "tp"), CUTS)
def test_all_ranks_find_the_same_homes_whatever_their_slice(shards: int, tp: int) -> None:
    ranks = Ranks(WEIGHTS, shards, tp)
    assert len({tuple(exchange.homes) for exchange in ranks.exchanges}) == 1
    assert set(ranks.exchanges[0].homes) == set(range(min(shards * tp, 7)))


# ---------------------------------------------------------------------------------------------------------
# the update


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_each_iteration_is_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape, seed=0)
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(
        newton_schulz(matrix, 5), u @ values.diag() @ vt, rtol=1e-11, atol=1e-12
    )
    assert float(values.min()) > 0.2 and float(values.max()) < 1.3


def test_no_gradient_gives_no_update() -> None:
    assert not newton_schulz(torch.zeros(3, 4), 5).any()
    # rounding alone is not blown up
    assert newton_schulz(1e-20 * drawn(3, 4, seed=0), 5).abs().max() < 1e-9


def test_scales_of_the_papers() -> None:
    """Jordan: sqrt(max(1, rows / columns)); Moonlight: 0.2 sqrt(max(rows, columns))."""
    assert [SCALES["spectral"](*shape) for shape in ((8, 2), (2, 8), (3, 3))] == [2.0, 1.0, 1.0]
    assert [SCALES["match_rms_adamw"](*shape) for shape in ((9, 4), (4, 9))] == [
        pytest.approx(0.6)
    ] * 2


def plain_step(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    config: Optimizer,
    rate: float,
    matrices: Sequence[Sequence[int]],
) -> None:
    """Muon as its paper says, on a whole weight, by singular values instead of products."""
    momentum.mul_(config.muon_momentum).add_(gradient)
    direction = gradient + config.muon_momentum * momentum if config.nesterov else momentum
    weight.mul_(1 - rate * config.weight_decay)
    for rows in matrices:
        u, values, vt = torch.linalg.svd(direction[rows], full_matrices=False)
        values = values / values.norm()
        for _ in range(config.ns_steps):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        m, n = len(rows), weight.shape[1]
        scale = (
            math.sqrt(max(1, m / n)) if config.scale == "spectral" else 0.2 * math.sqrt(max(m, n))
        )
        weight[rows] -= rate * scale * (u @ values.diag() @ vt)


def flat_shard(weights: Tensor, gradient: Tensor, infos: Sequence[ParameterInfo]) -> OptimizerShard:
    """Return a bucket on one rank: these weights, one after the other."""
    starts = itertools.accumulate([math.prod(info.global_shape) for info in infos], initial=0)
    slots = tuple(MatrixSlot(info, start) for info, start in zip(infos, starts, strict=False))
    is_matrix = infos[0].matrix is not None
    shard = MatrixShard(slots, len(weights), ALONE, 1, weights.dtype) if is_matrix else None
    return OptimizerShard(
        weights,
        gradient,
        infos[0].decays,
        False,
        lambda: gradient,
        lambda: None,
        layout=ShardLayout(matrices=shard),
    )


@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_muon_on_matrices_and_adamw_on_the_rest(scale: str, nesterov: bool) -> None:
    """Four steps at changing rates, with gradients that a factor clips."""
    config = CONFIG.model_copy(update={"scale": scale, "nesterov": nesterov, "ns_steps": 3})
    qkv, wide, bias = drawn(16, 3, seed=0), drawn(3, 8, seed=1), drawn(16, seed=2)
    infos = [
        ParameterInfo("qkv", (16, 3), matrix=(4, 2, 2)),
        ParameterInfo("wide", (3, 8), matrix=()),
    ]
    matrices, vector = torch.cat([qkv.flatten(), wide.flatten()]), bias.clone()
    gradients = [torch.zeros_like(matrices), torch.zeros_like(vector)]
    ours = FlatOptimizer(
        [
            flat_shard(matrices, gradients[0], infos),
            flat_shard(vector, gradients[1], [ParameterInfo("bias", (16,))]),
        ],
        config,
    )
    adamw = nn.Parameter(bias.clone())
    theirs = torch.optim.AdamW(
        [adamw], betas=config.betas, eps=config.eps, weight_decay=0.0, foreach=False
    )
    momenta = [torch.zeros_like(qkv), torch.zeros_like(wide)]
    for step in range(4):
        found = [
            drawn(*each.shape, seed=10 * step + at) for at, each in enumerate((qkv, wide, bias))
        ]
        gradients[0].copy_(torch.cat([each.flatten() for each in found[:2]]) * 8)
        gradients[1].copy_(found[2] * 8)
        rate = 1e-2 / (step + 1)
        ours.step(rate, 0.125)
        plain_step(
            qkv, found[0], momenta[0], config, rate, [rows_of(infos[0], part) for part in range(3)]
        )
        plain_step(wide, found[1], momenta[1], config, rate, [range(3)])
        adamw.grad, theirs.param_groups[0]["lr"] = found[2], rate
        theirs.step()
        torch.testing.assert_close(
            matrices, torch.cat([qkv.flatten(), wide.flatten()]), rtol=1e-11, atol=1e-12
        )
        torch.testing.assert_close(vector, adamw.detach(), rtol=1e-12, atol=1e-13)
    states, steps = read_states(ours, 0)
    assert steps == 4 and list(states) == ["momentum"] == list(states_of(config, is_matrix=True))
    assert (
        list(read_states(ours, 1)[0])
        == ["exp_avg", "exp_avg_sq"]
        == list(states_of(config, is_matrix=False))
    )
    # a mean instead of a sum
    kept = torch.cat([each.flatten() for each in momenta]) * (1 - config.muon_momentum)
    torch.testing.assert_close(states["momentum"], kept, rtol=1e-12, atol=1e-13)


def test_states_go_out_and_come_back() -> None:
    """Saved after three steps and restored into a new optimizer,
    the fourth step gives the same bits.
    """

    def fresh(weights: Tensor) -> tuple[FlatOptimizer, Tensor]:
        gradient = torch.zeros_like(weights)
        info = ParameterInfo("w", (4, 3), matrix=(1, 1))
        return FlatOptimizer([flat_shard(weights, gradient, [info])], CONFIG), gradient

    weights = drawn(12, seed=0)
    first, gradient = fresh(weights)
    assert not read_states(first, 0)[0]["momentum"].any()
    for step in range(3):
        gradient.copy_(drawn(12, seed=step))
        first.step(1e-2, 1.0)
    states, steps = read_states(first, 0)
    copied = weights.clone()
    second, other = fresh(copied)
    restore_states(second, 0, {name: state.clone() for name, state in states.items()}, steps)
    for optimizer, found in ((first, gradient), (second, other)):
        found.copy_(drawn(12, seed=3))
        optimizer.step(1e-2, 1.0)
    assert torch.equal(weights, copied)


def test_factors_of_a_parameter_group_are_of_matrices_too() -> None:
    weights, gradient = drawn(12, seed=0), drawn(12, seed=1)
    moved = {}
    for factor in (1.0, 0.5):
        copy = weights.clone()
        shard = flat_shard(copy, gradient.clone(), [ParameterInfo("w", (4, 3), matrix=())])
        shard = shard._replace(
            settings=shard.settings._replace(rate_factor=factor, weight_decay=0.0)
        )
        FlatOptimizer([shard], CONFIG).step(1e-2, 1.0)
        moved[factor] = copy - weights
    torch.testing.assert_close(moved[0.5], moved[1.0] / 2, rtol=1e-12, atol=0.0)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "qkv as one matrix": lambda infos: [info._replace(matrix=()) for info in infos],
    "parts in another order": lambda infos: [info._replace(matrix=(2, 2, 4)) for info in infos],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_split_shows_that_the_comparison_can_fail(fault: str) -> None:
    infos = [ParameterInfo("qkv", (16, 3), matrix=(4, 2, 2))]
    moved = []
    for each in (infos, FAULTS[fault](infos)):
        weights = drawn(48, seed=0)
        FlatOptimizer([flat_shard(weights, drawn(48, seed=1), each)], CONFIG).step(1e-2, 1.0)
        moved.append(weights)
    assert (moved[0] - moved[1]).abs().max() > 1e-3
