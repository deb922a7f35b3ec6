"""A user's own samples: any map-style dataset of (inputs, labels), named in the configuration by its builder.

    data.builder = "my_package.images:build"        build(split, **data.options) -> dataset, or None
    dataset[i] -> (inputs, labels)                   inputs: a tensor, or a tuple or dict of tensors, of one sample
                                                     labels: a tensor, or a number; -100 does not count

``split`` is "train" or "validation"; a dataset that has no validation returns None for it. The same index must give
the same sample in every process: that is all that layouts, resuming and verify need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from meshwright.config import RunConfig
from meshwright.config.functions import error_place, find_function
from meshwright.data.corpus import IGNORE
from meshwright.errors import DataError


class Spec(NamedTuple):
    """One tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class Samples(NamedTuple):
    """A dataset, checked."""

    name: str
    dataset: Any
    num_samples: int
    like: tuple[Spec, ...] | None = None
    """Shapes and dtypes of the first sample; None: not read yet."""

    def sample(self, number: int) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of one sample, as tensors.

        Raises:
            DataError: the dataset fails, gives something else than a pair of tensors, or another shape than before.
        """
        try:
            found = self.dataset[number]
        except Exception as error:
            raise DataError(
                "MW-DATA-009",
                f"{self.name}: sample {number} of {self.num_samples:,} failed{error_place(error)}: "
                f"{type(error).__name__}: {error}",
            ) from error
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                "MW-DATA-010",
                f"{self.name}: sample {number} is a {type(found).__name__}: return (inputs, labels), inputs a tensor "
                f"or a tuple or dict of tensors, labels a tensor or a number",
            )
        try:
            inputs, labels = (tree_map(torch.as_tensor, part) for part in found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError("MW-DATA-011", f"{self.name}: sample {number} holds what is no number: {error}") from error
        if not isinstance(labels, Tensor) or not tree_leaves(inputs):
            raise DataError(
                "MW-DATA-012", f"{self.name}: the labels of sample {number} are a {type(found[1]).__name__}, no tensor"
            )
        specs = tuple(Spec(tuple(leaf.shape), leaf.dtype) for leaf in (*tree_leaves(inputs), labels))
        if self.like is not None and specs != self.like:
            raise DataError(
                "MW-DATA-013",
                f"{self.name}: sample {number} has {', '.join(map(str, specs))} where sample 0 has "
                f"{', '.join(map(str, self.like))}: all samples must be alike, since stages know beforehand what they "
                f"hand on. Pad or crop them",
            )
        return inputs, labels

    def fingerprint(self) -> dict[str, str]:
        """Return length, first and last sample as hashes: they distinguish datasets as far as their ends do."""
        ends = {f"sample {number}": _sha256(self.sample(number)) for number in (0, self.num_samples - 1)}
        return {"train_samples": str(self.num_samples)} | ends


def _sha256(sample: tuple[Any, Tensor]) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(sample):
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class DatasetSource(NamedTuple):
    """A dataset and the order in which a run goes through it; see :class:`meshwright.data.causal.CorpusSource`."""

    samples: Samples
    order: Callable[[int], int | None]

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return self.samples.num_samples

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...)) of these sample indices of the run.

        Past the end of a dataset that is read once, rows are sample 0 with IGNORE labels.
        """
        rows = [self._row(index) for index in indices]
        inputs, labels = (default_collate([row[part] for row in rows]) for part in (0, 1))
        return inputs, labels

    def _row(self, index: int) -> tuple[Any, Tensor]:
        number = self.order(index)
        inputs, labels = self.samples.sample(number or 0)
        return inputs, labels if number is not None else torch.full_like(labels, IGNORE)


def open_dataset(config: RunConfig, split: str) -> Samples | None:
    """Open the dataset of a split; None where its builder has none.

    Raises:
        DataError: the builder cannot be found, fails, or returns nothing that has a length and samples.
    """
    path = config.data.builder
    assert path is not None
    builder = find_function(path, "data.builder", "a function of (split, **data.options)", DataError)
    try:
        dataset = builder(split, **config.data.options)
        if dataset is None and split != "train":
            return None
        num_samples = len(dataset)
    except Exception as error:
        raise DataError(
            "MW-DATA-014",
            f"data.builder {path}({split!r}) with data.options {config.data.options} failed{error_place(error)}: "
            f"{type(error).__name__}: {error}",
        ) from error
    if num_samples < 1 or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "MW-DATA-015",
            f"data.builder {path}({split!r}) returned a {type(dataset).__name__} of {num_samples} samples",
        )
    samples = Samples(f"{path}({split!r})", dataset, num_samples)
    inputs, labels = samples.sample(0)
    like = tuple(Spec(tuple(leaf.shape), leaf.dtype) for leaf in (*tree_leaves(inputs), labels))
    samples = samples._replace(like=like)
    samples.sample(num_samples - 1)  # the likeliest to differ: an error appears before launch
    return samples
