"""Loss of each training corpus of a mixture, free with the sums of a step.

source           indices -> the corpus of each row            on the ranks of the last stage
with_corpora     losses of labels -> sums of each corpus      recorded as a model's metrics are
step             one all-reduce of all sums                   train/loss/NAME
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from os.path import realpath
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from meshwright.config import Data
from meshwright.current import CurrentMicrobatch
from meshwright.model.metrics import OF_CORPUS, record
from meshwright.pipeline.values import IGNORED_LABEL, Loss

MOST_PARTS = 4
"""Number of last parts of a path that its name has at most."""
MOST_LETTERS = 60


CorporaOf = Callable[[Sequence[int]], list[int]]
"""Method ``corpora_of`` of a source: sample indices -> the corpus of each, as a position in
:func:`corpus_losses`; empty if there is only one.
"""


def corpus_losses(data: Data) -> tuple[str, ...]:
    """Return the metric of each training corpus, in the order of the configuration; of a path that
    occurs several times once. Empty with one corpus.

    A corpus is called by the last part of its path, or by its folder if that is ``train``; by more
    parts where several have the same.
    """
    mixtures = [data.train, *(stage.train for stage in data.stages)]
    paths = [
        path
        for mixture in mixtures
        for path in ([mixture] if isinstance(mixture, str) else [each.path for each in mixture])
    ]
    unique: dict[str, str] = {}
    for path in paths:
        unique.setdefault(realpath(path), path)
    if data.builder is not None or len(unique) < 2:
        return ()
    return tuple(f"{OF_CORPUS}{name}" for name in _names(list(unique.values())))


def _names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: the last parts that only it has, as few as possible."""
    parts = [_parts(path) for path in paths]
    depths = [1] * len(paths)
    names = [""] * len(paths)
    for _ in range(MOST_PARTS):
        names = ["-".join(of_path[-depth:]) for of_path, depth in zip(parts, depths, strict=True)]
        counts = Counter(names)
        depths = [depth + (counts[name] > 1) for name, depth in zip(names, depths, strict=True)]
    found: list[str] = []
    for name in names:
        number, free = 1, name[-MOST_LETTERS:]
        while free in found:
            number += 1
            free = f"{name[-MOST_LETTERS:]}-{number}"
        found.append(free)
    return found


def _parts(path: str) -> list[str]:
    """Return the folders and the name of a path, without a last ``train``."""
    parts = [each for each in PurePath(path).parts if each not in ("/", ".", "..")]
    if len(parts) > 1 and parts[-1] == "train":
        parts.pop()
    return [re.sub(r"[^A-Za-z0-9_.]+", "-", each).strip("-.") or "corpus" for each in parts]


def with_corpora(loss: Loss, metrics: Sequence[str], current: CurrentMicrobatch) -> Loss:
    """Return the loss that also records the mean of each corpus.

    ``metrics``: from :func:`corpus_losses`. ``current``: has the corpora of the rows.
    """

    def recorded(output: Any, labels: Tensor) -> Tensor:
        losses = loss(output, labels)
        if current.corpora is not None:
            with torch.no_grad():
                _record(losses, labels, metrics, current.corpora)
        return losses

    return recorded


def _record(losses: Tensor, labels: Tensor, metrics: Sequence[str], corpora: Tensor) -> None:
    """Record the sums of losses and labels (B, ...) of each corpus; corpora: (B,) int64."""
    of_rows = torch.stack(
        [
            losses.flatten(1).sum(1, dtype=torch.float64),
            (labels != IGNORED_LABEL).flatten(1).sum(1, dtype=torch.float64),
        ],
        dim=1,
    )
    sums = of_rows.new_zeros(len(metrics), 2).index_add_(0, corpora, of_rows)
    for name, (loss_sum, count) in zip(metrics, sums, strict=True):
        record(name, loss_sum, count)
