"""Numbered samples of a ``.bin/.idx`` pair: tokens, labels, and the starts of documents.

``packing = "stream"``: the documents are concatenated, each with its end-of-document token, and cut
into windows that cross document ends. The last token of a window is only a label there, and the
first token of the next window::

    stream    t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ...        S = 4
    sample 0  t0 t1 t2 t3   t4                          tokens t0..t3, labels t1..t4
    sample 1                t4 t5 t6 t7   t8            tokens t4..t7, labels t5..t8

``packing = "documents"``: as many whole documents as fit, then padding; a document longer than S is
truncated. The last token of a document has no label, because the next token belongs to another
document::

    documents a0 a1 a2 | b0 b1 b2 b3 | c0 c1            S = 5
    sample 0  a0 a1 a2  .  .                            labels a1 a2  .  .  .           . IGNORE
    sample 1  b0 b1 b2 b3  .                            labels b1 b2 b3  .  .
    sample 2  c0 c1 ...

``document_boundaries``: in both packings no label crosses the end of a document, and ``starts``
marks the first token of each for the model, so that attention and positions do not cross it either.

No torch here: `meshwright data show` reads samples too.
"""

from __future__ import annotations

import itertools
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data import fingerprint as fingerprints
from meshwright.data.fingerprint import Split
from meshwright.data.indexed import inspect, mask_path
from meshwright.data.token_files import Mask, TokenStream, documents
from meshwright.errors import DataError

IGNORE = -100
"""Ignored label: it counts neither in the loss nor in the number of labels that divides it."""
Packing = Literal["stream", "documents"]
_TOKENS_PER_READ = 1 << 22
_SCAN_TOKENS = 1 << 26
"""Tokens up to which a corpus without a fingerprint is scanned for its largest id
when it is opened (0.1 s).
"""


class CorpusExample(NamedTuple):
    """One sample."""

    tokens: NDArray[np.int64]  # (S,)
    labels: NDArray[np.int64]  # (S,) the next token, or IGNORE
    starts: NDArray[np.bool_]  # (S,) first token of a document, of the sample, or of the padding


class DocumentRules(NamedTuple):
    """Rules for cutting documents into samples; see the module."""

    packing: Packing = "stream"
    boundaries: bool = False
    """``document_boundaries``: neither labels nor attention cross the end of a document."""
    eod_mask_loss: bool = False
    """Labels after an end-of-document token become IGNORE:
    the start of a document cannot be predicted.
    """
    eod_id: int | None = None
    """Id of the end-of-document token, for a corpus without a fingerprint."""


