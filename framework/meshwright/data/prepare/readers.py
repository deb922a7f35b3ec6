"""Blocks of text, JSONL and parquet files: the units of work of a worker.
Their order follows from the files alone.

    notes/*.txt            a document per file        a block: neighbouring files, read by the worker
    pages.jsonl            a document per line        a block: a range of bytes, read by the worker
    pages.jsonl.gz         a document per line        a block: lines, decompressed by the parent
    pages.parquet          a document per row         a block: rows, decoded by the parent, row group by row group

A line belongs to the block that contains its first byte, so that a file is split without being
read. Memory holds four blocks, or longer documents, for each worker. :func:`blocks` resumes from
the end of any block.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from meshwright.data.prepare.input_files import FileForm, InputFile
from meshwright.data.prepare.records import OptionalKey, advice_for
from meshwright.errors import DataError
from meshwright.system.bounded import MAX_DOCUMENT_BYTES, MAX_LINE_BYTES, open_regular, read_bytes

BLOCK_BYTES = 1 << 20
MAX_FILES = 256
"""Maximal number of text files in one block."""
MAX_RATIO = 50
"""Largest ratio of unpacked to packed bytes beyond ``MAX_LINE_BYTES``: text has 3 to 20,
a decompression bomb 1,000.
"""
MAX_ROWS_PER_BYTE = 100
_ROWS_PER_BATCH = 64


class ReadPosition(NamedTuple):
    """Position in the input files: index of a file, and an offset in it."""

    file: int = 0
    position: int = 0
    """Byte offset in the decompressed lines, or row index."""


BEGINNING = ReadPosition()


class RecordBlock(NamedTuple):
    """Unit of work of one worker."""

    first: ReadPosition
    after: ReadPosition
    """Start of the next block."""
    content: Any
    """Bytes of whole lines, or the columns of rows; None: the worker reads the file itself."""
    source_bytes: int
    """Size on the disk, for the estimate of the remaining time."""


def blocks(
    files: Sequence[InputFile],
    columns: Sequence[str],
    start: ReadPosition = BEGINNING,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RecordBlock]:
    """Yield all blocks from ``start`` on. ``columns``: the columns to read of parquet files.

    Raises DataError: a file cannot be read, is damaged, or lacks a column.
    """
    file = start.file
    while file < len(files):
        position = start.position if file == start.file else 0
        if files[file].kind is FileForm.TEXT:
            after = _end_of_text_block(files, file, block_bytes)
            size = sum(each.num_bytes for each in files[file:after])
            yield RecordBlock(ReadPosition(file), ReadPosition(after), None, size)
            file = after
            continue
        if files[file].kind is FileForm.ROWS:
            yield from _row_blocks(files[file], file, columns, position, block_bytes)
        elif files[file].is_gzipped:
            yield from _gzip_blocks(files[file], file, position, block_bytes)
        else:
            for begin in range(position, files[file].num_bytes, block_bytes):
                end = min(begin + block_bytes, files[file].num_bytes)
                yield RecordBlock(
                    ReadPosition(file, begin), ReadPosition(file, end), None, end - begin
                )
        file += 1


def _end_of_text_block(files: Sequence[InputFile], first: int, block_bytes: int) -> int:
    """Return the index after the last of the text files that form one block;
    the block has at least one.
    """
    size, after = files[first].num_bytes, first + 1
    while after < len(files) and files[after].kind is FileForm.TEXT and after - first < MAX_FILES:
        size += files[after].num_bytes
        if size > block_bytes:
            break
        after += 1
    return after


def _gzip_blocks(
    file: InputFile, index: int, position: int, block_bytes: int
) -> Iterator[RecordBlock]:
    at = position
    try:
        with open_regular(file.path) as raw, gzip.open(raw, "rb") as stream:
            _skip(stream, position)
            reported = raw.tell() if position else 0
            while content := stream.read(block_bytes):
                if not content.endswith(b"\n"):
                    content += _rest_of_line(
                        stream, f"{file.path}: the line over unpacked byte {at + len(content):,}"
                    )
                now = raw.tell()
                yield RecordBlock(
                    ReadPosition(index, at),
                    ReadPosition(index, at + len(content)),
                    content,
                    now - reported,
                )
                at, reported = at + len(content), now
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "MW-DATA-058",
            f"{file.path} is damaged after {at:,} unpacked bytes ({error}): restore it from an"
            " intact copy",
        ) from error
    except OSError as error:
        raise DataError(
            "MW-DATA-059", f"cannot read {file.path}: {error.strerror or error}"
        ) from error


def _rest_of_line(stream: IO[bytes] | gzip.GzipFile, place: str) -> bytes:
    """Read up to the next line feed. Raises DataError: the line is too long."""
    rest = stream.readline(MAX_LINE_BYTES + 1)
    if len(rest) > MAX_LINE_BYTES:
        raise DataError(
            "MW-DATA-060",
            f"{place} is longer than the {MAX_LINE_BYTES:,} bytes that a line may have: split it",
        )
    return rest


def _skip(stream: gzip.GzipFile, count: int) -> None:
    """Read and discard ``count`` decompressed bytes."""
    while count > 0 and (passed := len(stream.read(min(count, 1 << 20)))):
        count -= passed


def _row_blocks(
    file: InputFile, index: int, columns: Sequence[str], position: int, block_bytes: int
) -> Iterator[RecordBlock]:
    """Yield the blocks of a file row group by row group, from row ``position`` on."""
    table = open_parquet(file.path, columns)
    present = [name for name in columns if name in table.schema_arrow.names]
    row, num_rows = 0, max(1, table.metadata.num_rows)
    if num_rows > MAX_ROWS_PER_BYTE * file.num_bytes:
        table.close()
        raise DataError(
            "MW-DATA-130",
            f"{file.path} claims {num_rows:,} rows in {file.num_bytes:,} bytes: no text is so"
            " short. Copy it again",
        )
    reported = file.num_bytes * position // num_rows
    try:
        for group in range(table.num_row_groups):
            in_group = table.metadata.row_group(group).num_rows
            if row + in_group <= position:
                row += in_group
                continue
            size = _rows_per_batch(
                table.metadata.row_group(group), columns, f"{file.path}: row group {group}"
            )
            for batch in table.iter_batches(size, row_groups=[group], columns=present):
                read = {name: batch.column(name).to_pylist() for name in present}
                absent = [None] * len(batch)
                rows = list(zip(*(read.get(name, absent) for name in columns), strict=True))
                num_skipped = min(max(position - row, 0), len(rows))
                row += num_skipped
                for part in _split_rows(rows[num_skipped:], block_bytes, f"{file.path}: row", row):
                    now = file.num_bytes * (row + len(part)) // num_rows
                    yield RecordBlock(
                        ReadPosition(index, row),
                        ReadPosition(index, row + len(part)),
                        part,
                        now - reported,
                    )
                    reported = now
                    row += len(part)
    except (OSError, ValueError, _arrow_error()) as error:
        raise DataError(
            "MW-DATA-061", f"{file.path} is damaged after row {row:,}: {error}. Copy it again"
        ) from error
    finally:
        table.close()


def _rows_per_batch(group: Any, columns: Sequence[str], place: str) -> int:
    """Return the number of rows that are decoded at once; one,
    if values repeat so that a row may be large.

    Raises:
        DataError: the row group unpacks to implausibly many bytes.
    """
    chunks = [group.column(index) for index in range(group.num_columns)]
    read = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    packed = sum(chunk.total_compressed_size for chunk in read)
    unpacked = sum(chunk.total_uncompressed_size for chunk in read)
    if unpacked > max(MAX_LINE_BYTES, MAX_RATIO * packed):
        raise DataError(
            "MW-DATA-131",
            f"{place} unpacks from {packed:,} to {unpacked:,} bytes, and text to at most"
            f" {MAX_RATIO} times as many: write the file again with smaller row groups",
        )
    return 1 if unpacked > MAX_RATIO * packed else _ROWS_PER_BATCH


def _split_rows(
    rows: list[tuple[Any, ...]], block_bytes: int, place: str, first: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Split rows into blocks of about ``block_bytes``. ``first``: number of the first one,
    for errors at ``place``.

    Raises:
        DataError: a row is too long.
    """
    block: list[tuple[Any, ...]] = []
    size = 0
    for number, row in enumerate(rows, start=first):
        block.append(row)
        row_bytes = sum(len(value) if isinstance(value, str | bytes) else 64 for value in row)
        if row_bytes > MAX_LINE_BYTES:
            raise DataError(
                "MW-DATA-132",
                f"{place} {number:,} is longer than the {MAX_LINE_BYTES:,} bytes that a row may"
                " have: split it",
            )
        size += row_bytes
        if size >= block_bytes:
            yield block
            block, size = [], 0
    if block:
        yield block


