"""What a layer costs, against counts by hand, torch's own FLOP counter,
and what must not matter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model.build import build_model
from meshwright.model.meter import Meter, OperationCost, ReferenceDevice, causal_share, reference
from meshwright.pipeline.plan import LayerCost, count_layers, layer_weights, recompute_parts
from meshwright_models import gpt2, llama, t5
from tests.support import builders
from tests.support.errors import raises

BY = ReferenceDevice("a device of round numbers", 1000.0, 10.0, fused=False)
FUSED = BY._replace(fused=True)
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def cost_of(
    layer: nn.Module, inputs: Any, labels: Tensor | None = None, by: ReferenceDevice = BY
) -> LayerCost:
    (cost,) = count_layers(nn.Sequential(layer), inputs, labels, by)
    return cost


class Apply(nn.Module):
    """Some function of a tensor, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ----------------------------------------------------------------------------------------------------------------
# FLOPs


def test_flops_are_those_of_the_matrix_products() -> None:
    layers = build_model(
        "tests.support.builders:plain", {"vocab_size": 17, "width": 8, "depth": 1}, 0
    ).layers
    costs = count_layers(layers, ids(2, 6), ids(2, 6), BY)
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    products = [0.0, 2.0 * 2 * 6 * 8 * 8, 0.0, 2.0 * 2 * 6 * 8 * 17]
    assert [cost.forward.flops for cost in costs] == products
    assert [cost.backward.flops for cost in costs] == [2.0 * flops for flops in products], (
        "inputs and weights"
    )


@pytest.mark.parametrize("build", [gpt2.build, llama.build, t5.build])
def test_flops_are_torch_s_own_count_of_the_real_modules(
    build: Callable[..., nn.Sequential],
) -> None:
    options = SMALL | (
        {"num_kv_heads": 1, "ffn_size": 24} if build is llama.build else {"dropout": 0.0}
    )
    layers = build(**options)
    inputs: Any = (
        {"encoder_ids": ids(2, 6), "decoder_ids": ids(2, 4)} if build is t5.build else ids(2, 6)
    )
    # no formula for CPU's fused kernel
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layers(inputs)
    costs = count_layers(layers, inputs, None, BY)
    assert sum(cost.forward.flops for cost in costs) == counter.get_total_flops() > 0


def test_the_first_linear_needs_no_gradient_of_its_input() -> None:
    cost = cost_of(nn.Linear(8, 4), torch.zeros(3, 8))
    assert cost.forward.flops == cost.backward.flops == 2.0 * 3 * 8 * 4


# ----------------------------------------------------------------------------------------------------------------
# bytes


def test_bytes_of_a_linear() -> None:
    """x (3, 8), W (4, 8), y (3, 4). Backward: dy and x read, dW written,
    dW read and added to the gradient's sum.
    """
    cost = cost_of(nn.Linear(8, 4, bias=False), torch.zeros(3, 8))
    assert cost.forward.bytes == 4 * (3 * 8 + 4 * 8 + 3 * 4)
    assert cost.backward.bytes == 4 * (3 * 4 + 3 * 8 + 4 * 8) + 4 * 3 * (4 * 8)
    assert cost.num_parameters == 32


def test_an_embedding_reads_its_rows_and_makes_a_gradient_of_all() -> None:
    cost = cost_of(nn.Embedding(1000, 8), ids(2, 6))
    rows, whole = 4 * 2 * 6 * 8, 4 * 1000 * 8
    assert cost.forward == OperationCost(0.0, 2 * rows + 8 * 12, (2 * rows + 8 * 12) / 10.0)
    assert cost.backward.bytes == rows + 8 * 12 + whole + 3 * whole


def test_the_loss_is_bytes_of_the_last_layer() -> None:
    """Over V logits of N tokens: log-softmax reads and writes them, and so again backward,
    with the output read too.
    """
    layers = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), head=nn.Linear(8, 1000)))
    without = count_layers(layers, torch.zeros(2, 6, 8), None, BY)
    costs = count_layers(layers, torch.zeros(2, 6, 8), ids(2, 6), BY)
    assert costs[0] == without[0]
    assert costs[1].forward.flops == without[1].forward.flops
    logits = 4 * 12 * 1000
    small = 12 * 100
    assert 2 * logits <= costs[1].forward.bytes - without[1].forward.bytes < 2 * logits + small
    assert 4 * logits <= costs[1].backward.bytes - without[1].backward.bytes < 4 * logits + small


