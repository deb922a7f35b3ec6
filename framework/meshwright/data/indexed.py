"""Megatron's ``.bin``/``.idx`` pair: checks before it is opened, and writers.
The door to megatron.core.datasets.

    prefix.bin   the tokens of all documents, concatenated, as one plain array
    prefix.idx   b"MMIDIDX\\0\\0", version u64 = 1, dtype code u8, num_sequences n u64, num_document_ends d u64,
                 lengths i32[n], byte offsets i64[n], document ends i64[d]          (little endian)
    prefix.mask  optional, an addition of this project: a byte for each token, 1 where it counts as
    a label

megatron-core asserts, or reads past the end of a damaged file; :func:`inspect` reads the index
first and reports the damage. It needs neither megatron-core (whose import takes 2.5 s) nor torch,
so a damaged corpus is reported before any rank starts. No other file imports
``megatron.core.datasets``.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError
from meshwright.system.bounded import open_regular

_MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
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
_SEQUENCES_PER_READ = 1 << 20
RESTORE = "prepare the corpus again, or restore both files from an intact copy"


class Index(NamedTuple):
    """Contents of an ``.idx`` that is consistent with its ``.bin``."""

    prefix: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    num_tokens: int
    one_each: bool
    """True if every document is one sequence."""


def bin_path(prefix: Path) -> Path:
    """Return ``prefix.bin``. The suffix is appended, because a prefix may contain dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return ``prefix.idx``."""
    return prefix.with_name(prefix.name + ".idx")


def mask_path(prefix: Path) -> Path:
    """Return ``prefix.mask``, the mask of labels."""
    return prefix.with_name(prefix.name + ".mask")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of Megatron's two token types
    that holds the vocabulary (the bound is Megatron's).
    """
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def inspect(prefix: Path) -> Index:
    """Check a corpus without megatron-core, in one pass over the index and none over the tokens.

    Raises:
        DataError: a missing file, a wrong magic or version, a truncated index, sizes that do not
            match the ``.bin``, a dtype that is no integer, or no tokens.
    """
    _check_present(prefix)
    index_file, tokens_file = idx_path(prefix), bin_path(prefix)
    try:
        dtype, num_sequences, num_ends = _read_header(index_file)
        num_tokens = _check_sequences(index_file, num_sequences, dtype)
        one_each = _check_documents(index_file, num_sequences, num_ends)
        tokens_bytes = tokens_file.stat().st_size
    except OSError as error:
        raise DataError("MW-DATA-027", f"cannot read the corpus {prefix}: {error}") from error
    if tokens_bytes != num_tokens * dtype.itemsize:
        raise DataError(
            "MW-DATA-028",
            f"{tokens_file} has {tokens_bytes:,} bytes where its index counts {num_tokens:,}"
            f" {dtype.name} tokens = {num_tokens * dtype.itemsize:,} bytes: the two files do not"
            f" belong together or a copy was cut short. Next: {RESTORE}",
        )
    if num_tokens == 0:
        raise DataError(
            "MW-DATA-029",
            f"the corpus {prefix} is empty: {num_ends - 1} documents, 0 tokens. Prepare it from"
            " other text",
        )
    return Index(prefix, dtype, num_sequences, num_ends - 1, num_tokens, one_each)


def _read_header(index_file: Path) -> tuple[np.dtype[Any], int, int]:
    """Return (dtype, number of sequences, number of document ends),
    checked against the size of the file.
    """
    index_bytes = index_file.stat().st_size
    with open_regular(index_file) as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        raise DataError(
            "MW-DATA-021",
            f"{index_file} ends inside its header ({len(head)} of {HEADER.size} bytes): {RESTORE}",
        )
    magic, version, code, num_sequences, num_ends = HEADER.unpack(head)
    if magic != _MAGIC or version != 1:
        raise DataError(
            "MW-DATA-022",
            f"{index_file} is no index of a Megatron corpus: it starts with {magic!r} version"
            f" {version}, expected {_MAGIC!r} version 1. Name a .bin/.idx pair by its path without"
            " the suffix",
        )
    if code not in _DTYPES:
        raise DataError(
            "MW-DATA-023",
            f"{index_file} has the unknown dtype code {code} (known: 1 to 8): {RESTORE}",
        )
    dtype = _DTYPES[code]
    if dtype.kind not in "iu":
        raise DataError(
            "MW-DATA-024",
            f"{index_file} has tokens of type {dtype.name}: token ids must be integers. "
            "Write it again as uint16 (vocabulary below 65500) or int32",
        )
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_ends
    if index_bytes == expected_bytes + num_sequences and num_sequences > 0:
        raise DataError(
            "MW-DATA-025",
            f"{index_file} is a multimodal index (a mode per sequence): only plain token corpora"
            " train",
        )
    if index_bytes != expected_bytes:
        raise DataError(
            "MW-DATA-026",
            f"{index_file} has {index_bytes:,} bytes where {num_sequences:,} sequences and"
            f" {num_ends:,} document ends need {expected_bytes:,}: it is cut short or damaged."
            f" Next: {RESTORE}",
        )
    return dtype, num_sequences, num_ends


def write(prefix: Path, documents: Iterable[NDArray[Any]], vocab_size: int) -> None:
    """Write a corpus with Megatron's builder, a sequence per document. Not atomic:
    the caller renames the files.
    """
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(
        str(bin_path(prefix)), token_dtype(vocab_size).type
    )
    for document in documents:
        assert document.ndim == 1 and 0 <= int(document.min()) <= int(document.max()) < vocab_size
        builder.add_document(document, [document.size])
    builder.finalize(str(idx_path(prefix)))


