"""A record as a conversation for a chat template.

{"messages": [{"role": "user", "content": "2+2?"},
              {"role": "assistant", "tool_calls": [{"function": {"name": "add", ...}}]},
              {"role": "tool", "content": "4"},
              {"role": "assistant", "content": "Four", "reasoning_content": "..."}],
 "tools": [{"type": "function", "function": {...}}],            optional
 "chat_template_kwargs": {"enable_thinking": false}}            optional
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.data.prepare.chat.spans import Conversation
from meshwright.data.prepare.records import Broken, is_label
from meshwright.system.bounded import parse_json

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that a record may not set."""
UNKNOWN_KEYS = ("function_call", "train_detail", "loss_mask")
"""Keys of a message that no template writes, or that choose labels in another way."""


def conversation_of(messages: Any, tools: Any, variables: Any) -> Conversation:
    """Return the conversation of a record. Raises Broken.

    ``tools`` and ``variables`` may be JSON texts, as in columns of parquet files.
    """
    if not isinstance(messages, list) or not messages:
        raise Broken("has no list of messages in 'messages'")
    counts = [_check_message(message, number) for number, message in enumerate(messages, 1)]
    if not any(counts):
        raise Broken(
            "has no message of the 'assistant' that counts: there is nothing to learn from it"
        )
    tools = _parsed(tools, "tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise Broken("has 'tools' that are no list of objects")
    variables = _parsed(variables, "chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Broken("has 'chat_template_kwargs' that are no object")
    reserved = next((name for name in RESERVED if name in variables), None)
    if reserved is not None:
        raise Broken(f"has {reserved!r} in 'chat_template_kwargs', which is set already")
    conversation = Conversation(messages, counts, tools, variables)
    try:
        json.dumps(conversation)
    except (TypeError, ValueError) as error:
        raise Broken(f"holds a value that is no JSON: {error}") from None
    return conversation


def without_nulls(value: Any) -> Any:
    """Return a value without nulls in its objects: a parquet file has all fields in each of them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _check_message(message: Any, number: int) -> bool:
    """Check a message; return whether its text is a label. Raises Broken."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Broken(f"has no 'role' in message {number}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        raise Broken(f"has no 'content' in message {number}")
    if content is not None and not isinstance(content, str | list | dict):
        raise Broken(f"has no text as 'content' of message {number}")
    if calls is not None and not isinstance(calls, list):
        raise Broken(f"has 'tool_calls' that are no list in message {number}")
    unknown = next(
        (key for key in UNKNOWN_KEYS if message.get(key) not in (None, [], {}, "")), None
    )
    if unknown is not None:
        raise Broken(f"has {unknown!r} in message {number}, which would have no effect: remove it")
    return is_label(message, number, message["role"] == "assistant")


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise Broken(f"has {name!r} as a text that is not valid JSON: {error}") from None
