"""Stages chained by hand in one process, without any group:
forward and backward equal to the plain model's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.pipeline.plan import describe_boundaries
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.values import (
    IGNORED_LABEL,
    StageSpec,
    TensorSpec,
    ValueSpec,
    describe_value,
)
from tests.support import builders
from tests.support.errors import raises

B, S, V = 2, 6, 17
TOKENS = torch.zeros((B, S), dtype=torch.int64, device="meta")


def token_loss(output: Any, labels: Tensor) -> Tensor:
    """(B, S, V), (B, S) -> (B, S), zero where ignored."""
    flat = F.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return flat.view(labels.shape)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one micro-batch, a few labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, S), generator=generator)
    labels = torch.randint(V, (B, S), generator=generator)
    labels[0, : seed + 1] = IGNORED_LABEL
    return tokens, labels


def cut(
    model: nn.Sequential,
    sizes: list[int],
    label_scale: float = 1.0,
    splits: bool = False,
    **changes: Any,
) -> list[Stage]:
    """Return the model as a chain of stages of so many layers each;
    their parameters are the model's own.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    specs, _ = describe_boundaries(model, ranges, TOKENS)
    named = list(model.named_children())
    stages = []
    for index, layers in enumerate(ranges):
        piece = nn.Sequential()
        for layer in layers:
            piece.add_module(*named[layer])
        stages.append(
            Stage(
                StageSpec(
                    index,
                    specs[index - 1] if index else None,
                    specs[index] if index < len(sizes) - 1 else None,
                    label_scale=label_scale,
                    splits_backward=splits,
                ),
                piece,
                token_loss,
                **changes,
            )
        )
    return stages


def forward(
    stages: list[Stage], microbatch: int, tokens: Tensor, labels: Tensor, train: bool = True
) -> LossPart:
    """Through all stages, as the wire would carry it:
    tensors that share nothing with what was sent.
    """
    values: Any = tokens
    for stage in stages:
        found = stage.forward(
            microbatch, values, labels if stage.output_spec is None else None, train=train
        )
        if isinstance(found, LossPart):
            return found
        assert not any(leaf.requires_grad for leaf in found)
        assert all(leaf.is_contiguous() for leaf in found)
        values = [leaf.clone() for leaf in found]
    raise AssertionError("the last stage gave no loss")


def backward(stages: list[Stage], microbatch: int, halves: bool = False) -> None:
    """Back through all stages, whole, or the input gradients alone."""
    gradients: list[Tensor] | None = None
    for stage in reversed(stages):
        found = (stage.backward_input if halves else stage.backward)(microbatch, gradients)
        assert all(gradient.is_contiguous() for gradient in found)
        gradients = [gradient.clone() for gradient in found]
    assert gradients == []


def linear_weights(stage: Stage) -> list[Tensor]:
    """Return those of linears and embeddings, whose gradients wait for W."""
    modules = [m for m in stage.layers.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    return [module.weight for module in modules]


def models() -> list[Any]:
    found = []
    for builder, num_layers in ((builders.plain, 6), (builders.carrying, 5)):
        cuts = [
            [num_layers],
            [1, num_layers - 1],
            [num_layers - 1, 1],
            [2, 1, num_layers - 3],
            [1] * num_layers,
        ]
        found += [pytest.param(builder, sizes, id=f"{builder.__name__}-{sizes}") for sizes in cuts]
    return found


@pytest.mark.parametrize(("builder", "sizes"), models())
@pytest.mark.parametrize("halves", [False, True])
def test_chained_stages_equal_the_plain_model(builder: Any, sizes: list[int], halves: bool) -> None:
    """Three micro-batches in flight, backward in another order; loss bit-equal,
    gradients to rounding of their sum.

    In halves: all input gradients first, then the weights' in yet another order.
    """
    torch.manual_seed(0)
    model = builder().double()
    oracle = copy.deepcopy(model)
    stages = cut(model, sizes, label_scale=0.125, splits=halves)
    batches = [batch(seed) for seed in range(3)]
    parts = [forward(stages, m, *batches[m]) for m in range(3)]
    assert all(stage.num_in_flight == 3 for stage in stages)
    for m in (2, 0, 1):
        backward(stages, m, halves)
    if halves:
        assert all(stage.num_in_flight == 3 for stage in stages)
        assert all(
            parameter.grad is None for stage in stages for parameter in linear_weights(stage)
        )
        for m in (1, 2, 0):
            for stage in stages:
                stage.backward_weight(m)
    assert all(stage.num_in_flight == 0 for stage in stages)
    for part, (tokens, labels) in zip(parts, batches, strict=True):
        loss = F.cross_entropy(oracle(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * 0.125).backward()
        torch.testing.assert_close(part.loss_sum, loss.detach(), rtol=1e-14, atol=0)
        assert int(part.num_tokens) == int((labels != IGNORED_LABEL).sum())
    for (name, found), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14, msg=name)


def test_what_goes_over_the_borders_is_known_beforehand() -> None:
    """Shapes, kinds and which of them need a gradient, without a real tensor."""
    model = builders.carrying()
    specs, last = describe_boundaries(model, [range(0, 2), range(2, 4), range(4, 5)], TOKENS)
    dict_leaves = {
        (leaf.shape, leaf.dtype, leaf.needs_gradient) for leaf in specs[0].leaves
    }  # pytree orders a dict by insertion: told as a set
    assert dict_leaves == {
        ((B, S, 8), torch.float32, True),
        ((B, S), torch.int64, False),
        ((B, S, 1), torch.float64, False),
    }
    assert len(specs[0].leaves) == 4
    assert specs[1].leaves == (
        TensorSpec((B, S, 8), torch.float32, True),
        TensorSpec((B, S), torch.int64, False),
        TensorSpec((B, S, 8), torch.float32, True),
    )
    assert last.leaves == (TensorSpec((B, S, V), torch.float32, True),)
    assert [
        tuple(leaf.shape) for leaf in (spec.empty(torch.device("cpu")) for spec in specs[1].leaves)
    ] == [(B, S, 8), (B, S), (B, S, 8)]
    assert len(specs[1].with_gradient) == 2
    assert next(model.parameters()).device.type == "cpu", "the model itself was moved"


def test_a_value_that_skips_stages_brings_its_gradient_back() -> None:
    """``skipped`` is made in the first stage, passed through the second, used in the third."""
    torch.manual_seed(1)
    model = builders.carrying(depth=3).double()
    stages = cut(model, [2, 2, 2])
    forward(stages, 0, *batch(0))
    gradients = stages[2].backward(0, None)
    assert len(gradients) == 2  # of x and of skipped; ids and mask have none
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients)
    back = stages[1].backward(0, gradients)
    skipped = [gradient for gradient in back if torch.equal(gradient, gradients[1])]
    assert len(skipped) == 1, "the second stage passes the skipping value's gradient on unchanged"


