"""Safetensors files that are read by byte ranges: objects of a store, or files of another machine.

    u64 | header | bytes of the tensors       the header is read once, at the first tensor
                    ...[  ]..[  ]..[  ]...    runs of a box, in the bytes of its tensor
                       |<-- a request ->|     near runs are read together, far and long ones in parallel

`RangedFile` has the part of safetensors' ``safe_open`` that `CheckpointReader` uses, so that a local
file stays memory-mapped and takes no detour. The file is untrusted: its header is bounded, and no
range lies outside of the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import Dtype
from meshwright.errors import CheckpointError
from meshwright.system.bounded import parse_json
from meshwright.system.process import map_in_daemon_threads

MAX_HEADER_BYTES = 100_000_000
"""Longest header, as in the library."""
FIRST_READ_BYTES = 64 * 2**10
"""Bytes of the first read, which hold most headers."""
MAX_GAP_BYTES = 2**20
"""Runs that are nearer are read together: the bytes between them take less time than a request."""
MAX_REQUEST_BYTES = 16 * 2**20
NUM_THREADS = 8

ReadRange = Callable[[int, int], bytes]
"""Function of (start, stop) that returns these bytes of a file; it retries, and may block."""


class TensorSlice(Protocol):
    """A tensor of an open file, not read yet; as safetensors' ``PySafeSlice``."""

    def get_shape(self) -> Sequence[int]:
        """Return the shape."""

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors."""

    def __getitem__(self, source: tuple[slice, ...]) -> Tensor:
        """Read a box."""


class TensorFile(Protocol):
    """An open safetensors file."""

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor without reading it."""


class _Entry(NamedTuple):
    """One tensor in a header, checked."""

    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    """Position of its first byte in the file."""


class RangedFile:
    """A safetensors file that is read by ranges."""

    def __init__(self, place: str, size: int, read: ReadRange) -> None:
        """Open without reading. ``place``: path, for messages; ``size``: bytes of the file."""
        self._place, self._size, self._read = place, size, read
        self._header: dict[str, Any] | None = None
        self._data_start = 0

    def get_slice(self, key: str) -> RangedSlice:
        """Return a tensor without reading it.

        Raises:
            CheckpointError: the header is damaged, or has no such tensor.
        """
        if self._header is None:
            self._header = self._read_header()
        return RangedSlice(self._entry(self._header.get(key), key), self._read)

    def _read_header(self) -> dict[str, Any]:
        first = self._read(0, min(FIRST_READ_BYTES, self._size))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > min(MAX_HEADER_BYTES, self._size - 8):
            raise self._damaged(f"its header would have {length:,} bytes")
        self._data_start = 8 + length
        text = first[8 : self._data_start]
        if len(text) < length:
            text += self._read(len(first), self._data_start)
        try:
            header = parse_json(text)
        except ValueError as error:
            raise self._damaged(f"its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is no table")
        return header

    def _entry(self, found: object, key: str) -> _Entry:
        """Check one tensor of the header."""
        if not isinstance(found, dict):
            raise self._damaged(f"it has no tensor {key!r}")
        dtype = next((each for each in Dtype if each == found.get("dtype")), None)
        shape, offsets = _counts(found.get("shape")), _counts(found.get("data_offsets"))
        if dtype is None or shape is None or offsets is None or len(offsets) != 2:
            raise self._damaged(f"the header's entry of tensor {key!r} is not of this format")
        num_bytes = math.prod(shape) * dtype.as_torch.itemsize
        num_held = self._size - self._data_start
        if offsets[1] > num_held or offsets[1] - offsets[0] != num_bytes:
            raise self._damaged(f"tensor {key!r} would lie at bytes {offsets} of {num_held:,}")
        return _Entry(dtype, shape, self._data_start + offsets[0])

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            "MW-CHECKPOINT-033", f"{self._place}: {what}: it is damaged; take another checkpoint"
        )


def _counts(values: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers from 0 up; None: it is none."""
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        return None
    return tuple(values) if all(each >= 0 for each in values) else None


class RangedSlice:
    """A tensor of a :class:`RangedFile`."""

    def __init__(self, entry: _Entry, read: ReadRange) -> None:
        self._entry, self._read = entry, read

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape."""
        return self._entry.shape

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors."""
        return self._entry.dtype.value

    def __getitem__(self, source: tuple[slice, ...]) -> Tensor:
        """Read a box, a copy on the CPU. Blocks; long boxes are read by several threads."""
        dtype = self._entry.dtype.as_torch
        shape = tuple(each.stop - each.start for each in source)
        target = bytearray(math.prod(shape) * dtype.itemsize)
        runs = box_runs(self._entry.shape, source, dtype.itemsize)
        requests = list(group_runs(runs))

        def fill(request: RangeRequest) -> None:
            found = self._read(self._entry.start + request.start, self._entry.start + request.stop)
            for start, stop, at in request.runs:
                inside = slice(start - request.start, stop - request.start)
                target[at : at + stop - start] = memoryview(found)[inside]

        if len(requests) == 1:
            fill(requests[0])
        else:
            map_in_daemon_threads(fill, requests, NUM_THREADS)
        if not target:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(target, dtype=dtype).view(shape)


Run = tuple[int, int, int]
"""Bytes [start, stop) of a tensor, and their position in the box."""


class RangeRequest(NamedTuple):
    """Bytes that are read at once, and the runs in them."""

    start: int
    stop: int
    runs: list[Run]


def box_runs(shape: tuple[int, ...], source: tuple[slice, ...], itemsize: int) -> Iterator[Run]:
    """Yield the contiguous bytes of a box of a tensor, in order."""
    if any(each.start >= each.stop for each in source):
        return
    # dims after `cut` are whole, so that a run goes through them
    cut = len(shape)
    while cut > 0 and source[cut - 1] == slice(0, shape[cut - 1]):
        cut -= 1
    cut = max(cut - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    first = source[cut].start * strides[cut] if shape else 0
    length = (source[cut].stop - source[cut].start) * strides[cut] if shape else itemsize
    outer = [range(each.start, each.stop) for each in source[:cut]]
    for index, position in enumerate(itertools.product(*outer)):
        start = first + sum(at * strides[dim] for dim, at in enumerate(position))
        yield start, start + length, index * length


def group_runs(runs: Iterator[Run]) -> Iterator[RangeRequest]:
    """Yield the requests that read all runs: near ones together, a long one in several."""
    open_request: RangeRequest | None = None
    for start, stop, at in runs:
        if open_request is not None:
            is_near = start - open_request.stop <= MAX_GAP_BYTES
            if is_near and stop - open_request.start <= MAX_REQUEST_BYTES:
                open_request.runs.append((start, stop, at))
                open_request = open_request._replace(stop=stop)
                continue
            yield open_request
            open_request = None
        while stop - start > MAX_REQUEST_BYTES:
            middle = start + MAX_REQUEST_BYTES
            yield RangeRequest(start, middle, [(start, middle, at)])
            start, at = middle, at + MAX_REQUEST_BYTES
        open_request = RangeRequest(start, stop, [(start, stop, at)])
    if open_request is not None:
        yield open_request
