"""Activation offload: equal bits in every mode and over every axis."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.build import build
from meshwright.config.combinations.layout import Layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.offload_copies import HostCopies, StoredActivation
from meshwright.schedule.build import build as build_schedule
from meshwright.step import take_step
from meshwright.verify import parse_layout
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import (
    LATER,
    References,
    assert_agrees,
    config_of,
    model_config,
    size_for,
)
from tests.support.marks import long_row

LENGTH, WIDTH = 16, 32
ROWS = 64


def trained(model: str, layout: Layout, sections: dict[str, Any]) -> Tensor:
    """Return the weights after two steps of 4 micro-batches."""
    options: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": WIDTH,
        "num_layers": 3,
        "num_heads": 4,
        "dropout": 0.1,
    }
    options |= (
        {"num_kv_heads": 2, "ffn_size": 48} if model == "llama" else {"max_sequence_length": LENGTH}
    )
    config = config_of(f"meshwright_models.{model}:build", options, LENGTH)
    config = layout_config(config, layout._replace(micro_batch_size=2), 8, "float32").replace(
        **sections
    )
    parts = build(
        config,
        open_mesh(Grid(), "cpu"),
        (open_verify_source(config, random_tokens=True), {}),
    )
    for _ in range(2):
        take_step(parts)
    assert not parts.executor.offload or not parts.executor.offload._groups
    return torch.cat(
        [bucket.master.flatten() for each in parts.replicas.values() for bucket in each.buckets]
    )


FP8 = {"train": {"linear": "fp8", "fp8_keep": []}}
ADAPTERS = {"adapter": {"rank": 2, "targets": ["block*"]}}


@pytest.mark.parametrize(
    ("model", "recompute", "schedule", "sections"),
    [
        ("gpt2", "none", "1f1b", {}),
        long_row("llama", "pointwise", "zb_h1", {}),
        long_row("gpt2", "selective", "gpipe", {}),
        long_row("llama", "full", "interleaved_1f1b", {}),
        long_row("llama", "none", "zb_h1", FP8),
        long_row("llama", "pointwise", "1f1b", ADAPTERS),
    ],
)
def test_numbers_are_equal(
    model: str,
    recompute: str,
    schedule: str,
    sections: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, posted = [0, 0], (HostCopies.post_out, HostCopies.post_in)
    for way, name in enumerate(("post_out", "post_in")):

        def post(copies: HostCopies, stored: Any, way: int = way) -> None:
            copied[way] += sum((each.device is None) == bool(way) for each in stored)
            posted[way](copies, stored)

        monkeypatch.setattr(HostCopies, name, post)
    layout = Layout(
        recompute=recompute, schedule=schedule, interleave=2 if "interleaved" in schedule else 0
    )
    plain = trained(model, layout, sections)
    assert copied == [0, 0]
    away = trained(model, layout, sections | {"pipeline": {"offload_activations": ["*"]}})
    assert min(copied) > 0
    assert torch.equal(plain, away)


def squares(x: Tensor) -> Tensor:
    h = x * 1
    return (h * h).sum()


def offloaded(offload: ActivationOffload, function: Any, *args: Any) -> Any:
    offload.begin_forward(0, 0, [])
    with offload.around_layer(is_last=False):
        return function(*args)


def test_a_storage_is_copied_once_for_all_views() -> None:
    made: list[Tensor] = []
    offload = ActivationOffload(torch.device("cpu"))
    offload.copies.on_allocate = made.append
    x, linear = torch.randn(ROWS, 3 * WIDTH).requires_grad_(), nn.Linear(WIDTH, WIDTH)

    def layer(x: Tensor) -> Tensor:
        a, b, c = (x * 1).split(WIDTH, dim=1)
        return (linear(a) * torch.sigmoid(b) * c.t().contiguous().t()).sum() + (x * 2).view(
            torch.complex64
        ).abs().sum()

    expected = torch.autograd.grad(layer(x), [x, *linear.parameters()])
    out = offloaded(offload, layer, x)
    offload.begin_backward(0, 0)
    assert all(
        torch.equal(*pair)
        for pair in zip(torch.autograd.grad(out, [x, *linear.parameters()]), expected, strict=True)
    )
    offload.end_backward()
    sizes = [memory.numel() for memory in made]
    one = 4 * ROWS * WIDTH
    assert sizes[0] < 3 * one + 4 * one + 7 * one + 2 * 3 * one, (
        sizes
    )  # the split tensor is there once, not three times


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_write_into_what_is_saved_is_found(rows: int) -> None:
    """As without offload: before the copy is complete, and into what is too small to be copied."""
    offload = ActivationOffload(torch.device("cpu"))
    held: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        held.append(x * 1)
        return F.silu(held[0]).sum()

    out = offloaded(offload, layer, torch.randn(rows, WIDTH).requires_grad_())
    with torch.no_grad():
        held[0].mul_(2)
    offload.begin_backward(0, 0)
    offload.end_backward()
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*pipeline.offload_activations"
    ):
        out.backward()


def test_a_graph_that_is_dropped_releases_its_memory() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    out = offloaded(offload, squares, torch.randn(ROWS, WIDTH).requires_grad_())
    members = offload._groups[0, 0].members
    assert members and all(each.host is not None for each in members)
    del members, out
    assert not offload._groups[0, 0].members


class Idle:
    """Stream on which nothing has to be waited for."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> str:
        return "event"


