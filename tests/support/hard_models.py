"""Models that train in plain torch, and that a pipeline could train wrongly without an error."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 8


class Embed(nn.Module):
    """Embedding that returns a dict of ids (B, S) and h (B, S, D)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, D)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"ids": ids, "h": self.table(ids)}


class Step(nn.Module):
    """h + tanh(linear(h)), where ``how`` names the way in which the linear is called."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(D, D)

    def called(self, h: Tensor) -> Tensor:
        if self.how == "vmap":
            return torch.vmap(lambda row: F.linear(row, self.linear.weight))(h)
        if self.how == "vector":
            return h * F.linear(h, self.linear.bias).unsqueeze(-1) + self.linear(h)
        if self.how == "gradient within" and h.requires_grad:
            with torch.enable_grad():
                (found,) = torch.autograd.grad(self.linear(h).tanh().sum(), h, create_graph=True)
            return found
        if self.how == "checkpoint":
            found = checkpoint(lambda x: torch.tanh(self.linear(x)), h, use_reentrant=False)
            assert isinstance(found, Tensor)
            return found
        return self.linear(h)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**value, "h": value["h"] + torch.tanh(self.called(value["h"]))}


class Overwriting(Step):
    """Step that assigns into its input dict; no tensor is changed in place."""

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        value["h"] = value["h"] + torch.tanh(self.linear(value.pop("h")))
        return value


class Fickle(Step):
    """Step whose output has another shape in eval mode, or another dtype off the meta device."""

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        value = super().forward({**value, "h": value["h"].to(self.linear.weight.dtype)})
        if self.how == "eval" and not self.training:
            value["h"] = value["h"][:, :-1]
        if self.how == "dtype" and not value["h"].is_meta:
            value["h"] = value["h"].half()
        return value


class Head(nn.Module):
    """Linear head: dict -> logits (B, S, V)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, vocab_size)

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return self.linear(value["h"].to(self.linear.weight.dtype))  # type: ignore[no-any-return]


class FrozenNorm(nn.Module):
    """Batch norm that its builder puts into eval mode: it uses its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D).eval()

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**value, "h": self.norm(value["h"].transpose(1, 2)).transpose(1, 2)}


def build(vocab_size: int, layer: str = "Step", how: str = "plain", **_: Any) -> nn.Sequential:
    """Build five layers: embedding, three of the class ``layer``, head."""
    kind = {"Step": lambda: Step(how), "Overwriting": Overwriting, "Fickle": lambda: Fickle(how)}[
        layer
    ]
    return nn.Sequential(Embed(vocab_size), kind(), kind(), kind(), Head(vocab_size))


def frozen_norm(vocab_size: int) -> nn.Sequential:
    return nn.Sequential(Embed(vocab_size), Step(), FrozenNorm(), Step(), Head(vocab_size))


def frozen(vocab_size: int) -> nn.Sequential:
    return build(vocab_size).requires_grad_(False)


def sparse(vocab_size: int) -> nn.Sequential:
    model = build(vocab_size)
    model[0].table = nn.Embedding(vocab_size, D, sparse=True)
    return model


def reduced_loss(vocab_size: int) -> nn.Sequential:
    model = build(vocab_size)
    model.loss = lambda output, labels: F.cross_entropy(output.flatten(0, -2), labels.flatten())  # type: ignore[assignment]
    return model


def no_forward(vocab_size: int) -> nn.Sequential:
    return nn.Sequential(Embed(vocab_size), nn.Module(), Head(vocab_size))


class OwnTensor(Step):
    """Step that creates a tensor on the CPU, whatever the device of the layer."""

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**value, "h": value["h"] * torch.ones(D)}


def own_tensor(vocab_size: int) -> nn.Sequential:
    return nn.Sequential(Embed(vocab_size), OwnTensor(), Head(vocab_size))


class InPlace(nn.Module):
    """Residual layer that changes the output of its linear in place;
    ``how`` names the operation.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(D, D)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        h = self.linear(value["h"])
        if self.how == "relu":
            h = F.relu_(h)
        elif self.how == "mul":
            h.mul_(0.5)
        else:
            h[:, 0] *= 2.0
        return {**value, "h": value["h"] + h}


class InPlaceEmbed(Embed):
    """Embedding layer that changes the looked-up rows in place."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"ids": ids, "h": self.table(ids).mul_(2.0)}


def in_place(vocab_size: int, how: str) -> nn.Sequential:
    return nn.Sequential(InPlaceEmbed(vocab_size), InPlace(how), InPlace(how), Head(vocab_size))


def hooked(vocab_size: int, how: str) -> nn.Sequential:
    """Build a model with a hook on the gradient of one parameter;
    ``how`` names the kind of hook.
    """
    model = build(vocab_size)
    weight = model[1].linear.weight
    if how == "hook":
        weight.register_hook(lambda gradient: 2.0 * gradient)
    elif how == "accumulated":
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
    else:
        made = nn.Parameter(torch.empty(D, D))
        made.register_hook(lambda gradient: 2.0 * gradient)
        model[1].linear.weight = made
    return model


class Odd(nn.Linear):
    """Linear with an additional frozen parameter of ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(D, D)
        self.odd = nn.Parameter(torch.zeros(D, dtype=dtype), requires_grad=False)


def odd_parameter(vocab_size: int, dtype: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(vocab_size, D), Odd(getattr(torch, dtype)), nn.Linear(D, vocab_size)
    )


def lazy(vocab_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocab_size, D), nn.LazyLinear(D), nn.Linear(D, vocab_size))


def careless_loss(vocab_size: int) -> nn.Sequential:
    """Build a model whose loss counts ignored labels as class 0."""
    model = build(vocab_size)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        flat = F.cross_entropy(
            output.flatten(0, -2), labels.clamp_min(0).flatten(), reduction="none"
        )
        return flat.view(labels.shape)

    model.loss = loss  # type: ignore[assignment]
    return model


class Borrowing(Step):
    """Step that also calls a module shared with another layer."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def called(self, h: Tensor) -> Tensor:
        return self.linear(self.shared(h))  # type: ignore[no-any-return]


def shared_submodule(vocab_size: int) -> nn.Sequential:
    """Build a model in which two of three steps share a module, declared in ``tied_weights``."""
    shared = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    model = nn.Sequential(
        Embed(vocab_size), Borrowing(shared), Step(), Borrowing(shared), Head(vocab_size)
    )
    names = [f"shared.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")]
    model.tied_weights = [(f"1.{name}", f"3.{name}") for name in names]  # type: ignore[assignment]
    return model
