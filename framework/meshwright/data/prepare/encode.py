"""Encoding of a block by a worker: records -> tokens, lengths and errors,
as arrays that are sent through a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data.prepare.input_files import FileForm, InputFile
from meshwright.data.prepare.readers import RecordBlock, lines_of, lines_of_range, text_of
from meshwright.data.prepare.records import (
    Broken,
    DocumentPiece,
    Form,
    decoded,
    pieces_of,
    values_of_line,
)
from meshwright.errors import DataError

_BOM = b"\xef\xbb\xbf"
_TEXTS_PER_BATCH = 64
_MAX_TOKENS = 2**31 - 1
"""Maximal number of tokens of a document: the index counts them in 32 bits."""


class EncodedBlock(NamedTuple):
    """Encoded records of one block, in order."""

    tokens: NDArray[Any]  # (T,) of all documents, concatenated
    lengths: NDArray[np.int64]  # (R,) tokens of each record; 0: empty or broken
    counts: NDArray[np.uint8] | None  # (T,) 1 where a token counts as label; None: all do
    lines: NDArray[np.int64]  # (R,) line, row or file of each record, from 0 in this block
    num_lines: int
    """Number of lines, rows or files read, blank lines included."""
    broken: list[tuple[int, str]]
    """(index of the record, problem)."""
    text_bytes: int
    digest: bytes
    """Digest of the bytes of the block."""
    num_cut: int = 0
    """Number of conversations that were cut to the largest length."""
    num_long: int = 0
    """Number of conversations left out because no turn of theirs fits."""
    is_fatal: bool = False
    """True if the last broken record ends the preparation, also where such are skipped."""


class EncodedDocument(NamedTuple):
    """Tokens of a document."""

    tokens: NDArray[Any]  # (T,)
    counts: NDArray[np.uint8] | None  # (T,) 1 where a token counts as label; None: all do
    text_bytes: int


class ParsedRecord(NamedTuple):
    """A record: pieces to encode, an encoded document, or a problem."""

    line: int
    pieces: Sequence[DocumentPiece] = ()
    problem: str | None = None
    document: EncodedDocument | None = None
    is_cut: bool = False
    is_long: bool = False


class TooCostly(Broken):
    """A record that ends the preparation: more like it would take too long."""


def encoded(encode: Callable[[], Any], file: Path) -> Any:
    """Call the tokenizer. Raises DataError, with the file, where it cannot encode a text."""
    try:
        return encode()
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            "MW-DATA-122",
            f"{file}: the tokenizer cannot encode a text ({error}): give it an unknown"
            " token, or name another",
        ) from error


@dataclass
class Encoder:
    """Reader and encoder of blocks. Made once, and copied into each worker by the fork."""

    files: Sequence[InputFile]
    tokenizer: Tokenizer
    form: Form
    columns: tuple[str, ...]
    """Keys to read of a record, in the order of :meth:`RecordKeys.of`."""
    dtype: np.dtype[Any]
    end: int
    """Id of the end-of-document token."""
    begin: int | None = None
    """Id of the token before each document; None: none."""

    def __post_init__(self) -> None:
        """Disable truncation and padding, and encode special tokens in the text
        as ordinary characters.
        """
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.place = Path()
        self._is_over = False

    def close(self) -> None:
        """Release what the encoder has opened."""

    def __call__(self, block: RecordBlock) -> EncodedBlock:
        """Encode a block. Raises DataError: a file cannot be read, or a document is too long."""
        digest = sha256()
        self.place = self.files[block.first.file].path
        records, num_lines = self._read(block, digest)
        arrays: list[NDArray[Any]] = []
        counts: list[NDArray[np.uint8]] = []
        lengths = np.zeros(len(records), dtype=np.int64)
        text_bytes = 0
        for number, document in enumerate(self._documents(records)):
            if document is None:
                continue
            text_bytes += document.text_bytes
            if len(document.tokens) > _MAX_TOKENS:
                raise DataError(
                    "MW-DATA-038",
                    f"{self.place}: a document of {len(document.tokens):,} tokens is"
                    f" more than the index of a corpus can count ({_MAX_TOKENS:,}): cut it",
                )
            lengths[number] = len(document.tokens)
            arrays.append(document.tokens)
            if document.counts is not None:
                counts.append(document.counts)
        return EncodedBlock(
            np.concatenate(arrays) if arrays else np.zeros(0, dtype=self.dtype),
            lengths,
            (
                None
                if not self.form.has_mask
                else np.concatenate(counts)
                if counts
                else np.zeros(0, dtype=np.uint8)
            ),
            np.array([record.line for record in records], dtype=np.int64),
            num_lines,
            [
                (number, record.problem)
                for number, record in enumerate(records)
                if record.problem is not None
            ],
            text_bytes,
            digest.digest(),
            sum(record.is_cut for record in records),
            sum(record.is_long for record in records),
            self._is_over,
        )

    def _documents(self, records: list[ParsedRecord]) -> Iterator[EncodedDocument | None]:
        """Yield the document of each record; None for an empty or broken one."""
        ids_of_records = self._encode([record.pieces for record in records])
        for record, ids in zip(records, ids_of_records, strict=True):
            if not record.pieces:
                yield record.document
                continue
            text_bytes = sum(len(piece.text.encode()) for piece in record.pieces)
            yield EncodedDocument(*self._document(record.pieces, ids), text_bytes)

    def _document(
        self, pieces: Sequence[DocumentPiece], ids: list[list[int]]
    ) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        """Return the tokens of a document, (T,), and its mask of labels, (T,); None: all count."""
        parts: list[list[int]] = [] if self.begin is None else [[self.begin]]
        runs: list[tuple[bool, int]] = [] if self.begin is None else [(False, 1)]
        for piece, piece_ids in zip(pieces, ids, strict=True):
            parts.append(piece_ids)
            if piece.ends:
                parts.append([self.end])
            runs.append((piece.counts, len(piece_ids) + piece.ends))
        length = sum(map(len, parts))
        tokens = np.fromiter(chain.from_iterable(parts), dtype=self.dtype, count=length)
        if not self.form.has_mask:
            return tokens, None
        flags, lengths = zip(*runs, strict=True)
        return tokens, np.repeat(np.array(flags, dtype=np.uint8), lengths)

    def _encode(self, documents: list[Sequence[DocumentPiece]]) -> Iterator[list[list[int]]]:
        """Yield the ids of each piece of each document; texts are encoded in batches."""
        for start in range(0, len(documents), _TEXTS_PER_BATCH):
            batch = documents[start : start + _TEXTS_PER_BATCH]
            texts = [piece.text for pieces in batch for piece in pieces]
            encode = partial(self.tokenizer.encode_batch_fast, texts, add_special_tokens=False)
            encodings = iter(encoded(encode, self.place))
            for pieces in batch:
                yield [next(encodings).ids for _ in pieces]

    def _read(self, block: RecordBlock, digest: Any) -> tuple[list[ParsedRecord], int]:
        """Return the parsed records of a block and its number of lines, rows or files;
        update the digest.
        """
        file = self.files[block.first.file]
        if file.kind is FileForm.TEXT:
            files = self.files[block.first.file : block.after.file]
            return [self._text(number, each, digest) for number, each in enumerate(files)], len(
                files
            )
        if file.kind is FileForm.ROWS:
            digest.update(repr(block.content).encode(errors="backslashreplace"))
            return [
                self._parse(number, row, self._row) for number, row in enumerate(block.content)
            ], len(block.content)
        try:
            if block.content is not None:
                lines = lines_of(block.content)
            else:
                lines = lines_of_range(file.path, block.first.position, block.after.position)
        except OSError as error:
            raise DataError(
                "MW-DATA-039", f"cannot read {file.path}: {error.strerror or error}"
            ) from error
        if lines and block.first.position == 0:
            lines[0] = lines[0].removeprefix(_BOM)
        for line in lines:
            digest.update(line + b"\n")
        parse = partial(values_of_line, columns=self.columns)
        return [
            self._parse(number, line, parse) for number, line in enumerate(lines) if line.strip()
        ], len(lines)

    def _text(self, number: int, file: InputFile, digest: Any) -> ParsedRecord:
        raw = text_of(file)
        digest.update(sha256(raw).digest())
        return self._parse(number, raw.removeprefix(_BOM), lambda raw: (decoded(raw),))

    def _row(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the columns of a row of a parquet file."""
        return row

    def _record(self, line: int, values: tuple[Any, ...]) -> ParsedRecord:
        """Return a record of these columns. Raises Broken."""
        return ParsedRecord(line, pieces_of(self.form, values, self.columns))

    def _parse(
        self, number: int, raw: Any, values_of: Callable[[Any], tuple[Any, ...]]
    ) -> ParsedRecord:
        """Parse a record; ``values_of`` returns its columns.
        A broken record has a problem and no pieces.
        """
        if self._is_over:
            return ParsedRecord(number)
        try:
            return self._record(number, values_of(raw))
        except Broken as problem:
            self._is_over = isinstance(problem, TooCostly)
            return ParsedRecord(number, problem=str(problem))
