"""Prompts as token ids that begin like the training documents, and end-of-document tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.config import Data
from meshwright.data.fingerprint import Fingerprint
from meshwright.data.tokenizer import begin_id, document_ends, ending_ids


def with_starts(ids: Tensor, ends: set[int], begin: int | None = None) -> dict[str, Tensor]:
    """Return the inputs that ``data.document_boundaries`` gives a model in training: (B, S)
    ids and (B, S) bool starts.

    A document starts after each end token. An end token at position 0 that equals ``begin`` closes
    no document.
    """
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    closed = torch.isin(ids[:, :-1], torch.tensor(sorted(ends), dtype=ids.dtype, device=ids.device))
    closed[:, 0] &= ids[:, 0] != (-1 if begin is None else begin)
    starts[:, 1:] = closed
    return {"tokens": ids, "starts": starts}


def ends_of_document(
    path: Path, tokenizer: Tokenizer, known: Fingerprint | None, data: Data
) -> set[int]:
    """Return the ids that end a document: of the tokenizer and its files, the corpus beside it,
    the run's corpora.
    """
    beside = set() if known is None else {known.end_of_document_id}
    return ending_ids(path, tokenizer) | beside | set(document_ends(data, tokenizer))


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, known: Fingerprint | None, ends: set[int]
) -> list[int]:
    """Encode a prompt with the beginning that the model's training documents had.

    ``known`` describes the corpus beside the tokenizer. In it nothing precedes a text except a
    token added by --bos. Without a corpus (an imported model) the tokenizer's own special tokens
    apply, minus an end token that it appends to a text.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = list(tokenizer.encode(prompt, add_special_tokens=False).ids)
    if known is not None:
        begin = begin_id(known, tokenizer)
        return text if begin is None else [begin, *text]
    ids = list(tokenizer.encode(prompt).ids)
    added = len(ids) - len(text)
    while added > 0 and ids and ids[-1] in ends:
        ids.pop()
        added -= 1
    return ids
