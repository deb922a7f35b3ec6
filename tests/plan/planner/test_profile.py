"""What a layer does and holds on the meta device is what it does and holds for real,
or what its formula says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.fp8.linear import Fp8Linear
from meshwright.pipeline.values import cross_entropy
from meshwright.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from meshwright_plan.planner.hardware import read_hardware
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import GroupMessages, LayerProfile
from meshwright_plan.planner.operations import Work, WorkKind, WorkRecorder
from meshwright_plan.planner.profile import LayerProfiler, counting_group
from meshwright_plan.planner.rates import PerformanceModel
from tests.plan.planner.small import cache
from tests.support.processes import Live

B, S, D = 2, 16, 32
WIDE = 4
"""Bytes of an element of float32."""


class Attend(nn.Module):
    """(B, heads, S, d) to itself; what comes out is then laid out anew, as (B, S, heads x d)."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        self.strided = strided

    def forward(self, x: Tensor) -> Tensor:
        q = x.transpose(1, 2).contiguous().transpose(1, 2) if self.strided else x * 2.0
        mixed = nn.functional.scaled_dot_product_attention(q, x * 2.0, x * 2.0, is_causal=True)
        return mixed.transpose(1, 2).reshape(B, S, -1)


def profile(layer: nn.Module, x: Tensor, **other: Any) -> LayerProfile:
    """Of one layer without a loss."""
    profiler = LayerProfiler(
        counting_group(1), cross_entropy, other.pop("execution", ExecutionOptions())
    )
    inputs = x.to("meta").requires_grad_(x.is_floating_point())
    return profiler.profile([("layer", layer.to("meta"))], inputs, None, **other)[0]


def kept_for_real(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """(bytes that autograd holds after forward, besides what came in and goes out;
    bytes of what goes out).
    """
    x.requires_grad_(x.is_floating_point())
    with Live() as live:
        output = layer(x)
        own = {x.untyped_storage()._cdata} | {
            p.untyped_storage()._cdata for p in layer.parameters()
        }
        live.storages = {
            key: reference for key, reference in live.storages.items() if key not in own
        }
        out_bytes = output.untyped_storage().nbytes()
        return live.live_bytes() - out_bytes, out_bytes


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(D, D),
    "tanh": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()),
    "gelu mlp": lambda: nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)
    ),
    "attention": lambda: Attend(),
    "attention, heads inside": lambda: Attend(strided=True),
    "relu in place": lambda: nn.Sequential(
        nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, 2 * D)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_kept_is_what_autograd_keeps(name: str) -> None:
    shape = (B, 4, S, D) if "attention" in name else (B, S, D)
    kept, out_bytes = kept_for_real(LAYERS[name](), torch.randn(shape))
    found = profile(LAYERS[name](), torch.randn(shape))
    (out,) = found.outputs
    assert found.kept_bytes - (out.bytes if out.kept else 0) == kept
    assert out.bytes == out_bytes


def test_a_linear_is_one_product_forward_and_two_backward() -> None:
    found = profile(nn.Linear(D, 3 * D, bias=False), torch.randn(B, S, D))
    flops = 2.0 * B * S * D * 3 * D
    assert [work.flops * work.times for work in found.forward if work.kind is WorkKind.PRODUCT] == [
        flops
    ]
    assert sum(work.flops * work.times for work in found.backward) == 2 * flops
    (product,) = [work for work in found.forward if work.kind is WorkKind.PRODUCT]
    assert product.shape == (1, B * S, 3 * D, D)
    assert product.bytes == WIDE * (B * S * D + 3 * D * D + B * S * 3 * D)
    assert found.num_parameters == 3 * D * D
    assert found.inputs_kept == (True,)


