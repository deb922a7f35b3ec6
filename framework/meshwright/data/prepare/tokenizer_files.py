"""An existing tokenizer: its files, its hash, and the tokens that begin and end a document."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from meshwright.data.tokenizer import TOKENIZER_FILE, USUAL_ENDS, load
from meshwright.errors import DataError
from meshwright.system.atomic import leads_elsewhere
from meshwright.system.bounded import parse_json, read_bytes

CONFIG_FILE = "tokenizer_config.json"
MAX_TOKEN_ID = 2**24
"""Upper limit of token ids: several arrays have an entry for each id up to the largest."""
SIDE_FILES = (CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
"""Hugging Face files beside a ``tokenizer.json``, copied with it."""


class KnownTokenizer(NamedTuple):
    """A tokenizer with its path, hash, vocabulary size and special ids."""

    tokenizer: Tokenizer
    path: Path
    """Path of the ``tokenizer.json``."""
    sha256: str
    vocab_size: int
    """Largest id + 1."""
    end: int
    end_token: str
    begin: int | None

    @property
    def files(self) -> list[Path]:
        """Return the paths of the ``tokenizer.json`` and of its side files."""
        beside = [each for name in SIDE_FILES if (each := self.path.with_name(name)).is_file()]
        for each in beside:
            if (end := leads_elsewhere(each)) is not None:
                raise DataError(
                    "MW-DATA-127",
                    f"{each} is a link to {end}: put the file itself there, or remove it",
                )
        return [self.path, *beside]


def open_tokenizer(
    place: Path, end_token: str | None = None, begin_token: str | None = None
) -> KnownTokenizer:
    """Open a ``tokenizer.json``, or the one in a folder. ``end_token``:
    None takes that of ``tokenizer_config.json``.

    Raises DataError: there is no tokenizer, it cannot be read, or it lacks these tokens.
    """
    path = place / TOKENIZER_FILE if place.is_dir() else place
    if place.is_dir() and not path.is_file():
        others = [each for each in sorted(place.iterdir()) if each.is_file() and _conversion(each)]
        if not others:
            raise DataError(
                "MW-DATA-098",
                f"{place} holds no {TOKENIZER_FILE}: name a Hugging Face folder or the file",
            )
        path = others[0]
    if how := _conversion(path):
        raise DataError(
            "MW-DATA-128",
            f"{path} is no {TOKENIZER_FILE}, which holds a tokenizer as a whole: {how}",
        )
    tokenizer = load(path)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise DataError("MW-DATA-099", f"{path} has no tokens: name another tokenizer")
    if max(ids.values()) >= MAX_TOKEN_ID:
        raise DataError(
            "MW-DATA-123",
            f"{path} has the token id {max(ids.values()):,}: at most {MAX_TOKEN_ID - 1:,}",
        )
    end_token = end_token or _end_token(path, ids)
    for option, token in (("--eod", end_token), ("--bos", begin_token)):
        if token is not None and token not in ids:
            raise DataError(
                "MW-DATA-100",
                f"{path} has no token {token!r}: name one of its own with"
                f" {option}{_special(tokenizer)}",
            )
    begin = None if begin_token is None else ids[begin_token]
    digest = sha256(read_bytes(path)).hexdigest()
    return KnownTokenizer(
        tokenizer, path, digest, max(ids.values()) + 1, ids[end_token], end_token, begin
    )


def _conversion(path: Path) -> str:
    """Return how to write a tokenizer.json from a tokenizer file of another library;
    empty for any other file.

    The conversions were tried with transformers 5.23 and sentencepiece 0.2.3, on a BPE model and a
    file in tiktoken's form. Of a sentencepiece model alone AutoTokenizer makes a tokenizer without
    the space before the text.
    """
    if path.suffix == ".tiktoken" or path.name.endswith(".tiktoken.model"):
        return (
            "of a tiktoken file write one with transformers'"
            " convert_slow_tokenizer.TikTokenConverter(vocab_file=..., pattern=...,"
            " additional_special_tokens=[...]).converted().save('tokenizer.json'), with the pattern"
            " and the special tokens of its encoding"
        )
    if path.suffix in (".model", ".spm"):
        return (
            'of a sentencepiece model write one with `python -c "from transformers import'
            " LlamaTokenizer as T; "
            f"T.from_pretrained('{path.parent}').save_pretrained('{path.parent}')\"` (T5Tokenizer"
            " for a unigram model; "
            "AutoTokenizer if the model's config.json lies beside it), after pip install"
            " transformers sentencepiece"
        )
    if path.name in ("vocab.json", "vocab.txt"):
        return (
            '`python -c "from transformers import AutoTokenizer as T;'
            f" T.from_pretrained('{path.parent}').save_pretrained('{path.parent}')\"` writes one of"
            " the files in that folder"
        )
    return ""


def find_chat_template(path: Path) -> Path | None:
    """Return the file beside a ``tokenizer.json`` that holds its chat template;
    None if there is none.
    """
    for name in ("chat_template.jinja", "chat_template.json"):
        if path.with_name(name).is_file():
            return path.with_name(name)
    config = path.with_name(CONFIG_FILE)
    try:
        settings: Any = parse_json(read_bytes(config))
    except (OSError, ValueError):
        return None
    return config if isinstance(settings, dict) and settings.get("chat_template") else None


def drops_characters(path: Path) -> bool:
    """Return True for a ``tokenizer.json`` with a BPE model
    that leaves out the characters it has no token for.
    """
    parts: dict[str, Any] = parse_json(read_bytes(path))
    model = parts["model"]
    before = json.dumps([parts.get("normalizer"), parts.get("pre_tokenizer")])
    is_total = (
        model.get("unk_token") is not None or model.get("byte_fallback") or '"ByteLevel"' in before
    )
    return model.get("type", "BPE") == "BPE" and not is_total


def _end_token(path: Path, ids: dict[str, int]) -> str:
    config = path.with_name(CONFIG_FILE)
    if config.is_file():
        try:
            settings: Any = parse_json(read_bytes(config))
        except (OSError, ValueError) as error:
            raise DataError(
                "MW-DATA-101",
                f"{config} is not valid JSON ({error}): copy it again, or name the token with"
                " --eod",
            ) from error
        token = settings.get("eos_token") if isinstance(settings, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in ids:
            return token
        if isinstance(token, str):
            raise DataError(
                "MW-DATA-102",
                f"{config} names the eos_token {token!r}, which {path} does not have: name one with"
                " --eod",
            )
    usual = next((token for token in USUAL_ENDS if token in ids), None)
    if usual is not None:
        return usual
    raise DataError(
        "MW-DATA-103",
        f"no token ends a document in {path}: there is no eos_token in a {CONFIG_FILE} beside it,"
        f" nor any of {', '.join(USUAL_ENDS)} in it. Name one with --eod{_special(load(path))}",
    )


def _special(tokenizer: Tokenizer) -> str:
    """List the special tokens for a message; empty if there are none."""
    special = [
        str(token.content)
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special
    ]
    return f" (its special tokens: {', '.join(special[:8])})" if special else ""
