"""Models as users write them, in plain torch: small ones that work, and one for each way to break the contract.

Named in a config as ``tests.support.builders:plain``. None of them knows of a rank, and most carry no attribute at all.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain(vocab_size: int = 17, width: int = 8, depth: int = 2) -> nn.Sequential:
    """What a newcomer would type: numbered layers, activations as layers of their own, no attribute at all."""
    middle: list[nn.Module] = []
    for _ in range(depth):
        middle += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(nn.Embedding(vocab_size, width), *middle, nn.Linear(width, vocab_size))


class Begin(nn.Module):
    """Token ids -> a dict of the hidden state, the ids themselves and a mask of floats that needs no gradient."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"x": self.tokens(ids), "ids": ids, "mask": (ids % 3 != 0).double()[..., None]}


class Middle(nn.Module):
    """Works on the hidden state, passes the rest on, and hands its input's square past the layers that follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        x = value["x"] + torch.tanh(self.linear(value["x"])) * value["mask"].to(value["x"].dtype)
        skipped = value.get("skipped", value["x"].square())
        return {"x": x, "ids": value["ids"], "mask": value["mask"], "skipped": skipped}


class Pack(nn.Module):
    """Dict -> tuple: the kinds of values may change on the way."""

    def forward(self, value: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return value["x"] * 2.0, (value["ids"], value["skipped"])


class End(nn.Module):
    """Logits of the hidden state, the value that skipped the middle, and a second embedding of the ids."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.again = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        x, (ids, skipped) = value
        return self.head(x + skipped + self.again(ids))


def carrying(vocab_size: int = 17, width: int = 8, depth: int = 2) -> nn.Sequential:
    """Dicts and tuples between the layers, with integers, tensors without gradient, and one that skips layers."""
    layers: dict[str, nn.Module] = {"begin": Begin(vocab_size, width)}
    for i in range(depth):
        layers[f"middle{i}"] = Middle(width)
    return nn.Sequential(OrderedDict(layers, pack=Pack(), end=End(vocab_size, width)))