class Corpus:
    """Numbered samples of a ``.bin/.idx`` pair.
    Raises :class:`DataError` if the files are damaged or do not fit.

    Args:
        prefix: path of the pair without the suffix.
        sequence_length: tokens of a sample.
        vocab_size: vocabulary size of the model; None: any id is accepted.
        num_sentinels: number of the vocabulary's last ids that are sentinels, which text may not
            use.
        rules: rules for cutting documents into samples.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        vocab_size: int | None = None,
        num_sentinels: int = 0,
        rules: DocumentRules | None = None,
    ) -> None:
        """Check the corpus before any rank starts; with a fingerprint no token is read."""
        rules = DocumentRules() if rules is None else rules
        self.prefix = Path(prefix)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_sentinels = num_sentinels
        self.text_ids = None if vocab_size is None else vocab_size - num_sentinels
        """Upper bound (exclusive) of the ids that text may use."""
        self.stream = TokenStream(inspect(self.prefix))
        self.mask = Mask(self.stream.index)
        self.documents = documents(self.stream.index)
        self.document_boundaries = rules.boundaries
        num_tokens = len(self.stream)
        self.packed = (
            None
            if rules.packing == "stream"
            else DocumentPacking.of(self.documents.all_starts(), sequence_length)
        )
        self.num_samples = (
            (num_tokens - 1) // sequence_length
            if self.packed is None
            else len(self.packed.firsts) - 1
        )
        if self.num_samples < 1:
            raise DataError(
                "MW-DATA-001",
                f"the corpus {self.prefix} has {num_tokens:,} tokens, less than one sample: a"
                f" sequence of {sequence_length:,} needs {sequence_length + 1:,}. Lower"
                " data.sequence_length or prepare more text",
            )
        self.known = _known(self.prefix, num_tokens, has_mask=bool(self.mask))
        self.eod_id = self.known.end_of_document_id if self.known else rules.eod_id
        self.eod_mask_loss = rules.eod_mask_loss
        if self.eod_mask_loss and self.eod_id is None:
            raise DataError(
                "MW-DATA-002",
                "data.eod_mask_loss needs the id of the end-of-document token, and no fingerprint"
                f" beside {self.prefix} has it: set data.tokenizer to the tokenizer.json that made"
                " the corpus, or eod_mask_loss = false",
            )
        self._check_largest_id()

    def open(self) -> None:
        """Open the files now, so that the first step does not wait for it."""
        self.stream.open()

    def sampled_hash(self) -> str:
        """Return one hash of sampled blocks of all its files.
        Raises DataError if a file cannot be read.
        """
        try:
            hashes = [fingerprints.sampled_sha256(path) for path in self.files()]
        except OSError as error:
            raise DataError(
                "MW-DATA-003",
                f"{error.filename} cannot be read: {error.strerror} (errno {error.errno})",
            ) from error
        return sha256("".join(hashes).encode()).hexdigest()

    def modified_ns(self) -> dict[str, int]:
        """Return the modification time of each of its files in ns, by path."""
        return {str(path): path.stat().st_mtime_ns for path in self.files()}

    def files(self) -> list[Path]:
        """Return the files that samples are read from."""
        paths = [
            self.prefix.with_name(f"{self.prefix.name}{suffix}") for suffix in fingerprints.READ
        ]
        return [path for path in paths if path.is_file()]

    def document_lengths(self, number: int) -> list[int]:
        """Return the lengths of the documents in sample ``number``, padding last, without reading a
        token: attention and positions restart at each.
        """
        length = self.sequence_length
        if not self.document_boundaries:
            return [length]
        if self.packed is None:
            places = self._starts_inside(number * length)
        else:
            first, last = self.packed.firsts[number], self.packed.firsts[number + 1]
            begins = self.documents.starts_from(first, last - first)
            ends = np.append(begins[1:], self.documents.start(last))
            places = np.minimum(ends - begins, length).cumsum().tolist()
        bounds = sorted({0, *(place for place in places if place < length), length})
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def _starts_inside(self, start: int) -> list[int]:
        """Return the places in the window from token ``start`` on at which documents begin, without
        the first token and with the one behind the last.
        """
        found: list[int] = []
        document = self.documents.at(start) + 1
        while document < len(self.documents):
            place = self.documents.start(document) - start
            if place > self.sequence_length:
                break
            if place > 0:
                found.append(place)
            document += 1
        return found

    def example(self, number: int) -> CorpusExample:
        """Return sample ``number``: tokens, labels, and the starts of documents."""
        if self.packed is None:
            return self._window(number)
        return self._whole_documents(number, self.packed)

    def _window(self, number: int) -> CorpusExample:
        length, start = self.sequence_length, number * self.sequence_length
        window = self.sample(number)
        tokens, labels = window[:-1], window[1:].copy()
        starts = np.zeros(length, dtype=np.bool_)
        starts[0] = True
        if self.mask:
            labels[~self.mask.read(start + 1, length)] = IGNORE
        if self.eod_mask_loss:
            labels[tokens == self.eod_id] = IGNORE
        if self.document_boundaries:
            for place in self._starts_inside(start):
                labels[place - 1] = IGNORE
                starts[place:][:1] = True
        return CorpusExample(tokens, labels, starts)

    def _whole_documents(self, number: int, packed: DocumentPacking) -> CorpusExample:
        length = self.sequence_length
        tokens = np.zeros(length, dtype=np.int64)
        labels = np.full(length, IGNORE, dtype=np.int64)
        starts = np.zeros(length, dtype=np.bool_)
        at = 0
        for document in range(packed.firsts[number], packed.firsts[number + 1]):
            begin, end = self.documents.start(document), self.documents.start(document + 1)
            count, num_labels = min(end - begin, length), min(end - begin - 1, length)
            if count == 0:
                continue
            ids = self._checked(
                self.stream.read(begin, min(end - begin, length + 1)), f"in document {document:,}"
            )
            tokens[at : at + count] = ids[:count]
            counting = self.mask.read(begin + 1, num_labels)
            labels[at : at + num_labels] = np.where(counting, ids[1 : num_labels + 1], IGNORE)
            starts[at] = True
            at += count
        starts[at:][:1] = True
        return CorpusExample(tokens, labels, starts)

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return window ``number``: (S + 1,) token ids, checked against the vocabulary."""
        assert 0 <= number < self.num_samples, (number, self.num_samples)
        window = self.stream.read(number * self.sequence_length, self.sequence_length + 1)
        return self._checked(
            window, f"in sample {number} (tokens from {number * self.sequence_length:,} on)"
        )

    def _checked(self, ids: NDArray[np.int64], where: str) -> NDArray[np.int64]:
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or (self.text_ids is not None and highest >= self.text_ids):
            self._raise_outside(lowest if lowest < 0 else highest, where)
        return ids

    def _check_largest_id(self) -> None:
        if self.text_ids is None:
            return
        if self.known:
            assert self.vocab_size is not None
            if self.known.vocab_size > self.vocab_size:
                raise DataError(
                    "MW-DATA-004",
                    f"the corpus {self.prefix} was made with a tokenizer of"
                    f" {self.known.vocab_size:,} tokens, and the model's vocabulary has"
                    f" {self.vocab_size:,}: set model.options.vocab_size to"
                    f" {self.known.vocab_size:,} or more, or prepare the corpus with the tokenizer"
                    " that belongs to the model",
                )
            if self.known.split.max_token_id >= self.text_ids:
                self._raise_outside(
                    self.known.split.max_token_id, f"according to its {fingerprints.FILE_NAME}"
                )
            return
        if len(self.stream) <= _SCAN_TOKENS:
            for start in range(0, len(self.stream), _TOKENS_PER_READ):
                block = self.stream.read(start, min(_TOKENS_PER_READ, len(self.stream) - start))
                outside = np.flatnonzero((block < 0) | (block >= self.text_ids))
                if outside.size:
                    at = start + int(outside[0])
                    where = f"in sample {at // self.sequence_length} (token {at:,})"
                    self._raise_outside(int(block[outside[0]]), where)

    def _raise_outside(self, token_id: int, where: str) -> None:
        if token_id < 0:
            raise DataError(
                "MW-DATA-005",
                f"the corpus {self.prefix} holds the token id {token_id:,} {where}: prepare it"
                " again",
            )
        assert self.vocab_size is not None and self.text_ids is not None
        for_text = f"ids 0 to {self.vocab_size - 1:,}"
        if self.num_sentinels:
            for_text = (
                f"of which the last {self.num_sentinels:,} are sentinels, so that text may use ids"
                " below "
            )
            for_text += f"{max(self.text_ids, 0):,}"
        raise DataError(
            "MW-DATA-006",
            f"the corpus {self.prefix} holds token id {token_id:,} {where}, the model's vocabulary"
            f" has {self.vocab_size:,} ({for_text}): set the model's vocab_size to"
            f" {token_id + 1 + self.num_sentinels:,} or more, or prepare the corpus with the"
            " tokenizer that belongs to the model",
        )