def test_a_loss_of_the_model_s_own_is_counted_instead() -> None:
    def mean_of_all(output: Tensor, labels: Tensor) -> Tensor:
        return output.mean(-1) * labels

    layers, inputs = nn.Sequential(nn.Linear(8, 1000)), torch.zeros(12, 8)
    (own,) = count_layers(layers, inputs, ids(12), BY, loss=mean_of_all)
    (usual,) = count_layers(layers, inputs, ids(12), BY)
    assert own.forward.bytes < usual.forward.bytes


@pytest.mark.parametrize(
    ("function", "elements"),
    [
        (lambda x: x.view(-1).view(4, 16).t().detach(), 0),  # views
        (lambda x: torch.empty_like(x).expand(2, 8, 8), 0),
        (lambda x: torch.zeros_like(x), 64),
        (lambda x: x.new_zeros(5), 5),
        (lambda x: x + 1.0, 2 * 64),
        (lambda x: x + x, 2 * 64),  # one tensor is read once
        (lambda x: x + torch.empty((), device="meta").expand(8, 8), 2 * 64 + 1),
        (lambda x: x.add_(1.0), 2 * 64),
        (lambda x: x.fill_(1.0), 64),
        (lambda x: torch.empty_like(x).copy_(x), 2 * 64),
        (lambda x: x.t().contiguous(), 2 * 64),
        (lambda x: torch.cat((x, x)), 3 * 64),
        (lambda x: x.sum(), 64 + 1),
        (lambda x: x[:, 2:4] * 1.0, 2 * 16),
    ],
)
def test_bytes_of_operations(function: Callable[[Tensor], Tensor], elements: int) -> None:
    meter = Meter(BY)
    x = torch.empty(8, 8, device="meta")
    with meter:
        function(x)
    assert meter.count.bytes == 4 * elements


def test_an_index_reads_what_it_picks_and_a_scatter_touches_what_it_is_given() -> None:
    x, rows = torch.empty(1000, 4, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    for function, expected in (
        (lambda: x[rows], 3 * 8 + 2 * 3 * 4 * 4),
        (lambda: x.index_add_(0, rows, torch.empty(3, 4, device="meta")), 3 * (3 * 8 + 3 * 4 * 4)),
    ):
        with Meter(BY) as meter:
            function()
        assert meter.count.bytes == expected


def test_bfloat16_halves_the_bytes_but_for_gradients_that_are_summed_in_float32() -> None:
    layers, inputs = nn.Sequential(nn.Linear(8, 4, bias=False)), torch.zeros(3, 8)
    (full,) = count_layers(layers, inputs, None, BY, dtype=torch.float32)
    (half,) = count_layers(layers, inputs, None, BY, dtype=torch.bfloat16)
    assert half.forward.bytes == full.forward.bytes / 2
    assert half.backward.bytes == 2 * (3 * 4 + 3 * 8 + 4 * 8) + (2 + 4 + 4) * (4 * 8)


# ------------------------------------------------------------------------------------------------------------
# attention


def attention(length: int, by: ReferenceDevice = FUSED, **options: Any) -> LayerCost:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, **options)

    return cost_of(Apply(attend), torch.zeros(1, 2, length, 4), by=by)


def test_attention_is_one_operation_that_writes_no_scores() -> None:
    cost = attention(64)
    assert cost.forward.flops == 2 * 2.0 * 2 * 64 * 64 * 4
    assert cost.forward.bytes == 4 * 4 * (2 * 64 * 4), (
        "query, key and value read, the output written"
    )
    assert attention(128).forward.bytes == 2 * cost.forward.bytes


def test_causal_attention_computes_half_of_what_it_counts() -> None:
    whole, causal = attention(4096), attention(4096, is_causal=True)
    assert causal.forward.flops == whole.forward.flops
    assert (causal.forward.masked_flops, whole.forward.masked_flops) == (
        causal.forward.flops / 2,
        0.0,
    )
    assert causal_share([causal.forward, whole.forward]) == 0.75
    assert causal.forward.time_s == pytest.approx(whole.forward.time_s / 2)


