"""Encoding of a task's texts, as the documents of the training were."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.config import RunConfig
from meshwright.data import fingerprint
from meshwright.data.fingerprint import Fingerprint
from meshwright.data.tokenizer import load
from meshwright.inference.prompts import encode_prompt, ends_of_document


@dataclass(frozen=True)
class TextEncoding:
    """Tokenizer of a run, with the tokens that begin and end its documents."""

    path: Path
    """The ``tokenizer.json``."""
    tokenizer: Tokenizer
    known: Fingerprint | None
    """Fingerprint of the corpus beside the tokenizer."""
    ends: frozenset[int]
    """Tokens that end a document."""

    @classmethod
    def of(cls, config: RunConfig) -> TextEncoding:
        """Return the encoding of a configuration that names its tokenizer."""
        assert config.data.tokenizer is not None
        path = Path(config.data.tokenizer)
        tokenizer, known = load(path), fingerprint.read(path.parent)
        ends = ends_of_document(path, tokenizer, known, config.data)
        return cls(path, tokenizer, known, frozenset(ends))

    @property
    def begin(self) -> int | None:
        """Token before a document: one that begins it, or the end of the one before; None: the
        tokenizer has none.
        """
        if first := self.encode("", is_whole=True):
            return first[-1]
        if self.known is not None and self.known.end_of_document_id is not None:
            return self.known.end_of_document_id
        return min(self.ends, default=None)

    def encode(self, text: str, *, is_whole: bool) -> list[int]:
        """Encode a text; ``is_whole``: one that begins a document."""
        if is_whole:
            return encode_prompt(self.tokenizer, text, self.known, set(self.ends))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids
