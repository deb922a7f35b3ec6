"""Models that a rebuilt copy could get wrong: what plain torch does with them is the reference."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

D = 8


class Body(nn.Module):
    """A residual branch; what it does besides is its subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def around(vocab_size: int, *bodies: nn.Module) -> nn.Sequential:
    """Embedding, bodies, head."""
    return nn.Sequential(nn.Embedding(vocab_size, D), *bodies, nn.Linear(D, vocab_size))


class Cancelled(nn.Module):
    """A residual branch with two biases whose gradients are tiny: one that softmax cancels,
    and one times ``factor``.

    The exact gradient of the first is 0, as that of the bias of attention's keys.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(D, D), factor
        self.shift, self.faint = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.linear(x) + self.shift, -1)
        return x + scores + self.factor * self.faint


def cancelled(vocab_size: int, factor: float = 1e-9) -> nn.Sequential:
    model = around(vocab_size, Cancelled(factor), Cancelled(factor))

    def initialise(name: str, tensor: Tensor) -> None:
        tensor.zero_() if name.endswith(("shift", "faint")) else nn.init.normal_(tensor, std=0.5)

    model.initialise = initialise  # type: ignore[assignment]
    return model


class WithDropout(Body):
    """One dropout; ``calls`` times."""

    def __init__(self, p: float, calls: int = 1) -> None:
        super().__init__()
        self.dropout, self.calls = nn.Dropout(p), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.dropout(super().forward(x))
        return x


def quiet_dropout(vocab_size: int) -> nn.Sequential:
    """Dropout that no option turns on."""
    return around(vocab_size, WithDropout(0.0), WithDropout(0.0))


def dropout_twice(vocab_size: int) -> nn.Sequential:
    """Return one module, called twice in a forward."""
    return around(vocab_size, WithDropout(0.3, calls=2))


class Functional(Body):
    """Drops elements by a function."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.p, self.training)


def functional_dropout(vocab_size: int, dropout: float) -> nn.Sequential:
    return around(vocab_size, Functional(dropout))


class Noisy(Body):
    """Draws by itself."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (torch.rand_like(x) >= self.p) if self.p else x


def noisy_dropout(vocab_size: int, dropout: float) -> nn.Sequential:
    return around(vocab_size, Noisy(dropout))


def hooked(vocab_size: int) -> nn.Sequential:
    """Return a hook that scales a weight's gradient."""
    model = around(vocab_size, Body())
    model[1].linear.weight.register_hook(lambda gradient: gradient * 0.25)
    return model


def written_by_data(vocab_size: int, std: float = 0.02) -> nn.Sequential:
    """First values as many write them: ``.data`` in ``apply``."""
    model = around(vocab_size, Body(), Body())

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, std)
            module.bias.data.zero_()

    return model.apply(initialise)


def undeclared_sharing(vocab_size: int) -> nn.Sequential:
    """Return a declared tie that the builder does not make."""
    model = nn.Sequential(nn.Embedding(vocab_size, D), Body(), nn.Linear(D, vocab_size, bias=False))
    model.tied_weights = [("0.weight", "2.weight")]
    return model


def parametrized(vocab_size: int) -> nn.Sequential:
    """Weight norm, torch's new one: two originals and a computed weight."""
    body = Body()
    parametrizations.weight_norm(body.linear)
    return around(vocab_size, body)


class Again(WithDropout):
    """Recomputes itself in backward, dropout too."""

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


def checkpointed(vocab_size: int) -> nn.Sequential:
    """torch's own activation checkpointing around a dropout that is called twice."""
    return around(vocab_size, Again(0.3, calls=2))


def own_loss(vocab_size: int, breaks: bool = False) -> nn.Sequential:
    """Return a loss of its own that is not zero where the label is ignored; or one that raises."""
    model = around(vocab_size, Body())

    def loss(output: Any, labels: Tensor) -> Tensor:
        if breaks and not output.is_meta:
            raise ValueError("no such label")
        return F.cross_entropy(
            output.flatten(0, -2), labels.clamp_min(0).flatten(), reduction="none"
        ).view_as(labels)

    model.loss = loss  # type: ignore[assignment]
    return model


class Failing(Body):
    """Raises in a world of 2 ranks, dies in one of 3, and says nothing in one of 4."""

    def forward(self, x: Tensor) -> Tensor:
        size = 0 if x.is_meta else int(os.environ.get("WORLD_SIZE", "1"))
        if size == 2:
            raise RuntimeError("two are too many")
        if size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if size == 4:
            time.sleep(600)
        return super().forward(x)


def failing(vocab_size: int) -> nn.Sequential:
    return around(vocab_size, Failing())
