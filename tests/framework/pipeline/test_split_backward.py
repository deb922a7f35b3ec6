"""A backward in halves, layer by layer, against autograd's own: inputs' gradients in I,
weights' in W.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.pipeline.plan import SplitBackward, accumulate_deferred
from meshwright_models import llama

D, V, B, S = 6, 9, 2, 5


class Doubled(nn.Linear):
    """Uses a weight that is computed from its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2.0 * self.weight, self.bias)


class Twice(nn.Linear):
    """Uses its weight two times."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight)


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "no bias": lambda: nn.Linear(D, D, bias=False),
    "frozen bias": lambda: frozen(nn.Linear(D, D), "bias"),
    "frozen weight": lambda: frozen(nn.Linear(D, D), "weight"),
    "computed weight": lambda: Doubled(D, D),
    "used twice": lambda: Twice(D, D),
    "embedding": lambda: nn.Embedding(V, D),
    "first row is padding": lambda: nn.Embedding(V, D, padding_idx=0),
    "last row is padding": lambda: nn.Embedding(V, D, padding_idx=-1),
    "by frequency": lambda: nn.Embedding(V, D, scale_grad_by_freq=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_halves_add_up(name: str) -> None:
    """Every id occurs, the last one and its neighbour too: none may pass for the padding."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    plain = copy.deepcopy(layer)
    is_embedding = isinstance(layer, nn.Embedding)
    ids = torch.arange(B * S).view(B, S) % V
    given = (
        [ids, ids]
        if is_embedding
        else [torch.randn(B, S, D, dtype=torch.float64).requires_grad_() for _ in "ab"]
    )
    if not is_embedding:
        given[1] = given[0].detach().clone().requires_grad_()
    weights = torch.randn(B, S, D, dtype=torch.float64)
    split = SplitBackward()
    with split:
        output = layer(given[0])
    torch.testing.assert_close(output, plain(given[1]), rtol=1e-14, atol=1e-14)
    if output.requires_grad:
        with split.deferring() as notes:
            (output * weights).sum().backward()
        (plain(given[1]) * weights).sum().backward()
        accumulate_deferred(notes)
    if not is_embedding:
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-13, atol=1e-14)
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-13, atol=1e-14)


@pytest.mark.long
def test_a_compiled_layer_is_split() -> None:
    """One graph before, between and behind the four linears of a block;
    none for the linears or the mode.
    """
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    block = llama.build(
        hidden_size=8, num_heads=2, num_kv_heads=1, ffn_size=12, num_layers=1, vocab_size=V
    )[1]
    plain = copy.deepcopy(block)
    torch._dynamo.reset()
    counters.clear()
    block.compile(backend="aot_eager")
    inputs = torch.randn(B, S, 8)
    found = []
    for layer in (plain, block):
        split, x = SplitBackward(), inputs.clone().requires_grad_()
        for _ in range(2):
            with split:
                y = layer(x)
            with split.deferring() as notes:
                y.square().sum().backward()
            assert [note.parameter.shape for note in notes] == [(8, 12), (24, 8), (8, 8), (16, 8)]
            accumulate_deferred(notes)
        found.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for with_, without in zip(*found, strict=True):
        torch.testing.assert_close(with_, without, rtol=1e-6, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 5
    (reason,) = counters["graph_break"]
    assert "SplitBackward._linear" in reason


def test_between_the_halves_the_input_of_the_stage_is_free() -> None:
    """A norm's output is deferred for its linear;
    with its history it would keep the stage's input alive.
    """
    layers = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))
    received = torch.randn(B, S, D, requires_grad=True)
    split = SplitBackward()
    with split:
        output = layers(received)
    with split.deferring() as deferred:
        output.sum().backward()
    storages = [
        weakref.ref(tensor.untyped_storage())
        for tensor in (received, received.grad)
        if tensor is not None
    ]
    del received, output
    assert len(deferred) == 4
    assert [storage() for storage in storages] == [None, None]
    accumulate_deferred(deferred)
    assert all(parameter.grad is not None for parameter in layers.parameters())
