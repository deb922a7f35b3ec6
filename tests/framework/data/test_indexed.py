"""The door to Megatron's indexed datasets: whole corpora open,
each kind of damage is named with its file.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from meshwright.data import indexed
from meshwright.data.indexed import inspect
from meshwright.data.token_files import TokenStream, documents
from tests.support.errors import raises

DOCUMENTS = [np.array([5, 6, 7, 0]), np.array([0]), np.arange(100, 120)]


def build(
    prefix: Path,
    dtype: type = np.uint16,
    documents: list[np.ndarray] = DOCUMENTS,
    multimodal: bool = False,
) -> Path:
    """Write with Megatron's own builder, as its preprocess_data.py does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        builder.add_document(document, [document.size], [0] if multimodal else None)
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_reads_what_megatron_wrote(tmp_path: Path, dtype: type) -> None:
    index = inspect(build(tmp_path / "corpus.v1", dtype))
    assert (index.dtype, index.num_documents, index.num_sequences, index.num_tokens) == (
        np.dtype(dtype),
        3,
        3,
        25,
    )
    stream = TokenStream(index)
    everything = np.concatenate(DOCUMENTS)
    assert stream.read(0, 25).dtype == np.int64
    for start, count in [(0, 25), (3, 2), (24, 1), (5, 20)]:
        assert stream.read(start, count).tolist() == everything[start : start + count].tolist()


def test_megatron_reads_what_we_wrote(tmp_path: Path) -> None:
    for vocab_size, dtype in [(4096, np.uint16), (128_256, np.int32)]:
        prefix = tmp_path / str(vocab_size)
        indexed.write(prefix, DOCUMENTS, vocab_size)
        dataset = IndexedDataset(str(prefix))
        assert dataset.index.dtype == dtype
        assert [dataset[i].tolist() for i in range(3)] == [
            document.tolist() for document in DOCUMENTS
        ]
        assert dataset.document_indices.tolist() == [0, 1, 2, 3]


