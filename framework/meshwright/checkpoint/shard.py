"""Writer of one rank's shard: an iterator of pieces becomes safetensors files and a small report.

Memory stays bounded. Pieces are copied to the host one by one and written when they fill a file, so
that at most one file's bytes are buffered besides the current piece. The copy also allows the
iterator to reuse its buffer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.boxes import LocalBox, flat_boxes, local_boxes
from meshwright.checkpoint.files import MAX_FILE_BYTES, as_checkpoint_error, write_synced
from meshwright.checkpoint.manifest import (
    Dtype,
    FileEntry,
    PieceEntry,
    StrictModel,
    TensorEntry,
    TensorKind,
)
from meshwright.errors import CheckpointError
from meshwright.parameters import ParameterInfo
from meshwright.system.atomic import sync

BYTES_AT_ONCE = 16 * 2**20
REPORT_SUFFIX = ".shard.json"


class TensorPiece(NamedTuple):
    """One rank's part of one tensor: its whole slice, or consecutive elements of it."""

    kind: TensorKind
    info: ParameterInfo
    tensor: Tensor
    """The slice without padding (``info.unpadded``), or (n,) elements of it; on any device."""
    start: int | None = None
    """Position of the first element in the flattened slice, padding included; None:
    the whole slice.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.numel() * self.tensor.element_size()

    def boxes(self) -> Iterator[LocalBox]:
        """Yield the boxes of the global tensor in this piece, with views of its elements."""
        tensor = self.tensor.detach()
        if self.start is None:
            return local_boxes(self.info, tensor)
        return flat_boxes(self.info, self.start, tensor)


def describe(piece: TensorPiece, file: str) -> tuple[str, TensorEntry, dict[str, Tensor]]:
    """Return the name of a piece's tensor, its part of the manifest, and the views of its boxes by
    their keys in ``file``.

    Raises:
        CheckpointError: a checkpoint cannot hold its dtype.
    """
    name = piece.kind.of(piece.info.name)
    dtype = Dtype.of(piece.tensor.dtype)
    if dtype is None:
        raise CheckpointError(
            "MW-CHECKPOINT-028",
            f"tensor {name!r}: a checkpoint cannot hold dtype {piece.tensor.dtype}",
        )
    boxes = list(piece.boxes()) if piece.num_bytes else []
    entries: list[PieceEntry] = []
    views: dict[str, Tensor] = {}
    for index, (offset, shape, tensor) in enumerate(boxes):
        key = f"{name}/{index}" if len(boxes) > 1 else name
        assert tuple(tensor.shape) == shape, (key, tuple(tensor.shape), shape)
        entries.append(PieceEntry(file=file, key=key, offset=offset, shape=shape))
        views[key] = tensor
    entry = TensorEntry(shape=piece.info.global_shape, dtype=dtype, pieces=tuple(entries))
    return name, entry, views


class ShardReport(StrictModel):
    """Report of one shard: its part of the manifest."""

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]


def write_shard(
    temporary: Path,
    shard_name: str,
    pieces: Iterable[TensorPiece],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    copied: bool = False,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> ShardReport:
    """Write the pieces as ``<shard_name>-00000.safetensors``, ... and a report beside them,
    and fsync all of it.

    Exactly one rank must provide each element of the model, under the canonical name of a tied
    weight. ``publish`` checks it.

    Args:
        temporary: Directory of the attempt.
        shard_name: Prefix of the file names.
        pieces: This rank's pieces.
        max_file_bytes: Size at which a new file is started.
        copied: True if the tensors are host copies that nothing else writes to; otherwise this
            function copies them.
        on_bytes: Called with the number of bytes after each write.

    Raises:
        CheckpointError: A tensor occurs twice, or its dtype is not supported.
    """
    report = write_files(
        lambda name, chunks: write_synced(temporary / name, chunks),
        shard_name,
        pieces,
        max_file_bytes=max_file_bytes,
        copied=copied,
        on_bytes=on_bytes,
    )
    partial = temporary / f"{shard_name}.part"
    write_synced(partial, [report.model_dump_json().encode()])
    with as_checkpoint_error(temporary):
        sync(temporary)
        # A visible report is complete and the last file of its shard: the directory may be renamed
        # right after. The publisher syncs it.
        partial.rename(temporary / f"{shard_name}{REPORT_SUFFIX}")
    return report


WriteFile = Callable[[str, Iterable[bytes | memoryview]], tuple[int, str]]
"""Function that writes a file of a name, and returns its size and the sha256 of its intended bytes."""


def write_files(
    write: WriteFile,
    shard_name: str,
    pieces: Iterable[TensorPiece],
    *,
    max_file_bytes: int,
    copied: bool,
    on_bytes: Callable[[int], None],
) -> ShardReport:
    """Write the pieces as ``<shard_name>-00000.safetensors``, ... by ``write``. Return the report,
    which is not written. The other arguments, and errors, are those of :func:`write_shard`.
    """
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", shard_name), shard_name
    shard = _ShardFiles(write, shard_name, max_file_bytes, on_bytes)
    for piece in pieces:
        shard.add(piece, copied)
    shard.flush()
    return ShardReport(tensors=shard.tensors, files=shard.files)


class _ShardFiles:
    """Files of one shard in progress. Pieces are buffered in host memory until they fill a file."""

    def __init__(
        self,
        write: WriteFile,
        shard_name: str,
        max_file_bytes: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.files: dict[str, FileEntry] = {}
        self._write, self._shard_name = write, shard_name
        self._max_file_bytes, self._on_bytes = max_file_bytes, on_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0

    def add(self, piece: TensorPiece, copied: bool) -> None:
        """Store a piece for the next file; write the current file first
        if the piece does not fit into it.
        """
        if self._pending_bytes + piece.num_bytes > self._max_file_bytes:
            self.flush()
        name, entry, boxes = describe(piece, self._file_name())
        if name in self.tensors:
            raise CheckpointError(
                "MW-CHECKPOINT-027",
                f"shard {self._shard_name} got the tensor {name!r} twice: tied"
                " weights are saved once, under the first name of their tie",
            )
        for key, tensor in boxes.items():
            is_ready = copied and tensor.is_contiguous()
            self._pending[key] = (
                tensor if is_ready else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            )
        self._pending_bytes += piece.num_bytes
        self.tensors[name] = entry

    def flush(self) -> None:
        """Write the pending pieces as the shard's next file. Blocks until it is on the disk."""
        if self._pending:
            name = self._file_name()
            size, sha256 = self._write(name, safetensors_chunks(self._pending, self._on_bytes))
            self.files[name] = FileEntry(size=size, sha256=sha256)
            self._pending.clear()
            self._pending_bytes = 0

    def _file_name(self) -> str:
        return f"{self._shard_name}-{len(self.files):05d}.safetensors"


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> tuple[int, str]:
    """Write contiguous host tensors as one safetensors file. Return (bytes, sha256).
    Blocks until it is on the disk.

        | u64: length of the header | JSON header, padded with spaces to 8 bytes | bytes of the tensors, end to end |

    This replaces ``safetensors.save_file``, so that the bytes are hashed while writing and fsynced.
    """
    return write_synced(path, safetensors_chunks(tensors, on_bytes))


def safetensors_chunks(
    tensors: Mapping[str, Tensor], on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of contiguous host tensors."""
    header, ordered = lay_out(tensors)
    yield header
    for tensor in ordered.values():
        for part in torch.split(tensor.reshape(-1).view(torch.uint8), BYTES_AT_ONCE):
            yield part.numpy().data
            on_bytes(part.numel())


def lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Tensor]]:
    """Return the header of a safetensors file, and the tensors in the order of their bytes.

    Tensors with wide elements come first, as in the library. Every tensor is then aligned to its
    own element size.
    """
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header: dict[str, object] = {}
    start = 0
    for name, tensor in ordered.items():
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": Dtype.of(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered
