"""What is known of a prepared corpus, kept beside it as ``fingerprint.json``: hashes, counts, ids, entropy, source.

With it a corpus is checked against the model before anything starts, a second preparation knows that there is nothing
to do, and a result can name exactly what it was trained on. A corpus without one (Megatron's own) trains too.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from framework.errors import DataError

FILE_NAME = "fingerprint.json"
_READ_BYTES = 1 << 20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Split(_Part):
    """One ``.bin/.idx`` pair."""

    documents: int
    tokens: int
    max_token_id: int
    unigram_entropy_nats: float
    unigram_entropy_bits: float
    """Of the tokens that count as labels."""
    counting: int | None = None
    """Tokens that count as labels, where not all do."""


class Source(_Part):
    """What was asked for: two preparations with equal sources give equal files."""

    description: str
    documents: int
    text_bytes: int
    sha256: str
    """Of the names and contents of all documents."""
    vocab_size: int
    """As asked; a small corpus may have yielded fewer tokens."""
    validation_share: float


class File(_Part):
    """A file that documents came from, as it was then."""

    path: str
    num_bytes: int
    mtime_ns: int


class Prepared(_Part):
    """How `meshwright data prepare` made it, and from what."""

    files: list[File]
    tokenizer_sha256: str
    end_of_document: str
    begin_of_document: str | None = None
    form: str
    text_key: str
    validation_share: float
    test_share: float
    seed: int
    """A document's place among all, and this, decide its split."""
    records: int
    """Documents, and these two:"""
    empty: int
    skipped: int


class Fingerprint(_Part):
    """The whole file."""

    schema_version: Literal[1] = 1
    files: dict[str, str]
    """File name -> sha256, for each ``.bin``, ``.idx`` and ``tokenizer.json``."""
    splits: dict[str, Split]
    vocab_size: int
    end_of_document_id: int
    source: Source
    prepared: Prepared | None = None
    """Of corpora that were written by `meshwright data prepare`."""


class Entropy(NamedTuple):
    """Of the distribution of single tokens; a model that knows only their frequencies has this loss."""

    nats: float
    bits: float


def entropy(counts: NDArray[np.int64]) -> Entropy:
    """-sum p ln p over the tokens that occur."""
    shares = counts[counts > 0] / counts.sum()
    nats = float(-(shares * np.log(shares)).sum())
    return Entropy(nats, nats / float(np.log(2.0)))


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read(folder: Path) -> Fingerprint | None:
    """The fingerprint in a folder; None where there is none; :class:`DataError` where it cannot be understood."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        return Fingerprint.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        first: Any = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": error}
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise DataError(
            f"{path} cannot be understood ({where}: {first['msg']}): prepare the corpus again, or delete this file to "
            f"train on the .bin/.idx without its checks"
        ) from error


def damaged_files(folder: Path, fingerprint: Fingerprint) -> list[str]:
    """The names of files that are missing or differ from their hash; reads every byte."""
    return [
        name
        for name, expected in fingerprint.files.items()
        if not (folder / name).is_file() or file_sha256(folder / name) != expected
    ]
