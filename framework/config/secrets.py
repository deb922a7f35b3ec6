"""Detection of options that look like secrets. Options are written to many places, where secrets must not appear.

    api_key = "sk-..."      HF_TOKEN = "hf_..."     dbPassword = "..."     x_secret = 7         a secret
    key_size = 64           num_key_value_heads = 8     tokenizer = "..."     pad_token = 0     no secret

A name is split at its underscores, dashes, dots and capitals. ``password`` and ``secret`` count anywhere in it. ``key``
and ``token`` count as its last word, and only if the value is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

ANYWHERE = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "apikey"}
AT_THE_END = {"key", "token"}
MARKERS = {"bos", "cls", "end", "eod", "eos", "mask", "pad", "sep", "start", "unk"}
"""Words before ``token`` that mark a token of the vocabulary."""


def is_secret_name(name: str) -> bool:
    """Return True when a text value under this name is likely a secret."""
    words = _words(name)
    if ANYWHERE & {*words}:
        return True
    return words[-1] in AT_THE_END and not (words[-1] == "token" and MARKERS & {*words[:-1]})


def _words(name: str) -> list[str]:
    """Split a name into lower-case words: ``dbPassword``, ``DB-PASSWORD`` -> db, password."""
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def find_secrets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the keys from ``path`` on whose values look like secrets, inside tables and lists too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from find_secrets(inner, (*path, name))
    elif isinstance(value, list):
        found = {key for inner in value for key in find_secrets(inner, path)}
        yield from sorted(found)
    elif value not in (None, "") and not isinstance(value, bool):
        for name in path[2:]:
            if is_secret_name(name) and (isinstance(value, str) or ANYWHERE & {*_words(name)}):
                yield path
                return


def secret_message(path: tuple[str, ...]) -> str:
    """Return the error text for a secret, without its value."""
    name = path[-1]
    variable = "_".join(_words(name)).upper()
    return (
        f"{'.'.join(path)} looks like a secret, and options are written to config.toml, resolved.json, checkpoints and "
        f'wandb: leave it out, and read it in {path[0]}.builder from an environment variable (os.environ["'
        f'{variable}"]); if it is none, give it another name'
    )
