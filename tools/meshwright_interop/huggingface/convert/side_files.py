"""Files that accompany the weights (tokenizer files, generation_config.json),
and the tokenizer's fit to the model.

An imported run keeps them in ``huggingface/`` below its run directory, and ``data.tokenizer``
points there. A run that was not imported has only the tokenizer.json of its corpus; the other files
are generated from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.config import Data, Model
from meshwright.data.tokenizer import END_OF_DOCUMENT, load
from meshwright.errors import DataError
from meshwright_interop.huggingface.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    copy_side_files,
    read_json,
    with_known_type,
    write_json,
)

DIRECTORY = "huggingface"
NUM_TOKENS = 2**32
"""Upper limit of token ids (exclusive)."""


def side_file_directory(run: Path, data: Data) -> Path | None:
    """Return the directory of a run's side files: its ``huggingface/``, or that of its tokenizer;
    None: neither.
    """
    if (run / DIRECTORY / CONFIG).is_file():
        return run / DIRECTORY
    if data.tokenizer is None:
        return None
    directory = Path(data.tokenizer).parent
    return directory if directory.is_dir() else None


def check_vocabulary(path: Path, vocab_size: int, origin: str) -> list[str]:
    """Check that the model has an embedding row for every token of a tokenizer.

    Args:
        path: the tokenizer.json.
        vocab_size: rows of the model's token embedding.
        origin: source of ``vocab_size``, for the error message.

    Returns:
        A note if the tokenizer has fewer tokens than the model has rows.

    Raises:
        DataError: the tokenizer has no tokens, has tokens without a row, or cannot be read.
    """
    tokens = load(path).get_vocab(with_added_tokens=True)
    if not tokens:
        raise DataError("MW-INTEROP-039", f"{path} has no tokens: give the tokenizer of this model")
    token, last = max(tokens.items(), key=lambda item: item[1])
    if last >= vocab_size:
        beyond = sum(number >= vocab_size for number in tokens.values())
        raise DataError(
            "MW-INTEROP-040",
            f"{path} does not fit the model: its token {token!r} is number {last}"
            + (f", one of {beyond} beyond the model" if beyond > 1 else "")
            + f", and {origin} has vocab_size = {vocab_size}, rows 0 to {vocab_size - 1}: give the"
            f" tokenizer that belongs to the model, or remove the added tokens from {path.name}",
        )
    if last + 1 == vocab_size:
        return []
    return [
        f"{path.name} has {last + 1:,} tokens, the model has {vocab_size:,} rows: the remaining"
        " rows are unused"
    ]


def check(source: Path) -> None:
    """Check at import that a later export can read the side files.

    Raises:
        ModelError: tokenizer_config.json or generation_config.json is no JSON object.
    """
    for name in (TOKENIZER_CONFIG, GENERATION):
        read_side_file(source, name)


def read_side_file(source: Path | None, name: str) -> dict[str, Any]:
    """Return the fields of one JSON side file; an empty dict if it does not exist."""
    return read_json(source / name, "") if source is not None and (source / name).is_file() else {}


def write(source: Path | None, target: Path, data: Data, model: Model) -> dict[str, Any]:
    """Write the side files of a model into ``target``.

    Args:
        source: directory of the existing files; missing ones are generated from ``data.tokenizer``.
        target: the exported directory.
        data: section of the run's configuration, and so ``model``.

    Returns:
        Ids of the special tokens for config.json: ``bos_token_id`` and ``eos_token_id``, None if
        unknown.
    """
    copied = [] if source is None else copy_side_files(source, target)
    own = data.tokenizer
    if TOKENIZER not in copied and own is not None and Path(own).is_file():
        shutil.copyfile(own, target / TOKENIZER)
        copied.append(TOKENIZER)
    tokenizer = load(target / TOKENIZER) if TOKENIZER in copied else None
    ids = _special_ids(source, tokenizer)
    if tokenizer is not None and TOKENIZER_CONFIG not in copied:
        max_length = model.options.get("max_sequence_length", data.sequence_length)
        _write_tokenizer_config(target, tokenizer, ids, max_length)
    if GENERATION not in copied and any(token_id is not None for token_id in ids.values()):
        write_json(
            target / GENERATION,
            {name: token_id for name, token_id in ids.items() if token_id is not None},
        )
    return ids


def _special_ids(source: Path | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return ``bos_token_id`` and ``eos_token_id`` of the first source
    that has an ``eos_token_id``.

    Order: generation_config.json, config.json, tokenizer_config.json, the tokenizer. If none has
        it, both are None and
    are written as null: the defaults of transformers' config classes fit one released model each.
    """
    names = ("bos_token_id", "eos_token_id")
    candidates = [read_side_file(source, GENERATION), imported_config(source)]
    if tokenizer is not None:
        fields = read_side_file(source, TOKENIZER_CONFIG)
        tokens = {name: fields.get(name.removesuffix("_id")) for name in names}
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in tokens.items()
        }
        candidates.append(
            {
                name: tokenizer.token_to_id(text)
                for name, text in texts.items()
                if isinstance(text, str)
            }
        )
        candidates.append(dict.fromkeys(names, tokenizer.token_to_id(END_OF_DOCUMENT)))
    chosen = next((ids for ids in candidates if ids.get("eos_token_id") is not None), {})
    return {name: chosen.get(name) for name in names}


def _write_tokenizer_config(
    target: Path, tokenizer: Tokenizer, ids: Mapping[str, Any], max_length: int
) -> None:
    """Write a tokenizer_config.json with the generic tokenizer class,
    since tokenizer.json defines the tokenizer.
    """
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        # no token_type_ids, which GPT-2 would add to the tokens
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    for name, value in ids.items():
        token_id = value[0] if isinstance(value, list) and value else value
        token = (
            tokenizer.id_to_token(token_id)
            if isinstance(token_id, int) and 0 <= token_id < NUM_TOKENS
            else None
        )
        fields |= {name.removesuffix("_id"): token} if token is not None else {}
    write_json(target / TOKENIZER_CONFIG, fields)


def imported_config(source: Path | None, model_type: str | None = None) -> dict[str, Any]:
    """Return the config.json that a run was imported from;
    its fields without a meshwright option stay in the export.

    Empty if the run was not imported, or if ``model_type`` is given and differs.
    """
    fields = with_known_type(read_side_file(source, CONFIG))
    return fields if model_type is None or fields.get("model_type") == model_type else {}