class DocumentPacking(NamedTuple):
    """Assignment of whole documents to samples."""

    firsts: list[int]
    """(samples + 1,) index of the first document of each sample;
    the last entry is the number of documents.
    """
    num_cut: int
    """Number of documents of more than S + 1 tokens: their ends are in no sample."""

    @staticmethod
    def of(starts: NDArray[np.int64], sequence_length: int) -> DocumentPacking:
        """Pack as many documents as fit into each sample, in order. ``starts``: (documents + 1,)
        first tokens.
        """
        lengths = np.diff(starts)
        ends = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(np.minimum(lengths, sequence_length))]
        )
        firsts, num_documents = [0], len(lengths)
        while firsts[-1] < num_documents:
            firsts.append(
                int(np.searchsorted(ends, ends[firsts[-1]] + sequence_length, "right")) - 1
            )
        return DocumentPacking(firsts, int((lengths > sequence_length + 1).sum()))


class _Known(NamedTuple):
    """Entries of the fingerprint for one corpus."""

    split: Split
    unigram_baseline_nats: float
    end_of_document_id: int
    vocab_size: int
    """Vocabulary of the tokenizer."""


def _known(prefix: Path, num_tokens: int, *, has_mask: bool) -> _Known | None:
    """Read the fingerprint beside the corpus, and check its counts and sampled hashes. None:
    there is none.
    """
    known = fingerprints.read(prefix.parent)
    split = known.splits.get(prefix.name) if known else None
    if known is None or split is None:
        return None
    if split.tokens != num_tokens:
        raise DataError(
            "MW-DATA-007",
            f"{prefix.parent / fingerprints.FILE_NAME} counts {split.tokens:,} tokens in"
            f" {prefix.name}, its .idx {num_tokens:,}: the corpus was changed afterwards. Prepare"
            " it again, or delete the fingerprint if the .bin/.idx are right",
        )
    if split.counting is not None and not has_mask:
        raise DataError(
            "MW-DATA-008",
            f"{mask_path(prefix)} is missing: it marks the {split.counting:,} of the"
            f" {split.tokens:,} tokens of {prefix} that are labels. Copy it from where the corpus"
            " was prepared, or prepare it again",
        )
    fingerprints.check_sampled(prefix.parent, prefix.name, known)
    baseline = known.unigram_baseline_nats(prefix.name)
    return _Known(split, baseline, known.end_of_document_id, known.vocab_size)
