"""Source of the samples of a stream: the i-th of the run is the i-th of the stream,
on any layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.data.dataset import ignore_rows
from meshwright.data.read_ahead import ReadAhead, Start, Steps
from meshwright.data.stream import Stream


class StreamSource:
    """Source that reads a stream. ``num_samples``: number of samples for validation, read once;
    None: endless.
    """

    def __init__(self, stream: Stream, kept: int, num_samples: int | None = None) -> None:
        """Read ``stream``. ``kept``: samples that stay in memory,
        for schedules that read a micro-batch twice.
        """
        self.stream = stream
        self.ahead: ReadAhead | None = None
        self._num_samples = num_samples
        self._kept = kept
        self._read: OrderedDict[tuple[int, int], tuple[Any, Tensor]] = OrderedDict()

    @property
    def num_samples(self) -> int:
        """Samples that are read once, for validation."""
        assert self._num_samples is not None, "a stream that is trained on has no number of samples"
        return self._num_samples

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...))
        of these sample indices of the run.

        Past the end of a stream that is read once, rows repeat sample 0 with IGNORE labels.
        """
        key = indices[0], len(indices)
        if key not in self._read:
            self._read[key] = (
                self.compute(self._gather(indices))
                if self.ahead is None
                else self.ahead.read(indices)
            )
            while sum(length for _, length in self._read) > self._kept and len(self._read) > 1:
                self._read.popitem(last=False)
        return self._read[key]

    def state_at(self, samples_seen: int) -> dict[str, Any]:
        """Return the stream's mark after ``samples_seen`` samples of the run,
        as plain JSON for a checkpoint.
        """
        return self.stream.state_at(samples_seen)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Add the mark of a checkpoint; the next reads continue from it."""
        self.stream.restore(state)

    def with_workers(
        self, num_workers: int, steps: Steps, start_process: Start | None = None
    ) -> StreamSource:
        """Return the source with threads that read ahead;
        each with a process that collates if one can be started.
        """
        self.ahead = ReadAhead(self._gather, self.compute, num_workers, steps, start_process)
        return self

    def _gather(self, indices: Sequence[int]) -> list[tuple[int, Any, bool]]:
        """Return (number, raw sample, past the end) of each index."""
        end = self._num_samples
        numbers = [(index, False) if end is None or index < end else (0, True) for index in indices]
        return [(number, self.stream.raw(number), is_past) for number, is_past in numbers]

    def compute(self, gathered: list[tuple[int, Any, bool]]) -> tuple[Any, Tensor]:
        """Return (inputs, labels) of (number, raw sample, past the end) of each row."""
        inputs, labels = self.stream.collate(
            [raw for _, raw, _ in gathered], [number for number, _, _ in gathered]
        )
        return inputs, ignore_rows(labels, [is_past for _, _, is_past in gathered])
