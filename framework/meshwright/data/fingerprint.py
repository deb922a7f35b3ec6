"""The fingerprint of a prepared corpus, ``fingerprint.json`` beside it: hashes, counts, ids,
entropy, source.

It serves to check a corpus against the model before any rank starts, to skip a second preparation,
and to identify the training data of a run exactly. A corpus without one (Megatron's own) can be
trained on too.
"""

from __future__ import annotations

import os
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import DataError
from meshwright.system.bounded import MAX_FILE_BYTES, open_regular, read_bytes

FILE_NAME = "fingerprint.json"
SAMPLED_BLOCKS, SAMPLED_BYTES = 256, 4096
"""Number and size in bytes of the blocks that a sampled hash covers."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Split(_Part):
    """Counts of one ``.bin/.idx`` pair."""

    documents: int
    tokens: int
    max_token_id: int
    unigram_entropy_nats: float
    unigram_entropy_bits: float
    """Unigram entropy of the tokens that count as labels, in bits."""
    unigram_baseline_nats: float | None = None
    """Loss on these labels of a model with the token frequencies of the training split alone; None:
    not measured.
    """
    counting: int | None = None
    """Number of tokens that count as labels; None: all do."""


class SourceSummary(_Part):
    """Source text and options of a corpus. If all but the description are equal,
    so are the files.
    """

    description: str
    documents: int
    text_bytes: int
    sha256: str
    """Hash of the names and contents of all documents."""
    vocab_size: int
    """Requested size; a small corpus may have yielded fewer tokens."""
    validation_share: float
    split: Literal["documents", "position"] = "documents"
    """Rule of the split; see :mod:`meshwright.data.splits`. Older versions split by documents."""


class File(_Part):
    """Input file as it was during the preparation."""

    path: str
    num_bytes: int
    mtime_ns: int


class Request(_Part):
    """Inputs and options of `meshwright data prepare`, which decide the bytes of a corpus."""

    files: list[File]
    tokenizer_sha256: str
    end_of_document: str
    begin_of_document: str | None = None
    form: str
    text_key: str
    prompt_key: str = "prompt"
    response_key: str = "response"
    validation_share: float
    test_share: float
    seed: int
    """Seed of a split by documents: a document's split follows from the seed and its number."""
    split: Literal["documents", "position"] = "documents"
    """Rule of the split."""
    chat_template: str | None = None
    """Hash of the chat template and its special tokens; None: conversations without one."""
    chat_date: str | None = None
    """Date and time that the template writes; None: it writes none."""
    max_tokens: int | None = None
    """Largest number of tokens of a conversation; None: any."""

    def first_files(self, count: int) -> Request:
        """Return the request with its first ``count`` files only."""
        return self.model_copy(update={"files": self.files[:count]})

    def differences(self, other: Request) -> list[str]:
        """Return the changes from this request to ``other``, a line each."""
        lines = []
        before, after = ({file.path: file for file in each.files} for each in (self, other))
        lines += [f"{path} is no longer there" for path in before if path not in after]
        lines += [f"{path} is new" for path in after if path not in before]
        for path in before.keys() & after.keys():
            was, now = before[path], after[path]
            if was.num_bytes != now.num_bytes:
                lines.append(f"{path} had {was.num_bytes:,} bytes and has {now.num_bytes:,}")
            elif was.mtime_ns != now.mtime_ns:
                lines.append(f"{path} was written to since ({now.num_bytes:,} bytes as before)")
        lines.sort()
        if not lines and list(before) != list(after):
            lines.append("the files come in another order")
        for name in Request.model_fields:
            old, new = getattr(self, name), getattr(other, name)
            if name != "files" and old != new:
                lines.append(f"{name} was {old!r} and is {new!r}")
        return lines


class Preparation(Request):
    """Request and result of `meshwright data prepare`."""

    records: int
    """Number of documents, empty and skipped ones included."""
    empty: int
    skipped: int
    cut: int | None = None
    """Number of conversations of which only the first turns fit ``max_tokens``."""
    too_long: int | None = None
    """Number of conversations left out because no turn of theirs fits ``max_tokens``."""


class Fingerprint(_Part):
    """Contents of ``fingerprint.json``."""

    schema_version: Literal[1] = 1
    files: dict[str, str]
    """File name -> sha256, for every other file of the corpus."""
    sampled: dict[str, str] = {}
    """File name -> :func:`sampled_sha256`, of the files that a run reads.
    Empty in those of older versions.
    """
    splits: dict[str, Split]
    vocab_size: int
    end_of_document_id: int
    source: SourceSummary
    prepared: Preparation | None = None
    """Set for corpora that were written by `meshwright data prepare`."""

    def unigram_baseline_nats(self, name: str) -> float:
        """Return the loss on a split of a model with the token frequencies
        of the training split alone.

        Older fingerprints lack it for validation: there the entropy of the training split stands
        for it, which differs little. The entropy of a small validation split is no baseline, as it
        fits these few tokens.
        """
        split = self.splits[name]
        if split.unigram_baseline_nats is not None:
            return split.unigram_baseline_nats
        return self.splits.get("train", split).unigram_entropy_nats

    def sha256_of(self, name: str) -> str:
        """Return the hash of one file. Raises DataError where the fingerprint has none."""
        if name not in self.files:
            raise DataError(
                "MW-DATA-016",
                f"{FILE_NAME} has no hash of {name}: prepare the corpus again, or copy it again as"
                " a whole",
            )
        return self.files[name]