def write_index(prefix: Path, dtype: np.dtype[Any], lengths_file: Path) -> None:
    """Write the ``.idx`` of a ``.bin``, a sequence per document. ``lengths_file``:
    document lengths as an int32 array.

    The bytes are those of Megatron's builder, written in bounded memory and without its import (2.5
    s).
    """
    num_documents = lengths_file.stat().st_size // 4
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    starts = range(0, num_documents, _SEQUENCES_PER_READ)
    with idx_path(prefix).open("wb") as stream:
        stream.write(HEADER.pack(_MAGIC, 1, code, num_documents, num_documents + 1))
        for start in starts:
            stream.write(
                np.fromfile(lengths_file, np.int32, _SEQUENCES_PER_READ, offset=4 * start).tobytes()
            )
        next_byte = 0
        for start in starts:
            lengths = np.fromfile(
                lengths_file, np.int32, _SEQUENCES_PER_READ, offset=4 * start
            ).astype(np.int64)
            ends = next_byte + np.cumsum(lengths) * dtype.itemsize
            stream.write((ends - lengths * dtype.itemsize).tobytes())
            next_byte = int(ends[-1])
        for start in (*starts, num_documents):
            if start < num_documents:
                stop = min(start + _SEQUENCES_PER_READ, num_documents)
            else:
                stop = num_documents + 1
            stream.write(np.arange(start, stop, dtype=np.int64).tobytes())


def megatron_indexed_dataset() -> Any:
    """Import megatron-core's indexed_dataset module, at first use because the import is slow.

    The import warns four times about missing optional packages, which are not needed here. Only
    these messages are silenced, and only during the import.
    """
    with warnings.catch_warnings():
        missing = r"(Transformer Engine and Apex are|absl\.logging is) not installed"
        warnings.filterwarnings("ignore", message=missing, category=UserWarning)
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def _check_present(prefix: Path) -> None:
    if not prefix.name:
        raise DataError(
            "MW-DATA-126",
            f"{str(prefix)!r} names no corpus: give the path of a .bin/.idx pair, no suffix",
        )
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if not missing:
        return
    if prefix.suffix in (".bin", ".idx") and prefix.is_file():
        raise DataError(
            "MW-DATA-033",
            f"{prefix} names one file of the pair: write {prefix.with_suffix('')} (no suffix)",
        )
    if len(missing) == 1:
        raise DataError(
            "MW-DATA-034",
            f"{missing[0]} is missing: a corpus is a .bin/.idx pair and only the other half is"
            f" there. {RESTORE}",
        )
    folder = prefix.parent
    if not folder.is_dir():
        contents = f"the directory {folder} does not exist"
    else:
        names = sorted(path.stem for path in folder.glob("*.idx"))
        contents = f"{folder} holds {', '.join(names)}" if names else f"{folder} holds no .idx file"
    raise DataError(
        "MW-DATA-035",
        f"there is no corpus at {prefix} (neither {prefix.name}.bin nor {prefix.name}.idx;"
        f" {contents}). Prepare one, or point the config at the path of a .bin/.idx pair without"
        " its suffix",
    )


def _check_sequences(index_file: Path, num_sequences: int, dtype: np.dtype[Any]) -> int:
    """Check that the sequences are contiguous; return the number of tokens."""
    next_byte = 0
    for first in range(0, num_sequences, _SEQUENCES_PER_READ):
        count = min(_SEQUENCES_PER_READ, num_sequences - first)
        lengths = np.fromfile(index_file, np.int32, count, offset=HEADER.size + 4 * first).astype(
            np.int64
        )
        offsets = np.fromfile(
            index_file, np.int64, count, offset=HEADER.size + 4 * num_sequences + 8 * first
        )
        ends = next_byte + np.cumsum(lengths) * dtype.itemsize
        wrong = np.flatnonzero((offsets != ends - lengths * dtype.itemsize) | (lengths < 0))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                "MW-DATA-036",
                f"{index_file}: sequence {first + at} of {num_sequences} has length {lengths[at]}"
                f" at byte {offsets[at]}, which does not continue the one before it: the index is"
                f" damaged. Next: {RESTORE}",
            )
        next_byte = int(ends[-1])
    return next_byte // dtype.itemsize


def _check_documents(index_file: Path, num_sequences: int, num_ends: int) -> bool:
    """Check the document ends; return True if every document is one sequence."""
    before, rises, one_each = 0, True, True
    for first in range(0, num_ends, _SEQUENCES_PER_READ):
        count = min(_SEQUENCES_PER_READ, num_ends - first)
        ends = np.fromfile(
            index_file, np.int64, count, offset=HEADER.size + 12 * num_sequences + 8 * first
        )
        steps = np.diff(ends, prepend=before)
        rises = rises and bool((steps >= 0).all()) and (first > 0 or ends[0] == 0)
        one_each = one_each and bool((steps[first == 0 :] == 1).all())
        before = int(ends[-1])
    if not rises or num_ends == 0 or before != num_sequences:
        raise DataError(
            "MW-DATA-037",
            f"{index_file}: the {num_ends} document ends do not rise from 0 to the {num_sequences}"
            f" sequences: the index is damaged. Next: {RESTORE}",
        )
    return one_each