def tied_to_the_head(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A tie whose canonical name is that of the *later* layer."""
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
    """The embedding is not trained: no gradient at all goes back over the first border."""
    model = plain(vocab_size, width)
    model[0].weight.requires_grad_(False)
    return model


# ----------------------------------------------------------------------------------------- against the contract


def not_a_sequential(vocab_size: int = 17) -> nn.Module:
    """A module that cannot be cut."""
    return nn.Linear(vocab_size, vocab_size)


def empty() -> nn.Sequential:
    """Nothing."""
    return nn.Sequential()


def without_parameters() -> nn.Sequential:
    """Nothing to train."""
    return nn.Sequential(nn.Identity(), nn.ReLU())


def undeclared_tie(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """One parameter under two names, and tied_weights does not say so."""
    model = nn.Sequential(
        OrderedDict(embedding=nn.Embedding(vocab_size, width), head=nn.Linear(width, vocab_size, bias=False))
    )
    model.head.weight = model.embedding.weight
    return model


def tie_to_nothing(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """tied_weights with a typing error."""
    model = undeclared_tie(vocab_size, width)
    model.tied_weights = [("embedding.weight", "haed.weight")]
    return model


class Scale(nn.Module):
    """A parameter that was given its value in __init__: nobody can draw it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def without_reset(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A module of the user's own that has no reset_parameters."""
    return nn.Sequential(nn.Embedding(vocab_size, width), Scale(width), nn.Linear(width, vocab_size))


def with_initialise(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """The same, with an ``initialise`` that knows."""
    model = without_reset(vocab_size, width)

    def initialise(name: str, tensor: Tensor) -> None:
        nn.init.uniform_(tensor, 0.5 if name == "1.factor" else -0.5, 1.0)

    model.initialise = initialise
    return model


def wrong_width(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """The middle layer is wider than what comes in."""
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(vocab_size, width),
            middle=nn.Linear(width + 1, width),
            head=nn.Linear(width, vocab_size),
        )
    )


class Pooled(nn.Module):
    """(B, S, D) -> (B, D): a classifier's ending."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def flat_logits(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Logits of a sequence instead of logits of each token."""
    return nn.Sequential(nn.Embedding(vocab_size, width), Pooled(), nn.Linear(width, vocab_size))


class Counted(nn.Module):
    """Hands on a number beside the tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, 3


class Uncounted(nn.Module):
    """Takes it again."""

    def forward(self, value: tuple[Tensor, int]) -> Tensor:
        return value[0] * value[1]


def hands_on_a_number(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A value between layers that is no tensor: no other process can be sent it."""
    return nn.Sequential(nn.Embedding(vocab_size, width), Counted(), Uncounted(), nn.Linear(width, vocab_size))


def fails(vocab_size: int = 17) -> nn.Sequential:
    """A builder that checks its options."""
    raise ValueError(f"vocab_size={vocab_size} is unlucky")


def needs_much(vocab_size: int, width: int, **more: Any) -> nn.Sequential:
    """Two options without a default, and any other."""
    return plain(vocab_size, width)


not_callable = 3


def repeated(vocab_size: int = 17, width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """One activation, or dropout, object in two places."""
    act = nn.Dropout(dropout) if dropout else nn.GELU()
    layers = nn.Sequential()
    layers.add_module("embedding", nn.Embedding(vocab_size, width))
    layers.add_module("act", act)
    layers.add_module("hidden", nn.Linear(width, width))
    layers.add_module("act_again", act)
    layers.add_module("head", nn.Linear(width, vocab_size))
    return layers


def repeated_linear(vocab_size: int = 17, width: int = 8, declared: bool = False) -> nn.Sequential:
    """One linear, with its parameters, in two places."""
    linear = nn.Linear(width, width)
    layers = nn.Sequential(nn.Embedding(vocab_size, width), linear, linear, nn.Linear(width, vocab_size))
    if declared:
        layers.tied_weights = [("1.weight", "2.weight"), ("1.bias", "2.bias")]
    return layers


def overlapping_ties(ties: list[list[str]], vocab_size: int = 8) -> nn.Sequential:
    """Three weights of one shape, tied as told."""
    layers = nn.Sequential()
    layers.add_module("emb", nn.Embedding(vocab_size, vocab_size))
    layers.add_module("mid", nn.Linear(vocab_size, vocab_size, bias=False))
    layers.add_module("head", nn.Linear(vocab_size, vocab_size))
    layers.tied_weights = [tuple(tie) for tie in ties]
    return layers


def zeroed_head(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Sets a first value after the module was made."""
    layers = plain(vocab_size, width)
    nn.init.zeros_(layers[-1].weight)
    return layers


class Scaled(nn.Embedding):
    """Keeps a buffer that is made out of its weight."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__(vocab_size, width)
        self.register_buffer("scale", self.weight.detach().abs().mean())


def buffer_of_parameter(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A buffer that has no value as long as the parameters have none."""
    return nn.Sequential(Scaled(vocab_size, width), nn.Linear(width, vocab_size))


class RunningMean(nn.Module):
    """Subtracts a mean that it keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)).to(self.mean.dtype), alpha=0.1)
        return x - self.mean


class FunctionalDropout(nn.Module):
    """Draws from whatever generator is there."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1)


def with_layer(kind: str, vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A layer with a state of its own in the middle."""
    middle = RunningMean(width) if kind == "running_mean" else FunctionalDropout()
    return nn.Sequential(nn.Embedding(vocab_size, width), middle, nn.Linear(width, vocab_size))


def softcap(vocab_size: int = 16, width: int = 8) -> nn.Sequential:
    """Something behind the head, which tensor parallelism splits."""
    layers = nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size), nn.Tanh())
    layers.sharding_plan = {"0": "vocab", "1": "vocab"}
    return layers


def values_by_data(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """Sets first values in the way of many scripts: through ``.data``, for all linears."""
    layers = plain(vocab_size, width)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)

    return layers.apply(init)


def own_loss_and_z_loss(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """The option belongs to the default loss, which this model does not use."""
    model = plain(vocab_size, width)
    model.loss = lambda output, labels: F.cross_entropy(output.mT, labels, reduction="none")
    model.z_loss = 1e-4
    return model


class HeadsOfInput(nn.Module):
    """Two heads of each token, mixed; takes the length from its input instead of from the projection's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:2], -1, x.shape[2] // 2)
        return x + self.down(torch.tanh(heads.flatten(2)))


def length_of_input(vocab_size: int = 17, width: int = 8) -> nn.Sequential:
    """A layer that is right in one process and fails under sequence parallelism."""
    layers = nn.Sequential(nn.Embedding(vocab_size, width), HeadsOfInput(width), nn.Linear(width, vocab_size))
    layers.sharding_plan = {"0": "vocab", "1.up": "column", "1.down": "row", "2": "vocab"}  # type: ignore[assignment]
    return layers
