"""User-defined streams: iterable datasets of unknown length,
which can be continued exactly from any sample.

    builder(split, **data.options) -> an iterable of samples that can be restarted in one of three
    ways:
        state_dict(), load_state_dict(state)    plain JSON after each sample: a resume reads nothing twice
        iterate(start)                          an iterator from sample number ``start`` of an epoch on
        neither                                 each iteration gives the same samples: a resume reads them again
    set_epoch(epoch)                            optional: called before each epoch; otherwise all epochs are equal

Sample i of the run is the i-th of the stream, epoch after epoch, so that the order is the same on
any layout. Each replica reads the whole stream and keeps its own samples; only those reach
``data.collate``. A mark is a position from which the stream can be continued: one is kept at each
global batch, with the sample after it, and a checkpoint holds one. Before the first step a few
samples are read twice, to test that the stream continues exactly from a mark.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from torch.utils.data import IterableDataset

from meshwright.config.functions import error_place
from meshwright.data.collate import Collate, own_copy, sha256_of, specs_of
from meshwright.errors import DataError, reason_of

MARKS = 64
"""Marks that are kept: more global batches than threads read ahead."""
TRIED, TRIED_MARK = 16, 9
"""Samples read to test a stream, and the sample from which it is continued in the test."""
MAX_STATE_CHARS = 2**15
"""Longest state of a dataset, as JSON: a checkpoint's manifest holds it."""


class StreamMark(NamedTuple):
    """A position from which a stream can be continued."""

    number: int
    """Number of the next sample, counted over all epochs."""
    epoch: int
    read: int
    """Samples of this epoch before it."""
    state: Any
    """Result of the dataset's ``state_dict``; None if it has none, and at the start of an epoch."""
    next: str | None = None
    """Hash of the next sample, which is compared when a checkpoint's mark is continued."""


def is_stream(dataset: Any) -> bool:
    """Return True for an iterable dataset, one that is not indexed by sample number."""
    by_number = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_iterable = hasattr(dataset, "__iter__") or hasattr(dataset, "iterate")
    return (
        isinstance(dataset, IterableDataset)
        or (is_iterable and not by_number)
        or hasattr(dataset, "iterate")
    )


