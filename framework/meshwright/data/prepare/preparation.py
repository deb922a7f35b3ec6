"""Preparation of a Megatron corpus with an existing tokenizer: parallel, resumable,
in bounded memory.

    files --blocks--> workers: read, parse, encode
          --in order--> by the split of each document: train.bin, train.mask, ...
          --at the end--> train.idx, ...

Documents keep the order of the files and of the lines in them, for any number of workers. A hash of
(seed, i) selects the split of document i; a few documents are split by position. Progress is
committed every few seconds (:mod:`work_folder`). At the end the indices are written, and a rename
publishes the folder: a complete corpus under the requested name, or none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.data import indexed
from meshwright.data.fingerprint import Fingerprint, Request
from meshwright.data.prepare import readers
from meshwright.data.prepare.chat.bounded import BoundedRenderer
from meshwright.data.prepare.chat.encode import ChatEncoder
from meshwright.data.prepare.chat.opening import open_chat
from meshwright.data.prepare.encode import EncodedBlock, Encoder
from meshwright.data.prepare.finish import Outcome, complete, present_rule, write_indices
from meshwright.data.prepare.input_files import FileForm, InputFile, list_files
from meshwright.data.prepare.publish import publish
from meshwright.data.prepare.readers import ReadPosition, RecordBlock, count_records
from meshwright.data.prepare.records import CHAT_KEYS, Form, OptionalKey, RecordKeys
from meshwright.data.prepare.tokenizer_files import (
    KnownTokenizer,
    drops_characters,
    find_chat_template,
    open_tokenizer,
)
from meshwright.data.prepare.work_folder import (
    WorkFolder,
    begun_request,
    remove_leftovers,
    requested_files,
)
from meshwright.data.prepare.workers import ordered_map
from meshwright.data.splits import (
    FEW_DOCUMENTS,
    SPLITS,
    SplitRule,
    owed_tokens,
    part_of_document,
    split_of,
)
from meshwright.errors import DataError
from meshwright.system.atomic import make_directory_synced
from meshwright.terminal.format import format_number_of

COMMIT_EVERY_S = 2.0


@dataclass(frozen=True)
class Options:
    """Options of a preparation."""

    sources: Sequence[Path]
    tokenizer: Path
    out: Path
    form: Form = Form.TEXT
    keys: RecordKeys = field(default_factory=RecordKeys)
    chat_template: str | None = None
    """``tokenizer``, or a .jinja file; None: conversations are written without a template."""
    max_tokens: int | None = None
    """Largest number of tokens of a conversation, with a template; None: any."""
    globs: Sequence[str] = ()
    end_token: str | None = None
    begin_token: str | None = None
    validation_share: float = 0.05
    test_share: float = 0.0
    seed: int = 1234
    split: SplitRule = SplitRule.AUTO
    num_workers: int = 0
    """Number of worker processes; 0: one for each core that this process may use."""
    skip_broken: bool = False
    replace: bool = False
    block_bytes: int = readers.BLOCK_BYTES
    commit_every_s: float = COMMIT_EVERY_S


class Progress(NamedTuple):
    """Progress of a preparation."""

    source_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    resumed: bool
    """True if an earlier call did a part of the work."""


def prepare(options: Options, on_progress: Callable[[Progress], None] = lambda _: None) -> Outcome:
    """Prepare ``options.out``. An interrupted preparation is resumed;
    a complete corpus is verified and kept.

    Raises:
        DataError: invalid options, sources or tokenizer; a broken record, with its file and line
            (unless ``skip_broken``); ``out`` holds something else (unless ``replace``); the disk is
            full.
    """
    _check_shares(options)
    _check_chat(options)
    files = list_files(options.sources, options.globs, options.out)
    columns = options.keys.of(options.form) if options.chat_template is None else CHAT_KEYS
    _check_kinds(files, options.form, columns)
    known = open_tokenizer(options.tokenizer, options.end_token, options.begin_token)
    out = options.out.absolute()
    chat = None
    if options.chat_template is not None:
        corpus = None if options.replace else out
        chat = open_chat(options.chat_template, known.path, known.tokenizer, corpus)
    rule = _settled_rule(options, out, files, columns)
    request = _request(options, files, known, rule, chat)
    names = [file.name for file in known.files]
    done = complete(out, request, replace=options.replace, tokenizer_files=names)
    if done is not None:
        remove_leftovers(out)
        return Outcome(out, built=False, fingerprint=done)
    dtype = indexed.token_dtype(known.vocab_size)
    try:
        make_directory_synced(out.parent)
        work = WorkFolder(
            out,
            request,
            dtype,
            has_mask=options.form.has_mask,
            replace=options.replace,
            may_skip=options.skip_broken,
        )
        try:
            splitter = _Splitter(options, rule, known)
            with closing(_encoder(options, files, columns, known, chat)) as encoder:
                _read_all(options, files, columns, encoder, work, splitter, on_progress)
            made = write_indices(
                work, files, known, request, None if chat is None else chat.template
            )
            publish(work.corpus, out)
            work.remove()
        finally:
            work.close()
    except OSError as error:
        raise DataError(
            "MW-DATA-047",
            f"cannot write the corpus {out}: {error}. Finished work is kept: the same command"
            " resumes",
        ) from error
    return Outcome(out, built=True, fingerprint=made, notes=_notes(options, made, known.path, chat))


def _check_shares(options: Options) -> None:
    validation, test = options.validation_share, options.test_share
    if not (validation >= 0 and test >= 0 and validation + test < 1):
        raise DataError(
            "MW-DATA-048",
            f"--validation-share {validation} and --test-share {test} leave nothing to train on:"
            " choose shares of at least 0 that add up to less than 1, such as 0.01 and 0.01",
        )


def _check_chat(options: Options) -> None:
    """Check that the options of conversations have an effect."""
    if options.chat_template is None:
        if options.max_tokens is not None:
            raise DataError(
                "MW-DATA-136",
                f"--max-tokens {options.max_tokens:,} has no effect without --chat-template: give"
                " one, or leave it out",
            )
        return
    if options.form is not Form.MESSAGES:
        raise DataError(
            "MW-DATA-137",
            f"--chat-template {options.chat_template} has no effect with --format"
            f" {options.form.value}: it is for --format messages",
        )
    if options.begin_token is not None:
        raise DataError(
            "MW-DATA-138",
            f"--bos {options.begin_token} has no effect with --chat-template"
            f" {options.chat_template}: the template itself writes the token, or does not",
        )


def _encoder(
    options: Options,
    files: Sequence[InputFile],
    columns: tuple[str, ...],
    known: KnownTokenizer,
    chat: BoundedRenderer | None,
) -> Encoder:
    dtype = indexed.token_dtype(known.vocab_size)
    usual = (files, known.tokenizer, options.form, columns, dtype, known.end, known.begin)
    if chat is None:
        return Encoder(*usual)
    return ChatEncoder(*usual, chat, options.max_tokens)


def _request(
    options: Options,
    files: Sequence[InputFile],
    known: KnownTokenizer,
    rule: SplitRule,
    chat: BoundedRenderer | None,
) -> Request:
    return Request(
        files=requested_files(files),
        tokenizer_sha256=known.sha256,
        end_of_document=known.end_token,
        begin_of_document=options.begin_token,
        form=options.form.value,
        text_key=options.keys.text,
        prompt_key=options.keys.prompt,
        response_key=options.keys.response,
        validation_share=options.validation_share,
        test_share=options.test_share,
        seed=options.seed,
        split="position" if rule is SplitRule.POSITION else "documents",
        chat_template=None if chat is None else chat.template.sha256,
        chat_date=chat.now if chat is not None and chat.template.is_dated else None,
        max_tokens=options.max_tokens,
    )


def _settled_rule(
    options: Options, out: Path, files: Sequence[InputFile], columns: Sequence[str]
) -> SplitRule:
    """Return how to split the corpus: as requested, as ``out`` was split,
    or by the number of documents.
    """
    if options.split is not SplitRule.AUTO:
        return options.split
    if not options.replace:
        if (finished := present_rule(out)) is not None:
            return finished
        if (begun := begun_request(out)) is not None:
            return SplitRule(begun.split)
    return options.split.settle(count_records(files, columns, FEW_DOCUMENTS))


def _check_kinds(files: Sequence[InputFile], form: Form, columns: Sequence[str]) -> None:
    """Check the columns of parquet files,
    and that no plain text file is given for pairs or messages.
    """
    required = [name for name in columns if not isinstance(name, OptionalKey)]
    for file in files:
        if file.kind is FileForm.TEXT and form is not Form.TEXT:
            raise DataError(
                "MW-DATA-049",
                f"{file.path} is one text: --format {form.value} is read from .jsonl and .parquet,"
                f" with the keys {' and '.join(required)}",
            )
        if file.kind is FileForm.ROWS:
            readers.open_parquet(file.path, columns).close()


def _read_all(
    options: Options,
    files: Sequence[InputFile],
    columns: Sequence[str],
    encoder: Encoder,
    work: WorkFolder,
    splitter: _Splitter,
    on_progress: Callable[[Progress], None],
) -> None:
    # the workers are the parallelism, and are forked
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    state, total_bytes = work.state, sum(file.num_bytes for file in files)
    num_workers = options.num_workers or len(os.sched_getaffinity(0))
    place = ReadPosition(*state.place)
    committed_s = time.monotonic()
    blocks = readers.blocks(files, columns, place, options.block_bytes)
    encoded = ordered_map(encoder, blocks, num_workers)
    is_whole = True
    on_progress(_progress(work, total_bytes))
    try:
        for block, result in encoded:
            problems = _broken(block, result, files, state.line)
            if result.is_fatal:
                raise DataError(
                    "MW-DATA-140",
                    f"{problems[-1]}. Correct the template or the record: the same command resumes"
                    " before it",
                )
            if problems and not options.skip_broken:
                raise DataError(
                    "MW-DATA-050",
                    f"{problems[0]}. Correct it, or leave such records out with --skip-broken,"
                    " which lists them"
                    + (f" ({len(problems)} in this block)" if len(problems) > 1 else ""),
                )
            is_whole = False
            _append(block, result, problems, work, splitter)
            place = block.after
            is_whole = True
            if time.monotonic() - committed_s >= options.commit_every_s:
                work.commit(place)
                committed_s = time.monotonic()
            on_progress(_progress(work, total_bytes))
    finally:
        encoded.close()  # type: ignore[attr-defined]
        if is_whole:  # False after Ctrl-C in the middle of a block
            work.commit(place)
    changed = next((file for file in files if file.has_changed()), None)
    if changed is not None:
        raise DataError(
            "MW-DATA-051",
            f"{changed.path} was written to while it was being read: start over with --replace",
        )


def _progress(work: WorkFolder, total_bytes: int) -> Progress:
    tokens = sum(split.tokens for split in work.state.splits.values())
    return Progress(
        work.state.source_bytes, total_bytes, work.state.records, tokens, work.is_resumed
    )


def _broken(
    block: RecordBlock, result: EncodedBlock, files: Sequence[InputFile], line: int
) -> list[str]:
    """Return the problems of a block, each with its place. ``line``:
    number of lines read of the last file.
    """
    first_line = line if block.first.position else 0
    return [
        f"{_place_of(block, files, first_line, int(result.lines[n]))} {problem}"
        for n, problem in result.broken
    ]


def _append(
    block: RecordBlock,
    result: EncodedBlock,
    problems: list[str],
    work: WorkFolder,
    splitter: _Splitter,
) -> None:
    """Append a block's documents to their splits, and its problems to the skipped records."""
    state = work.state
    work.skip(problems)
    splitter.append(result, work)
    state.records += len(result.lengths)
    state.empty += int((result.lengths == 0).sum()) - len(result.broken) - result.num_long
    state.cut += result.num_cut
    state.too_long += result.num_long
    state.line = (state.line if block.first.position else 0) + result.num_lines
    state.text_bytes += result.text_bytes
    state.source_bytes += block.source_bytes
    state.digest = sha256(state.digest.encode() + result.digest).hexdigest()


