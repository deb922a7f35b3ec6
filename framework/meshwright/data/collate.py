"""Collation of a user's raw samples into the tensors of a micro-batch,
by default or by ``data.collate``, with checks.

A sample of the dataset is (inputs, labels) already, or whatever ``data.collate`` takes: it receives
the raw samples of a micro-batch as a list, and returns (inputs, labels), each tensor with these
samples along its first dim. A replica calls it with its own samples alone, so that tokenising or
decoding in it is divided over the replicas.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from meshwright.config import Data
from meshwright.config.functions import error_place, find_function
from meshwright.errors import DataError, reason_of


class Spec(NamedTuple):
    """Shape and dtype of one tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def specs_of(inputs: Any, labels: Tensor) -> tuple[Spec, ...]:
    """Return shapes and dtypes of one sample."""
    return tuple(Spec(tuple(leaf.shape), leaf.dtype) for leaf in (*tree_leaves(inputs), labels))


def sha256_of(sample: tuple[Any, Tensor]) -> str:
    """Return a hash of the tensors of a sample."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(sample):
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        digest.update(
            leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def own_copy(raw: Any) -> Any:
    """Return a raw sample whose tensors and arrays, also in lists, tuples and dicts, are its own.

    A reader of a ring buffer may fill the same tensor for each sample, while several are kept.
    """
    if isinstance(raw, Tensor):
        return raw.clone()
    if isinstance(raw, np.ndarray | bytearray | array):
        return copy.copy(raw)
    if isinstance(raw, memoryview):
        return bytes(raw)
    if type(raw) is list:
        # of token ids or text: no tensors in it
        is_plain = bool(raw) and isinstance(raw[0], int | float | str)
        return raw.copy() if is_plain else [own_copy(each) for each in raw]
    if type(raw) is dict:
        return {key: own_copy(value) for key, value in raw.items()}
    if isinstance(raw, tuple):
        members = [own_copy(each) for each in raw]
        return type(raw)(*members) if hasattr(raw, "_fields") else tuple(members)
    return raw


def as_index(labels: Tensor) -> Tensor:
    """Return integer labels as int64, which losses of classes need; others unchanged."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return labels
    return labels.long()


class Collate(NamedTuple):
    """Collate function: converts raw samples to tensors and checks their shapes."""

    name: str
    """Dataset, for errors."""
    path: str | None = None
    """``data.collate``; None: raw samples are pairs."""
    function: Callable[[list[Any]], Any] | None = None
    like: tuple[Spec, ...] | None = None
    """Shapes and dtypes of the first sample; None: not read yet."""

    def __call__(self, raws: Sequence[Any], numbers: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...)) of raw samples. ``numbers``:
        for errors.

        Raises:
            DataError: ``data.collate`` fails, or shapes are not those of the first sample.
        """
        if self.function is None:
            rows = [self._pair(raw, number) for raw, number in zip(raws, numbers, strict=True)]
            inputs, labels = (default_collate([row[part] for row in rows]) for part in (0, 1))
            return inputs, labels
        where = (
            f"data.collate = {self.path!r}, samples {', '.join(map(str, numbers))} of {self.name}"
        )
        try:
            inputs, labels = (tree_map(torch.as_tensor, part) for part in self.function(list(raws)))
            labels = as_index(labels)
            ragged = [
                leaf
                for leaf in (*tree_leaves(inputs), labels)
                if leaf.dim() < 1 or len(leaf) != len(raws)
            ]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-106",
                f"{where}, failed{error_place(error)}: {reason_of(error)}. It returns (inputs,"
                " labels): tensors, or for the inputs a tuple or dict of tensors",
            ) from error
        found = () if ragged else specs_of(tree_map(lambda leaf: leaf[0], inputs), labels[0])
        if ragged or (self.like is not None and found != self.like):
            wanted = "the samples along the first dim"
            if not ragged:
                wanted = ", ".join(map(str, self.like or ()))
            raise DataError(
                "MW-DATA-107",
                f"{where}, returned {', '.join(map(str, specs_of(inputs, labels)))}, not"
                f" {len(raws)} samples, each with {wanted}. All samples must have the shapes of the"
                " first: pad or crop to a fixed length",
            )
        return inputs, labels

    def one(self, raw: Any, number: int) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of one sample."""
        inputs, labels = self([raw], [number])
        return tree_map(lambda leaf: leaf[0], inputs), labels[0]

    def check_rows(self, raws: Sequence[Any], numbers: Sequence[int]) -> None:
        """Check that a sample's tensors do not depend on the other samples in the micro-batch,
        which a layout changes.

        Raises:
            DataError: they do.
        """
        if self.function is None:
            return
        together = self(raws, numbers)
        for row, (raw, number) in enumerate(zip(raws, numbers, strict=True)):
            beside = tree_map(lambda leaf, row=row: leaf[row], together)
            if sha256_of(self.one(raw, number)) != sha256_of(beside):
                raise DataError(
                    "MW-DATA-108",
                    f"data.collate = {self.path!r}: sample {number} of {self.name} differs between"
                    " a micro-batch and a call by itself. Which samples share a micro-batch"
                    " depends on the layout: each row must follow from its own sample, without"
                    " random numbers",
                )

    def _pair(self, raw: Any, number: int) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of one sample, as tensors.
        Raises DataError for anything but a pair of tensors.
        """
        if not isinstance(raw, tuple | list) or len(raw) != 2:
            raise DataError(
                "MW-DATA-010",
                f"{self.name}: sample {number} is a {type(raw).__name__}: return (inputs, labels),"
                " inputs a tensor or a tuple or dict of tensors, labels a tensor or a number; or"
                " set data.collate",
            )
        try:
            inputs, labels = (tree_map(torch.as_tensor, part) for part in raw)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                "MW-DATA-011",
                f"{self.name}: sample {number} holds a value that is no number: {error}",
            ) from error
        if not isinstance(labels, Tensor) or not tree_leaves(inputs):
            raise DataError(
                "MW-DATA-012",
                f"{self.name}: the labels of sample {number} are a {type(raw[1]).__name__}, no"
                " tensor",
            )
        labels = as_index(labels)
        specs = specs_of(inputs, labels)
        if self.like is not None and specs != self.like:
            raise DataError(
                "MW-DATA-013",
                f"{self.name}: sample {number} has {', '.join(map(str, specs))} where sample 0 has"
                f" {', '.join(map(str, self.like))}: all samples must have the same shapes, which"
                " pipeline stages need in advance. Pad or crop them",
            )
        return inputs, labels


def make_collate(data: Data, name: str) -> Collate:
    """Return the conversion that the configuration names. ``name``: dataset, for errors."""
    path = data.collate
    if path is None:
        return Collate(name)
    function = find_function(path, "data.collate", "a function of (list of samples)", DataError)
    return Collate(name, path, function)