@pytest.mark.parametrize(("least", "most"), [long_row(1848, 2248), (1, 1000), long_row(700, 1400)])
def test_pinned_memory_is_bounded_where_sizes_vary(
    least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts over ep receive other numbers of rows in each micro-batch;
    torch pins a power of two bytes.
    """
    empty, draw, made, peak = torch.empty, random.Random(0), list[int](), 0
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Idle())
    copies = HostCopies(torch.device("cpu"))
    copies._out = copies._in = Idle()  # as on CUDA
    copies.on_allocate = lambda memory: made.append(memory.numel())
    for _ in range(100):
        layers = [
            [StoredActivation(torch.rand(draw.randint(least, most) * 64)) for _ in range(3)]
            for _ in range(4)
        ]
        before = [[each.device for each in layer] for layer in layers]
        for layer in layers:
            copies.post_out(layer)
            copies.finish_out(layer)
        blocks = {
            id(each.block): each.block.memory.numel()
            for layer in layers
            for each in layer
            if each.block
        }
        assert len(blocks) == len(layers)
        peak = max(peak, sum(blocks.values()))
        for layer, saved in zip(layers, before, strict=True):
            copies.post_in(layer)
            copies.finish_in(layer)
            for each, tensor in zip(layer, saved, strict=True):
                assert (
                    tensor is not None
                    and each.device is not None
                    and torch.equal(each.device, tensor)
                )
        del layers, layer, each
    assert sum(made) < 2 * peak, (len(made), peak)
    assert all(size.bit_count() == 1 for size in made), "what is counted is what torch takes"


def test_the_next_backward_returns_one_computation_ahead() -> None:
    """1f1b: F of the third micro-batch runs between B of the first and of the second."""
    offload = ActivationOffload(torch.device("cpu"))
    offload.set_schedule(build_schedule("1f1b", 2, 4, 1), 0)
    following = offload._following
    assert following == {
        (False, 0, 1): (0, 0), (False, 0, 2): (0, 1), (False, 0, 3): (0, 2), (True, 0, 2): (0, 3)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "pp2,tp2,sequence,zb_h1,pointwise,mbs2"),
        long_row("llama", "dp2,tp2,sequence,zero3"),
        LATER("t5", "dp2,pp2,zb_v,zero2"),
        LATER("gpt2", "dp2,pp4,interleaved_1f1b,full"),
        LATER("llama", "dp2,pp2,zero3,offload"),
    ],
)
def test_layouts_agree(pool: RankPool, references: References, model: str, layout: str) -> None:
    chosen = parse_layout(layout)
    size = size_for(chosen)
    config = model_config(model, size).replace(pipeline={"offload_activations": ["*"]})
    assert_agrees(config, chosen, pool, references, global_batch=size.global_batch, steps=2)