class Stream:
    """An iterable dataset as an endless sequence of numbered samples,
    which can be read from any number on.
    """

    def __init__(self, name: str, make: Callable[[], Any], collate: Collate) -> None:
        """Read the dataset that ``make`` builds;
        each call builds one that starts from its first sample.
        """
        self.name, self.collate = name, collate
        self.is_due: Callable[[int], bool] = lambda number: False
        """Function that returns True for the sample numbers at which a mark is kept:
        the first sample of each step.
        """
        self._make = make
        self._lock = threading.RLock()
        self._begin = StreamMark(0, 0, 0, None)
        self._marks: dict[int, StreamMark] = {}
        self._after: dict[int, Any] = {}
        """Number of a mark -> the raw sample at it, once read;
        read-ahead reads it before the checkpoint is saved.
        """
        self._at = self._begin
        self._dataset: Any = None
        self._samples: Iterator[Any] | None = None
        self._last: tuple[int, Any] | None = None
        """Number of the sample read last, and the sample."""
        self._expected: dict[int, str] = {}
        """Number of a sample -> its hash when the checkpoint was saved."""

    @staticmethod
    def open(name: str, dataset: Any, make: Callable[[], Any], collate: Collate) -> Stream:
        """Return a stream that has passed a test: continued from a mark,
        it gives the same samples as without a break.

        Raises:
            DataError: it does not, or samples are no tensors of one shape.
        """
        if buffer := _buffer_of(dataset):
            raise DataError(
                "MW-DATA-116",
                f"{name} shuffles in a {buffer}, which Hugging Face datasets leave out of the"
                " state: a resumed run would lose its samples. Shuffle before"
                " (datasets.Dataset.shuffle, then save_to_disk), or read the dataset map-style",
            )
        if not _has_state(dataset) and not hasattr(dataset, "iterate") and iter(dataset) is dataset:
            raise DataError(
                "MW-DATA-109",
                f"{name} is a {type(dataset).__name__}, which can be read only once: a resumed run"
                " could not find its place. Return an iterable that begins anew in each `for`, or"
                " one with state_dict and load_state_dict, or with iterate(start)",
            )
        numbers = range(TRIED)
        first = Stream(name, make, collate)
        raws = [first.raw(number) for number in numbers]
        first.collate = collate._replace(like=specs_of(*collate.one(raws[0], 0)))
        hashes = [
            sha256_of(first.collate.one(raw, number))
            for raw, number in zip(raws, numbers, strict=True)
        ]
        first.collate.check_rows(raws[:2], numbers[:2])
        again = Stream(name, make, first.collate)
        again.restore(json.loads(json.dumps(first.state_at(TRIED_MARK))))
        for number in numbers[TRIED_MARK:]:
            if sha256_of(again.sample(number)) != hashes[number]:
                again._raise_inexact(number)
        return Stream(name, make, first.collate)

    @property
    def how(self) -> str:
        """Description, for messages, of how the stream is continued at a mark."""
        self._dataset = self._make() if self._dataset is None else self._dataset
        if _has_state(self._dataset):
            return "by load_state_dict"
        if hasattr(self._dataset, "iterate"):
            return "by iterate(start)"
        return "by reading from the begin of the epoch"

    def raw(self, number: int) -> Any:
        """Return one raw sample: read forward to it, or first go back to a mark before it."""
        with self._lock:
            if self._last is not None and self._last[0] == number:
                return self._last[1]
            if number in self._after:
                return self._after[number]
            if number < self._at.number or self._samples is None:
                self._begin_at(self._mark_before(number))
            while True:
                raw = self._next()
                if self._at.number > number:
                    return raw

    def sample(self, number: int) -> tuple[Any, Any]:
        """Return (inputs, labels) of one sample, as tensors."""
        return self.collate.one(self.raw(number), number)

    def state_at(self, number: int) -> dict[str, Any]:
        """Return the mark at sample ``number``, as plain JSON for a checkpoint."""
        with self._lock:
            if number not in self._marks:
                if number:
                    self.raw(number - 1)
                self._remember(
                    self._mark() if number and self._at.number == number else self._begin
                )
            return self._marks[number]._replace(next=sha256_of(self.sample(number)))._asdict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the mark of a checkpoint; the next reads continue from it."""
        with self._lock:
            mark = StreamMark(**state)
            self._remember(mark)
            if mark.next is not None:
                self._expected[mark.number] = mark.next

    def count(self, at_most: int) -> int:
        """Return the number of samples of the first epoch, at most ``at_most``."""
        with self._lock:
            self._begin_at(self._begin)
            while self._at.number < at_most:
                self._next()
                if self._at.epoch:
                    return self._at.number - 1
            return at_most

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of the first samples."""
        with self._lock:
            return {f"sample {number}": sha256_of(self.sample(number)) for number in (0, 1)}

    def _raise_inexact(self, number: int) -> NoReturn:
        raise DataError(
            "MW-DATA-110",
            f"{self.name} cannot be resumed exactly: continued {self.how}, its sample {number}"
            " differs from the one read without a break. Samples in a shuffle buffer that is not"
            " in the state, random numbers without a fixed seed, changed files, or a count that is"
            " raised only after `yield` do this",
        )

    def _mark_before(self, number: int) -> StreamMark:
        return max(
            (mark for mark in self._marks.values() if mark.number <= number), default=self._begin
        )

    def _remember(self, mark: StreamMark) -> None:
        for kept in (self._marks, self._after):
            kept.pop(mark.number, None)
        self._marks[mark.number] = mark
        while len(self._marks) > MARKS:
            oldest = next(iter(self._marks))
            del self._marks[oldest]
            self._after.pop(oldest, None)

    def _mark(self) -> StreamMark:
        """Return a mark at the present position.

        Raises:
            DataError: the dataset's state is no JSON, or too long.
        """
        if not _has_state(self._dataset):
            return self._at
        try:
            state = self._dataset.state_dict()
            text = json.dumps(state)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-111",
                f"{self.name}: state_dict() of {type(self._dataset).__name__} failed or is no plain"
                f" JSON{error_place(error)}: {reason_of(error)}",
            ) from error
        if len(text) > MAX_STATE_CHARS:
            raise DataError(
                "MW-DATA-112",
                f"{self.name}: state_dict() of {type(self._dataset).__name__} has {len(text):,}"
                f" characters as JSON, at most {MAX_STATE_CHARS:,}: keep counts and seeds in it,"
                " not samples",
            )
        return self._at._replace(state=json.loads(text))

    def _begin_at(self, mark: StreamMark) -> None:
        """Build the dataset anew and continue at a mark."""
        self._dataset = dataset = self._make()
        self._at = mark
        try:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(mark.epoch)
            if _has_state(dataset):
                if mark.state is not None:
                    dataset.load_state_dict(mark.state)
                self._samples = iter(dataset)
            elif hasattr(dataset, "iterate"):
                self._samples = iter(dataset.iterate(mark.read))
            else:
                self._samples = iter(dataset)
                for _ in range(mark.read):
                    next(self._samples)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-113",
                f"{self.name} cannot continue {self.how} at sample {mark.read} of epoch"
                f" {mark.epoch}{error_place(error)}: {reason_of(error)}",
            ) from error

    def _next(self) -> Any:
        """Return the next raw sample, across the end of an epoch; keep a mark where one is due."""
        assert self._samples is not None
        at = self._at
        try:
            raw = own_copy(next(self._samples))
        except StopIteration:
            if at.read == 0:
                raise DataError(
                    "MW-DATA-114", f"{self.name} has no samples in epoch {at.epoch}"
                ) from None
            self._begin_at(StreamMark(at.number, at.epoch + 1, 0, None))
            return self._next()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise DataError(
                "MW-DATA-115",
                f"{self.name}: sample {at.read} of epoch {at.epoch} failed{error_place(error)}:"
                f" {reason_of(error)}",
            ) from error
        self._at = StreamMark(at.number + 1, at.epoch, at.read + 1, None)
        self._last = at.number, raw
        if at.number in self._marks:
            self._after[at.number] = raw
        expected = self._expected.pop(at.number, None)
        if expected is not None and sha256_of(self.collate.one(raw, at.number)) != expected:
            self._raise_inexact(at.number)
        if self.is_due(self._at.number):
            self._remember(self._mark())
        return raw


def _has_state(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def _buffer_of(dataset: Any, depth: int = 0) -> str | None:
    """Return the class of a shuffle buffer inside of a Hugging Face dataset, or None.

    Near the start its state replays the buffer, so that a test on a few samples does not detect it.
    """
    if "BufferShuffled" in type(dataset).__name__:
        return type(dataset).__name__
    inner = [getattr(dataset, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
    inner += getattr(dataset, "ex_iterables", None) or []
    return next(
        (
            found
            for each in inner
            if depth < 20 and each is not None and (found := _buffer_of(each, depth + 1))
        ),
        None,
    )
