"""A chat template: its text, or texts by name, and the special tokens that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from meshwright.data.prepare.tokenizer_files import CONFIG_FILE, find_chat_template
from meshwright.errors import DataError
from meshwright.system.bounded import MIB, parse_json, read_bytes, read_text

OF_TOKENIZER = "tokenizer"
"""Value of ``--chat-template`` that takes the template beside the ``tokenizer.json``."""
COPY = "chat_template.jinja"
"""Name of the template's copy in a corpus."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of further templates beside ``chat_template.jinja``."""
SPECIAL_FILE = "special_tokens_map.json"
MAX_TEMPLATE_BYTES = MIB


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which alone decides the text of a conversation."""

    path: Path
    """File that it was read from, for messages."""
    texts: dict[str, str]
    """Name -> text: ``default`` and, where there is one, ``tool_use``."""
    specials: dict[str, str]
    """Name -> text of the special tokens, such as ``bos_token``."""

    @property
    def sha256(self) -> str:
        """Return the hash of the texts and special tokens."""
        content = json.dumps([self.texts, self.specials], sort_keys=True)
        return sha256(content.encode()).hexdigest()

    @property
    def is_dated(self) -> bool:
        """True if a rendering may hold the date of the day."""
        return any("strftime_now" in text for text in self.texts.values())


def open_chat_template(choice: str, tokenizer: Path) -> ChatTemplate:
    """Read the template of ``--chat-template``.

    Args:
        choice: ``tokenizer``, or the path of a .jinja file.
        tokenizer: path of the ``tokenizer.json``.

    Raises:
        DataError: there is no such template, or a file of it cannot be read.
    """
    if choice == OF_TOKENIZER:
        path = find_chat_template(tokenizer)
        if path is None:
            raise DataError(
                "MW-DATA-133",
                f"there is no chat template beside {tokenizer}: put its chat_template.jinja there,"
                " or name a file with --chat-template FILE",
            )
    else:
        path = Path(choice)
    try:
        texts = dict(_texts(path, is_beside=choice == OF_TOKENIZER))
        specials = _specials(tokenizer)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            "MW-DATA-134",
            f"the chat template {path} cannot be read ({reason}): copy the files of the tokenizer"
            " again, or name a .jinja file with --chat-template",
        ) from None
    if "default" not in texts:
        raise DataError(
            "MW-DATA-135",
            f"{path} has the chat templates {', '.join(sorted(texts)) or 'none'} and no 'default':"
            " write the right one to a .jinja file, and name it with --chat-template",
        )
    return ChatTemplate(path, texts, specials)


def _texts(path: Path, *, is_beside: bool) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a template's file, and of those in the folder beside it.
    Raises OSError, ValueError.
    """
    if path.suffix != ".json":
        yield "default", read_text(path, MAX_TEMPLATE_BYTES)
        folder = path.with_name(MORE_TEMPLATES)
        for other in sorted(folder.glob("*.jinja")) if is_beside else ():
            yield other.stem, read_text(other, MAX_TEMPLATE_BYTES)
        return
    content = _json_object(path).get("chat_template")
    if isinstance(content, str):
        content = {"default": content}
    if isinstance(content, list):  # named templates, as tokenizer_config.json holds them
        if not all(isinstance(each, dict) for each in content):
            raise ValueError("'chat_template' is a list of something else than names and templates")
        content = {each.get("name"): each.get("template") for each in content}
    if not isinstance(content, dict):
        raise ValueError("'chat_template' is no text")
    for name, text in content.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError("'chat_template' has a name or a template that is no text")
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"'chat_template' has more than {MAX_TEMPLATE_BYTES:,} characters")
        yield name, text


def _specials(tokenizer: Path) -> dict[str, str]:
    """Return the special tokens that transformers passes to a template.
    Raises OSError, ValueError.

    ``special_tokens_map.json`` counts where ``tokenizer_config.json`` has no table of tokens: files
    of older versions.
    """
    config = _json_object(tokenizer.with_name(CONFIG_FILE), is_optional=True)
    if "added_tokens_decoder" not in config:
        config = {**config, **_json_object(tokenizer.with_name(SPECIAL_FILE), is_optional=True)}
    own = {name: config.get(name) for name in config if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            own |= config[key]
    found = {}
    for name, value in own.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _json_object(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Read a JSON object. Raises OSError, ValueError."""
    if is_optional and not path.exists():
        return {}
    content = parse_json(read_bytes(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content
