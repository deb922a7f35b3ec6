"""The last steps of a preparation: indices, tokenizer and fingerprint; and whether a corpus is what was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data import fingerprint as fingerprints
from meshwright.data import indexed
from meshwright.data.fingerprint import Fingerprint, Preparation
from meshwright.data.prepare.input_files import FileForm, InputFile
from meshwright.data.prepare.tokenizer_files import KnownTokenizer
from meshwright.data.prepare.work_folder import SKIPPED_FILE, Request, WorkFolder
from meshwright.data.splits import SPLITS
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.errors import DataError

_TOKENS_AT_ONCE = 1 << 22


def write_indices(work: WorkFolder, files: Sequence[InputFile], known: KnownTokenizer, request: Request) -> Fingerprint:
    """Write indices, tokenizer and fingerprint beside the tokens. Can be repeated at any moment."""
    state = work.state
    if not state.splits["train"].documents:
        what = f"{state.records:,} documents, {state.empty:,} of them empty, {state.skipped:,} broken"
        where = f"{files[0].path}" + (f" and {len(files) - 1:,} other files" if files[1:] else "")
        raise DataError(
            "MW-DATA-040", f"nothing is left to train on in {where}: {what}. Give more text, or lower the other shares"
        )
    splits, hashes = {}, {}
    for name in SPLITS:
        prefix = work.corpus / name
        if not state.splits[name].documents:
            for ending in ("bin", "idx", "mask"):
                work.corpus.joinpath(f"{name}.{ending}").unlink(missing_ok=True)
            continue
        indexed.write_index(prefix, work.dtype, work.file_of(name, "lengths"))
        mask = np.memmap(indexed.mask_path(prefix), np.uint8, "r") if work.has_mask else None
        counts, hashes[f"{name}.bin"] = _count_tokens(indexed.bin_path(prefix), work.dtype, known.vocab_size, mask)
        nats, bits = fingerprints.entropy(counts.counting)
        splits[name] = fingerprints.Split(
            documents=state.splits[name].documents,
            tokens=state.splits[name].tokens,
            max_token_id=int(np.flatnonzero(counts.all)[-1]),
            unigram_entropy_nats=nats,
            unigram_entropy_bits=bits,
            counting=None if mask is None else int(counts.counting.sum()),
        )
    for file in known.files:
        shutil.copyfile(file, work.corpus / (TOKENIZER_FILE if file == known.path else file.name))
    if state.skipped:
        shutil.copyfile(work.path / SKIPPED_FILE, work.corpus / SKIPPED_FILE)
    (work.corpus / fingerprints.FILE_NAME).unlink(missing_ok=True)
    hashes |= {path.name: fingerprints.file_sha256(path) for path in work.corpus.iterdir() if path.name not in hashes}
    made = Fingerprint(
        files=dict(sorted(hashes.items())),
        sampled=fingerprints.sampled_files(work.corpus),
        splits=splits,
        vocab_size=known.vocab_size,
        end_of_document_id=known.end,
        source=fingerprints.PreparationRequest(
            description=_described(files),
            documents=sum(split.documents for split in splits.values()),
            text_bytes=state.text_bytes,
            sha256=state.digest,
            vocab_size=known.vocab_size,
            validation_share=request.validation_share,
        ),
        prepared=Preparation(**request.model_dump(), records=state.records, empty=state.empty, skipped=state.skipped),
    )
    text = made.model_dump_json(indent=2, exclude_none=True) + "\n"
    (work.corpus / fingerprints.FILE_NAME).write_text(text, encoding="utf-8")
    return made


class _TokenCounts(NamedTuple):
    """Token counts of a file, and its hash."""

    all: NDArray[np.int64]  # (V,)
    counting: NDArray[np.int64]  # (V,) as a label


def _count_tokens(
    path: Path, dtype: np.dtype[Any], vocab_size: int, mask: NDArray[np.uint8] | None
) -> tuple[_TokenCounts, str]:
    """Count the tokens of a file and hash it, in one pass. ``mask``: 1 where a token counts as label; None: all do."""
    counts = np.zeros((2, vocab_size), dtype=np.int64)
    digest, at = sha256(), 0
    with path.open("rb") as stream:
        while content := stream.read(_TOKENS_AT_ONCE):
            digest.update(content)
            tokens = np.frombuffer(content, dtype)
            counts[0] += np.bincount(tokens, minlength=vocab_size)
            if mask is not None:
                counts[1] += np.bincount(tokens[mask[at : at + len(tokens)] != 0], minlength=vocab_size)
            at += len(tokens)
    return _TokenCounts(counts[0], counts[0] if mask is None else counts[1]), digest.hexdigest()


def _described(files: Sequence[InputFile]) -> str:
    names = {FileForm.TEXT: "text", FileForm.LINES: "JSONL", FileForm.ROWS: "parquet"}
    kinds = [kind for kind in FileForm if any(file.kind is kind for file in files)]
    return " and ".join(
        f"{count:,} {names[kind]} file{'s' * (count > 1)}"
        for kind in kinds
        if (count := sum(file.kind is kind for file in files))
    )


def complete(out: Path, request: Request, *, replace: bool) -> Fingerprint | None:
    """Return the fingerprint of a corpus that is whole and as requested; None if ``out`` may be written."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise DataError("MW-DATA-041", f"{out} is a file: name a folder for the corpus")
    names = sorted(path.name for path in out.iterdir())
    if not names:
        return None
    found = fingerprints.read(out) if (out / fingerprints.FILE_NAME).is_file() else None
    foreign = [name for name in names if found is None or name not in {*found.files, fingerprints.FILE_NAME}]
    if foreign:
        raise DataError(
            "MW-DATA-042",
            f"{out} holds other files ({', '.join(foreign[:3])}): name a folder of its own for the corpus",
        )
    assert found is not None
    if replace and (found.prepared is None or _request(found.prepared).differences(request)):
        return None
    if found.prepared is None:
        raise DataError(
            "MW-DATA-043",
            f"{out} holds another corpus ({found.source.description}): name another folder, or --replace it",
        )
    changes = _request(found.prepared).differences(request)
    if changes:
        raise DataError(
            "MW-DATA-044",
            f"{out} was prepared from something else:\n"
            + "\n".join(f"  {change}" for change in changes[:10])
            + ("\n  ..." if len(changes) > 10 else "")
            + "\nname another folder, or build it anew with --replace",
        )
    return None if fingerprints.damaged_files(out, found) else found


def _request(prepared: Preparation) -> Request:
    return Request(**prepared.model_dump(exclude={"records", "empty", "skipped"}))
