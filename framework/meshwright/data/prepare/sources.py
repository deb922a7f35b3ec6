"""Sources of text: hashed documents, one per file, sorted by name."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

from meshwright.data.prepare.input_files import files_below
from meshwright.data.splits import SHORTEST_PART, SplitRule, owed_tokens, part_of_document
from meshwright.errors import DataError
from meshwright.system.bounded import MAX_DOCUMENT_BYTES, read_bytes, real_path
from meshwright.terminal.format import format_number_of

_SHORTEST_PART_BYTES = 4 * SHORTEST_PART
"""SHORTEST_PART in bytes, at four bytes a token."""
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """One non-empty UTF-8 text file."""

    name: str
    """Path relative to the root of the source, with forward slashes: the same on all machines."""
    path: Path
    sha256: str
    num_bytes: int

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """Read the text of bytes [start, stop), line ends unchanged;
        a cut moves back to the start of its character.

        Raises DataError: the file has changed since it was listed.
        """
        raw = _read_bytes(self.path)
        if sha256(raw).hexdigest() != self.sha256:
            raise DataError(
                "MW-DATA-069",
                f"{self.path} changed while the corpus was being prepared: run it again when no"
                " process writes to it",
            )
        stop = len(raw) if stop is None else stop
        return raw[_character_start(raw, start) : _character_start(raw, stop)].decode("utf-8")

    def split_key(self) -> float:
        """Return a hash of the name in [0, 1):
        documents added later do not change the split of others.
        """
        return (
            int.from_bytes(blake2b(os.fsencode(self.name), digest_size=8).digest(), "big") / 2**64
        )


class DocumentSource(NamedTuple):
    """Documents sorted by name, and a one-line description."""

    documents: tuple[Document, ...]
    description: str

    def sha256(self) -> str:
        """Return the hex digest of all names and contents."""
        digest = sha256()
        for document in self.documents:
            digest.update(os.fsencode(f"{document.name}\0{document.sha256}\n"))
        return digest.hexdigest()


class DocumentPart(NamedTuple):
    """Bytes [start, stop) of a document."""

    document: Document
    start: int
    stop: int

    def text(self) -> str:
        """Read the text of this part. Raises DataError
        if the file has changed since it was listed.
        """
        return self.document.text(self.start, self.stop)


class Splits(NamedTuple):
    """Parts of a source's documents, or whole ones; each byte is in exactly one split."""

    train: tuple[DocumentPart, ...]
    validation: tuple[DocumentPart, ...]


