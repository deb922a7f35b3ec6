"""Text files -> byte-level BPE -> a Megatron corpus: two splits, the tokenizer,
and a fingerprint of all of it.

    files --split by name--> train docs -----> BPE ----> tokenizer.json
                                |               |
                                +---- encode ---+------> train.bin/.idx
                       validation docs ---------+------> validation.bin/.idx      (not used to train the tokenizer)

The corpus is written to a temporary folder, flushed to the disk and renamed: a kill at any moment
leaves a complete corpus under the requested name or none. The same files give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data import fingerprint as fingerprints
from meshwright.data import indexed, tokenizer
from meshwright.data.fingerprint import Fingerprint, Split
from meshwright.data.prepare import sources
from meshwright.data.prepare.finish import (
    Outcome,
    list_own_files,
    measure_split,
    present_rule,
    write_fingerprint,
)
from meshwright.data.prepare.publish import OLD, publish
from meshwright.data.splits import SPLITS, SplitRule
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.errors import DataError
from meshwright.system.atomic import make_directory_synced
from meshwright.system.numbers import whole_number
from meshwright.system.process import is_alive
from meshwright.system.working_folder import why_not_own
from meshwright.terminal.format import format_number_of

TRAINED_SPLITS = SPLITS[:2]
"""Splits of a corpus whose tokenizer is trained here; documents are split by name."""
_FILES = {TOKENIZER_FILE, fingerprints.FILE_NAME} | {
    f"{split}.{ending}" for split in TRAINED_SPLITS for ending in ("bin", "idx")
}


def prepare_stdlib(
    out: Path,
    vocab_size: int = 4096,
    validation_share: float = 0.05,
    *,
    replace: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Prepare a corpus of the running Python's standard library: no download, no account.
    About 5 s on 2 cores.
    """
    source, rule = sources.stdlib(), SplitRule.DOCUMENTS
    return _prepare(source, out, vocab_size, validation_share, rule, replace=replace, say=say)


def prepare_files(
    paths: Sequence[Path],
    out: Path,
    vocab_size: int = 4096,
    validation_share: float = 0.05,
    *,
    split: SplitRule = SplitRule.AUTO,
    replace: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Prepare a corpus of text files (of a folder: all files below it), a document per file."""
    source = sources.files(paths)
    if split is SplitRule.AUTO and not replace:
        split = present_rule(Path(out)) or split
    rule = split.settle(len(source.documents))
    return _prepare(source, out, vocab_size, validation_share, rule, replace=replace, say=say)


def _prepare(
    source: sources.DocumentSource,
    out: Path,
    vocab_size: int,
    validation_share: float,
    rule: SplitRule,
    *,
    replace: bool,
    say: Callable[[str], None],
) -> Outcome:
    """Prepare ``out`` unless it already holds exactly this corpus.
    The callback receives progress lines.

    A damaged corpus is built again. An intact one from other text or options is refused unless
    ``replace``, because a run may be training on it. A folder with other files is never changed.
    """
    out = Path(out).absolute()
    splits = sources.split(source, validation_share, rule)
    request = fingerprints.SourceSummary(
        description=source.description,
        documents=len(source.documents),
        text_bytes=sum(document.num_bytes for document in source.documents),
        sha256=source.sha256(),
        vocab_size=vocab_size,
        validation_share=validation_share,
        split="position" if rule is SplitRule.POSITION else "documents",
    )
    existing = _matching(out, request, replace=replace)
    if existing:
        return Outcome(out, built=False, fingerprint=existing)
    try:
        aside = _make_aside(out)
        try:
            built = _build(aside, splits, request, say)
            publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        # another process may have published the same corpus first
        existing = _matching(out, request, replace=False)
        if existing is None:
            raise DataError("MW-DATA-079", f"cannot write the corpus {out}: {error}") from error
        return Outcome(out, built=False, fingerprint=existing)
    return Outcome(out, built=True, fingerprint=built)


def _build(
    aside: Path,
    splits: sources.Splits,
    request: fingerprints.SourceSummary,
    say: Callable[[str], None],
) -> Fingerprint:
    say(
        f"training a tokenizer of {request.vocab_size:,} tokens on"
        f" {format_number_of(len(splits.train), 'document')}"
    )
    bpe = tokenizer.train((document.text() for document in splits.train), request.vocab_size)
    bpe.save(str(aside / TOKENIZER_FILE))
    vocab_size = bpe.get_vocab_size()
    end = tokenizer.end_of_document_id(bpe)
    assert end is not None
    written, hashes = dict[str, Split](), dict[str, str]()
    training: NDArray[np.int64] | None = None
    for name, documents in zip(TRAINED_SPLITS, splits, strict=True):
        if not documents:
            continue
        say(f"writing {name}: {format_number_of(len(documents), 'document')}")
        prefix = aside / name
        indexed.write(
            prefix, tokenizer.encode(bpe, (document.text() for document in documents)), vocab_size
        )
        dtype = indexed.token_dtype(vocab_size)
        measured = measure_split(prefix, len(documents), dtype, vocab_size, training)
        written[name], hashes[f"{name}.bin"] = measured.split, measured.sha256
        training = measured.labels if name == "train" else training
    draft = Fingerprint(
        files=hashes, splits=written, vocab_size=vocab_size, end_of_document_id=end, source=request
    )
    return write_fingerprint(aside, draft)


def _matching(
    out: Path, request: fingerprints.SourceSummary, *, replace: bool
) -> Fingerprint | None:
    """Return the fingerprint of a corpus that is intact and as requested;
    None if ``out`` may be written.
    """
    names = list_own_files(out, _FILES)
    if not names:
        return None
    try:
        known = fingerprints.read(out)
    except DataError:
        # a malformed fingerprint beside files of these names: a damaged corpus, built again
        return None
    if known is None:
        if replace:
            return None
        raise DataError(
            "MW-DATA-082",
            f"{out} holds {', '.join(names[:3])} without {fingerprints.FILE_NAME}: meshwright did"
            " not write it; name another folder, or replace it (--replace)",
        )
    if fingerprints.damaged_files(out, known):
        return None
    if _deciding_fields(known.source) == _deciding_fields(request):
        return known
    if replace:
        return None
    raise DataError(
        "MW-DATA-083",
        f"{out} holds another corpus: {known.source.description},"
        f" vocab_size={known.source.vocab_size}, validation_share={known.source.validation_share},"
        f" {known.source.documents:,} documents; asked for: {request.description},"
        f" vocab_size={request.vocab_size}, validation_share={request.validation_share},"
        f" {request.documents:,} documents. Name another folder, delete this one, or replace it"
        " (--replace)",
    )


def _deciding_fields(source: fingerprints.SourceSummary) -> dict[str, Any]:
    """Return the fields that decide the bytes of a corpus: all but the description."""
    return source.model_dump(exclude={"description"})


def _make_aside(out: Path) -> Path:
    """Make an empty folder beside ``out``, named after this process;
    remove those of this host's dead processes.
    """
    make_directory_synced(out.parent)
    prefix = f".{out.name}.partial.{socket.gethostname()}."
    for leftover in out.parent.glob(f"{prefix}*"):
        pid = whole_number(leftover.name.removeprefix(prefix).removesuffix(OLD), 1, 2**31 - 1)
        if pid is not None and not is_alive(pid) and why_not_own(leftover) is None:
            shutil.rmtree(leftover, ignore_errors=True)
    aside = out.parent / f"{prefix}{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside
