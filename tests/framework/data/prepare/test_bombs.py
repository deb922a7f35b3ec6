"""Files of some hundred bytes that unpack to gigabytes: refused, or read in bounded memory."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.prepare.input_files import list_files
from meshwright.data.prepare.readers import blocks, text_of
from meshwright.system.bounded import MIB
from tests.support.errors import raises

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def repeated(path: Path, value: str, rows: int) -> Path:
    """Return one value, stored once, in this many rows."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([value]))
    pq.write_table(
        pa.table({"text": column}),
        path,
        compression="zstd",
        store_schema=False,
        dictionary_pagesize_limit=2**30,
    )
    return path


def test_a_packed_document_without_end(tmp_path: Path) -> None:
    path = tmp_path / "zeros.txt.gz"
    with gzip.open(path, "wb") as stream:
        for _ in range(80):
            stream.write(bytes(MIB))
    (file,) = list_files([path])
    with raises("MW-DATA-066", "67,108,864"):
        text_of(file)
    with gzip.open(path, "wb") as stream:
        stream.write(b"word " * MIB)
    assert len(text_of(list_files([path])[0])) == 5 * MIB


def test_a_large_value_in_many_rows_is_decoded_row_by_row(tmp_path: Path) -> None:
    path = repeated(tmp_path / "rows.parquet", "x" * (30 * MIB), 1000)
    assert path.stat().st_size < 20_000
    first = next(blocks(list_files([path]), ["text"]))
    assert [len(text) for (text,) in first.content] == [30 * MIB]


def test_a_value_or_a_number_of_rows_beyond_all_text(tmp_path: Path) -> None:
    path = repeated(tmp_path / "value.parquet", "x" * (70 * MIB), 10)
    with raises("MW-DATA-131", "row group 0"):
        next(blocks(list_files([path]), ["text"]))
    path = repeated(tmp_path / "many.parquet", "x", 10**6)
    with raises("MW-DATA-130", "1,000,000"):
        next(blocks(list_files([path]), ["text"]))
