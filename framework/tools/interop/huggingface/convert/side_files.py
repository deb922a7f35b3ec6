"""What goes along with the weights: tokenizer files, generation_config.json, and whether the tokenizer fits the model.

In a run directory they lie in ``huggingface/``, where ``data.tokenizer`` points into; a run of our own has only the
tokenizer.json that its corpus was made with, and the rest is written from that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.config import RunConfig
from meshwright.data.tokenizer import END_OF_DOCUMENT, load
from meshwright.errors import DataError
from meshwright.tools.interop.huggingface.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    copy_companions,
    read_json,
    write_json,
)

DIRECTORY = "huggingface"
NUM_TOKENS = 2**32
"""That a tokenizer can have."""


def place_of(run: Path, config: RunConfig) -> Path | None:
    """Where the companions of a run are: its own, or those beside its tokenizer; None: nowhere."""
    if (run / DIRECTORY / CONFIG).is_file():
        return run / DIRECTORY
    if config.data.tokenizer is None:
        return None
    beside = Path(config.data.tokenizer).parent
    return beside if beside.is_dir() else None


def check_vocabulary(path: Path, vocab_size: int, said: str) -> str | None:
    """A line on a tokenizer with fewer tokens than the model has rows for; None when they are as many.

    ``said``: where the model's vocabulary is from.

    Raises:
        DataError: it has tokens that the model has no row for, or cannot be read.
    """
    tokens = load(path).get_vocab(with_added_tokens=True)
    if not tokens:
        raise DataError(f"{path} has no tokens at all: give the tokenizer of this model")
    token, last = max(tokens.items(), key=lambda item: item[1])
    if last >= vocab_size:
        beyond = sum(number >= vocab_size for number in tokens.values())
        raise DataError(
            f"{path} does not fit the model: its token {token!r} is number {last}"
            + (f", one of {beyond} beyond the model" if beyond > 1 else "")
            + f", and {said} has vocab_size = {vocab_size}, rows 0 to {vocab_size - 1}: give the tokenizer that "
            f"belongs to the model, or take what was added out of {path.name}"
        )
    if last + 1 == vocab_size:
        return None
    return f"{path.name} has {last + 1:,} tokens, the model has {vocab_size:,} rows: the last are not used"


def check(source: Path) -> None:
    """What a model cannot be taken away again with.

    Raises:
        ModelError: tokenizer_config.json or generation_config.json is no JSON object.
    """
    for name in (TOKENIZER_CONFIG, GENERATION):
        said_in(source, name)


def said_in(source: Path | None, name: str) -> dict[str, Any]:
    """The fields of one of the companions; none where it is not there."""
    return read_json(source / name, "") if source is not None and (source / name).is_file() else {}


def write(source: Path | None, target: Path, config: RunConfig) -> dict[str, Any]:
    """Write the companions of a model into ``target``; the ids of special tokens that its config.json should name.

    ``source``: where they are; what is not there is made from ``data.tokenizer``.
    """
    copied = [] if source is None else copy_companions(source, target)
    if TOKENIZER not in copied and config.data.tokenizer is not None and Path(config.data.tokenizer).is_file():
        shutil.copyfile(config.data.tokenizer, target / TOKENIZER)
        copied.append(TOKENIZER)
    tokenizer = load(target / TOKENIZER) if TOKENIZER in copied else None
    ids = _special_ids(source, tokenizer)
    if tokenizer is not None and TOKENIZER_CONFIG not in copied:
        _write_tokenizer_config(target, tokenizer, ids, config)
    if GENERATION not in copied and any(found is not None for found in ids.values()):
        write_json(target / GENERATION, {name: found for name, found in ids.items() if found is not None})
    return ids


def _special_ids(source: Path | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The first that says what ends a text: generation_config.json, config.json, tokenizer_config.json, the tokenizer.

    null where nobody says it: the defaults of transformers' classes are those of one released model each.
    """
    names = ("bos_token_id", "eos_token_id")
    said = [said_in(source, GENERATION), base_of(source)]
    if tokenizer is not None:
        fields = said_in(source, TOKENIZER_CONFIG)
        tokens = {name: fields.get(name.removesuffix("_id")) for name in names}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        said.append({name: tokenizer.token_to_id(text) for name, text in texts.items() if isinstance(text, str)})
        said.append(dict.fromkeys(names, tokenizer.token_to_id(END_OF_DOCUMENT)))
    found = next((each for each in said if each.get("eos_token_id") is not None), {})
    return {name: found.get(name) for name in names}


def _write_tokenizer_config(target: Path, tokenizer: Tokenizer, ids: Mapping[str, Any], config: RunConfig) -> None:
    """As a class of no model in particular: all that the tokenizer does is in tokenizer.json."""
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.options.get("max_sequence_length", config.data.sequence_length),
        "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids, which GPT-2 would add to the tokens
        "clean_up_tokenization_spaces": False,
    }
    for name, found in ids.items():
        found = found[0] if isinstance(found, list) and found else found
        token = tokenizer.id_to_token(found) if isinstance(found, int) and 0 <= found < NUM_TOKENS else None
        fields |= {name.removesuffix("_id"): token} if token is not None else {}
    write_json(target / TOKENIZER_CONFIG, fields)


def base_of(source: Path | None, model_type: str | None = None) -> dict[str, Any]:
    """The config.json that a run was made from, if it was: fields of it that we do not decide stay."""
    found = said_in(source, CONFIG)
    return found if model_type is None or found.get("model_type") == model_type else {}