def test_a_linear_in_float8_multiplies_at_the_float8_rate_where_the_device_has_one() -> None:
    """Forward and the input gradient; the weight gradient is one of bfloat16.
    Conversions are a CPU's emulation.
    """
    layer = nn.Linear(4096, 8192, bias=False, dtype=torch.bfloat16)
    x = torch.randn(1, 8192, 4096, dtype=torch.bfloat16)
    plain = profile(layer, x)
    layer.__class__ = Fp8Linear
    found = profile(layer, x)
    flops = 2.0 * 8192 * 4096 * 8192
    assert [work.flops for work in found.forward if work.kind is WorkKind.FLOAT8] == [flops]
    products = [(work.kind, work.flops) for work in found.backward if work.flops]
    assert products == [(WorkKind.FLOAT8, flops), (WorkKind.PRODUCT, flops)]
    assert sum(work.times for work in found.forward if work.kind is WorkKind.EMULATION) == 2
    memory = Counter(
        {work.bytes: work.times for work in found.forward if work.kind is WorkKind.MEMORY}
    )
    # of x and of the weight: each is read once and written in bytes, with its exponents
    rows, width = 8192, 4096
    assert memory[3 * rows * width + rows] == 2
    h100, a100 = (PerformanceModel.of(read_hardware(name)) for name in ("h100", "a100"))

    def product_s(of: LayerProfile, performance: PerformanceModel) -> float:
        return sum(
            performance.work_s(work, "bfloat16", backward=False)
            for work in of.forward
            if work.kind in (WorkKind.PRODUCT, WorkKind.FLOAT8)
        )

    assert product_s(found, h100) / product_s(plain, h100) == pytest.approx(
        989 / 1979 / 0.87, rel=0.02
    )
    assert product_s(found, a100) == product_s(plain, a100)
    emulation = next(work for work in found.forward if work.kind is WorkKind.EMULATION)
    assert (
        h100.work_s(emulation, "bfloat16", backward=False)
        == 0
        < a100.work_s(emulation, "bfloat16", backward=False)
    )


def test_halves_of_a_backward_are_the_whole() -> None:
    layers = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    whole = profile(layers, torch.randn(B, S, D))
    halves = profile(layers, torch.randn(B, S, D), splits_backward=True)
    flops = [
        sum(w.flops * w.times for w in each)
        for each in (whole.backward, halves.backward, halves.weight_half)
    ]
    assert flops[0] == flops[1] + flops[2]
    assert flops[1] == flops[2] == 2 * 2.0 * B * S * D * D
    assert (whole.weight_half, whole.deferred_bytes) == ((), 0)
    assert halves.deferred_bytes > 0


def llama(tp: int = 1, sequence: bool = False, **how: Any) -> dict[str, LayerProfile]:
    """The layers of a small Llama on a rank."""
    bench = cache()
    layers, group, *_ = bench.split(tp, sequence)
    shapes = bench.example(B)
    execution = how.pop("execution", ExecutionOptions())
    found = LayerProfiler(group, bench.loss(layers, group), execution).profile(
        [
            (n, layers.get_submodule(first))
            for n, first in zip(bench.names, bench.representatives, strict=True)
        ],
        shapes.inputs,
        shapes.labels,
        **how,
    )
    return {each.name: each for each in found}


def calls(said: tuple[GroupMessages, ...]) -> Counter[str]:
    """By operation."""
    return Counter({each.operation: each.calls for each in said})


def test_a_block_sums_twice_forward_and_twice_backward() -> None:
    block = llama(tp=2)["block0"]
    assert calls(block.forward_messages) == calls(block.backward_messages) == {"all_reduce": 2}
    # bfloat16; a ring of two ranks puts 2 (n - 1) / n = 1 of it on the wire
    message = B * S * D * 2
    assert (
        sum(said.wire_bytes for said in (*block.forward_messages, *block.backward_messages))
        == 4 * message
    )


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    block = llama(tp=2, sequence=True)["block0"]
    assert calls(block.forward_messages) == {"all_gather": 2, "reduce_scatter": 2}
    backward = calls(block.backward_messages)
    assert backward["reduce_scatter"] == 2
    # four: what was gathered is not kept but gathered again
    assert backward["all_gather"] in (2, 4)
    assert "all_reduce" not in calls(block.forward_messages)
    assert block.outputs[0].bytes == B * S * D * 2 // 2
    assert llama()["block0"].forward_messages == ()


def test_a_rank_of_two_computes_half_of_the_products() -> None:
    whole, half = llama()["block0"], llama(tp=2)["block0"]

    def flops(works: tuple[Work, ...]) -> float:
        return sum(work.flops * work.times for work in works)

    assert flops(half.forward) == flops(whole.forward) / 2
    assert flops(half.backward) == flops(whole.backward) / 2
    assert flops(whole.backward) == pytest.approx(
        2 * flops(whole.forward), rel=0.1
    )  # fused attention makes scores again


