"""Readers of a corpus checked by :func:`~meshwright.data.indexed.inspect`: tokens,
document boundaries, the mask.

They use pread instead of mmap: a file that is truncated during a run raises an error instead of
SIGBUS.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.indexed import HEADER, RESTORE, Index, bin_path, idx_path, mask_path
from meshwright.errors import DataError
from meshwright.system.bounded import open_regular


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a corpus in tokens, read from the index on access."""

    index: Index
    starts: NDArray[np.int64] | FileReader
    """Byte offset of each document; read from the file on access
    if every document is one sequence (the usual case).
    """
    itemsize: int
    """Bytes per token, the divisor of ``starts``."""

    def __len__(self) -> int:
        """Number of documents."""
        return self.index.num_documents

    def start(self, number: int) -> int:
        """Return the first token of a document.
        ``number`` = number of documents returns the end of the last one.
        """
        if number >= len(self):
            return self.index.num_tokens
        return int(self._read(number, 1)[0]) // self.itemsize

    def at(self, token: int) -> int:
        """Return the document that contains a token;
        the last one if empty documents start there too.
        """
        return bisect_right(range(len(self)), token, key=self.start) - 1

    def all_starts(self) -> NDArray[np.int64]:
        """Return the starts of all documents and the end of the last, (documents + 1,)."""
        starts = self._read(0, len(self)) // self.itemsize
        return np.append(starts, np.int64(self.index.num_tokens))

    def starts_from(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the starts of ``count`` documents from ``first`` on."""
        return self._read(first, count) // self.itemsize

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        if not isinstance(self.starts, FileReader):
            return self.starts[first : first + count]
        offset = HEADER.size + 4 * self.index.num_sequences + 8 * first
        return self.starts.read(np.dtype(np.int64), offset, count)


def documents(index: Index) -> Documents:
    """Open the document boundaries of a corpus checked by :func:`inspect`."""
    n, file = index.num_sequences, idx_path(index.prefix)
    if index.one_each:
        return Documents(index, FileReader(file), index.dtype.itemsize)
    offsets = np.fromfile(file, np.int64, n, offset=HEADER.size + 4 * n)
    firsts = np.fromfile(file, np.int64, index.num_documents, offset=HEADER.size + 12 * n)
    byte_starts = np.append(offsets, index.num_tokens * index.dtype.itemsize)[firsts]
    return Documents(index, byte_starts, index.dtype.itemsize)


class FileReader:
    """Reader of a file by byte offset, with pread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size

    @cached_property
    def _file(self) -> IO[bytes]:
        return open_regular(self.path)

    def open(self) -> None:
        """Open the file now instead of at the first read."""
        _ = self._file

    def read(self, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
        """Return ``count`` numbers from byte ``start`` on, (count,).

        Raises:
            DataError: the file was truncated, or cannot be read.
        """
        values = np.empty(count, dtype)
        buffer, num_read = memoryview(values.data).cast("B") if count else memoryview(b""), 0
        try:
            while num_read < len(buffer):
                part = os.preadv(self._file.fileno(), [buffer[num_read:]], start + num_read)
                if part == 0:
                    break
                num_read += part
            now = os.fstat(self._file.fileno()).st_size if num_read < len(buffer) else 0
        except OSError as error:
            raise DataError(
                "MW-DATA-030",
                f"{self.path} cannot be read any more: {error.strerror} (errno {error.errno})."
                " Check its file system; the same command resumes from the last checkpoint",
            ) from error
        if num_read < len(buffer):
            raise DataError(
                "MW-DATA-031",
                f"{self.path} has {now:,} bytes, and had {self._size:,} when it was opened: it was"
                " cut short while it was in use. Restore it from an intact copy; the same command"
                " resumes from the last checkpoint",
            )
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}


class TokenStream:
    """The concatenated tokens of a corpus, read in slices."""

    def __init__(self, index: Index) -> None:
        """Open the tokens of an index returned by :func:`inspect`."""
        self.index = index
        self._tokens = FileReader(bin_path(index.prefix))

    def open(self) -> None:
        """Open the file now instead of in the first step of a run."""
        self._tokens.open()

    def __len__(self) -> int:
        """Number of tokens."""
        return self.index.num_tokens

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return a copy of the tokens ``[start, start + count)``, (count,) int64."""
        assert start >= 0 and start + count <= len(self), (start, count, len(self))
        return self._tokens.read(self.index.dtype, start * self.index.dtype.itemsize, count).astype(
            np.int64
        )


class Mask:
    """Mask of the labels that count; without a ``.mask`` file all count."""

    def __init__(self, index: Index) -> None:
        """Open the mask. Raises DataError if its size does not match the corpus."""
        path = mask_path(index.prefix)
        self._bytes: FileReader | None = None
        if not path.is_file():
            return
        if path.stat().st_size != index.num_tokens:
            raise DataError(
                "MW-DATA-032",
                f"{path} has {path.stat().st_size:,} bytes where the corpus has"
                f" {index.num_tokens:,} tokens, one for each: it was cut short or is of another"
                f" corpus. Next: {RESTORE}",
            )
        self._bytes = FileReader(path)

    def __bool__(self) -> bool:
        """Return True if some labels may not count."""
        return self._bytes is not None

    def read(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return the mask of the tokens ``[start, start + count)``: (count,) bool."""
        if self._bytes is None:
            return np.ones(count, dtype=np.bool_)
        mask: NDArray[np.bool_] = self._bytes.read(np.dtype(np.uint8), start, count) != 0
        return mask
