"""``batch.padding = "trim"`` in runs: the losses of whole rows, of corpora and of a dataset's rows,
and exact resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from meshwright.config import RunConfig
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import MODELS, exact_losses, layout, lines, run_config, train
from tests.support.marks import long_row

LENGTH = 32


class Conversations:
    """Rows of mixed length, padded to one, as of a conversation each."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(300, (LENGTH + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[3 + index * 7 % 22 :] = -100
        return ids[:-1], labels


def conversations(split: str) -> Conversations:
    """Return the rows, for ``data.builder``."""
    return Conversations()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same rows, in their own order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = Conversations()
        return (rows[index] for index in range(len(rows)))


def stream(split: str) -> Stream:
    """Return the rows, for ``data.builder``."""
    return Stream()


def config_of(corpus: Path, runs: Path, padding: str, text: str, **sections: Any) -> RunConfig:
    data = sections.pop("data", {"packing": "documents", "sequence_length": 96})
    options = MODELS["llama"]["options"] | {"max_sequence_length": 96}
    return run_config(
        corpus,
        runs,
        model=MODELS["llama"] | {"options": options},
        data=data,
        batch={"micro_batch_size": 1, "global_batch": 8, "padding": padding},
        parallel=layout(text),
        train={"steps": 4, "dtype": "float64", "validate_every": 2, "validate_steps": 1},
        **sections,
    )


def numbers(config: RunConfig) -> list[float]:
    names = ("train/loss", "train/grad_norm", "validation/loss")
    return [line[name] for line in lines(config) for name in names if line.get(name) is not None]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("dp2,pp2", None),
        long_row("tp2,sequence,pp2", None),
        ("dp2", {"builder": f"{__name__}:conversations", "train": ""}),
        long_row("pp4", {"builder": f"{__name__}:conversations", "train": ""}),
        long_row("pp4", {"builder": f"{__name__}:stream", "train": ""}),
        long_row("dp2,pp2", {"builder": f"{__name__}:stream", "train": ""}),
    ],
)
def test_the_losses_are_those_of_whole_rows(
    text: str, data: dict[str, Any] | None, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    given = {} if data is None else {"data": data}
    found = []
    for padding, where in (("keep", ""), ("trim", text)):
        config = config_of(corpus, tmp_path / padding, padding, where, **given)
        said = train(pool, config)
        assert ("padding    " in said) == (padding == "trim" and data is None)
        found.append(numbers(config))
    whole, cut = found
    assert len(whole) == len(cut) >= 10
    for expected, number in zip(whole, cut, strict=True):
        assert math.isclose(number, expected, rel_tol=1e-9)


def test_a_resume_is_exact(corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    whole = config_of(corpus, tmp_path / "whole", "trim", "dp2,pp2")
    train(pool, whole)
    cut = config_of(corpus, tmp_path / "cut", "trim", "dp2,pp2", optimizer={"decay_until": 4})
    train(pool, cut.replace(train={"steps": 2}))
    train(pool, cut)
    assert exact_losses(cut) == exact_losses(whole)
