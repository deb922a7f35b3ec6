"""Megatron's ``.bin``/``.idx`` pair, checked whole before it is opened; the door to megatron.core.datasets.

    prefix.bin   the tokens of all documents, one after the other, as one plain array
    prefix.idx   b"MMIDIDX\\0\\0", version u64 = 1, dtype code u8, num_sequences n u64, num_document_ends d u64,
                 lengths i32[n], byte offsets i64[n], document ends i64[d]          (little endian)
    prefix.mask  of this project, and not always there: a byte for each token, 1 where it counts as a label

megatron-core asserts, or reads past the end, where a file is damaged; :func:`inspect` reads the index by itself first
and reports what is wrong and what to do. It needs neither megatron-core (whose import takes 2.5 s) nor torch, so a
damaged corpus is reported before any rank starts. No other file imports ``megatron.core.datasets``.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
_SEQUENCES_AT_ONCE = 1 << 20
_AGAIN = "prepare the corpus again, or copy both files again from where they are whole"


class Index(NamedTuple):
    """Contents of an ``.idx`` that agree with the ``.bin``."""

    prefix: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    num_tokens: int


def bin_path(prefix: Path) -> Path:
    """Return ``prefix.bin``: appended, not replaced, because a prefix may have dots of its own."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return ``prefix.idx``."""
    return prefix.with_name(prefix.name + ".idx")


def mask_path(prefix: Path) -> Path:
    """Return ``prefix.mask``, the labels that count, where not all do."""
    return prefix.with_name(prefix.name + ".mask")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of Megatron's two token types that holds the vocabulary (the bound is Megatron's own)."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def inspect(prefix: Path) -> Index:
    """Check a corpus without opening it through megatron-core; cost: one pass over the index, none over the tokens.

    Raises :class:`DataError`: a missing file, a bad magic or version, a truncated index, sizes that do not match the
    ``.bin``, a dtype that is no integer, no tokens at all.
    """
    _check_present(prefix)
    index_file, tokens_file = idx_path(prefix), bin_path(prefix)
    try:
        index_bytes = index_file.stat().st_size
        with index_file.open("rb") as stream:
            head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise DataError(
                "MW-DATA-021", f"{index_file} ends inside its header ({len(head)} of {_HEADER.size} bytes): {_AGAIN}"
            )
        magic, version, code, num_sequences, num_ends = _HEADER.unpack(head)
        if magic != _MAGIC or version != 1:
            raise DataError(
                "MW-DATA-022",
                f"{index_file} is no index of a Megatron corpus: it starts with {magic!r} version {version}, "
                f"expected {_MAGIC!r} version 1. Name a .bin/.idx pair by its path without the suffix",
            )
        if code not in _DTYPES:
            raise DataError("MW-DATA-023", f"{index_file} has the unknown dtype code {code} (known: 1 to 8): {_AGAIN}")
        dtype = _DTYPES[code]
        if dtype.kind not in "iu":
            raise DataError(
                "MW-DATA-024",
                f"{index_file} says that the corpus holds {dtype.name}: token ids must be integers. "
                f"Write it again as uint16 (vocabulary below 65500) or int32",
            )
        expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_ends
        if index_bytes == expected_bytes + num_sequences and num_sequences > 0:
            raise DataError(
                "MW-DATA-025",
                f"{index_file} is a multimodal index (a mode per sequence): only plain token corpora train",
            )
        if index_bytes != expected_bytes:
            raise DataError(
                "MW-DATA-026",
                f"{index_file} has {index_bytes:,} bytes where {num_sequences:,} sequences and {num_ends:,} document "
                f"ends need {expected_bytes:,}: it is cut short or damaged. Next: {_AGAIN}",
            )
        num_tokens = _check_sequences(index_file, num_sequences, dtype)
        _check_documents(index_file, num_sequences, num_ends)
        tokens_bytes = tokens_file.stat().st_size
    except OSError as error:
        raise DataError("MW-DATA-027", f"cannot read the corpus {prefix}: {error}") from error
    if tokens_bytes != num_tokens * dtype.itemsize:
        raise DataError(
            "MW-DATA-028",
            f"{tokens_file} has {tokens_bytes:,} bytes where its index counts {num_tokens:,} {dtype.name} tokens = "
            f"{num_tokens * dtype.itemsize:,} bytes: the two files do not belong together or a copy was cut short. "
            f"Next: {_AGAIN}",
        )
    if num_tokens == 0:
        raise DataError(
            "MW-DATA-029",
            f"the corpus {prefix} is empty: {num_ends - 1} documents, 0 tokens. Prepare it from other text",
        )
    return Index(prefix, dtype, num_sequences, num_ends - 1, num_tokens)


def write(prefix: Path, documents: Iterable[NDArray[Any]], vocab_size: int) -> None:
    """Write a corpus with Megatron's own builder, a sequence per document. Not atomic: write aside and rename."""
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(str(bin_path(prefix)), token_dtype(vocab_size).type)
    for document in documents:
        assert document.ndim == 1 and 0 <= int(document.min()) <= int(document.max()) < vocab_size
        builder.add_document(document, [document.size])
    builder.finalize(str(idx_path(prefix)))


