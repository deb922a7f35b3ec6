"""Documents that share a sample do not see each other:
loss and gradients are those of each on its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import gpt2, llama
from meshwright_models.attention import positions_of

LENGTHS = [3, 1, 7, 5]
VOCAB = 29


def model_of(name: str, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    if name == "gpt2":
        layers = gpt2.build(VOCAB, 16, 3, 4, max_sequence_length=16, dropout=dropout)
    else:
        layers = llama.build(VOCAB, 16, 3, 4, 2, 24, max_sequence_length=16, dropout=dropout)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.5)  # so large that attention is far from even
    return layers.double()


def packed() -> tuple[dict[str, Tensor], Tensor]:
    """Return two samples, their documents in another order."""
    torch.manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, 16)), torch.randint(VOCAB, (2, 16))
    starts = torch.zeros(2, 16, dtype=torch.bool)
    for row, lengths in enumerate((LENGTHS, LENGTHS[::-1])):
        starts[row, [sum(lengths[:i]) for i in range(len(lengths))]] = True
    return {"tokens": tokens, "starts": starts}, labels


def gradients(layers: nn.Sequential, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(layers.parameters()))
    return {
        name: gradient for (name, _), gradient in zip(layers.named_parameters(), found, strict=True)
    }


@pytest.mark.parametrize("dropout", [0.0, 1e-12], ids=["fused", "own attention"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_packed_sample_is_its_documents_alone(name: str, dropout: float) -> None:
    layers, (inputs, labels) = model_of(name, dropout), packed()
    together = F.cross_entropy(layers(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
    alone = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        edges = [*inputs["starts"][row].nonzero().flatten().tolist(), 16]
        assert len(edges) == 5
        for begin, end in pairwise(edges):
            logits = layers(inputs["tokens"][row, begin:end][None])[0]
            alone = alone + F.cross_entropy(logits, labels[row, begin:end], reduction="sum")
    assert float((together - alone).abs().detach() / alone.detach()) < (1e-9 if dropout else 1e-13)
    expected = gradients(layers, alone)
    for parameter, gradient in gradients(layers, together).items():
        assert float((gradient - expected[parameter]).norm() / expected[parameter].norm()) < 1e-8, (
            parameter
        )
    leaking = F.cross_entropy(
        layers(inputs["tokens"]).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert float((leaking - alone).abs().detach() / alone.detach()) > 1e-3, (
        "without boundaries it is something else"
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_document_is_as_if_there_were_none(name: str) -> None:
    layers, (inputs, _) = model_of(name), packed()
    starts = torch.zeros(2, 16, dtype=torch.bool)
    starts[:, 0] = True
    both: list[Any] = [
        layers(inputs["tokens"]),
        layers({"tokens": inputs["tokens"], "starts": starts}),
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=1e-12)


def test_positions_begin_anew() -> None:
    starts = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    assert positions_of(starts).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