class HalfUsed(nn.Module):
    """Takes two tensors and uses one."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0]


class Doubled(nn.Module):
    """Hands on two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


def test_a_value_that_nobody_uses_has_a_gradient_of_zeros() -> None:
    """The sender waits for a gradient of each: zeros have to be sent."""
    model = nn.Sequential(nn.Embedding(V, 4), Doubled(), HalfUsed(), nn.Linear(4, V)).double()
    stages = cut(model, [2, 2])
    forward(stages, 0, *batch(0))
    gradients = stages[1].backward(0, None)
    assert float(gradients[0].abs().sum()) > 0 and float(gradients[1].abs().sum()) == 0
    stages[0].backward(0, gradients)


def test_validation_keeps_nothing() -> None:
    stages = cut(builders.plain().double(), [2, 4])
    part = forward(stages, 0, *batch(0), train=False)
    assert not part.loss_sum.requires_grad
    assert all(stage.num_in_flight == 0 for stage in stages)


def test_one_microbatch_twice_is_a_mistake_of_ours() -> None:
    stages = cut(builders.plain().double(), [2, 4])
    forward(stages, 0, *batch(0))
    with pytest.raises(AssertionError, match="micro-batch 0 is already in flight on stage 0"):
        forward(stages, 0, *batch(0))


def test_each_layer_is_announced_before_it_runs() -> None:
    """Whoever brings the weights is asked just in time, by the layers' names in the whole model."""
    told: list[str] = []
    model = builders.carrying()
    stages = cut(model, [2, 3], before_layer=told.append)
    forward(stages, 0, *batch(0))
    assert told == ["begin", "middle0", "middle1", "pack", "end"]


def test_a_layer_that_does_not_take_what_it_is_handed() -> None:
    with raises("MW-PIPELINE-031", "layer middle (Linear)", "layer embedding", "(2, 6, 8)"):
        describe_boundaries(builders.wrong_width(), [range(0, 1), range(1, 3)], TOKENS)


def test_a_stage_that_begins_by_overwriting_its_input() -> None:
    """Autograd has no gradient for it: said while the stages are cut, not in the first step.
    Elsewhere it may.
    """
    model = nn.Sequential(
        nn.Embedding(V, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, V)
    )
    with raises("MW-PIPELINE-031", "layer 2 (ReLU)"):
        describe_boundaries(model, [range(0, 2), range(2, 4)], TOKENS)
    describe_boundaries(model, [range(0, 3), range(3, 4)], TOKENS)


class Counting(nn.Module):
    """Does something with a pair of tensors, and notes that it was asked to. ``beat``:
    a buffer that it may change.
    """

    calls: list[str] = []

    def __init__(self, what: str, width: int = 4) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(width, width)
        self.register_buffer("beat", torch.zeros(()))

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls.append(self.what)
        x, skipping = value
        if self.what == "counts":
            self.beat += 1
        if self.what == "overwrites":
            skipping *= 2
        return self.linear(x), self.linear(skipping) if self.what == "both" else skipping


