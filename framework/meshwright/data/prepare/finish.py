"""End of a preparation: indices, tokenizer, fingerprint, result;
and the check of a corpus that already exists.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data import fingerprint as fingerprints
from meshwright.data import indexed
from meshwright.data.fingerprint import Fingerprint, Preparation, Request, Split
from meshwright.data.prepare.chat.template import COPY, ChatTemplate
from meshwright.data.prepare.input_files import FileForm, InputFile
from meshwright.data.prepare.tokenizer_files import CONFIG_FILE, KnownTokenizer
from meshwright.data.prepare.work_folder import SKIPPED_FILE, WorkFolder, describe_changes
from meshwright.data.splits import SPLITS, SplitRule
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.errors import DataError
from meshwright.system.bounded import open_regular
from meshwright.terminal.format import format_number_of, format_size

_READ_BYTES = 1 << 22
_LINE_BYTES = 400
OF_A_CORPUS = {TOKENIZER_FILE, SKIPPED_FILE, COPY, fingerprints.FILE_NAME} | {
    f"{split}.{ending}" for split in SPLITS for ending in ("bin", "idx", "mask")
}
"""Names of the files that a preparation writes, beside the tokenizer's further ones."""


@dataclass(frozen=True)
class Outcome:
    """Result of a preparation: the corpus in ``out``, and whether this call wrote it."""

    out: Path
    built: bool
    fingerprint: Fingerprint
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Format the result in a few lines."""
        known, prepared = self.fingerprint, self.fingerprint.prepared
        done = "prepared" if self.built else "already complete and verified, nothing to do:"
        if self.out.is_relative_to(Path.cwd()):
            place = self.out.relative_to(Path.cwd())
        else:
            place = self.out
        end = f"end of document = {known.end_of_document_id}"
        tokenizer = f"byte-level BPE, {known.vocab_size:,} tokens, {end}"
        if prepared is not None:
            tokenizer = f"{known.vocab_size:,} tokens, {end} ({prepared.end_of_document})"
        lines = [
            f"corpus {done} {place}",
            (
                f"  source      {known.source.description};"
                f" {format_number_of(known.source.documents, 'document')},"
                f" {format_size(known.source.text_bytes)} of text"
            ),
            f"  tokenizer   {tokenizer}",
        ]
        for name, split in known.splits.items():
            counting = "" if split.counting is None else f" ({split.counting:,} of them labels)"
            if prepared is None:
                nats = known.unigram_baseline_nats(name)
                counting = (
                    f", unigram baseline {nats:.3f} nats ({nats / log(2):.3f} bits) per token"
                )
            documents = format_number_of(split.documents, "document")
            lines.append(
                f"  {name:<11} {documents}, {format_number_of(split.tokens, 'token')}{counting}"
            )
        if known.source.split == "position":
            lines.append(
                "  split       by position: the ends of the documents are for validation and test"
            )
        if prepared is not None and prepared.empty:
            lines.append(
                f"  empty       {format_number_of(prepared.empty, 'document')} without text,"
                " left out"
            )
        if prepared is not None and prepared.skipped:
            lines.append(
                f"  skipped     {prepared.skipped:,} broken ones, listed in {place / SKIPPED_FILE}"
            )
        if prepared is not None and prepared.cut:
            cut = format_number_of(prepared.cut, "conversation")
            lines.append(
                f"  cut         {cut}, to the turns that fit {prepared.max_tokens:,} tokens"
            )
        if prepared is not None and prepared.too_long:
            long = format_number_of(prepared.too_long, "conversation")
            lines.append(
                f"  too long    {long}, left out: the first answer ends after"
                f" {prepared.max_tokens:,} tokens"
            )
        return "\n".join([*lines, *(f"  note        {note}" for note in self.notes)])


def write_indices(
    work: WorkFolder,
    files: Sequence[InputFile],
    known: KnownTokenizer,
    request: Request,
    template: ChatTemplate | None = None,
) -> Fingerprint:
    """Write indices, tokenizer, chat template and fingerprint beside the tokens. Idempotent:
    a killed call can be repeated.
    """
    state = work.state
    if not state.splits["train"].documents:
        read = format_number_of(state.records, "document")
        what = f"{read}, {state.empty:,} of them empty, {state.skipped:,} broken"
        if state.too_long:
            what += f", {state.too_long:,} longer than --max-tokens {request.max_tokens:,}"
        if state.skipped:
            what += f" (the first: {_first_line(work.path / SKIPPED_FILE)})"
        where = f"{files[0].path}" + (f" and {len(files) - 1:,} other files" if files[1:] else "")
        raise DataError(
            "MW-DATA-040",
            f"nothing is left to train on in {where}: {what}. Give more text, or lower the other"
            " shares",
        )
    splits, hashes = dict[str, Split](), dict[str, str]()
    training: NDArray[np.int64] | None = None
    for name in SPLITS:
        prefix, documents = work.corpus / name, state.splits[name].documents
        if not documents:
            for path in (
                indexed.bin_path(prefix),
                indexed.idx_path(prefix),
                indexed.mask_path(prefix),
            ):
                path.unlink(missing_ok=True)
            continue
        indexed.write_index(prefix, work.dtype, work.file_of(name, "lengths"))
        measured = measure_split(
            prefix, documents, work.dtype, known.vocab_size, training, has_mask=work.has_mask
        )
        splits[name], hashes[f"{name}.bin"] = measured.split, measured.sha256
        training = measured.labels if name == "train" else training
    _copy_side_files(work, known, template)
    draft = Fingerprint(
        files=hashes,
        splits=splits,
        vocab_size=known.vocab_size,
        end_of_document_id=known.end,
        source=fingerprints.SourceSummary(
            description=_describe_files(files),
            documents=state.records - state.empty - state.skipped - state.too_long,
            text_bytes=state.text_bytes,
            sha256=state.digest,
            vocab_size=known.vocab_size,
            validation_share=request.validation_share,
            split=request.split,
        ),
        prepared=Preparation(
            **request.model_dump(),
            records=state.records,
            empty=state.empty,
            skipped=state.skipped,
            cut=None if request.max_tokens is None else state.cut,
            too_long=None if request.max_tokens is None else state.too_long,
        ),
    )
    return write_fingerprint(work.corpus, draft)


def _copy_side_files(
    work: WorkFolder, known: KnownTokenizer, template: ChatTemplate | None
) -> None:
    """Copy the tokenizer, the chat template and the list of skipped records to the corpus."""
    for file in known.files:
        shutil.copyfile(file, work.corpus / (TOKENIZER_FILE if file == known.path else file.name))
    if template is not None and template.path.name != CONFIG_FILE:
        (work.corpus / COPY).write_text(template.texts["default"], encoding="utf-8")
    if work.state.skipped:
        shutil.copyfile(work.path / SKIPPED_FILE, work.corpus / SKIPPED_FILE)


def _first_line(path: Path) -> str:
    """Return the first line of a text file, at most _LINE_BYTES of it."""
    with open_regular(path) as stream:
        return stream.readline(_LINE_BYTES).decode(errors="replace").rstrip("\n")


class MeasuredSplit(NamedTuple):
    """Counts of a split."""

    split: Split
    sha256: str
    """Hash of the ``.bin``."""
    labels: NDArray[np.int64]  # (V,) occurrences of each token among those that count as labels


def measure_split(
    prefix: Path,
    documents: int,
    dtype: np.dtype[Any],
    vocab_size: int,
    training: NDArray[np.int64] | None,
    *,
    has_mask: bool = False,
) -> MeasuredSplit:
    """Return the counts of a split and the hash of its ``.bin``, in one pass over the tokens.

    Args:
        prefix: path of the split without the suffix.
        documents: number of documents.
        dtype: type of the tokens.
        vocab_size: largest token id + 1.
        training: (V,) labels of the training split, for the unigram baseline; None: this is the
            training split.
        has_mask: the corpus has a mask of labels.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    labels = np.zeros_like(counts) if has_mask else counts
    mask = np.memmap(indexed.mask_path(prefix), np.uint8, "r") if has_mask else None
    digest, at = sha256(), 0
    with open_regular(indexed.bin_path(prefix)) as stream:
        while content := stream.read(_READ_BYTES):
            digest.update(content)
            tokens = np.frombuffer(content, dtype)
            counts += np.bincount(tokens, minlength=vocab_size)
            if mask is not None:
                labels += np.bincount(
                    tokens[mask[at : at + len(tokens)] != 0], minlength=vocab_size
                )
            at += len(tokens)
    nats, bits = fingerprints.entropy(labels)
    split = Split(
        documents=documents,
        tokens=at,
        max_token_id=int(np.flatnonzero(counts)[-1]),
        unigram_entropy_nats=nats,
        unigram_entropy_bits=bits,
        unigram_baseline_nats=(
            nats if training is None else fingerprints.cross_entropy(labels, training)
        ),
        counting=int(labels.sum()) if has_mask else None,
    )
    return MeasuredSplit(split, digest.hexdigest(), labels)


def write_fingerprint(folder: Path, draft: Fingerprint) -> Fingerprint:
    """Write the fingerprint of a folder: the draft, with the hashes of the files that it lacks."""
    target = folder / fingerprints.FILE_NAME
    target.unlink(missing_ok=True)
    hashes = {
        path.name: draft.files.get(path.name) or fingerprints.file_sha256(path)
        for path in folder.iterdir()
    }
    made = draft.model_copy(
        update={
            "files": dict(sorted(hashes.items())),
            "sampled": fingerprints.sampled_files(folder),
        }
    )
    target.write_text(made.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
    return made


def _describe_files(files: Sequence[InputFile]) -> str:
    names = {FileForm.TEXT: "text", FileForm.LINES: "JSONL", FileForm.ROWS: "parquet"}
    counts = {name: sum(file.kind is kind for file in files) for kind, name in names.items()}
    return " and ".join(
        f"{count:,} {name} file{'s' * (count > 1)}" for name, count in counts.items() if count
    )


def complete(
    out: Path, request: Request, *, replace: bool, tokenizer_files: Collection[str] = ()
) -> Fingerprint | None:
    """Return the fingerprint if ``out`` holds the requested corpus, intact;
    None if ``out`` may be written.

    ``tokenizer_files``: names of the tokenizer's files.

    Raises DataError: it holds another corpus (unless ``replace``), or other files.
    """
    try:
        known = fingerprints.read(out)
    except DataError:  # of a damaged corpus: prepared again if the folder holds nothing else
        list_own_files(out, {*OF_A_CORPUS, *tokenizer_files})
        return None
    if not list_own_files(out, set() if known is None else {*known.files, fingerprints.FILE_NAME}):
        return None
    assert known is not None
    changes = None if known.prepared is None else known.prepared.differences(request)
    if replace and (changes is None or changes):
        return None
    if changes is None:
        raise DataError(
            "MW-DATA-043",
            f"{out} holds another corpus ({known.source.description}): name another folder, or"
            " --replace it",
        )
    if changes:
        raise DataError(
            "MW-DATA-044",
            f"{out} was prepared from something else:\n{describe_changes(changes)}\n"
            "name another folder, or rebuild it with --replace",
        )
    return None if fingerprints.damaged_files(out, known) else known


def present_rule(out: Path) -> SplitRule | None:
    """Return the rule by which the corpus in ``out`` is split;
    None if there is none that can be read.
    """
    try:
        known = fingerprints.read(out)
    except DataError:  # damaged: prepared again
        return None
    return None if known is None else SplitRule(known.source.split)


def list_own_files(out: Path, own: Collection[str]) -> list[str]:
    """Return the sorted names of the files in ``out``; empty where no such folder exists.

    Raises:
        DataError: ``out`` is a file, or holds files other than ``own``.
    """
    if not out.exists():
        return []
    if not out.is_dir():
        raise DataError("MW-DATA-041", f"{out} is a file: name a folder for the corpus")
    names = sorted(path.name for path in out.iterdir())
    foreign = [name for name in names if name not in own]
    if foreign:
        raise DataError(
            "MW-DATA-042",
            f"{out} holds other files ({', '.join(foreign[:3])}): name a folder of its own for the"
            " corpus",
        )
    return names
