"""User-defined datasets, named in the configuration by their builder: map-style here,
streams in stream.py.

    data.builder = "my_package.images:build"        build(split, **data.options) -> dataset, or None
    dataset[i] -> (inputs, labels)                   inputs: a tensor, or a tuple or dict of tensors, of one sample
                                                     labels: a tensor, or a number; -100: no label

``split`` is "train" or "validation"; the builder returns None if there is no validation set. The
same index must give the same sample in every process: layouts, resumes and `meshwright verify`
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.config import Data
from meshwright.config.functions import error_place, find_function
from meshwright.data.collate import Collate, make_collate, sha256_of, specs_of
from meshwright.data.corpus import IGNORE
from meshwright.data.read_ahead import ReadAhead, Start, Steps
from meshwright.data.stream import Stream, is_stream
from meshwright.errors import DataError, reason_of


class Samples(NamedTuple):
    """Map-style dataset whose samples are checked when they are read."""

    name: str
    dataset: Any
    num_samples: int
    collate: Collate

    def raw(self, number: int) -> Any:
        """Return one sample as the dataset has it.

        Raises:
            DataError: the dataset raises.
        """
        try:
            return self.dataset[number]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-009",
                f"{self.name}: sample {number} of {self.num_samples:,} failed{error_place(error)}:"
                f" {reason_of(error)}",
            ) from error

    def sample(self, number: int) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of one sample, as tensors.

        Raises:
            DataError: the dataset raises, or returns no pair of tensors, or shapes that differ from
                the first.
        """
        return self.collate.one(self.raw(number), number)

    def fingerprint(self) -> dict[str, str]:
        """Return the number of samples, and hashes of the first and the last one."""
        ends = {
            f"sample {number}": sha256_of(self.sample(number))
            for number in (0, self.num_samples - 1)
        }
        return {"train_samples": str(self.num_samples)} | ends


class DatasetSource(NamedTuple):
    """A dataset and the order in which a run reads it;
    see :class:`meshwright.data.causal.CorpusSource`.
    """

    samples: Samples
    order: Callable[[int], int | None]
    ahead: ReadAhead | None = None
    """Threads that read ahead."""

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return self.samples.num_samples

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...))
        of these sample indices of the run.

        Past the end of a dataset that is read once, rows repeat sample 0 with IGNORE labels.
        """
        return self.compute(indices) if self.ahead is None else self.ahead.read(indices)

    def compute(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the samples of these indices, read now and in this thread."""
        numbers = [self.order(index) for index in indices]
        inputs, labels = self.samples.collate(
            [self.samples.raw(n or 0) for n in numbers], [n or 0 for n in numbers]
        )
        return inputs, ignore_rows(labels, [number is None for number in numbers])

    def with_workers(
        self, num_workers: int, steps: Steps, start_process: Start | None = None
    ) -> DatasetSource:
        """Return the source with threads that read ahead;
        each with a process if ``start_process`` is given.
        """
        return self._replace(ahead=ReadAhead(list, self.compute, num_workers, steps, start_process))


def ignore_rows(labels: Tensor, ignored: Sequence[bool]) -> Tensor:
    """Return labels (B, ...) with IGNORE in the rows past the end of a dataset
    that is read once.
    """
    if any(ignored):
        labels = labels.clone()
        labels[torch.tensor(ignored)] = IGNORE
    return labels


def _check_buffers(samples: Samples) -> None:
    """Refuse a dataset that fills the same tensor for each sample:
    threads read several at the same time.
    """
    first = samples.raw(0)
    before = sha256_of(samples.collate.one(first, 0))
    for number in {min(1, samples.num_samples - 1), samples.num_samples - 1}:
        samples.raw(number)
        if sha256_of(samples.collate.one(first, 0)) != before:
            raise DataError(
                "MW-DATA-129",
                f"{samples.name}: reading sample {number} changes sample 0, which was read before:"
                " the dataset fills the same tensor for each sample, and a micro-batch would hold"
                " the last one several times. Return a copy (x.clone()) from __getitem__",
            )


def open_dataset(data: Data, split: str) -> Samples | Stream | None:
    """Open the dataset of a split; None if its builder returns None.

    Raises:
        DataError: the builder cannot be found, raises, or returns an object without samples; or a
            stream of samples that cannot be resumed exactly.
    """
    path = data.builder
    assert path is not None
    builder = find_function(
        path, "data.builder", "a function of (split, **data.options)", DataError
    )

    def make() -> Any:
        try:
            dataset = builder(split, **data.options)
            if dataset is not None and not is_stream(dataset):
                len(dataset)
            return dataset
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-014",
                f"data.builder {path}({split!r}) with data.options {data.options}"
                f" failed{error_place(error)}: {reason_of(error)}",
            ) from error

    dataset = make()
    if dataset is None and split != "train":
        return None
    name = f"{path}({split!r})"
    if is_stream(dataset):
        return Stream.open(name, dataset, make, make_collate(data, name))
    num_samples = 0 if dataset is None else len(dataset)
    if num_samples < 1 or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "MW-DATA-015",
            f"data.builder {path}({split!r}) returned a {type(dataset).__name__} of {num_samples}"
            " samples",
        )
    samples = Samples(name, dataset, num_samples, make_collate(data, name))
    samples = samples._replace(collate=samples.collate._replace(like=specs_of(*samples.sample(0))))
    # the sample most likely to differ: an error appears before launch
    samples.sample(num_samples - 1)
    ends = [0, num_samples - 1]
    _check_buffers(samples)
    samples.collate.check_rows([samples.raw(number) for number in ends], ends)
    return samples
