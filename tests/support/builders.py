"""Small models as users write them, in plain torch: valid ones,
and one for each way to break the contract of builders.

A configuration names one as ``tests.support.builders:plain``. Most have no sharding plan or other
attribute.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import gpt2


def plain(vocab_size: int = 17, width: int = 8, depth: int = 2) -> nn.Sequential:
    """Build the simplest model: numbered layers, activations as separate layers, no attributes."""
    middle: list[nn.Module] = []
    for _ in range(depth):
        middle += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(nn.Embedding(vocab_size, width), *middle, nn.Linear(width, vocab_size))


def declared(axis: str) -> nn.Sequential:
    """Build a small GPT-2 that rules out an axis."""
    model = gpt2.build(
        vocab_size=32, hidden_size=16, num_layers=4, num_heads=4, max_sequence_length=32
    )
    model.impossible = {axis: "a test"}  # type: ignore[assignment]
    return model


class Begin(nn.Module):
    """Embedding: ids (B, S) -> dict of x (B, S, D), the ids, and a float mask (B, S, 1)
    without gradient.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"x": self.tokens(ids), "ids": ids, "mask": (ids % 3 != 0).double()[..., None]}


class Middle(nn.Module):
    """Residual layer on ``x`` that passes the rest on. The first one adds ``skipped``,
    the square of its input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        x = value["x"] + torch.tanh(self.linear(value["x"])) * value["mask"].to(value["x"].dtype)
        skipped = value.get("skipped", value["x"].square())
        return {"x": x, "ids": value["ids"], "mask": value["mask"], "skipped": skipped}


class Pack(nn.Module):
    """Layer from a dict to a nested tuple: the type of the value may change between layers."""

    def forward(self, value: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return value["x"] * 2.0, (value["ids"], value["skipped"])


class End(nn.Module):
    """Head: logits (B, S, V) from the hidden state, the skipped value,
    and a second embedding of the ids.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.again = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        x, (ids, skipped) = value
        return self.head(x + skipped + self.again(ids))


def carrying(vocab_size: int = 17, width: int = 8, depth: int = 2) -> nn.Sequential:
    """Build a model with dicts and tuples between layers: integers, tensors without gradient,
    one that skips layers.
    """
    layers: dict[str, nn.Module] = {"begin": Begin(vocab_size, width)}
    for i in range(depth):
        layers[f"middle{i}"] = Middle(width)
    return nn.Sequential(OrderedDict(layers, pack=Pack(), end=End(vocab_size, width)))


