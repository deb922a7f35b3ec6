"""Multi-token prediction of DeepSeek-V3 against its equations,
written out token by token in float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.pipeline.values import cross_entropy, shift_labels, with_heads
from meshwright_models import decoder, llama
from tests.support.errors import has_code

DEPTHS, WEIGHT, EPS, BASE = 2, 0.3, 1e-5, 500_000.0
HEADS, KV_HEADS, HEAD = 4, 2, 6
SIZES = {
    "vocab_size": 29,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
}
SIZES |= {"ffn_size": 20, "max_sequence_length": 16}
IGNORED = -100


def model_of(**options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    layers = llama.build(**SIZES | {"mtp_layers": DEPTHS, "mtp_loss_weight": WEIGHT} | options)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.5)  # so large that attention is far from even
    return layers.double()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head of one token."""
    half = len(x) // 2
    angles = torch.tensor(
        [position * BASE ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64
    )
    real = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((real.real, real.imag))


def block(weights: dict[str, Tensor], prefix: str, rows: list[Tensor]) -> list[Tensor]:
    """One document through one block, token by token and head by head."""
    w = {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    group = HEADS // KV_HEADS
    fused = [
        (w["attention.qkv.weight"] @ rms_norm(x, w["attention_norm.weight"])).split(HEAD)
        for x in rows
    ]
    found = []
    for t, x in enumerate(rows):
        heads = []
        for head in range(HEADS):
            at = head // group * (group + 2)
            query = rotated(fused[t][at + head % group], t)
            scores = torch.stack(
                [query @ rotated(fused[s][at + group], s) / math.sqrt(HEAD) for s in range(t + 1)]
            )
            values = torch.stack([fused[s][at + group + 1] for s in range(t + 1)])
            heads.append(torch.softmax(scores, 0) @ values)
        x = x + w["attention.out.weight"] @ torch.cat(heads)
        x = x + feed_forward(w, rms_norm(x, w["mlp_norm.weight"]))
        found.append(x)
    return found


def feed_forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Gate and up rows lie in KV_HEADS blocks [gate up], so that tp can cut between them."""
    units = (w["mlp.gate_up.weight"] @ x).view(math.gcd(20, KV_HEADS), 2, -1)
    return w["mlp.down.weight"] @ (F.silu(units[:, 0]) * units[:, 1]).flatten()


def loss_by_equations(
    weights: dict[str, Tensor], ids: list[int], labels: list[int]
) -> list[list[Tensor]]:
    """Equations 21 to 25 for one document: per depth,
    the losses of all positions that have a label.
    """
    hidden = [weights["embedding.tokens.weight"][i] for i in ids]
    for layer in range(2):
        hidden = block(weights, f"block{layer}.", hidden)
    hidden = [rms_norm(x, weights["norm.weight"]) for x in hidden]
    found = []
    for depth in range(DEPTHS + 1):
        if depth:
            prefix = f"mtp{depth - 1}."
            pairs = [
                torch.cat(
                    (
                        rms_norm(
                            weights["embedding.tokens.weight"][ids[t + depth]],
                            w_norm(weights, prefix, "embedding_"),
                        ),
                        rms_norm(hidden[t], w_norm(weights, prefix, "hidden_")),
                    )
                )
                for t in range(len(ids) - depth)
            ]
            mixed = [weights[f"{prefix}project.weight"] @ pair for pair in pairs]
            mixed = block(weights, f"{prefix}block.", mixed)
            hidden = [rms_norm(x, w_norm(weights, prefix, "")) for x in mixed]
        head = weights["head.linear.weight"]
        found.append(
            [
                -torch.log_softmax(head @ hidden[t], 0)[labels[t + depth]]
                for t in range(len(ids) - depth)
                if all(label != IGNORED for label in labels[t : t + depth + 1])
            ]
        )
    return found


def w_norm(weights: dict[str, Tensor], prefix: str, which: str) -> Tensor:
    return weights[f"{prefix}{which}norm.weight"]


def compared(
    layers: nn.Sequential, inputs: Any, labels: Tensor, documents: list[list[tuple[int, int]]]
) -> None:
    """Loss and all gradients of both; the mean is over the labels of the next token."""
    outputs = layers(inputs)
    count = (labels != IGNORED).sum()
    loss = with_heads(cross_entropy, layers.loss_heads)(outputs, labels).sum() / count
    weights = dict(layers.named_parameters())
    ids = inputs["tokens"] if isinstance(inputs, dict) else inputs
    parts: list[list[Tensor]] = [[] for _ in range(DEPTHS + 1)]
    for row, spans in enumerate(documents):
        for begin, end in spans:
            found = loss_by_equations(
                weights, ids[row, begin:end].tolist(), labels[row, begin:end].tolist()
            )
            for part, losses in zip(parts, found, strict=True):
                part += losses
    assert 0 < len(parts[2]) < len(parts[1]) < len(parts[0]) == count
    expected = torch.stack(parts[0]).sum() / count
    expected = expected + WEIGHT / DEPTHS * sum(
        torch.stack(part).sum() / count for part in parts[1:]
    )
    assert float((loss - expected).abs().detach() / expected.detach()) < 1e-12
    ours, theirs = (
        torch.autograd.grad(each, list(weights.values()), retain_graph=True)
        for each in (loss, expected)
    )
    for name, gradient, wanted in zip(weights, ours, theirs, strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-12, name
    only_next = (
        with_heads(cross_entropy, layers.loss_heads, training=False)(outputs, labels).sum() / count
    )
    mean = torch.stack(parts[0]).mean().detach()
    assert float((only_next.detach() - mean).abs() / mean) < 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_the_equations(tied: bool) -> None:
    layers = model_of(tied=tied)
    tokens = torch.randint(29, (2, 10), generator=torch.Generator().manual_seed(1))
    labels = torch.cat((tokens[:, 1:], torch.tensor([[5], [7]])), dim=1)
    labels[0, 4] = labels[1, :3] = labels[1, 9] = IGNORED
    weights = dict(layers.named_parameters())
    if tied:
        weights["head.linear.weight"] = layers.get_parameter("head.linear.weight")
        assert weights["head.linear.weight"] is weights["embedding.tokens.weight"]
        layers.named_parameters = lambda: iter(weights.items())  # the gradient of both names is one
    compared(layers, tokens, labels, [[(0, 10)], [(0, 10)]])


def test_no_head_looks_over_the_end_of_a_document() -> None:
    """Labels as data.document_boundaries makes them: the last one of each document is ignored."""
    layers = model_of()
    tokens = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(2))
    labels = torch.roll(tokens, -1, 1)
    documents = [[(0, 5), (5, 6), (6, 12)], [(0, 3), (3, 5), (5, 12)]]
    starts = torch.zeros(2, 12, dtype=torch.bool)
    for row, spans in enumerate(documents):
        for begin, end in spans:
            starts[row, begin], labels[row, end - 1] = True, IGNORED
    compared(layers, {"tokens": tokens, "starts": starts}, labels, documents)


def test_labels_are_shifted_inside_their_sample() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, IGNORED, 9, 10, 11]])
    x = IGNORED
    assert shift_labels(labels, 0).tolist() == labels.tolist()
    assert shift_labels(labels, 1).tolist() == [[2, 3, 4, 5, 6, x], [8, x, x, 10, 11, x]]
    assert shift_labels(labels, 2).tolist() == [[3, 4, 5, 6, x, x], [x, x, x, 11, x, x]]
    assert shift_labels(labels, 9).tolist() == [[x] * 6] * 2


def test_the_trunk_is_the_model_without_modules() -> None:
    with_modules, without = model_of(tied=True), model_of(tied=True, mtp_layers=0)
    names = {"head.weight": "head.linear.weight"}
    without.load_state_dict(
        {n: with_modules.state_dict()[names.get(n, n)] for n in without.state_dict()}
    )
    ids = torch.randint(29, (1, 10), generator=torch.Generator().manual_seed(1))
    assert torch.equal(with_modules(ids)[0], without(ids))
    assert not hasattr(without, "loss_heads") and without.tied_weights == [
        ("embedding.tokens.weight", "head.weight")
    ]


def test_the_decoder_with_llamas_options_has_the_same_modules() -> None:
    options = SIZES | {"mtp_layers": 1, "residual_init": "layer_index", "qk_norm": True}
    models = []
    for builder, more in ((llama.build, {}), (decoder.build, {"rope_theta": BASE})):
        torch.manual_seed(1)
        models.append(builder(**options | more))
    for (name, value), (other, expected) in zip(
        *(m.named_parameters() for m in models), strict=True
    ):
        assert name == other and torch.equal(value, expected), name
    for attribute in (
        "sharding_plan",
        "divisible",
        "tied_weights",
        "selective_recompute",
        "loss_heads",
    ):
        assert getattr(models[0], attribute) == getattr(models[1], attribute)
    assert models[0].loss_heads == [(0, 1.0), (1, 0.1)]
    stds = [
        float(models[0].get_parameter(f"{at}.attention.out.weight").detach().std())
        for at in ("block1", "mtp0.block")
    ]
    assert stds[0] / stds[1] == pytest.approx(math.sqrt(3 / 2), rel=0.2)  # layer 2 of 2, and 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mtp_layers": -1}, "mtp_layers=-1, mtp_loss_weight=0.1: at least 0"),
        ({"mtp_layers": 1, "mtp_loss_weight": -0.1}, "mtp_loss_weight=-0.1"),
        (
            {"mtp_layers": 1, "positions": "learned"},
            "mtp_layers=1 needs positions = rotary or none, not learned",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, check=has_code("MW-MODEL-003")) as caught:
        build_model("meshwright_models.decoder:build", SIZES | options, 0)
    assert said in str(caught.value)