def described(
    *layers: nn.Module, width: int = 4, cut_after: int = 1
) -> tuple[list[ValueSpec], ValueSpec]:
    Counting.calls.clear()
    ranges = [range(cut_after), range(cut_after, len(layers))]
    pair = (torch.zeros(2, width, device="meta"), torch.zeros(2, width, device="meta"))
    return describe_boundaries(nn.Sequential(*layers), ranges, pair)


def test_layers_that_are_alike_are_run_once() -> None:
    """And others, or with other values, are not;
    what they hand on is the same as if they had been run.
    """
    first = described(
        Counting("x", 3), Counting("x", 3), Counting("both", 3), Counting("both", 3), width=3
    )
    assert Counting.calls == ["x", "x", "both", "both"], "the second x is handed a gradient"
    again = described(
        Counting("x", 3), Counting("x", 3), Counting("both", 3), Counting("both", 3), width=3
    )
    assert Counting.calls == [] and again == first
    assert [leaf.needs_gradient for leaf in first[0][0].leaves] == [True, False]
    assert [leaf.needs_gradient for leaf in first[1].leaves] == [True, True]
    described(Counting("x", 5), Counting("x", 5).eval(), Counting("x", 5), width=5)
    assert Counting.calls == ["x", "x", "x"]
    described(*(Counting("x", 6) for _ in range(5)), width=6, cut_after=4)
    assert Counting.calls == ["x", "x", "x"], (
        "a value that comes from another stage is a leaf again"
    )
    described(*(Counting("x", 6) for _ in range(5)), width=6, cut_after=4)
    assert Counting.calls == []


def test_what_changes_something_is_run_each_time() -> None:
    """A buffer, what it was handed, or what a hook may."""
    for _ in range(2):
        described(Counting("counts"), Counting("counts"))
        assert Counting.calls == ["counts", "counts"]
    hooked = Counting("x", 7)
    hooked.register_forward_hook(lambda module, given, output: output)
    for _ in range(2):
        described(hooked, width=7)
        assert Counting.calls == ["x"]


def test_what_is_handed_on_as_it_came_is_still_that() -> None:
    """Through a layer that is not run, too: a later layer must not write into it."""
    for _ in range(2):
        with raises("MW-PIPELINE-032", "layer 2 (Counting)"):
            described(Counting("x"), Counting("x"), Counting("overwrites"))


def test_a_value_that_is_no_tensor() -> None:
    with raises("MW-PIPELINE-030", "layer 1", "int"):
        describe_boundaries(builders.hands_on_a_number(), [range(0, 2), range(2, 4)], TOKENS)


def test_a_value_s_spec_tells_its_tree() -> None:
    spec = describe_value(
        {"a": torch.zeros(2, requires_grad=True), "b": (torch.zeros(3, dtype=torch.int64),)}, "x"
    )
    assert isinstance(spec, ValueSpec)
    assert spec.leaves == (
        TensorSpec((2,), torch.float32, True),
        TensorSpec((3,), torch.int64, False),
    )


class WritesAside(nn.Module):
    """Keeps a table and writes into it past autograd and its version counter."""

    def __init__(self, table: float, written: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([1.0, table]))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("table").data[1] = self.written
        return 2.0 * x


NAN = float("nan")


@pytest.mark.parametrize(
    ("table", "written", "is_refused"),
    [(2.0, 3.0, True), (2.0, NAN, True), (NAN, 2.0, True), (2.0, 2.0, False), (NAN, NAN, False)],
)
def test_a_buffer_that_is_changed_where_none_was_planned(
    table: float, written: float, is_refused: bool
) -> None:
    """NaN that was there before is no change; NaN instead of a number is,
    and a number instead of NaN.
    """
    model = nn.Sequential(
        builders.plain(V, width=8)[0], WritesAside(table, written), nn.Linear(8, V)
    )
    stages = cut(model, [3])
    if is_refused:
        with raises("MW-PIPELINE-019", "layer 1", "table"):
            forward(stages, 0, *batch(0))
    else:
        forward(stages, 0, *batch(0))


class OffsetOnly:
    """A CUDA device's generator, as far as it can be read without a sync."""

    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset


def test_a_draw_from_a_cuda_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA alone, such as dropout in a fused kernel: the draw on meta, before the run,
    does not see it.
    """
    generator = OffsetOnly()
    monkeypatch.setattr(torch.cuda, "default_generators", (OffsetOnly(), generator))
    (stage,) = cut(builders.plain(V), [6])
    first = stage.layers[1].forward

    def drawing(x: Tensor) -> Tensor:
        generator.offset += 4
        return first(x)

    monkeypatch.setattr(stage.layers[1], "forward", drawing)
    with raises("MW-PIPELINE-020", "layer 1"):
        stage.forward(0, *batch(0), train=True)
