"""Streams of numbers, right ones and wrong ones, named in configurations of tests."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

LENGTH = 21


def sample(number: int, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number + 1000 * epoch)
    ids = torch.randint(300, (9,), generator=draw)
    return ids[:-1], ids[1:]


class Plain:
    """Iterable that gives the same samples each time; another order in each epoch."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield sample(number, self.epoch)


class Stateful(Plain):
    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield sample(self.at - 1, self.epoch)

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Late(Stateful):
    """Counts a sample only when the next one is wanted."""

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            yield sample(self.at, self.epoch)
            self.at += 1


class Buffered(Stateful):
    """A shuffle whose buffer is not in the state."""

    def __iter__(self) -> Iterator[Any]:
        draw, buffer = random.Random(5), []
        while self.at < self.length:
            buffer.append(sample(self.at, self.epoch))
            self.at += 1
            if len(buffer) == 4:
                yield buffer.pop(draw.randrange(4))
        yield from buffer


class Handles(Plain):
    """Yields what no other process can have."""

    def __iter__(self) -> Iterator[Any]:
        return ((number, threading.Lock()) for number in range(self.length))


class From:
    """Begins at any number."""

    def iterate(self, start: int) -> Iterator[Any]:
        return (sample(number) for number in range(start, LENGTH))


class Large(Stateful):
    def state_dict(self) -> Any:
        return {"at": self.at, "buffer": [0] * 20000}


class Binary(Stateful):
    def state_dict(self) -> Any:
        return {"at": self.at, "generator": b"\x00"}


class Noise(Plain):
    def __iter__(self) -> Iterator[Any]:
        return (sample(random.randrange(10**9)) for _ in range(self.length))


class Breaks(Stateful):
    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            if self.at == 18:
                raise ValueError("record 18 is damaged")
            yield each


class Slow(Stateful):
    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            time.sleep(0.02)
            yield each


class CountedPlain(Plain):
    """Counts how often it is built, and the samples that are read,
    of all objects of this process.
    """

    built = read = 0

    def __init__(self) -> None:
        super().__init__(1000)
        CountedPlain.built += 1

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            CountedPlain.read += 1
            yield each


class Counted(CountedPlain, Stateful):
    """The same with a state."""


def once() -> Iterator[Any]:
    return (sample(number) for number in range(LENGTH))


KINDS = {
    "handles": Handles,
    "plain": Plain, "stateful": Stateful, "late": Late, "buffered": Buffered, "from": From, "large": Large,
    "binary": Binary, "noise": Noise, "breaks": Breaks, "slow": Slow, "once": once, "empty": lambda: Plain(0),
    "counted": Counted, "counted plain": CountedPlain,
}  # fmt: skip


def build(split: str, kind: str = "stateful") -> Any:
    return KINDS[kind]() if split == "train" else Plain(11)


def rows(split: str) -> Any:
    """A map-style dataset of raw numbers."""
    return list(range(37)) if split == "train" else list(range(5))


def collate(numbers: list[int]) -> Any:
    pairs = [sample(number) for number in numbers]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def leaving(numbers: list[int]) -> Any:
    """Ends the process that is not the one of the test."""
    if "worker_main" in "".join(sys.argv):
        os._exit(3)
    return collate(numbers)


def elsewhere(numbers: list[int]) -> Any:
    if "worker_main" in "".join(sys.argv):
        raise ValueError("only in another process")
    return collate(numbers)


def first_of(handles: list[Any]) -> Any:
    return collate([first if isinstance(first, int) else 0 for first, _ in handles])


def padded(numbers: list[int]) -> Any:
    """Pads to the longest."""
    ids, labels = collate(numbers)
    length = 4 + max(numbers) % 3
    return ids[:, :length], labels[:, :length]


def centred(numbers: list[int]) -> Any:
    ids, labels = collate(numbers)
    return ids - ids.min(), labels