def test_recomputed_whole_a_layer_keeps_only_what_came_in() -> None:
    kept, again = llama()["block0"], llama(recompute=["block0"])["block0"]
    assert (again.kept_bytes, again.inputs_kept) == (0, (True,))
    assert kept.kept_bytes > 0
    last_product = 2.0 * B * S * D * 64  # nobody needs what the block hands on a second time
    assert sum(w.flops * w.times for w in again.backward) == (
        sum(w.flops * w.times for w in (*kept.forward, *kept.backward)) - last_product
    )
    assert again.backward_peak >= kept.kept_bytes
    assert llama(recompute=["block0"])["block1"] == llama()["block1"]


def test_attention_that_writes_its_scores_costs_more() -> None:
    fused, written = (
        llama()["block0"],
        llama(execution=ExecutionOptions(fused_attention=False))["block0"],
    )

    def moved(found: LayerProfile) -> float:
        return sum(work.bytes * work.times for work in (*found.forward, *found.backward))

    assert moved(written) > moved(fused)
    assert {work.kind for work in fused.forward} == {
        WorkKind.PRODUCT,
        WorkKind.ATTENTION,
        WorkKind.MEMORY,
    }
    assert WorkKind.ATTENTION not in {work.kind for work in written.forward}


class Bare(nn.Module):
    """(B, heads, S, d) to itself."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_fused_attention_keeps_a_number_for_a_row_and_the_other_all_scores() -> None:
    heads, x = 4, torch.randn(B, 4, S, D)
    fused, written = (
        profile(Bare(), x, execution=ExecutionOptions(fused_attention=f)) for f in (True, False)
    )
    rows = B * heads * S * WIDE
    assert fused.kept_bytes - fused.outputs[0].bytes * fused.outputs[0].kept == rows
    assert written.kept_bytes - written.outputs[0].bytes * written.outputs[0].kept == rows * S
    flops = [
        sum(w.flops * w.times for w in works)
        for works in (written.forward, fused.forward, fused.backward)
    ]
    assert flops == [
        4.0 * B * heads * S * S * D,
        4.0 * B * heads * S * S * D,
        10.0 * B * heads * S * S * D,
    ]


def test_operations_that_are_fused_move_fewer_bytes() -> None:
    apart, fused = llama()["block0"], llama(execution=ExecutionOptions(fused=True))["block0"]
    for a, b in ((apart.forward, fused.forward), (apart.backward, fused.backward)):
        assert sum(w.bytes * w.times for w in b) < sum(w.bytes * w.times for w in a)
        assert sum(w.times for w in b) < sum(w.times for w in a)
        assert sum(w.flops * w.times for w in b) == sum(w.flops * w.times for w in a)
    assert fused.kept_bytes == apart.kept_bytes


def test_layers_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright_plan.planner.profile as module

    run: list[str] = []
    original = module.LayerRun

    def counted(name: str, *rest: Any) -> Any:
        run.append(name)
        return original(name, *rest)

    monkeypatch.setattr(module, "LayerRun", counted)
    bench = cache(num_layers=6)
    found = bench.profiles(bench.config, splits_backward=False)
    assert [each.name for each in found] == bench.names
    assert len(found) == 9
    assert run == ["embedding", "block0", "norm", "head"]
    assert found[1].forward is found[6].forward


@pytest.mark.parametrize("rows", [64, 63])
def test_one_pass_of_a_loop_stands_for_all(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The loss goes over its logits in pieces; on paper one piece is done and counted as often."""
    import meshwright.tensor_parallel.cross_entropy as module

    def one_after_the_other(logits: Tensor, _: object) -> list[slice]:
        return [slice(start, min(start + 8, len(logits))) for start in range(0, len(logits), 8)]

    group = counting_group(2)
    monkeypatch.setattr(module, "rows_per_chunk", lambda _: 8)
    found = []
    for chunks in (module._chunks, one_after_the_other):
        monkeypatch.setattr(module, "_chunks", chunks)
        logits = torch.empty(1, rows, 48, device="meta", requires_grad=True)
        labels = torch.empty(1, rows, dtype=torch.int64, device="meta")
        with WorkRecorder(group) as recorder:
            vocab_parallel_cross_entropy(logits, labels, group, 96).sum().backward()
        found.append(
            (
                sum(op.bytes * op.times for op in recorder.ops),
                sum(op.times for op in recorder.ops),
                len(recorder.ops),
            )
        )
    assert found[0][:2] == pytest.approx(found[1][:2], rel=0.03)
    assert found[0][2] < found[1][2]
