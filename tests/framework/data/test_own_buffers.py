"""Readers that fill the same tensor for each sample, and labels that no default loss takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.data.collate import own_copy
from meshwright.data.dataset import open_dataset
from meshwright.data.stream import Stream
from tests.support.errors import raises

V, S, N = 13, 6, 24


def sample(number: int) -> tuple[Tensor, Tensor]:
    x = (torch.arange(S + 1) * (number + 3)) % V
    return x[:-1], x[1:]


class Ring:
    """Stream that fills the same two tensors, or arrays in a dict, for each sample."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        x, y = torch.zeros(S, dtype=torch.long), torch.zeros(S, dtype=torch.long)
        a = np.zeros(S, dtype=np.int64)
        for number in range(N):
            for into, value in zip((x, y), sample(number), strict=True):
                into.copy_(value)
            a[:] = y.numpy()
            yield x, a if self.kind == "array" else y


class Map:
    """Map-style dataset; "ring": it fills the same tensor for each sample."""

    def __init__(self, kind: str) -> None:
        self.kind, self.x, self.mask = kind, torch.zeros(S, dtype=torch.long), torch.ones(S)

    def __len__(self) -> int:
        return N

    def __getitem__(self, number: int) -> Any:
        x, y = sample(number)
        if self.kind == "ring":
            return self.x.copy_(x), y
        if self.kind == "constant":
            return {"tokens": x, "mask": self.mask}, y
        labels = {"bool": y > 5, "float": y.double()}.get(
            self.kind, y.int() if self.kind == "int" else y
        )
        return x, labels


def stream(split: str, kind: str) -> Any:
    return Ring(kind) if split == "train" else None


def mapped(split: str, kind: str) -> Any:
    return Map(kind) if split == "train" else None


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V))


def config_of(runs: Path, builder: str = "mapped", kind: str = "", **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": "run", "directory": str(runs)},
        "model": {"builder": f"{__name__}:model"},
        "data": {"builder": f"{__name__}:{builder}", "options": {"kind": kind}},
        "batch": {"micro_batch_size": 2, "global_batch": 4},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
        "train": {"device": "cpu", "steps": 2, "dtype": "float64"},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    return resolve(RunConfig.model_validate(tree), 1)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_stream_that_fills_one_buffer_gives_its_samples(kind: str, tmp_path: Path) -> None:
    found = open_dataset(config_of(tmp_path, "stream", kind).data, "train")
    assert isinstance(found, Stream)
    raws = [found.raw(number) for number in range(4)]
    for number, raw in enumerate(raws):
        inputs, labels = found.collate.one(raw, number)
        assert torch.equal(inputs, sample(number)[0]) and torch.equal(labels, sample(number)[1])


def test_a_dataset_that_fills_one_buffer_is_refused(tmp_path: Path) -> None:
    """Threads read several samples at the same time, so that no copy could be right."""
    with raises("MW-DATA-129"):
        open_dataset(config_of(tmp_path, kind="ring").data, "train")
    assert open_dataset(config_of(tmp_path, kind="constant").data, "train") is not None


class Pair(NamedTuple):
    x: Any
    y: Any


def test_a_copy_shares_no_memory() -> None:
    x = np.zeros(3)
    raw = Pair(
        {"a": torch.zeros(3), "b": [x, bytearray(b"abc")]},
        (array("i", [1, 2]), memoryview(b"xy"), [1, 2], "t"),
    )
    copied = own_copy(raw)
    raw.x["a"] += 1
    x += 1
    raw.x["b"][1][0] = 0
    raw.y[0][0], raw.y[2][0] = 7, 7
    assert type(copied) is Pair and not copied.x["a"].any() and not copied.x["b"][0].any()
    assert copied.x["b"][1] == b"abc" and copied.y == (array("i", [1, 2]), b"xy", [1, 2], "t")


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_labels_that_are_no_classes_are_refused(kind: str, tmp_path: Path) -> None:
    with raises("MW-PIPELINE-046") as error:
        draw_blueprint(config_of(tmp_path, kind=kind))
    assert kind in error.value.message
    draw_blueprint(config_of(tmp_path, kind="int"))


def trained(runs: Path, steps: int, **group: Any) -> dict[str, Tensor]:
    groups = {"parameter_groups": [{"names": ["1.*"], **group}]} if group else {}
    with meshwright.open_run(config_of(runs, model=groups, train={"steps": steps})) as run:
        while run.step < steps:
            run.take_step()
        run.save()
        layers = run.parts.executor.stages[0].layers
        return {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}


def test_weights_that_were_frozen_are_named(tmp_path: Path) -> None:
    trained(tmp_path, 1, frozen=True)
    with raises("MW-RUN-040", "1.weight", 1):
        trained(tmp_path, 2)


def test_a_rate_of_zero_can_be_raised_later(tmp_path: Path) -> None:
    """The next move of that message."""
    first = trained(tmp_path, 1, learning_rate_factor=0.0)
    second = trained(tmp_path, 2, learning_rate_factor=1.0)
    assert not torch.equal(first["1.weight"], second["1.weight"])
