"""User-defined map-style datasets of (inputs, labels), named in the configuration by their builder.

    data.builder = "my_package.images:build"        build(split, **data.options) -> dataset, or None
    dataset[i] -> (inputs, labels)                   inputs: a tensor, or a tuple or dict of tensors, of one sample
                                                     labels: a tensor, or a number; -100 does not count

``split`` is "train" or "validation"; the builder returns None if there is no validation set. The same index must give
the same sample in every process: layouts, resumes and `meshwright verify` depend on it.
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
    """Shape and dtype of one tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def _specs(inputs: Any, labels: Tensor) -> tuple[Spec, ...]:
    return tuple(Spec(tuple(leaf.shape), leaf.dtype) for leaf in (*tree_leaves(inputs), labels))


class Samples(NamedTuple):
    """Dataset whose samples are checked when they are read."""

    name: str
    dataset: Any
    num_samples: int
    like: tuple[Spec, ...] | None = None
    """Shapes and dtypes of the first sample; None: not read yet."""

    def sample(self, number: int) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of one sample, as tensors.

        Raises:
            DataError: the dataset raises, or returns no pair of tensors, or shapes that differ from ``like``.
        """
        try:
            pair = self.dataset[number]
        except Exception as error:
            raise DataError(
                "MW-DATA-009",
                f"{self.name}: sample {number} of {self.num_samples:,} failed{error_place(error)}: "
                f"{type(error).__name__}: {error}",
            ) from error
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                "MW-DATA-010",
                f"{self.name}: sample {number} is a {type(pair).__name__}: return (inputs, labels), inputs a tensor "
                f"or a tuple or dict of tensors, labels a tensor or a number",
            )
        try:
            inputs, labels = (tree_map(torch.as_tensor, part) for part in pair)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                "MW-DATA-011", f"{self.name}: sample {number} holds a value that is no number: {error}"
            ) from error
        if not isinstance(labels, Tensor) or not tree_leaves(inputs):
            raise DataError(
                "MW-DATA-012", f"{self.name}: the labels of sample {number} are a {type(pair[1]).__name__}, no tensor"
            )
        specs = _specs(inputs, labels)
        if self.like is not None and specs != self.like:
            raise DataError(
                "MW-DATA-013",
                f"{self.name}: sample {number} has {', '.join(map(str, specs))} where sample 0 has "
                f"{', '.join(map(str, self.like))}: all samples must have the same shapes, which pipeline stages need "
                f"in advance. Pad or crop them",
            )
        return inputs, labels

    def fingerprint(self) -> dict[str, str]:
        """Return the number of samples, and hashes of the first and the last one."""
        ends = {f"sample {number}": _sha256(self.sample(number)) for number in (0, self.num_samples - 1)}
        return {"train_samples": str(self.num_samples)} | ends


def _sha256(sample: tuple[Any, Tensor]) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(sample):
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class DatasetSource(NamedTuple):
    """A dataset and the order in which a run reads it; see :class:`meshwright.data.causal.CorpusSource`."""

    samples: Samples
    order: Callable[[int], int | None]

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return self.samples.num_samples

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...)) of these sample indices of the run.

        Past the end of a dataset that is read once, rows repeat sample 0 with IGNORE labels.
        """
        rows = [self._row(index) for index in indices]
        inputs, labels = (default_collate([row[part] for row in rows]) for part in (0, 1))
        return inputs, labels

    def _row(self, index: int) -> tuple[Any, Tensor]:
        number = self.order(index)
        inputs, labels = self.samples.sample(number or 0)
        return inputs, labels if number is not None else torch.full_like(labels, IGNORE)


def open_dataset(config: RunConfig, split: str) -> Samples | None:
    """Open the dataset of a split; None if its builder returns None.

    Raises:
        DataError: the builder cannot be found, raises, or returns an object without length or samples.
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
    samples = samples._replace(like=_specs(*samples.sample(0)))
    samples.sample(num_samples - 1)  # the sample most likely to differ: an error appears before launch
    return samples
