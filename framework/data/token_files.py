"""Readers of a corpus that :func:`~meshwright.data.indexed.inspect` has checked: tokens, document boundaries, the mask.

They read by position, with pread and no mapping: a file that is cut short during a run is an error, and no SIGBUS.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.indexed import COPY_AGAIN, HEADER, Index, bin_path, idx_path, mask_path
from meshwright.errors import DataError


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a corpus in tokens, read from the index on access."""

    index: Index
    starts: NDArray[np.int64] | FileReader
    """First byte of each; read from the file as it is asked for where a document is a sequence, as almost always."""
    itemsize: int
    """Divisor of ``starts``: bytes per token."""

    def __len__(self) -> int:
        """Number of documents."""
        return self.index.num_documents

    def start(self, number: int) -> int:
        """Return the first token of a document; for the number of documents, the end of the last one."""
        if number >= len(self):
            return self.index.num_tokens
        return int(self._read(number, 1)[0]) // self.itemsize

    def at(self, token: int) -> int:
        """Return the document that holds a token; of empty ones that begin there, the last."""
        return bisect_right(range(len(self)), token, key=self.start) - 1

    def all_starts(self) -> NDArray[np.int64]:
        """Return the starts of all documents and the end of the last, (documents + 1,)."""
        starts = self._read(0, len(self)) // self.itemsize
        return np.append(starts, np.int64(self.index.num_tokens))

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        if not isinstance(self.starts, FileReader):
            return self.starts[first : first + count]
        offset = HEADER.size + 4 * self.index.num_sequences + 8 * first
        return self.starts.read(np.dtype(np.int64), offset, count)


def documents(index: Index) -> Documents:
    """Open the documents of a corpus that :func:`inspect` has checked."""
    n, file = index.num_sequences, idx_path(index.prefix)
    if index.num_documents == n:
        return Documents(index, FileReader(file), index.dtype.itemsize)
    offsets = np.fromfile(file, np.int64, n, offset=HEADER.size + 4 * n)
    firsts = np.fromfile(file, np.int64, index.num_documents, offset=HEADER.size + 12 * n)
    byte_starts = np.append(offsets, index.num_tokens * index.dtype.itemsize)[firsts]
    return Documents(index, byte_starts, index.dtype.itemsize)


class FileReader:
    """Bytes of a file by position, with pread and no mapping: a file that is cut short is an error, and no SIGBUS."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size

    @cached_property
    def _file(self) -> io.FileIO:
        return self.path.open("rb", buffering=0)

    def open(self) -> None:
        """Open the file now, and not at the first read."""
        _ = self._file

    def read(self, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
        """Return ``count`` numbers from the byte ``start`` on, (count,).

        Raises:
            DataError: the file has become shorter, or cannot be read.
        """
        found = np.empty(count, dtype)
        into, got = memoryview(found.data).cast("B") if count else memoryview(b""), 0
        try:
            while got < len(into):
                read = os.preadv(self._file.fileno(), [into[got:]], start + got)
                if read == 0:
                    break
                got += read
            now = os.fstat(self._file.fileno()).st_size if got < len(into) else 0
        except OSError as error:
            raise DataError(
                "MW-DATA-030",
                f"{self.path} cannot be read any more: {error.strerror} (errno {error.errno}). See to its file system; "
                f"the same command goes on from the last checkpoint",
            ) from error
        if got < len(into):
            raise DataError(
                "MW-DATA-031",
                f"{self.path} has {now:,} bytes, and {self._size:,} were there when it was opened: it was cut short "
                f"while it was in use. Copy it again from where it is whole; the same command goes on from the last "
                f"checkpoint",
            )
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}


class TokenStream:
    """All tokens of a corpus as one stream, read in slices."""

    def __init__(self, index: Index) -> None:
        """Open the tokens of ``index``, which :func:`inspect` has checked."""
        self.index = index
        self._tokens = FileReader(bin_path(index.prefix))

    def open(self) -> None:
        """Open the file: now, and not in the first step of a run."""
        self._tokens.open()

    def __len__(self) -> int:
        """Number of tokens."""
        return self.index.num_tokens

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return a copy of the tokens ``[start, start + count)``, (count,) int64."""
        assert start >= 0 and start + count <= len(self), (start, count, len(self))
        return self._tokens.read(self.index.dtype, start * self.index.dtype.itemsize, count).astype(np.int64)


class Mask:
    """Labels of a corpus that count: all, unless there is a ``.mask`` beside it."""

    def __init__(self, index: Index) -> None:
        """Open the mask. Raises DataError for one of another corpus."""
        path = mask_path(index.prefix)
        self._bytes: FileReader | None = None
        if not path.is_file():
            return
        if path.stat().st_size != index.num_tokens:
            raise DataError(
                "MW-DATA-032",
                f"{path} has {path.stat().st_size:,} bytes where the corpus has {index.num_tokens:,} tokens, one for "
                f"each: it was cut short or is of another corpus. Next: {COPY_AGAIN}",
            )
        self._bytes = FileReader(path)

    def __bool__(self) -> bool:
        """Return True if some labels may not count."""
        return self._bytes is not None

    def read(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return the mask of the tokens ``[start, start + count)``: (count,) bool."""
        if self._bytes is None:
            return np.ones(count, dtype=np.bool_)
        found: NDArray[np.bool_] = self._bytes.read(np.dtype(np.uint8), start, count) != 0
        return found
