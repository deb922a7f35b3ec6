"""Text files -> byte-level BPE -> a Megatron corpus: two splits, the tokenizer, and a fingerprint of all of it.

    files --split by name--> train docs -----> BPE ----> tokenizer.json
                                |               |
                                +---- encode ---+------> train.bin/.idx
                       validation docs ---------+------> validation.bin/.idx      (the tokenizer never saw these)

Everything is written into a folder aside, flushed to disk, and published by a rename: under the name asked for there is
a whole corpus or none, whenever the preparation is killed. The same files give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data import fingerprint as fingerprints
from meshwright.data import indexed, tokenizer
from meshwright.data.fingerprint import Fingerprint
from meshwright.data.prepare import sources
from meshwright.data.prepare.publish import OLD, publish
from meshwright.errors import DataError
from meshwright.system.process import is_alive

TOKENIZER_FILE = "tokenizer.json"
TRAIN = "train"
VALIDATION = "validation"


@dataclass(frozen=True)
class Summary:
    """Result of a preparation: the corpus in ``out``, and whether this call wrote it."""

    out: Path
    built: bool
    fingerprint: Fingerprint

    def __str__(self) -> str:
        """Format the result in a few lines."""
        known = self.fingerprint
        done = "prepared" if self.built else "already complete and verified, nothing to do:"
        place = self.out.relative_to(Path.cwd()) if self.out.is_relative_to(Path.cwd()) else self.out
        lines = [
            f"corpus {done} {place}",
            f"  source      {known.source.description}; {known.source.documents:,} documents, "
            f"{known.source.text_bytes / 1e6:.1f} MB",
            f"  tokenizer   byte-level BPE, {known.vocab_size:,} tokens, end of document = {known.end_of_document_id}",
        ]
        for name, split in known.splits.items():
            lines.append(
                f"  {name:<11} {split.documents:,} documents, {split.tokens:,} tokens, unigram entropy "
                f"{split.unigram_entropy_nats:.3f} nats ({split.unigram_entropy_bits:.3f} bits) per token"
            )
        return "\n".join(lines)


def prepare_stdlib(
    out: Path,
    vocab_size: int = 4096,
    validation_share: float = 0.05,
    *,
    replace: bool = False,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Prepare a corpus of the running Python's standard library: no download, no account. About 5 s on 2 cores."""
    return prepare(sources.stdlib(), out, vocab_size, validation_share, replace=replace, say=say)