def test_documents_of_several_sequences_open(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
    builder.add_document(np.arange(9), [4, 5])
    builder.add_document(np.arange(3), [3])
    builder.finalize(str(tmp_path / "c.idx"))
    index = inspect(tmp_path / "c")
    assert (index.num_documents, index.num_sequences, index.num_tokens) == (2, 3, 12)


@pytest.mark.parametrize(
    ("of_documents", "starts"),
    [
        ([[5, 4], []], [0, 9, 9]),
        ([[5, 4], [], [3]], [0, 9, 9, 12]),
        ([[], [2, 7]], [0, 0, 9]),
        ([[5], [4]], [0, 5, 9]),
    ],
)
def test_documents_are_no_sequences(
    of_documents: list[list[int]], starts: list[int], tmp_path: Path
) -> None:
    """As many documents as sequences, and still not one in each:
    --split-sentences of texts that may be empty.
    """
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
    for lengths in of_documents:
        builder.add_document(np.arange(sum(lengths)), lengths)
    builder.finalize(str(tmp_path / "c.idx"))
    index = inspect(tmp_path / "c")
    assert index.num_documents == index.num_sequences == len(starts) - 1
    assert documents(index).all_starts().tolist() == starts
    assert [documents(index).start(number) for number in range(len(starts))] == starts


def test_a_large_index_is_checked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_SEQUENCES_PER_READ", 7)
    rng = np.random.default_rng(0)
    documents = [np.arange(n) for n in rng.integers(1, 30, 50)]
    prefix = build(tmp_path / "c", documents=documents)
    assert inspect(prefix).num_tokens == sum(map(len, documents))
    patch(indexed.idx_path(prefix), 34 + 4 * 40, struct.pack("<i", documents[40].size + 1))
    with raises("MW-DATA-036", "sequence 41", 50):
        inspect(prefix)


def patch(path: Path, offset: int, raw: bytes) -> None:
    """Overwrite bytes in the middle of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(raw)


def cut(path: Path, by: int) -> None:
    """Take bytes off the end of a file."""
    path.write_bytes(path.read_bytes()[:-by])


# This .idx: header 34 bytes, 3 lengths i32 at 34, 3 offsets i64 at 46, 4 document ends i64 at 70;
# 102 bytes in all.
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no .bin": (lambda tokens, index: tokens.unlink(), "MW-DATA-034"),
    "no .idx": (lambda tokens, index: index.unlink(), "MW-DATA-034"),
    "bad magic": (lambda tokens, index: patch(index, 0, b"PK\x03\x04"), "MW-DATA-022"),
    "bad version": (lambda tokens, index: patch(index, 9, b"\x02"), "MW-DATA-022"),
    "empty .idx": (lambda tokens, index: index.write_bytes(b""), "MW-DATA-021"),
    "cut in the header": (lambda tokens, index: cut(index, 80), "MW-DATA-021"),
    "cut short": (lambda tokens, index: cut(index, 5), "MW-DATA-026"),
    "absurd count": (lambda tokens, index: patch(index, 18, b"\xff" * 8), "MW-DATA-026"),
    "unknown dtype": (lambda tokens, index: patch(index, 17, b"\x2a"), "MW-DATA-023"),
    "float dtype": (lambda tokens, index: patch(index, 17, b"\x07"), "MW-DATA-024"),
    "wrong dtype": (lambda tokens, index: patch(index, 17, b"\x04"), "MW-DATA-036"),
    "negative length": (
        lambda tokens, index: patch(index, 34, struct.pack("<i", -4)),
        "MW-DATA-036",
    ),
    "wrong offset": (lambda tokens, index: patch(index, 54, struct.pack("<q", 9)), "MW-DATA-036"),
    "wrong documents": (
        lambda tokens, index: patch(index, 94, struct.pack("<q", 9)),
        "MW-DATA-037",
    ),
    "falling documents": (
        lambda tokens, index: patch(index, 78, struct.pack("<q", 3)),
        "MW-DATA-037",
    ),
    ".bin cut short": (lambda tokens, index: cut(tokens, 2), "MW-DATA-028"),
    ".bin of another": (lambda tokens, index: tokens.write_bytes(b"0" * 60), "MW-DATA-028"),
}


@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(
    tmp_path: Path, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many sequences and document ends are read at once."""
    monkeypatch.setattr(indexed, "_SEQUENCES_PER_READ", at_once)
    prefix = build(tmp_path / "c")
    assert inspect(prefix).one_each
    spoil, code = DAMAGE[kind]
    spoil(indexed.bin_path(prefix), indexed.idx_path(prefix))
    with raises(code, tmp_path):
        inspect(prefix)


def test_no_documents_is_an_empty_corpus(tmp_path: Path) -> None:
    with raises("MW-DATA-029", "c", 0):
        inspect(build(tmp_path / "c", documents=[]))


def test_multimodal_is_refused(tmp_path: Path) -> None:
    with raises("MW-DATA-025"):
        inspect(build(tmp_path / "c", multimodal=True))


def test_a_missing_corpus_says_what_is_there(tmp_path: Path) -> None:
    build(tmp_path / "train")
    with raises("MW-DATA-035", "trian", "train"):
        inspect(tmp_path / "trian")
    with raises("MW-DATA-035", "nowhere"):
        inspect(tmp_path / "nowhere" / "train")
    (tmp_path / "empty").mkdir()
    with raises("MW-DATA-035", "empty"):
        inspect(tmp_path / "empty" / "train")


def test_a_prefix_with_its_suffix_says_what_to_write(tmp_path: Path) -> None:
    prefix = build(tmp_path / "train")
    with raises("MW-DATA-033", prefix):
        inspect(tmp_path / "train.bin")


@pytest.mark.torture
def test_checking_is_light_and_opening_is_silent(tmp_path: Path) -> None:
    """A check imports neither torch nor megatron-core; nor does reading,
    and there is no warning of any kind.
    """
    prefix = build(tmp_path / "c")
    code = (
        "import sys; from pathlib import Path; from meshwright.data.indexed import inspect\n"
        "from meshwright.data.token_files import TokenStream\n"
        f"index = inspect(Path({str(prefix)!r}))\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "print(TokenStream(index).read(1, 2).tolist())\n"
        "import torch; assert not torch.distributed.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[6, 7]\n", "")


def test_there_is_one_door() -> None:
    framework = Path(indexed.__file__).resolve().parents[1]
    doors = [
        path.name
        for path in framework.rglob("*.py")
        if "import indexed_dataset" in path.read_text(encoding="utf-8")
    ]
    assert doors == ["indexed.py"]