def test_attention_that_a_cpu_has_no_kernel_for_writes_its_scores() -> None:
    """Dropout of probabilities, and a mask that needs a gradient."""
    dropped = attention(64, BY, dropout_p=0.1), attention(64, FUSED, dropout_p=0.1)
    assert (
        dropped[0].forward.bytes > 10 * dropped[1].forward.bytes == 10 * attention(64).forward.bytes
    )

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, self.bias)

    on_cpu, on_gpu = (cost_of(Biased(), torch.zeros(1, 2, 64, 4), by=by) for by in (BY, FUSED))
    assert on_gpu.forward.flops == on_cpu.forward.flops
    assert on_gpu.forward.bytes < on_cpu.forward.bytes
    assert on_gpu.backward.flops > 0


def test_backward_of_attention_makes_the_scores_again() -> None:
    layers = nn.Sequential(
        nn.Linear(4, 4, bias=False), Apply(lambda x: F.scaled_dot_product_attention(x, x, x))
    )
    cost = count_layers(layers, torch.zeros(1, 2, 8, 4), None, BY)[1]
    assert cost.backward.flops == 2.5 * cost.forward.flops > 0


# -----------------------------------------------------------------------------------------------------------------
# time


def test_an_operation_takes_as_long_as_the_slower_of_the_two() -> None:
    layer, inputs = nn.Linear(8, 4, bias=False), torch.zeros(3, 8)
    flops, num_bytes = 2.0 * 3 * 8 * 4, 4.0 * (3 * 8 + 4 * 8 + 3 * 4)
    assert cost_of(layer, inputs, by=ReferenceDevice("", 1.0, 1e9, True)).forward.time_s == flops
    assert (
        cost_of(layer, inputs, by=ReferenceDevice("", 1e9, 1.0, True)).forward.time_s == num_bytes
    )
    both = cost_of(nn.Sequential(layer, nn.Tanh()), inputs, by=ReferenceDevice("", 1.0, 1.0, True))
    assert both.forward.time_s == max(flops, num_bytes) + 4 * 2 * (3 * 4), (
        "each operation by itself"
    )


def test_masks_of_dropouts_are_counted() -> None:
    """Some twenty passes over int64: they cost a model with dropout more than its attention."""
    plain, dropping = (
        count_layers(
            build_model("meshwright_models.gpt2:build", SMALL | {"dropout": p}, 0).layers,
            ids(2, 6),
            ids(2, 6),
            BY,
        )
        for p in (0.0, 0.1)
    )
    assert dropping[0].forward.bytes > 20 * 8 * (2 * 6 * 16) + plain[0].forward.bytes
    assert dropping[1].forward.flops == plain[1].forward.flops


def test_a_device_is_chosen_from_the_configuration_and_never_from_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        found[available] = [
            reference(device, dtype)
            for device in ("auto", "cpu", "cuda")
            for dtype in ("float32", "bfloat16")
        ]
    assert found[False] == found[True]
    names = [by.name for by in found[True]]
    assert (
        names[0] == names[2] == "a CPU core in float32"
        and names[1] == names[5] == "an H100 in bfloat16"
    )
    assert all(by.flops_per_s > by.bytes_per_s for by in found[True])


# -------------------------------------------------------------------------------------------------
# layers of any model

ran: list[int] = []