class _Splitter:
    """Writer of encoded documents to their splits;
    see :mod:`meshwright.data.splits` for the rules.
    """

    def __init__(self, options: Options, rule: SplitRule, tokenizer: KnownTokenizer) -> None:
        self.options, self.rule = options, rule
        self.begin, self.end = tokenizer.begin, tokenizer.end
        self.shares = {"validation": options.validation_share, "test": options.test_share}

    def append(self, result: EncodedBlock, work: WorkFolder) -> None:
        """Append the documents of a block; ``work`` counts the documents and tokens before it."""
        if self.rule is SplitRule.POSITION:
            self._append_by_position(result, work)
        else:
            self._append_by_number(result, work)

    def _append_by_number(self, result: EncodedBlock, work: WorkFolder) -> None:
        first, is_document = work.state.records, result.lengths > 0
        numbers = np.arange(first, first + len(result.lengths))
        splits = split_of(numbers, self.options.seed, *self.shares.values())[is_document]
        lengths = result.lengths[is_document]
        of_token = np.repeat(splits, lengths)
        for number, name in enumerate(SPLITS):
            chosen = splits == number
            if not chosen.any():
                continue
            selected = slice(None) if chosen.all() else of_token == number
            mask = None if result.counts is None else result.counts[selected]
            work.append(name, result.tokens[selected], lengths[chosen], mask)

    def _append_by_position(self, result: EncodedBlock, work: WorkFolder) -> None:
        ends = np.cumsum(result.lengths)
        for length, end in zip(result.lengths.tolist(), ends.tolist(), strict=True):
            if not length:
                continue
            counts = result.counts
            seen = length + sum(split.tokens for split in work.state.splits.values())
            stop = end
            for name, share in self.shares.items():
                owed = owed_tokens(share, seen, work.state.splits[name].tokens)
                part = part_of_document(stop - end + length, owed, may_cut=counts is None)
                self._append_part(result, name, stop - part, stop, work)
                stop -= part
            self._append_part(result, "train", end - length, stop, work)

    def _append_part(
        self, result: EncodedBlock, split: str, start: int, stop: int, work: WorkFolder
    ) -> None:
        """Append tokens [start, stop) of a block as one document.
        A part that was cut off gets ends of its own.
        """
        tokens = result.tokens[start:stop]
        if not len(tokens):
            return
        if result.counts is None and tokens[-1] != self.end:
            tokens = np.append(tokens, tokens.dtype.type(self.end))
        if result.counts is None and self.begin is not None and tokens[0] != self.begin:
            tokens = np.insert(tokens, 0, self.begin)
        mask = None if result.counts is None else result.counts[start:stop]
        work.append(split, tokens, np.array([len(tokens)]), mask)


def _place_of(block: RecordBlock, files: Sequence[InputFile], first_line: int, line: int) -> str:
    """Format the place of a record: ``pages.jsonl:17``, ``pages.parquet: row 17`` (both from 1 on),
    ``notes.txt``.
    """
    file = files[block.first.file]
    if file.kind is FileForm.TEXT:
        return str(files[block.first.file + line].path)
    if file.kind is FileForm.ROWS:
        return f"{file.path}: row {block.first.position + line + 1}"
    return f"{file.path}:{first_line + line + 1}"


def _notes(
    options: Options, made: Fingerprint, tokenizer: Path, chat: BoundedRenderer | None
) -> list[str]:
    """Return remarks on a finished corpus, a line each."""
    notes = list[str]()
    if drops_characters(tokenizer):
        notes.append(
            f"{options.tokenizer} has no unknown token and no byte tokens: characters outside its"
            " vocabulary are left out"
        )
    is_plain = options.form is Form.MESSAGES and options.chat_template is None
    if is_plain and (template := find_chat_template(tokenizer)) is not None:
        notes.append(
            "warning: the conversations are written as <|user|> and <|assistant|> lines, not with"
            f" the chat template in {template}: a model that is served with that template has to be"
            " trained on it. Prepare them again with --chat-template tokenizer"
        )
    if chat is not None and not chat.closes_turns():
        notes.append(
            f"warning: nothing follows an answer in the chat template {chat.template.path}: a model"
            " does not learn where to stop. Add a token there, in a copy that --chat-template names"
        )
    shares = {"validation": options.validation_share, "test": options.test_share}
    for name, share in shares.items():
        if share > 0 and name not in made.splits:
            documents = format_number_of(made.source.documents, "document")
            move = "a larger share, another --seed"
            if made.source.split == "position":
                move = "more text, or a larger share"
            notes.append(
                f"{name} got nothing, with a share of {share:g} of {documents}: give {move}, or"
                " --split"
            )
    return notes