def prepare_files(
    paths: Sequence[Path],
    out: Path,
    vocab_size: int = 4096,
    validation_share: float = 0.05,
    *,
    root: Path | None = None,
    replace: bool = False,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Prepare a corpus of text files (folders: all files below them), a document per file."""
    return prepare(sources.files(paths, root), out, vocab_size, validation_share, replace=replace, say=say)


def prepare(
    source: sources.DocumentSource,
    out: Path,
    vocab_size: int,
    validation_share: float,
    *,
    replace: bool = False,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Prepare ``out`` unless it holds exactly this corpus already.

    A damaged corpus of ours is built again. A whole one from other text or settings is refused, because a run may be
    training on it, unless ``replace``. A folder with foreign files is never touched. The callback receives progress.
    """
    out = Path(out).absolute()
    splits = sources.split(source, validation_share)
    wanted = fingerprints.PreparationRequest(
        description=source.description,
        documents=len(source.documents),
        text_bytes=sum(document.num_bytes for document in source.documents),
        sha256=source.sha256(),
        vocab_size=vocab_size,
        validation_share=validation_share,
    )
    existing = _matching(out, wanted, replace=replace)
    if existing:
        return Summary(out, built=False, fingerprint=existing)
    try:
        aside = _make_aside(out)
        try:
            built = _build(aside, splits, wanted, say or _silent)
            publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        meanwhile = _matching(out, wanted, replace=False)  # another process may have published the same corpus first
        if meanwhile is None:
            raise DataError("MW-DATA-079", f"cannot write the corpus {out}: {error}") from error
        return Summary(out, built=False, fingerprint=meanwhile)
    return Summary(out, built=True, fingerprint=built)


def _build(
    aside: Path, splits: sources.Splits, wanted: fingerprints.PreparationRequest, say: Callable[[str], None]
) -> Fingerprint:
    say(f"learning a tokenizer of {wanted.vocab_size:,} tokens from {len(splits.train):,} documents")
    bpe = tokenizer.train(sources.texts(splits.train), wanted.vocab_size)
    bpe.save(str(aside / TOKENIZER_FILE))
    vocab_size = bpe.get_vocab_size()
    end = tokenizer.end_of_document_id(bpe)
    assert end is not None
    written = {}
    for name, documents in ((TRAIN, splits.train), (VALIDATION, splits.validation)):
        if not documents:
            continue
        say(f"writing {name}: {len(documents):,} documents")
        counts = np.zeros(vocab_size, dtype=np.int64)
        encoded = _counted(tokenizer.encode(bpe, sources.texts(documents)), counts)
        indexed.write(aside / name, encoded, vocab_size)
        nats, bits = fingerprints.entropy(counts)
        written[name] = fingerprints.Split(
            documents=len(documents),
            tokens=int(counts.sum()),
            max_token_id=int(np.flatnonzero(counts)[-1]),
            unigram_entropy_nats=nats,
            unigram_entropy_bits=bits,
        )
    made = Fingerprint(
        files={path.name: fingerprints.file_sha256(path) for path in sorted(aside.iterdir())},
        sampled=fingerprints.sampled_files(aside),
        splits=written,
        vocab_size=vocab_size,
        end_of_document_id=end,
        source=wanted,
    )
    (aside / fingerprints.FILE_NAME).write_text(
        made.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8"
    )
    return made


def _counted(documents: Iterable[NDArray[np.int64]], counts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Hand the documents on, adding up in ``counts`` how often each token occurs."""
    for document in documents:
        counts += np.bincount(document, minlength=counts.size)
        yield document


def _matching(out: Path, wanted: fingerprints.PreparationRequest, *, replace: bool) -> Fingerprint | None:
    """Return the fingerprint of a corpus that is whole and as requested; None if ``out`` may be written."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise DataError("MW-DATA-080", f"{out} is a file: name a folder for the corpus")
    names = {path.name for path in out.iterdir()}
    foreign = sorted(names - _own_names())
    if foreign:
        raise DataError(
            "MW-DATA-081",
            f"{out} holds other files ({', '.join(foreign[:3])}): name a folder of its own for the corpus",
        )
    if not names:
        return None
    try:
        found = fingerprints.read(out)
    except DataError:
        return None  # damaged beyond reading: ours by its file names, and built again
    if found is None:
        if replace:
            return None
        raise DataError(
            "MW-DATA-082",
            f"{out} holds {', '.join(sorted(names)[:3])} without {fingerprints.FILE_NAME}, so it is not ours: "
            f"name another folder, or allow to replace it (replace=True)",
        )
    if fingerprints.damaged_files(out, found):
        return None
    if _without_description(found.source) == _without_description(wanted):
        return found
    if replace:
        return None
    raise DataError(
        "MW-DATA-083",
        f"{out} holds another corpus: {found.source.description}, vocab_size={found.source.vocab_size}, "
        f"validation_share={found.source.validation_share}, {found.source.documents:,} documents; asked for: "
        f"{wanted.description}, vocab_size={wanted.vocab_size}, validation_share={wanted.validation_share}, "
        f"{wanted.documents:,} documents. Name another folder, delete this one, or allow to replace it (replace=True)",
    )


def _without_description(source: fingerprints.PreparationRequest) -> dict[str, Any]:
    """Return the source without its description: the fields that decide the bytes of a corpus."""
    return source.model_dump(exclude={"description"})


def _own_names() -> set[str]:
    pairs = {path.name for split in (TRAIN, VALIDATION) for path in _pair(split)}
    return pairs | {TOKENIZER_FILE, fingerprints.FILE_NAME}


def _pair(split: str) -> tuple[Path, Path]:
    return indexed.bin_path(Path(split)), indexed.idx_path(Path(split))


def _make_aside(out: Path) -> Path:
    """Make a fresh folder beside ``out``, named for this process; remove those of dead processes of this machine."""
    out.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{out.name}.partial.{socket.gethostname()}."
    for left in out.parent.glob(f"{mine}*"):
        pid = left.name.removeprefix(mine).removesuffix(OLD)
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    aside = out.parent / f"{mine}{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def _silent(_: str) -> None:
    """Ignore progress."""
