"""The byte-level BPE tokenizer (Hugging Face ``tokenizers``): training, loading,
and encoding of whole documents.

Byte level means that any text round-trips and no token is unknown. Id 0 is the special token, then
come the 256 bytes, then merges in the order of their frequency. The result of training depends on
the texts and the vocabulary size alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.config import Data
from meshwright.data.fingerprint import Fingerprint
from meshwright.data.fingerprint import read as read_fingerprint
from meshwright.errors import DataError
from meshwright.system.bounded import parse_json, read_bytes, read_text

TOKENIZER_FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
USUAL_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Usual names of the end-of-document token in families of tokenizers."""
MIN_VOCAB_SIZE = 257
"""256 bytes and the end-of-document token."""
MAX_GROWTH = 64
"""Factor by which the replacements of a tokenizer may lengthen a text:
26 that double it would need gigabytes.
"""
MAX_VOCAB_SIZE = 2**22
"""The trainer allocates memory for it at once."""
_TEXTS_PER_BATCH = 64


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer. A small corpus may yield fewer tokens than ``vocab_size``:
    check ``get_vocab_size()``.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            "MW-DATA-094",
            f"a vocabulary of {vocab_size} is too small for byte-level BPE: 256 bytes and"
            f" {END_OF_DOCUMENT} need {MIN_VOCAB_SIZE}; 4096 is a good size for a few megabytes of"
            " text",
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise DataError(
            "MW-DATA-125",
            f"a vocabulary of {vocab_size:,} is too large: at most {MAX_VOCAB_SIZE:,}",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a Hugging Face ``tokenizer.json``. Dropout of merges is turned off:
    a text has one encoding.
    """
    if not path.is_file():
        raise DataError(
            "MW-DATA-095",
            f"there is no tokenizer at {path}: name a tokenizer.json (data.tokenizer, or"
            " --tokenizer)",
        )
    try:
        tokenizer = Tokenizer.from_str(read_text(path))
        steps = [each for each in (tokenizer.normalizer, tokenizer.decoder) if each is not None]
        if any(_growth(parse_json(each.__getstate__())) > MAX_GROWTH for each in steps):
            raise ValueError(
                f"its replacements lengthen a text by a factor of more than {MAX_GROWTH}"
            )
    except OSError as error:
        raise DataError(
            "MW-DATA-096",
            f"{path}: cannot be read ({error.strerror or error}): copy it again, or name another",
        ) from error
    except BaseException as error:
        # the library raises a bare Exception, or a Rust panic, a BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise DataError(
            "MW-DATA-097",
            f"{path} is not a tokenizer.json of Hugging Face ({error}): copy it again, or name"
            " another",
        ) from error
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _growth(content: Any) -> int:
    """Return the largest factor by which the ``Replace`` steps of a normalizer
    or decoder can lengthen a text.
    """
    growth = 1
    if isinstance(content, dict):
        if content.get("type") == "Replace" and isinstance(content.get("content"), str):
            pattern = content.get("pattern")
            found = pattern.get("String") if isinstance(pattern, dict) else None
            growth = -(
                -len(content["content"]) // max(1, len(found) if isinstance(found, str) else 1)
            )
        content = list(content.values())
    for each in content if isinstance(content, list) else ():
        growth *= max(1, _growth(each))
    return growth


def end_of_document_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the first of :data:`USUAL_ENDS` that the tokenizer has, or None."""
    ids: Iterator[int | None] = map(tokenizer.token_to_id, USUAL_ENDS)
    return next((token_id for token_id in ids if token_id is not None), None)


def begin_id(known: Fingerprint | None, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token before each document of a corpus; None if there is none."""
    token = None
    if known is not None and known.prepared is not None:
        token = known.prepared.begin_of_document
    return None if token is None else tokenizer.token_to_id(token)


def ending_ids(path: Path, tokenizer: Tokenizer) -> set[int]:
    """Return the ids that end a text: ``<|endoftext|>``,
    and the end tokens in the files beside ``path``.

    An imported model has a ``generation_config.json`` with ``eos_token_id``, an id or a list of
    ids, or a ``tokenizer_config.json`` with ``eos_token``.
    """
    ids = {end_of_document_id(tokenizer)}
    end_ids = _read_json_file(path.with_name("generation_config.json")).get("eos_token_id")
    ids |= {
        each for each in (end_ids if isinstance(end_ids, list) else [end_ids]) if type(each) is int
    }
    token = _read_json_file(path.with_name("tokenizer_config.json")).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    ids |= {tokenizer.token_to_id(token)} if isinstance(token, str) else set()
    return {token_id for token_id in ids if isinstance(token_id, int)}


def corpus_folders(data: Data) -> list[Path]:
    """Return the folders of all training corpora of a run, those of its data stages too,
    each once.
    """
    mixtures = [data.train, *(stage.train for stage in data.stages)]
    paths = list[str]()
    for mixture in mixtures:
        paths += [mixture] if isinstance(mixture, str) else [each.path for each in mixture]
    return list(dict.fromkeys(Path(path).parent for path in paths))


def document_ends(data: Data, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that the documents of a run's training corpora end with;
    of known corpora alone.
    """
    ends = list[int]()
    for folder in corpus_folders(data) if data.builder is None else ():
        try:
            known = read_fingerprint(folder)
        except DataError:  # a damaged fingerprint, which a training run refuses
            continue
        if known is None:
            continue
        name = END_OF_DOCUMENT if known.prepared is None else known.prepared.end_of_document
        token_id = tokenizer.token_to_id(name)
        if token_id is not None and token_id not in ends:
            ends.append(token_id)
    return ends


def find_tokenizer(data: Data, model_directory: Path | None = None) -> Path | None:
    """Return the tokenizer of a run: ``data.tokenizer``, else that of its corpora,
    else that of its model; or None.
    """
    if data.tokenizer is not None:
        return Path(data.tokenizer)
    folders = [*corpus_folders(data), *([] if model_directory is None else [model_directory])]
    return next(
        (folder / TOKENIZER_FILE for folder in folders if (folder / TOKENIZER_FILE).is_file()), None
    )


def _read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or holds something else."""
    try:
        content = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
    """Encode each text as token ids with the end of document appended, (n + 1,) each.

    The characters ``<|endoftext|>`` in a text are encoded as ordinary text: only the appended id
    ends the document.
    """
    end = end_of_document_id(tokenizer)
    assert end is not None
    tokenizer.encode_special_tokens = True
    remaining = iter(texts)
    while batch := list(islice(remaining, _TEXTS_PER_BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=np.int64)
