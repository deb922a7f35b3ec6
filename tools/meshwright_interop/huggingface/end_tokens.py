"""End tokens of an exported model: generation stops where the documents
of the training corpora ended.

A run may have ended its documents with another token than the tokenizer's files name: another
`--eod`, a tokenizer without such files, a chat format on top of a released model. Generation would
then never stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.config import Data
from meshwright.data.tokenizer import document_ends, load
from meshwright_interop.huggingface.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_json,
    write_json,
)

SPECIAL_TOKENS = "special_tokens_map.json"


def add_document_ends(directory: Path, data: Data) -> list[str]:
    """Add the ends of the run's documents to ``eos_token_id`` of an exported directory.

    The ids that the files already have stay, after the run's own. Nothing changes if they contain
    all of them.

    Args:
        directory: the exported files: config.json, and those that accompany it.
        config: the run's configuration.

    Returns:
        Notes for the user, a line each.

    Raises:
        DataError, ModelError: a file cannot be read.
    """
    if not (directory / TOKENIZER).is_file():
        return []
    tokenizer = load(directory / TOKENIZER)
    ends = document_ends(data, tokenizer)
    known = _eos_ids(directory)
    if not set(ends) - set(known):
        return []
    ids = list(dict.fromkeys([*ends, *known]))
    eos_id: int | list[int] = ids if len(ids) > 1 else ids[0]
    for name in (CONFIG, GENERATION):
        write_json(directory / name, _fields(directory, name) | {"eos_token_id": eos_id})
    token = _text(tokenizer, ids[0])
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if (directory / name).is_file():
            write_json(directory / name, _fields(directory, name) | {"eos_token": token})
    return [f"eos_token_id = {eos_id}: the documents of the training corpus end with {token!r}"]


def _eos_ids(directory: Path) -> list[int]:
    """Return the ids that end a text, as transformers reads them:
    generation_config.json before config.json.
    """
    for name in (GENERATION, CONFIG):
        value = _fields(directory, name).get("eos_token_id")
        if value is not None:
            return [
                each
                for each in (value if isinstance(value, list) else [value])
                if type(each) is int
            ]
    return []


def _fields(directory: Path, name: str) -> dict[str, Any]:
    return read_json(directory / name, "") if (directory / name).is_file() else {}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    text: str | None = tokenizer.id_to_token(token_id)
    assert text is not None, token_id
    return text