def count_records(files: Sequence[InputFile], columns: Sequence[str], at_most: int) -> int:
    """Return the number of files, lines and rows, at most ``at_most``: counting ends there.

    Raises DataError: a parquet file cannot be read or lacks a column.
    """
    counted = 0
    for file in files:
        if counted >= at_most:
            break
        if file.kind is FileForm.TEXT:
            counted += 1
        elif file.kind is FileForm.ROWS:
            with open_parquet(file.path, columns) as table:
                counted += table.metadata.num_rows
        else:
            counted += _count_lines(file, at_most - counted)
    return min(counted, at_most)


def _count_lines(file: InputFile, at_most: int) -> int:
    """Return the number of lines of a file, or some number of at least ``at_most``.

    Counting ends in a line that is too long, refused where it is read: a file of zeros may unpack
    to terabytes.
    """
    counted, of_line = 0, 0  # line feeds, and bytes since the last one
    try:
        with (
            open_regular(file.path) as raw,
            gzip.open(raw, "rb") if file.is_gzipped else raw as stream,
        ):
            while (
                counted < at_most
                and of_line <= MAX_LINE_BYTES
                and (content := stream.read(BLOCK_BYTES))
            ):
                counted += content.count(b"\n")
                end = content.rfind(b"\n")
                of_line = len(content) - 1 - end if end >= 0 else of_line + len(content)
    except (OSError, EOFError, zlib.error):
        return counted  # damaged files are refused where they are read
    return counted + (of_line > 0)