def stdlib() -> DocumentSource:
    """List the ``.py`` files of the running Python's standard library,
    without its test suites and installed packages.

    Empty files (``__init__.py``) and the library's few files in other encodings than UTF-8 are
    skipped.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        paths += [Path(folder) / name for name in names if name.endswith(".py")]
    documents = _documents(paths, root, skip_other_encodings=True)
    if not documents:
        raise DataError(
            "MW-DATA-070",
            f"no Python source of the standard library under {root}: this Python was installed"
            " without it; prepare a corpus from text files of your own instead",
        )
    return DocumentSource(
        documents, f"Python {platform.python_version()} standard library, .py files without tests"
    )


def files(paths: Sequence[Path], root: Path | None = None) -> DocumentSource:
    """List text files, and all files below folders without hidden ones.

    ``root``: the folder that names are relative to; default: the common parent.

    Raises:
        DataError: a file is missing or not UTF-8, or no file has text.
    """
    listed: set[Path] = set()
    for path in paths:
        if path.is_dir():
            listed |= set(files_below(path))
        elif path.is_file():
            listed.add(path)
        else:
            raise DataError(
                "MW-DATA-071", f"there is no file or folder {path} to prepare a corpus from"
            )
    resolved = {real_path(path) for path in listed}
    if not resolved:
        raise DataError(
            "MW-DATA-072",
            "no files to prepare a corpus from in"
            f" {', '.join(map(str, paths)) or 'an empty list of paths'}",
        )
    if root:
        base = real_path(root)
    else:
        base = Path(os.path.commonpath([str(path.parent) for path in resolved]))
    outside = [path for path in resolved if not path.is_relative_to(base)]
    if outside:
        raise DataError(
            "MW-DATA-073",
            f"{outside[0]} is not below the root {base}: names are relative to it, choose a folder"
            " above both",
        )
    documents = _documents(resolved, base, skip_other_encodings=False)
    if not documents:
        raise DataError(
            "MW-DATA-074",
            f"all {len(resolved)} files are empty: a corpus needs text"
            f" ({', '.join(map(str, paths))})",
        )
    return DocumentSource(documents, format_number_of(len(documents), "text file"))


def split(source: DocumentSource, validation_share: float, rule: SplitRule) -> Splits:
    """Split the text by position, or the documents by a hash of their names.

    Raises:
        DataError: the share is none, or there is one document to split by documents.
    """
    if not 0.0 <= validation_share < 1.0:
        raise DataError(
            "MW-DATA-075",
            f"validation_share={validation_share} is no share of the documents: choose 0 <= share <"
            " 1, such as 0.05",
        )
    if validation_share == 0.0:
        return Splits(_whole(source.documents), ())
    if rule is SplitRule.POSITION:
        return _split_by_position(source, validation_share)
    if len(source.documents) < 2:
        raise DataError(
            "MW-DATA-076",
            f"one document ({source.documents[0].name}) cannot be split by document into training"
            " and validation: give more files, --split position, or --validation-share 0 for no"
            " validation corpus",
        )
    return _split_by_document(source, validation_share)


def _split_by_document(source: DocumentSource, validation_share: float) -> Splits:
    """Split by a hash of the documents' names; validation has at least one document."""
    by_key = sorted(source.documents, key=lambda document: (document.split_key(), document.name))
    num_validation = sum(document.split_key() < validation_share for document in by_key)
    num_validation = min(max(num_validation, 1), len(by_key) - 1)
    chosen = {document.name for document in by_key[:num_validation]}
    return Splits(
        _whole(document for document in source.documents if document.name not in chosen),
        _whole(document for document in source.documents if document.name in chosen),
    )


def _split_by_position(source: DocumentSource, validation_share: float) -> Splits:
    """Give the last bytes of the documents to validation; see :mod:`meshwright.data.splits`."""
    train, validation = list[DocumentPart](), list[DocumentPart]()
    seen, given = 0, 0
    for document in source.documents:
        length = document.num_bytes
        seen += length
        owed = owed_tokens(validation_share, seen, given)
        part = part_of_document(length, owed, may_cut=True, shortest=_SHORTEST_PART_BYTES)
        given += part
        if part < length:
            train.append(DocumentPart(document, 0, length - part))
        if part:
            validation.append(DocumentPart(document, length - part, length))
    return Splits(tuple(train), tuple(validation))


def _whole(documents: Iterable[Document]) -> tuple[DocumentPart, ...]:
    return tuple(DocumentPart(document, 0, document.num_bytes) for document in documents)


def _character_start(raw: bytes, at: int) -> int:
    """Return the start of the UTF-8 character that contains byte ``at``;
    the end of the bytes stays.
    """
    while 0 < at < len(raw) and raw[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _documents(
    paths: Iterable[Path], root: Path, *, skip_other_encodings: bool
) -> tuple[Document, ...]:
    documents = []
    for path in paths:
        raw = _read_bytes(path)
        if not raw:
            continue
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if skip_other_encodings:
                continue
            raise DataError(
                "MW-DATA-077",
                f"{path} is not utf-8 (byte {error.object[error.start]:#04x} at {error.start}):"
                " convert or omit it",
            ) from error
        documents.append(
            Document(path.relative_to(root).as_posix(), path, sha256(raw).hexdigest(), len(raw))
        )
    return tuple(sorted(documents))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise DataError("MW-DATA-078", f"cannot read {path}: {error.strerror or error}") from error
