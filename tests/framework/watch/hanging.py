"""A dataset and a model that hang on one rank, each in a way that users have met."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright_models.gpt2
from meshwright.mesh.comm import CollectiveHandle, Group

LENGTH = 32
BEGAN, ALONE = "began", "MESHWRIGHT_TEST_ALONE"
"""A file in the current directory, the hang has begun; and a variable: this process is rank 0,
and alone.
"""


def _is_me(rank: int) -> bool:
    return os.environ.get("RANK", "-1" if ALONE not in os.environ else "0") == str(rank)


class Sleepy:
    """Random tokens; one rank falls asleep over its so-manieth sample."""

    def __init__(self, rank: int, at_call: int) -> None:
        self.rank, self.at_call, self.num_calls = rank, at_call, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if _is_me(self.rank):
            self.num_calls += 1
            if self.num_calls == self.at_call:
                Path(BEGAN).touch()
                time.sleep(3600)
        tokens = torch.randint(300, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def samples(split: str, rank: int = -2, at_call: int = 0) -> Sleepy | None:
    return Sleepy(rank, at_call) if split == "train" else None


class Hang(nn.Module):
    """Lets everything through, until one rank comes by for the so-manieth time."""

    def __init__(self, how: str, rank: int, at_call: int) -> None:
        super().__init__()
        self.how, self.rank, self.at_call, self.num_calls = how, rank, at_call, 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and _is_me(self.rank):
            self.num_calls += 1
            if self.num_calls == self.at_call:
                Path(BEGAN).touch()
                hang(self.how)
        return x


def hang(how: str) -> None:
    """Begin to."""
    if how == "loop":
        while True:
            pass
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "collective more":
        dist.all_reduce(torch.ones(1))
    if how == "message less":
        transfer = Group.transfer
        Group.transfer = lambda group, tensors, peer, sends, what: (  # type: ignore[method-assign]
            None if sends else transfer(group, tensors, peer, sends, what)
        )
    if how == "collective less":
        all_reduce = Group.all_reduce
        Group.all_reduce = lambda group, tensor, op="sum": (  # type: ignore[method-assign]
            CollectiveHandle() if group.name == "world" else all_reduce(group, tensor, op)
        )
    if how == "collective other":
        all_reduce = Group.all_reduce

        def other(group: Group, tensor: Tensor, op: str = "sum") -> CollectiveHandle:
            if group.name != "world":
                return all_reduce(group, tensor, op)
            group.barrier()
            return CollectiveHandle()

        Group.all_reduce = other  # type: ignore[method-assign]


def hangs(how: str, rank: int, at_call: int, **options: Any) -> nn.Sequential:
    """GPT-2 with a trap in front of every block: whatever the stage, the rank meets one."""
    plain = meshwright_models.gpt2.build(**options)
    layers = nn.Sequential()
    for name, layer in plain.named_children():
        if name.startswith("block"):
            layers.add_module(f"before_{name}", Hang(how, rank, at_call))
        layers.add_module(name, layer)
    for attribute in ("sharding_plan", "divisible", "tied_weights", "initialise"):
        setattr(layers, attribute, getattr(plain, attribute))
    return layers
