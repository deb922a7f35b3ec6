"""Encoding of a block by a worker: records -> tokens, lengths and errors, as arrays that go through a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data.prepare.input_files import FileForm, InputFile
from meshwright.data.prepare.readers import RecordBlock, lines_of, lines_of_range, text_of
from meshwright.data.prepare.records import Broken, DocumentPiece, Form, columns_of, decoded, pieces_of, values_of_line
from meshwright.errors import DataError

_BOM = b"\xef\xbb\xbf"
_TEXTS_AT_ONCE = 64
_MOST_TOKENS = 2**31 - 1
"""Most tokens of a document: the index counts them in 32 bits."""


class Encoded(NamedTuple):
    """Encoded records of one block, in order."""

    tokens: NDArray[Any]  # (T,) of all documents, one after the other
    lengths: NDArray[np.int64]  # (R,) tokens of each record; 0: it is empty or broken
    counts: NDArray[np.uint8] | None  # (T,) 1 where a token counts as label; None: all do
    lines: NDArray[np.int64]  # (R,) line, row or file of each, from 0 in this block
    num_lines: int
    """Lines, rows or files that were passed, blank lines too."""
    broken: list[tuple[int, str]]
    """(index of the record, what is wrong with it)."""
    text_bytes: int
    digest: bytes
    """Digest of the bytes that were read."""


class _Read(NamedTuple):
    line: int
    pieces: list[DocumentPiece]
    problem: str | None


@dataclass
class Encoder:
    """Reads blocks and encodes them. Made once, copied into each worker by the fork."""

    files: Sequence[InputFile]
    tokenizer: Tokenizer
    form: Form
    text_key: str
    dtype: np.dtype[Any]
    end: int
    """Id of the end of document."""
    begin: int | None = None
    """Id that stands before each document, if any does."""

    def __post_init__(self) -> None:
        """Disable truncation and padding of the tokenizer, which would lose most of a document."""
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # a text that spells out a special token has those characters
        self.columns = columns_of(self.form, self.text_key)

    def __call__(self, block: RecordBlock) -> Encoded:
        """Encode a block. Raises DataError: a file that cannot be read, a document that is too long."""
        digest = sha256()
        reads, num_lines = self._read(block, digest)
        arrays: list[NDArray[Any]] = []
        counts: list[NDArray[np.uint8]] = []
        lengths = np.zeros(len(reads), dtype=np.int64)
        text_bytes = 0
        documents = self._encode([read.pieces for read in reads])
        for number, (read, ids) in enumerate(zip(reads, documents, strict=True)):
            if not read.pieces:
                continue
            text_bytes += sum(len(piece.text.encode()) for piece in read.pieces)
            tokens, counting = self._document(read.pieces, ids)
            if len(tokens) > _MOST_TOKENS:
                raise DataError(
                    "MW-DATA-038",
                    f"{self.files[block.first.file].path}: a document of {len(tokens):,} tokens is more than the index "
                    f"of a corpus can count ({_MOST_TOKENS:,}): cut it",
                )
            lengths[number] = len(tokens)
            arrays.append(tokens)
            if counting is not None:
                counts.append(counting)
        return Encoded(
            np.concatenate(arrays) if arrays else np.zeros(0, dtype=self.dtype),
            lengths,
            None if not self.form.has_mask else np.concatenate(counts) if counts else np.zeros(0, dtype=np.uint8),
            np.array([read.line for read in reads], dtype=np.int64),
            num_lines,
            [(number, read.problem) for number, read in enumerate(reads) if read.problem is not None],
            text_bytes,
            digest.digest(),
        )

    def _document(
        self, pieces: list[DocumentPiece], ids: list[list[int]]
    ) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        parts: list[list[int]] = [] if self.begin is None else [[self.begin]]
        counting: list[tuple[bool, int]] = [] if self.begin is None else [(False, 1)]
        for piece, own in zip(pieces, ids, strict=True):
            parts.append(own)
            if piece.ends:
                parts.append([self.end])
            counting.append((piece.counts, len(own) + piece.ends))
        length = sum(map(len, parts))
        tokens = np.fromiter(chain.from_iterable(parts), dtype=self.dtype, count=length)
        if not self.form.has_mask:
            return tokens, None
        flags, times = zip(*counting, strict=True)
        return tokens, np.repeat(np.array(flags, dtype=np.uint8), times)

    def _encode(self, documents: list[list[DocumentPiece]]) -> Iterator[list[list[int]]]:
        """Encode each piece of each document, several texts at a time."""
        for start in range(0, len(documents), _TEXTS_AT_ONCE):
            some = documents[start : start + _TEXTS_AT_ONCE]
            texts = [piece.text for pieces in some for piece in pieces]
            found = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for pieces in some:
                yield [next(found).ids for _ in pieces]

    def _read(self, block: RecordBlock, digest: Any) -> tuple[list[_Read], int]:
        file = self.files[block.first.file]
        if file.kind is FileForm.TEXT:
            reads = [
                self._text(number, each, digest)
                for number, each in enumerate(self.files[block.first.file : block.after.file])
            ]
            return reads, len(reads)
        if file.kind is FileForm.ROWS:
            digest.update(repr(block.content).encode(errors="backslashreplace"))
            return [self._values(number, row) for number, row in enumerate(block.content)], len(block.content)
        try:
            lines = (
                lines_of(block.content)
                if block.content is not None
                else lines_of_range(file.path, block.first.position, block.after.position)
            )
        except OSError as error:
            raise DataError("MW-DATA-039", f"cannot read {file.path}: {error.strerror or error}") from error
        if lines and block.first.position == 0:
            lines[0] = lines[0].removeprefix(_BOM)
        for line in lines:
            digest.update(line + b"\n")
        return [self._line(number, line) for number, line in enumerate(lines) if line.strip()], len(lines)

    def _text(self, number: int, file: InputFile, digest: Any) -> _Read:
        raw = text_of(file)
        digest.update(sha256(raw).digest())
        try:
            text = decoded(raw.removeprefix(_BOM))
        except Broken as problem:
            return _Read(number, [], str(problem))
        return _Read(number, [DocumentPiece(text, True, True)] if text else [], None)

    def _line(self, number: int, line: bytes) -> _Read:
        try:
            return self._values(number, values_of_line(line, self.columns))
        except Broken as problem:
            return _Read(number, [], str(problem))

    def _values(self, number: int, values: tuple[Any, ...]) -> _Read:
        try:
            return _Read(number, pieces_of(self.form, values, self.columns), None)
        except Broken as problem:
            return _Read(number, [], str(problem))
