"""Encoding of conversations: rendered text -> tokens, and a mask of the assistant's."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.prepare.chat.bounded import BoundedRenderer, TemplateLimitError
from meshwright.data.prepare.chat.records import conversation_of, without_nulls
from meshwright.data.prepare.chat.rendering import RenderingError
from meshwright.data.prepare.chat.spans import Conversation
from meshwright.data.prepare.encode import (
    EncodedDocument,
    Encoder,
    ParsedRecord,
    TooCostly,
    encoded,
)
from meshwright.data.prepare.records import Broken


@dataclass
class ChatEncoder(Encoder):
    """Reader and encoder of blocks of conversations.

    A rendered text is encoded as a whole, as transformers does: special tokens in it are tokens,
    also those in a message.
    """

    renderer: BoundedRenderer | None = None
    max_tokens: int | None = None
    """Largest number of tokens of a conversation; None: any."""

    def __post_init__(self) -> None:
        """Encode special tokens in a text as tokens."""
        super().__post_init__()
        self.tokenizer.encode_special_tokens = False

    def close(self) -> None:
        """End the renderer's process."""
        assert self.renderer is not None
        self.renderer.close()

    def _row(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(without_nulls(value) for value in row)

    def _record(self, line: int, values: tuple[Any, ...]) -> ParsedRecord:
        """Encode the conversation of a record. Raises Broken."""
        messages, tools, variables = values
        conversation = conversation_of(messages, tools, variables)
        try:
            document = self._encoded(conversation)
            fits = self.max_tokens is None or len(document.tokens) <= self.max_tokens
            if fits:
                return ParsedRecord(line, document=document)
            kept = self._fitting(conversation)
            return ParsedRecord(line, document=kept, is_cut=kept is not None, is_long=kept is None)
        except RenderingError as error:
            raise Broken(f"fits the chat template {self._template} badly: it {error}") from None
        except TemplateLimitError as error:
            raise TooCostly(f"stopped the chat template {self._template}, which {error}") from None

    @property
    def _template(self) -> str:
        assert self.renderer is not None
        return str(self.renderer.template.path)

    def _encoded(self, conversation: Conversation) -> EncodedDocument:
        """Return the tokens of a conversation and their mask. Raises Broken, RenderingError."""
        assert self.renderer is not None
        text, spans = self.renderer.find(conversation)
        found = self._tokens(text)
        mask = mask_of(text, spans, np.array(found.offsets, dtype=np.int64).reshape(-1, 2))
        return EncodedDocument(np.array(found.ids, dtype=self.dtype), mask, len(text.encode()))

    def _tokens(self, text: str) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Broken("has half of a surrogate pair, which is no text") from None
        return encoded(lambda: self.tokenizer.encode(text, add_special_tokens=False), self.place)

    def _fitting(self, conversation: Conversation) -> EncodedDocument | None:
        """Return the longest beginning that ends with a labelled turn and is short enough;
        None if there is none.
        """
        renderer, limit = self.renderer, self.max_tokens
        assert renderer is not None and limit is not None
        ends = [n + 1 for n, counts in enumerate(conversation.counts) if counts]

        def length(end: int) -> int:
            return len(self._tokens(renderer.render(conversation.first(end))).ids)

        fitting = bisect_left(ends, limit + 1, key=length)
        # templates that rewrite earlier turns may make a longer beginning shorter
        for end in reversed(ends[:fitting]):
            document = self._encoded(conversation.first(end))
            if len(document.tokens) <= limit:
                return document
        return None


def mask_of(text: str, spans: list[list[int]], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return 1 for the tokens that lie in a span, (T,). Raises Broken: a span has none.

    A token over the edge of a span counts if white space is all that it has outside; a token with
    other characters of the prompt never does.

    Args:
        text: the rendered conversation.
        spans: [start, stop) of the labels.
        offsets: (T, 2) first character of each token, and the one after its last.
    """
    starts, stops = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for start, stop in spans:
        first = len(text[:start].rstrip())
        after = len(text) - len(text[stop:].lstrip())
        touches = (starts < stop) & ((stops > start) | ((starts == stops) & (starts >= start)))
        inside = touches & (starts >= first) & (stops <= after)
        if not inside.any():
            raise Broken(
                f"has no token for {text[start:stop][:40]!r} alone: the chat template joins it to"
                " the text around it"
            )
        mask |= inside.astype(np.uint8)
    return mask
