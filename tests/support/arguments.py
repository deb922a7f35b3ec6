"""Models whose builders set initial values in various ways, all legal in plain torch:
see :func:`build`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.init import orthogonal_
from torch.nn.utils import parametrizations, parametrize

D, V = 8, 24


class Block(nn.Module):
    """x + tanh(linear(x))"""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Scale(nn.Module):
    """Scale with a parameter of ``value`` in ``__init__``,
    and of ones after ``reset_parameters``.
    """

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D,), value))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Orthogonal(nn.Linear):
    """Linear whose ``reset_parameters`` draws an orthogonal weight."""

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


class Scaled(nn.Linear):
    """Linear with a parameter that its ``reset_parameters`` does not set."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Attention(nn.Module):
    """Residual torch.nn.MultiheadAttention,
    whose reset method is private (``_reset_parameters``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Own(nn.Parameter):
    """Subclass of nn.Parameter."""


class Symmetric(nn.Module):
    """Parametrization that makes a weight symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.T) / 2


def build(how: str) -> nn.Sequential:
    """Build embedding, two blocks and head;
    ``how`` names the way in which the first block gets its values.
    """
    linear = nn.Linear(D, D)
    block: nn.Module = Block(linear)
    embedding = nn.Embedding(V, D)
    if how == "another tensor":
        linear.weight = nn.Parameter(torch.eye(D))
    elif how == "another tensor, drawn later":
        linear.weight = nn.Parameter(torch.empty(D, D))
        nn.init.normal_(linear.weight)
    elif how == "pretrained":
        embedding = nn.Embedding.from_pretrained(torch.randn(V, D), freeze=False)
    elif how == "orthogonal":
        orthogonal_(linear.weight)
    elif how == "xavier":
        nn.init.xavier_uniform_(linear.weight)
    elif how == "scaled":
        with torch.no_grad():
            linear.weight *= 0.5
    elif how == "drawn again":
        linear.reset_parameters()
    elif how == "orthogonal by reset":
        block = Block(Orthogonal(D, D))
    elif how == "ones":
        block = Scale()
    elif how == "not ones":
        block = Scale(0.3)
    elif how == "left out":
        block = Scaled()
    elif how == "attention":
        block = Attention()
    elif how == "encoder":
        block = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)
    elif how == "own class":
        linear.bias = Own(torch.zeros(D))
    elif how == "two dtypes":
        block = Block(nn.Linear(D, D, dtype=torch.float64))
    elif how == "parametrized":
        parametrize.register_parametrization(linear, "weight", Symmetric())
    elif how == "weight norm":
        parametrizations.weight_norm(linear)
    elif how == "orthogonal parametrization":
        parametrizations.orthogonal(linear)
    elif how == "old weight norm":
        torch.nn.utils.weight_norm(linear)  # type: ignore[no-untyped-call]
    elif how == "spectral norm":
        torch.nn.utils.spectral_norm(linear)
    model = nn.Sequential(embedding, block, Block(nn.Linear(D, D)), nn.Linear(D, V))
    if how == "weight norm":
        model.initialise = lambda name, tensor: (
            tensor.fill_(1.0) if "original0" in name else tensor.normal_(std=0.2)
        )  # type: ignore[assignment]
    return model
