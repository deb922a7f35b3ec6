"""Records (text files, JSON lines, rows) as pieces of a document,
with a flag for pieces that count as labels.

    text      {"text": "Once upon a time"}                      all of it counts
    pairs     {"prompt": "2+2=", "response": "4"}               the response and the end of document count
    messages  {"messages": [{"role": "user", "content": "Hi"},
                            {"role": "assistant", "content": "Hello"}]}

              <|user|>\\nHi\\n<|assistant|>\\nHello<end>          the assistant's messages and their ends count
                                                          (not one with "weight": 0, or "train":
                                                          false)

Nothing is inserted between prompt and response: a space or line feed between them must be the end
of the prompt. Each piece is encoded by itself, so that no token spans two pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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


class OptionalKey(str):
    """Key that a record may lack; its value is None then."""


CHAT_KEYS = ("messages", OptionalKey("tools"), OptionalKey("chat_template_kwargs"))
"""Keys to read of a conversation for a chat template."""


class RecordKeys(NamedTuple):
    """Keys of the fields that are read of a record."""

    text: str = "text"
    prompt: str = "prompt"
    response: str = "response"

    def of(self, form: Form) -> tuple[str, ...]:
        """Return the keys to read of a record, in the order that :func:`pieces_of` expects."""
        keys = {
            Form.TEXT: (self.text,),
            Form.PAIRS: (self.prompt, self.response),
            Form.MESSAGES: ("messages",),
        }
        return keys[form]


_USUAL_KEYS = {
    "text": (
        "--text-key",
        ("content", "body", "document", "raw_content", "markdown", "story", "article"),
    ),
    "prompt": ("--prompt-key", ("instruction", "question", "input", "query", "problem", "source")),
    "response": ("--response-key", ("completion", "output", "answer", "target", "solution")),
}
"""Default key -> the option that names another, and keys that others use for the same."""


def advice_for(missing: str, present: Sequence[str]) -> str:
    """Return the next move for a record or table without a key, to follow the message;
    empty if there is none.

    Args:
        missing: the key.
        present: the keys that the record has.
    """
    if missing == "messages":
        others = [
            key for key in ("conversations", "conversation", "dialog", "chat") if key in present
        ]
        return f": write {others[0]!r} as messages of role and content" if others else ""
    if missing not in _USUAL_KEYS:
        return ": name one of them with --text-key, --prompt-key or --response-key"
    option, usual = _USUAL_KEYS[missing]
    likely = next((key for key in usual if key in present), None)
    return f": name the key with {option} {likely or 'KEY'}"


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
        if name not in record and not isinstance(name, OptionalKey):
            keys = ", ".join(map(repr, list(record)[:6])) or "none"
            raise Broken(f"has no key {name!r} (its keys: {keys}){advice_for(name, list(record))}")
    return tuple(record.get(name) for name in columns)


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
        role, content = (
            _text(message[key], f"{key} of message {number}") for key in ("role", "content")
        )
        _check_is_plain(message, number)
        is_ours = role == "assistant"
        counts = is_label(message, number, is_ours)
        pieces.append(DocumentPiece(f"<|{role}|>\n", False, False))
        pieces.append(DocumentPiece(content if is_ours else f"{content}\n", counts, is_ours))
    if not any(piece.counts for piece in pieces):
        raise Broken(
            "has no message of the 'assistant' that counts: there is nothing to learn from it"
        )
    if not any(piece.text for piece in pieces if piece.counts):
        raise Broken(
            "has no text in any message of the 'assistant': there is nothing to learn from it"
        )
    return pieces


_UNWRITTEN = (
    "tool_calls",
    "function_call",
    "tool_call_id",
    "reasoning_content",
    "train_detail",
    "loss_mask",
)
"""Keys of a message whose content this format would lose,
or that choose labels in a way it does not have.
"""


def _check_is_plain(message: dict[str, Any], number: int) -> None:
    """Check that a message has nothing that would be left out. Raises Broken."""
    lost = next((key for key in _UNWRITTEN if message.get(key) not in (None, [], {}, "")), None)
    if lost is not None:
        raise Broken(
            f"has {lost!r} in message {number}, which would be left out: write it into the content,"
            " as text"
        )


def is_label(message: dict[str, Any], number: int, is_ours: bool) -> bool:
    """Return whether a message counts: the assistant's, unless its weight is 0 or train is false.
    Raises Broken.

    ``weight`` is that of OpenAI's fine-tuning files, ``train`` and ``training`` those of axolotl.
    ``is_ours``: the message is the assistant's.
    """
    flags = [
        (key, message[key])
        for key in ("weight", "train", "training")
        if message.get(key) is not None
    ]
    for key, value in flags:
        if value not in (0, 1):  # true and false are 1 and 0
            raise Broken(f"has {key} = {value!r} in message {number}: only 0 and 1 are known")
        if value == 1 and not is_ours:
            raise Broken(
                f"has {key} = {value!r} in message {number}: only messages of the assistant can"
                " count"
            )
    return is_ours and all(value == 1 for _, value in flags)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Broken(f"has {_a(_kind_of(value))} as {name!r}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Broken(
            f"has half of a surrogate pair in {name!r} (at {error.start}), which is no text"
        ) from error
    return value


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "list",
        dict: "object",
    }
    return kinds.get(type(value), type(value).__name__)


def _a(kind: str) -> str:
    return kind if kind == "null" else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