class Entropy(NamedTuple):
    """Entropy of the distribution of single tokens:
    the loss of a model with their frequencies alone.
    """

    nats: float
    bits: float


def entropy(counts: NDArray[np.int64]) -> Entropy:
    """Return -sum p ln p over the tokens that occur."""
    shares = counts[counts > 0] / counts.sum()
    nats = float(-(shares * np.log(shares)).sum())
    return Entropy(nats, nats / float(np.log(2.0)))


def cross_entropy(counts: NDArray[np.int64], training: NDArray[np.int64]) -> float:
    """Return the mean loss on counted tokens, in nats,
    of a model with the token frequencies of other ones.

    Tokens that ``training`` lacks have a share too: T of N + T, for T different tokens among N,
    spread over the whole vocabulary (Witten and Bell 1991, "The zero-frequency problem", method C).

    Args:
        counts: (V,) occurrences of each token in the text to predict.
        training: (V,) occurrences in the text that the frequencies come from.
    """
    num_tokens, num_different = int(training.sum()), int((training > 0).sum())
    shares = (training + num_different / len(training)) / (num_tokens + num_different)
    occurs = counts > 0
    return float(-(counts[occurs] * np.log(shares[occurs])).sum() / counts.sum())


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with open_regular(path) as stream:
        return file_digest(stream, "sha256").hexdigest()


def tokenizer_sha256(path: Path) -> str:
    """Return the hex digest of a tokenizer. Raises DataError where it cannot be read,
    or is too large for one.
    """
    try:
        return sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise DataError(
            "MW-DATA-017",
            f"{path} cannot be read: {error.strerror or error}; restore it from an intact copy",
        ) from None


def sampled_sha256(path: Path) -> str:
    """Return the hex digest of a file's size and of SAMPLED_BLOCKS of its blocks;
    of a small file all bytes are hashed.

    The blocks are the first, the last and, in each equal part between, one at an offset that
    follows from the size alone. At most 1 MiB is read of a file of any size. A change of all
    tokens, or of a share of them spread over the file, is found. A change between the blocks is
    not: see :func:`file_sha256`.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = sha256(f"{size}\n".encode())
        for start in sampled_offsets(size):
            digest.update(os.pread(stream.fileno(), SAMPLED_BYTES, start))
    return digest.hexdigest()


def sampled_offsets(size: int) -> list[int]:
    """Return the offsets of the sampled blocks in a file of ``size`` bytes."""
    if size <= SAMPLED_BLOCKS * SAMPLED_BYTES:
        return list(range(0, size, SAMPLED_BYTES))
    last, parts = size - SAMPLED_BYTES, SAMPLED_BLOCKS - 2
    drawn = np.random.Generator(np.random.PCG64(size)).random(parts)
    return [0, *(int((part + share) / parts * last) for part, share in enumerate(drawn)), last]


def read(folder: Path) -> Fingerprint | None:
    """Read the fingerprint in a folder; None if there is none.
    Raises :class:`DataError` for a malformed one.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        return Fingerprint.model_validate_json(read_bytes(path))
    except (ValidationError, OSError) as error:
        first: Any = (
            error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": error}
        )
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise DataError(
            "MW-DATA-018",
            f"{path} cannot be understood ({where}: {first['msg']}): prepare the corpus again, or"
            " delete this file to train on the .bin/.idx without its checks",
        ) from error


def damaged_files(folder: Path, fingerprint: Fingerprint) -> list[str]:
    """Return the names of files that are missing or differ from their hash.

    Reads every byte; a .json file over 256 MiB counts as damaged.
    """

    def is_whole(path: Path, expected: str) -> bool:
        if not path.is_file() or (path.suffix == ".json" and path.stat().st_size > MAX_FILE_BYTES):
            return False
        return file_sha256(path) == expected

    return [
        name
        for name, expected in fingerprint.files.items()
        if not is_whole(folder / name, expected)
    ]


def sampled_files(folder: Path) -> dict[str, str]:
    """Return the sampled hash of every file of a corpus that a run reads."""
    return {
        path.name: sampled_sha256(path) for path in sorted(folder.iterdir()) if path.suffix in READ
    }


READ = (".bin", ".idx", ".mask")
"""Endings of the files that a run reads in every step."""


def check_sampled(folder: Path, name: str, fingerprint: Fingerprint) -> None:
    """Compare the sampled hashes of one split's files with the fingerprint.

    Raises:
        DataError: a file was changed since it was prepared, or cannot be read.
    """
    for file in (f"{name}{ending}" for ending in READ):
        expected = fingerprint.sampled.get(file)
        path = folder / file
        if expected is None or not path.is_file():
            continue
        try:
            actual = sampled_sha256(path)
        except OSError as error:
            raise DataError(
                "MW-DATA-019", f"{path} cannot be read: {error.strerror} (errno {error.errno})"
            ) from error
        if actual != expected:
            raise DataError(
                "MW-DATA-020",
                f"{path} was changed after the corpus was prepared: its bytes do not match the hash"
                f" in {FILE_NAME} beside it. Prepare it again, or restore it from an intact copy;"
                f" `meshwright data verify {folder}` names every file that differs",
            )