def tied_to_the_head(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with tied weights whose canonical name belongs to the *later* layer."""
    model = nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(vocab_size, width),
            middle=nn.Linear(width, width),
            head=nn.Linear(width, vocab_size, bias=False),
        )
    )
    model.embedding.weight = model.head.weight
    model.tied_weights = [("head.weight", "embedding.weight")]
    return model


def frozen(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build ``plain`` with a frozen embedding:
    no gradient is sent back over the first stage boundary.
    """
    model = plain(vocab_size, width)
    model[0].weight.requires_grad_(False)
    return model


# ----------------------------------------------------------------------------------------- against
# the contract


def not_a_sequential(vocab_size: int = 17) -> nn.Module:
    """Build a module that is no nn.Sequential."""
    return nn.Linear(vocab_size, vocab_size)


def empty() -> nn.Sequential:
    """Build a Sequential without layers."""
    return nn.Sequential()


def without_parameters() -> nn.Sequential:
    """Build a model without parameters."""
    return nn.Sequential(nn.Identity(), nn.ReLU())


def undeclared_tie(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with tied weights that ``tied_weights`` does not declare."""
    model = nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(vocab_size, width), head=nn.Linear(width, vocab_size, bias=False)
        )
    )
    model.head.weight = model.embedding.weight
    return model


def tie_to_nothing(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model whose ``tied_weights`` names a parameter that does not exist."""
    model = undeclared_tie(vocab_size, width)
    model.tied_weights = [("embedding.weight", "haed.weight")]
    return model


class Scale(nn.Module):
    """Scale whose parameter is drawn in ``__init__``, without ``reset_parameters``:
    it cannot be drawn by name.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def without_reset(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with a module that has no ``reset_parameters``."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width), Scale(width), nn.Linear(width, vocab_size)
    )


def with_initialise(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build the model of :func:`without_reset` with an ``initialise``
    that draws every parameter.
    """
    model = without_reset(vocab_size, width)

    def initialise(name: str, tensor: Tensor) -> None:
        nn.init.uniform_(tensor, 0.5 if name == "1.factor" else -0.5, 1.0)

    model.initialise = initialise
    return model


def wrong_width(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model whose middle layer expects a wider input than it gets."""
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(vocab_size, width),
            middle=nn.Linear(width + 1, width),
            head=nn.Linear(width, vocab_size),
        )
    )


class Pooled(nn.Module):
    """Mean over the tokens, (B, S, D) -> (B, D), as in a classifier."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def flat_logits(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with logits (B, V) of a sequence instead of (B, S, V) of each token."""
    return nn.Sequential(nn.Embedding(vocab_size, width), Pooled(), nn.Linear(width, vocab_size))


class Counted(nn.Module):
    """Layer that returns a Python number besides the tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, 3


class Uncounted(nn.Module):
    """Layer that takes the output of :class:`Counted`."""

    def forward(self, value: tuple[Tensor, int]) -> Tensor:
        return value[0] * value[1]


def hands_on_a_number(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model that passes a number between layers: stages send tensors only."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width), Counted(), Uncounted(), nn.Linear(width, vocab_size)
    )


def fails(vocab_size: int = 17) -> nn.Sequential:
    """Raise as a builder does that rejects its options."""
    raise ValueError(f"vocab_size={vocab_size} is unlucky")


def needs_much(vocab_size: int, width: int, **more: Any) -> nn.Sequential:
    """Build ``plain`` from two required options; any other is accepted."""
    return plain(vocab_size, width)


not_callable = 3


def repeated(vocab_size: int = 17, width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """Build a model with one activation (or dropout) module at two positions."""
    act = nn.Dropout(dropout) if dropout else nn.GELU()
    layers = nn.Sequential()
    layers.add_module("embedding", nn.Embedding(vocab_size, width))
    layers.add_module("act", act)
    layers.add_module("hidden", nn.Linear(width, width))
    layers.add_module("act_again", act)
    layers.add_module("head", nn.Linear(width, vocab_size))
    return layers


def repeated_linear(vocab_size: int = 17, width: int = 8, declared: bool = False) -> nn.Sequential:
    """Build a model with one linear, and so its parameters, at two positions. ``declared``:
    as tied weights.
    """
    linear = nn.Linear(width, width)
    layers = nn.Sequential(
        nn.Embedding(vocab_size, width), linear, linear, nn.Linear(width, vocab_size)
    )
    if declared:
        layers.tied_weights = [("1.weight", "2.weight"), ("1.bias", "2.bias")]
    return layers


def overlapping_ties(ties: list[list[str]], vocab_size: int = 8) -> nn.Sequential:
    """Build a model with three weights of one shape, and ``ties`` as its ``tied_weights``."""
    layers = nn.Sequential()
    layers.add_module("emb", nn.Embedding(vocab_size, vocab_size))
    layers.add_module("mid", nn.Linear(vocab_size, vocab_size, bias=False))
    layers.add_module("head", nn.Linear(vocab_size, vocab_size))
    layers.tied_weights = [tuple(tie) for tie in ties]
    return layers


def zeroed_head(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build ``plain``, then set the head's weight to zero."""
    layers = plain(vocab_size, width)
    nn.init.zeros_(layers[-1].weight)
    return layers


class Scaled(nn.Embedding):
    """Embedding with a buffer that is computed from its weight in ``__init__``."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width)
        self.register_buffer("scale", self.weight.detach().abs().mean())


def buffer_of_parameter(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with a buffer that has no value on meta, since its parameters have none."""
    return nn.Sequential(Scaled(vocab_size, width), nn.Linear(width, vocab_size))


class RunningMean(nn.Module):
    """Layer that subtracts a running mean, a buffer that forward updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)).to(self.mean.dtype), alpha=0.1)
        return x - self.mean


class Noise(nn.Module):
    """Noise, which draws from torch's default generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.9)


def with_layer(kind: str, vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with a running mean ("running_mean") or noise in the middle."""
    middle = RunningMean(width) if kind == "running_mean" else Noise()
    return nn.Sequential(nn.Embedding(vocab_size, width), middle, nn.Linear(width, vocab_size))


def softcap(vocab_size: int = 16, width: int = 8) -> nn.Sequential:
    """Build a model with a layer after the head, whose logits are sharded over the vocabulary."""
    layers = nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size), nn.Tanh())
    layers.sharding_plan = {"0": "vocab", "1": "vocab"}
    return layers


def values_by_data(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build ``plain``, then set the weights of all linears through ``.data``,
    as many scripts do.
    """
    layers = plain(vocab_size, width)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)

    return layers.apply(init)


def own_loss_and_z_loss(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model with its own loss and ``z_loss``, which is an option of the default loss."""
    model = plain(vocab_size, width)
    model.loss = lambda output, labels: F.cross_entropy(output.mT, labels, reduction="none")
    model.z_loss = 1e-4
    return model


class HeadsOfInput(nn.Module):
    """Residual MLP that reshapes by the sequence length of its input,
    not of the projection's output (B, S, D).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:2], -1, x.shape[2] // 2)
        return x + self.down(torch.tanh(heads.flatten(2)))


def length_of_input(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Build a model that works in one process and fails under sequence parallelism."""
    layers = nn.Sequential(
        nn.Embedding(vocab_size, width), HeadsOfInput(width), nn.Linear(width, vocab_size)
    )
    layers.sharding_plan = {"0": "vocab", "1.up": "column", "1.down": "row", "2": "vocab"}  # type: ignore[assignment]
    return layers