def write_index(prefix: Path, dtype: np.dtype[Any], lengths_file: Path) -> None:
    """Write the ``.idx`` of a ``.bin`` with documents of these lengths (int32, one after the other), a sequence each.

    Equal to that of Megatron's builder byte for byte, in bounded memory and without the seconds of its import.
    """
    num_documents = lengths_file.stat().st_size // 4
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    starts = range(0, num_documents, _SEQUENCES_AT_ONCE)
    with idx_path(prefix).open("wb") as stream:
        stream.write(_HEADER.pack(_MAGIC, 1, code, num_documents, num_documents + 1))
        for start in starts:
            stream.write(np.fromfile(lengths_file, np.int32, _SEQUENCES_AT_ONCE, offset=4 * start).tobytes())
        next_byte = 0
        for start in starts:
            lengths = np.fromfile(lengths_file, np.int32, _SEQUENCES_AT_ONCE, offset=4 * start).astype(np.int64)
            ends = next_byte + np.cumsum(lengths) * dtype.itemsize
            stream.write((ends - lengths * dtype.itemsize).tobytes())
            next_byte = int(ends[-1])
        for start in (*starts, num_documents):
            stop = min(start + _SEQUENCES_AT_ONCE, num_documents) if start < num_documents else num_documents + 1
            stream.write(np.arange(start, stop, dtype=np.int64).tobytes())


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
        offset = _HEADER.size + 4 * self.index.num_sequences + 8 * first
        return self.starts.read(np.dtype(np.int64), offset, count)


def documents(index: Index) -> Documents:
    """Open the documents of a corpus that :func:`inspect` has checked."""
    n, file = index.num_sequences, idx_path(index.prefix)
    if index.num_documents == n:
        return Documents(index, FileReader(file), index.dtype.itemsize)
    offsets = np.fromfile(file, np.int64, n, offset=_HEADER.size + 4 * n)
    firsts = np.fromfile(file, np.int64, index.num_documents, offset=_HEADER.size + 12 * n)
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
                f"each: it was cut short or is of another corpus. Next: {_AGAIN}",
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


def megatron_indexed_dataset() -> Any:
    """Import megatron-core's indexed_dataset module at first use.

    Its import warns four times that optional CUDA packages are missing. Nothing here needs them: exactly that message
    is silenced, and only during the import.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed", category=UserWarning)
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def _check_present(prefix: Path) -> None:
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if not missing:
        return
    if prefix.suffix in (".bin", ".idx") and prefix.is_file():
        raise DataError(
            "MW-DATA-033", f"{prefix} names one file of the pair: write {prefix.with_suffix('')} (no suffix)"
        )
    if len(missing) == 1:
        raise DataError(
            "MW-DATA-034",
            f"{missing[0]} is missing: a corpus is a .bin/.idx pair and only the other half is there. {_AGAIN}",
        )
    folder = prefix.parent
    if not folder.is_dir():
        there = f"the directory {folder} does not exist"
    else:
        found = sorted(path.stem for path in folder.glob("*.idx"))
        there = f"{folder} holds {', '.join(found)}" if found else f"{folder} holds no .idx file"
    raise DataError(
        "MW-DATA-035",
        f"there is no corpus at {prefix} (neither {prefix.name}.bin nor {prefix.name}.idx; {there}). Prepare one, or "
        f"point the config at the path of a .bin/.idx pair without its suffix",
    )


def _check_sequences(index_file: Path, num_sequences: int, dtype: np.dtype[Any]) -> int:
    """Check that the sequences lie one after the other without a hole; return the number of tokens."""
    next_byte = 0
    for first in range(0, num_sequences, _SEQUENCES_AT_ONCE):
        count = min(_SEQUENCES_AT_ONCE, num_sequences - first)
        lengths = np.fromfile(index_file, np.int32, count, offset=_HEADER.size + 4 * first).astype(np.int64)
        offsets = np.fromfile(index_file, np.int64, count, offset=_HEADER.size + 4 * num_sequences + 8 * first)
        ends = next_byte + np.cumsum(lengths) * dtype.itemsize
        wrong = np.flatnonzero((offsets != ends - lengths * dtype.itemsize) | (lengths < 0))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                "MW-DATA-036",
                f"{index_file}: sequence {first + at} of {num_sequences} has length {lengths[at]} at byte "
                f"{offsets[at]}, which does not continue the one before it: the index is damaged. Next: {_AGAIN}",
            )
        next_byte = int(ends[-1])
    return next_byte // dtype.itemsize


def _check_documents(index_file: Path, num_sequences: int, num_ends: int) -> None:
    ends = np.fromfile(index_file, np.int64, num_ends, offset=_HEADER.size + 12 * num_sequences)
    if num_ends == 0 or ends[0] != 0 or ends[-1] != num_sequences or bool(np.any(np.diff(ends) < 0)):
        raise DataError(
            "MW-DATA-037",
            f"{index_file}: the {num_ends} document ends do not rise from 0 to the {num_sequences} sequences: "
            f"the index is damaged. Next: {_AGAIN}",
        )