class Counted(nn.Module):
    """A linear that writes down that it ran."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._window = window

    def forward(self, x: Tensor) -> Tensor:
        ran.append(self._window)
        return self.linear(x)[..., : self._window].repeat(1, x.shape[-1] // self._window)


def test_layers_that_are_alike_are_run_once() -> None:
    ran.clear()
    layers = nn.Sequential(*(Counted(8, window) for window in (4, 4, 2, 4, 2, 8)))
    costs = count_layers(layers, torch.zeros(3, 8), None, BY)
    assert ran == [4, 4, 2, 8], "the first gets an input that needs no gradient"
    assert [cost.name for cost in costs] == ["0", "1", "2", "3", "4", "5"]
    assert costs[1]._replace(name="") == costs[3]._replace(name="") != costs[2]._replace(name="")


def test_blocks_with_dropouts_of_their_own_names_are_alike() -> None:
    layers = build_model(
        "meshwright_models.gpt2:build", SMALL | {"num_layers": 3, "dropout": 0.1}, 0
    ).layers
    costs = count_layers(layers, ids(2, 6), ids(2, 6), BY)
    assert len({cost._replace(name="") for cost in costs[1:4]}) == 1


def test_the_model_is_not_touched() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval()
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    count_layers(layers, torch.zeros(3, 4), None, BY, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layers.state_dict().items())
    assert not any(module.training for module in layers.modules())
    assert all(p.grad is None and p.dtype == torch.float32 for p in layers.parameters())


def test_trees_of_tensors_go_from_layer_to_layer() -> None:
    layers = builders.carrying(depth=2)
    costs = {cost.name: cost for cost in count_layers(layers, ids(2, 6), ids(2, 6), BY)}
    assert all(cost.forward.bytes > 0 and cost.backward.bytes > 0 for cost in costs.values())
    assert costs["middle1"].backward.flops == 2 * costs["middle1"].forward.flops


def test_what_is_recomputed_is_counted_in_backward() -> None:
    """A layer as torch's counter sees it in a real backward,
    which stops as soon as it has what it needs.
    """
    options = SMALL | {"num_kv_heads": 1, "ffn_size": 24}
    layers = llama.build(**options)
    kept = count_layers(layers, ids(2, 6), ids(2, 6), FUSED)[2]
    extra = {}
    for pattern in ("block1", "block1.*.core"):
        again = count_layers(layers, ids(2, 6), ids(2, 6), FUSED, recompute=[pattern])
        assert again[1] == kept._replace(name="block0") and again[2].forward == kept.forward
        assert again[2].backward.time_s > kept.backward.time_s
        extra[pattern] = again[2].backward.flops - kept.backward.flops
    assert extra["block1.*.core"] == 2.0 * (2 * 2) * 6 * 6 * (8 + 8), "scores and the sum of values"

    whole = llama.build(**options)[2]
    recompute_parts("block1", whole, ["block1"], nullcontext)
    counts = []
    for block in (llama.build(**options)[2], whole):
        x = torch.zeros(2, 6, 16, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):
            y = block(x)
            with FlopCounterMode(display=False) as counter:
                y.sum().backward()
        counts.append(counter.get_total_flops())
    assert extra["block1"] == counts[1] - counts[0] < kept.forward.flops, (
        "the last linear does not run again"
    )


def test_what_is_not_trained_has_no_backward() -> None:
    costs = count_layers(builders.frozen(), ids(2, 6), ids(2, 6), BY)
    assert costs[0].backward == OperationCost()
    assert costs[1].backward.flops == costs[1].forward.flops, (
        "of its weights alone: nobody wants that of its input"
    )


class OneWay(torch.autograd.Function):
    """Has no backward without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("not on meta")


def test_a_backward_that_cannot_be_run_counts_as_two_forwards() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Apply(OneWay.apply))
    cost = count_layers(layers, torch.zeros(3, 4), None, BY)[1]
    assert (
        cost.backward == OperationCost(0.0, 2 * cost.forward.bytes, 2 * cost.forward.time_s)
        and cost.forward.bytes > 0
    )


def test_a_layer_that_fails_in_the_training_dtype_is_named() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("only float32 here")
        return x * 2.0

    layers = nn.Sequential(
        OrderedDict(linear=nn.Linear(4, 4), picky=Apply(picky), head=nn.Linear(4, 4))
    )
    assert len(count_layers(layers, torch.zeros(3, 4), None, BY)) == 3
    with raises("MW-PIPELINE-001", "layer picky (Apply)", "only float32 here"):
        count_layers(layers, torch.zeros(3, 4), None, BY, dtype=torch.bfloat16)
    with raises("MW-PIPELINE-001", "layer head (Linear)"):
        count_layers(layers, torch.zeros(3, 4), ids(5), BY)


def test_weights_of_each_balance() -> None:
    costs = [
        LayerCost("a", 7, OperationCost(1.0, 2.0, 3.0), OperationCost(1.0, 2.0, 4.0)),
        LayerCost("b", 0, OperationCost(), OperationCost()),
    ]
    assert layer_weights(costs, "layers") == [1.0, 1.0]
    assert layer_weights(costs, "parameters") == [7.0, 0.0]
    assert layer_weights(costs, "time") == [7.0, 0.0]