def open_parquet(path: Path, columns: Sequence[str]) -> Any:
    """Open a parquet file and check its columns. Raises DataError."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "MW-DATA-062", f"{path}: reading parquet needs pyarrow: pip install pyarrow"
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError, _arrow_error()) as error:
        raise DataError("MW-DATA-063", f"{path} cannot be read as parquet: {error}") from error
    names = table.schema_arrow.names
    wrong = next(
        (
            name
            for name in columns
            if names.count(name) != 1 and not (isinstance(name, OptionalKey) and name not in names)
        ),
        None,
    )
    if wrong is not None:
        table.close()
        if wrong in names:
            raise DataError(
                "MW-DATA-064",
                f"{path} has {names.count(wrong)} columns {wrong!r}: write it again with one",
            )
        raise DataError(
            "MW-DATA-065",
            f"{path} has no column {wrong!r}, only {', '.join(names)}{advice_for(wrong, names)}",
        )
    return table


def _arrow_error() -> type[Exception]:
    """Return the base class of pyarrow's exceptions; some of them are no OSError or ValueError."""
    import pyarrow

    base: type[Exception] = pyarrow.ArrowException
    return base


def lines_of_range(path: Path, start: int, stop: int) -> list[bytes]:
    """Return the lines whose first byte lies in [start, stop), without their line feeds."""
    with open_regular(path) as stream:
        stream.seek(max(0, start - 1))
        content = stream.read(stop - max(0, start - 1))
        if start > 0:
            end_of_previous = content.find(b"\n")
            if end_of_previous < 0 or end_of_previous + 1 >= len(content):
                return []
            content = content[end_of_previous + 1 :]
        if not content.endswith(b"\n"):
            content += _rest_of_line(stream, f"{path}: the line over byte {stop:,}")
    return lines_of(content)


def lines_of(content: bytes) -> list[bytes]:
    """Split at line feeds; the last line may have none."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def text_of(file: InputFile) -> bytes:
    """Read a whole file, decompressed. Raises DataError."""
    try:
        if not file.is_gzipped:
            return read_bytes(file.path, MAX_DOCUMENT_BYTES)
        limit_bytes = min(MAX_DOCUMENT_BYTES, max(MAX_LINE_BYTES, MAX_RATIO * file.num_bytes))
        with open_regular(file.path) as raw, gzip.open(raw, "rb") as stream:
            content = stream.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise DataError(
                "MW-DATA-066",
                f"{file.path} unpacks to more than {limit_bytes:,} bytes, the most of one document"
                f" of {file.num_bytes:,} packed bytes: unpack it with gunzip, or write an object on"
                " each line (.jsonl.gz)",
            )
        return content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "MW-DATA-067", f"{file.path} is damaged ({error}): restore it from an intact copy"
        ) from error
    except OSError as error:
        raise DataError(
            "MW-DATA-068", f"cannot read {file.path}: {error.strerror or error}"
        ) from error
