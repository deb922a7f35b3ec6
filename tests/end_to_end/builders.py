"""Models of users who err, or whose machine does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright_models.gpt2
import meshwright_models.llama


class Trap(nn.Module):
    """Lets everything through, until one rank is asked for the given time; ``once``:
    a file that says it has failed.
    """

    def __init__(self, rank: int, at_call: int, killed: bool | str, once: str) -> None:
        """Set the trap. ``killed``: True: by SIGKILL; "agent": the process that forks the ranks is;
        "hang": not at all; "stop": by SIGSTOP; False: an error is raised.
        """
        super().__init__()
        self.rank, self.at_call, self.killed, self.once = rank, at_call, killed, once
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and int(os.environ.get("RANK", "0")) == self.rank:
            self.num_calls += 1
            if self.num_calls >= self.at_call and not (self.once and Path(self.once).exists()):
                if self.once:
                    Path(self.once).touch()
                if self.killed == "hang":
                    time.sleep(3600)
                elif self.killed == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif self.killed == "agent":
                    agent = multiprocessing.parent_process()
                    assert agent is not None and agent.pid is not None
                    os.kill(agent.pid, signal.SIGKILL)
                    time.sleep(3600)  # this process dies with it
                elif self.killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("the layer of a user has failed")
        return x


class Pause(nn.Module):
    """Lets everything through, later: forward and backward, on one rank or on all."""

    def __init__(self, pause_s: float, rank: int | None) -> None:
        super().__init__()
        self.pause_s, self.rank = pause_s, rank

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta or self.rank not in (None, int(os.environ.get("RANK", "0"))):
            return x
        time.sleep(self.pause_s)
        later = x.view_as(x)
        if later.requires_grad:
            later.register_hook(lambda gradient: time.sleep(self.pause_s))
        return later


def in_front(plain: nn.Sequential, of: str, layer: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a layer in front of each whose name begins so; all that the model says of itself
    stays.
    """
    layers = nn.Sequential()
    for name, each in plain.named_children():
        if name.startswith(of):
            layers.add_module(f"before_{name}", layer())
        layers.add_module(name, each)
    for attribute in ("sharding_plan", "divisible", "tied_weights", "initialise"):
        setattr(layers, attribute, getattr(plain, attribute))
    return layers


def slow(
    pause_s: float, rank: int | None = None, of: str = "block", **options: Any
) -> nn.Sequential:
    """GPT-2 that pauses in front of each of these layers for every micro-batch:
    the same numbers as without.
    """
    return in_front(meshwright_models.gpt2.build(**options), of, lambda: Pause(pause_s, rank))


def trapped(
    rank: int, at_call: int, killed: bool | str = False, once: str = "", **options: Any
) -> nn.Sequential:
    """GPT-2 with a trap in front of every block: whatever the stage, the rank meets one."""
    return in_front(
        meshwright_models.gpt2.build(**options), "block", lambda: Trap(rank, at_call, killed, once)
    )


def trapped_llama(
    rank: int, at_call: int, killed: bool | str = False, once: str = "", **options: Any
) -> nn.Sequential:
    """Return the same of Llama, whose blocks may have experts."""
    return in_front(
        meshwright_models.llama.build(**options), "block", lambda: Trap(rank, at_call, killed, once)
    )


def partly_frozen(source: str, **options: Any) -> nn.Sequential:
    """GPT-2 whose first block and (tied) embedding are not trained;
    they come out of a file as one number.
    """
    model = meshwright_models.gpt2.build(**options)
    initialise = model.initialise
    for name, parameter in model.named_parameters():
        if name.startswith(("embedding", "block0")):
            parameter.requires_grad_(False)

    def read(name: str, tensor: Tensor) -> None:
        initialise(name, tensor)
        if name.startswith(("embedding", "block0")):
            tensor.mul_(float(Path(source).read_text()))

    model.initialise = read
    return model


def counts_letters(vocab_size: int = 300) -> nn.Module:
    """No nn.Sequential."""
    return nn.Linear(vocab_size, vocab_size)


def two_outputs(vocab_size: int = 300) -> nn.Sequential:
    """Return a model whose last layer returns no logits of each token."""
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.GRU(8, vocab_size))


def of_another_width(vocab_size: int = 300) -> nn.Sequential:
    """Return two layers of which the second does not take what the first one gives."""
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(9, vocab_size))


class Seen(nn.Module):
    """Remembers, in a buffer of a dtype that no checkpoint holds, whether it was ever used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.logical_not_()
        return x


def with_a_boolean_buffer(**options: Any) -> nn.Sequential:
    """GPT-2 behind such a layer."""
    return in_front(meshwright_models.gpt2.build(**options), "norm", Seen)
