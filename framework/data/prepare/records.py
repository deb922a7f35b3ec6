"""Records (text files, JSON lines, rows) as pieces of a document, with a flag for pieces that count as labels.

    text      {"text": "Once upon a time"}                      all of it counts
    pairs     {"prompt": "2+2=", "response": "4"}               the response and the end of document count
    messages  {"messages": [{"role": "user", "content": "Hi"},
                            {"role": "assistant", "content": "Hello"}]}

              <|user|>\\nHi\\n<|assistant|>\\nHello<end>          the assistant's messages and their ends count

Nothing is inserted between prompt and response: a space or line feed between them must be the end of the prompt. Each
piece is encoded by itself, so that no token spans two pieces.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from meshwright.system.bounded import parse_json


class Form(Enum):
    """Forms of records."""

    TEXT = "text"
    PAIRS = "pairs"
    MESSAGES = "messages"

    @property
    def has_mask(self) -> bool:
        """True if some tokens of a document do not count as labels."""
        return self is not Form.TEXT


class DocumentPiece(NamedTuple):
    """A part of a document of which either all tokens count as labels or none."""

    text: str
    counts: bool
    ends: bool
    """True if an end-of-document token follows; it counts as a label if the piece does."""


class Broken(Exception):
    """A record that cannot be read; its text follows the place in a message."""


def columns_of(form: Form, text_key: str) -> tuple[str, ...]:
    """Return the keys to read of a record, in the order that :func:`pieces_of` expects."""
    return {Form.TEXT: (text_key,), Form.PAIRS: ("prompt", "response"), Form.MESSAGES: ("messages",)}[form]


def decoded(raw: bytes) -> str:
    """Decode UTF-8. Raises Broken."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Broken(f"is not utf-8 (byte {raw[error.start]:#04x} at {error.start})") from error


def values_of_line(line: bytes, columns: tuple[str, ...]) -> tuple[Any, ...]:
    """Parse the columns of a JSON object on a line. Raises Broken."""
    try:
        record = parse_json(decoded(line))
    except json.JSONDecodeError as error:
        raise Broken(f"is not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise Broken(f"is not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise Broken(f"is a JSON {_kind_of(record)}, not an object with the key {columns[0]!r}")
    for name in columns:
        if name not in record:
            keys = ", ".join(map(repr, list(record)[:6])) or "none"
            raise Broken(f"has no key {name!r} (its keys: {keys})")
    return tuple(record[name] for name in columns)


def pieces_of(form: Form, values: tuple[Any, ...], columns: tuple[str, ...]) -> list[DocumentPiece]:
    """Return the pieces of a record's document; none for an empty text. Raises Broken."""
    if form is Form.MESSAGES:
        return _conversation(values[0])
    texts = [_text(value, name) for value, name in zip(values, columns, strict=True)]
    if form is Form.TEXT:
        return [DocumentPiece(texts[0], True, True)] if texts[0] else []
    prompt, response = texts
    if not response:
        raise Broken("has an empty 'response': there is nothing to learn from it")
    return [DocumentPiece(prompt, False, False), DocumentPiece(response, True, True)]


def _conversation(messages: Any) -> list[DocumentPiece]:
    if not isinstance(messages, list) or not messages:
        raise Broken("has no list of messages in 'messages'")
    pieces = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise Broken(f"has no 'role' and 'content' in message {number}")
        role, content = (_text(message[key], f"{key} of message {number}") for key in ("role", "content"))
        is_ours = role == "assistant"
        pieces.append(DocumentPiece(f"<|{role}|>\n", False, False))
        pieces.append(DocumentPiece(content if is_ours else f"{content}\n", is_ours, is_ours))
    if not any(piece.counts for piece in pieces):
        raise Broken("has no message of the 'assistant': there is nothing to learn from it")
    if not any(piece.text for piece in pieces if piece.counts):
        raise Broken("has no text in any message of the 'assistant': there is nothing to learn from it")
    return pieces


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Broken(f"has {_a(_kind_of(value))} as {name!r}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Broken(f"has half of a surrogate pair in {name!r} (at {error.start}), which is no text") from error
    return value


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def _a(kind: str) -> str:
    return kind if kind == "null" else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
