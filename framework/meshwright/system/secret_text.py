"""Secrets in text, found by the name of a value or by the form of a URL. No secret may be stored,
shown or uploaded.

    api_key = "sk-..."      HF_TOKEN = "hf_..."     dbPassword = "..."     x_secret = 7         a secret by its name
    auth = ["me", "..."]    credentials = "..."     dsn = "..."            sas_url = "..."      the same
    key_size = 64           num_key_value_heads = 8     tokenizer = "..."     pad_token = 0     no secret
    https://me:PASSWORD@host    s3://KEY:SECRET@bucket    https://TOKEN@host                    a secret in a URL
    https://host/x?sig=...      ?X-Amz-Signature=...      #access_token=...                     the same
    AccountName=me;AccountKey=...      host=db password=...      Bearer ...                     in a connection string

A name is split at its underscores, dashes, dots and capitals. SECRET_WORDS count anywhere in it;
SECRET_LAST_WORDS only as its last word, and only if the value is text. No torch.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

SECRET_WORDS = {
    *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd"),
    *("apikey", "credential", "credentials", "dsn", "sas", "webhook"),
}
SECRET_LAST_WORDS = {"key", "token", "auth", "authorization", "bearer", "jwt", "cookie"}
VOCABULARY_WORDS = {"bos", "cls", "end", "eod", "eos", "mask", "pad", "sep", "start", "unk"}
"""Words before ``token`` that mark a token of the vocabulary."""
QUERY_WORDS = {"sig", "signature"}
"""Further last words of the names of a URL's parameters."""
HIDDEN = "***"

# Each repetition that a later character can undo is bounded, so that a long text takes linear time.
_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]{0,19})://(?P<user>[^\s/?#'\"<>]+)@")
_PARAMETER = re.compile(r"(?<=[?&#;])(?P<name>[^\s=&?#;'\"<>]+)=(?P<value>[^\s&#;'\"<>]+)")
_VALUE = r"(?P<value>'[^']+'|\"[^\"]+\"|[^;\s'\"]+)"
_NAME = r"(?:(?<![^\s;'\"])(?P<word>[A-Za-z]\w{0,40})|(?<=;)(?P<words>[A-Za-z][\w ]{0,40}?))"
_ASSIGNMENT = re.compile(rf"{_NAME} ?= ?{_VALUE}")
_BEARER = re.compile(r"\b(?P<name>Bearer) (?P<value>[A-Za-z0-9+/=._~-]{16,})")


def split_name(name: str) -> list[str]:
    """Split a name into lower-case words: ``dbPassword``, ``DB-PASSWORD`` -> db, password."""
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def is_secret_name(name: str) -> bool:
    """Return True when a text value under this name is likely a secret."""
    words = split_name(name)
    if SECRET_WORDS & {*words}:
        return True
    return words[-1] in SECRET_LAST_WORDS and not (
        words[-1] == "token" and VOCABULARY_WORDS & {*words[:-1]}
    )


def hide_secrets(text: str) -> str:
    """Return text with the passwords and tokens in its URLs
    and connection strings replaced by ``***``.
    """
    text = _PARAMETER.sub(_hide_parameter, _USER.sub(_hide_user, text))
    return _BEARER.sub(f"Bearer {HIDDEN}", _ASSIGNMENT.sub(_hide_assignment, text))


def has_secret(text: str) -> bool:
    """Return True if a URL or connection string in a text has a password or token."""
    return hide_secrets(text) != text


def without_user(url: str) -> str:
    """Return a URL without user name and password."""
    return _USER.sub(lambda found: f"{found['scheme']}://", url)


def _hide_user(found: re.Match[str]) -> str:
    """Hide a password, or the token that stands alone before the host
    of a web server (``git@`` is a name).
    """
    user, colon, password = found["user"].partition(":")
    is_web = found["scheme"].lower() in ("http", "https")
    if (colon and not password) or (not colon and not is_web) or HIDDEN in (user, password):
        return found[0]
    return f"{found['scheme']}://{f'{user}:{HIDDEN}' if colon else HIDDEN}@"


def _hide_parameter(found: re.Match[str]) -> str:
    name = unquote_plus(found["name"])
    is_secret = is_secret_name(name) or split_name(name)[-1] in QUERY_WORDS
    return f"{found['name']}={HIDDEN}" if is_secret else found[0]


def _hide_assignment(found: re.Match[str]) -> str:
    """Hide a value of a connection string; words of prose such as ``key=value`` are left alone."""
    name = found["word"] or found["words"]
    words = split_name(name)
    if HIDDEN in found["value"]:
        return found[0]
    is_secret = bool(SECRET_WORDS & {*words}) or words[-2:] in (
        ["account", "key"],
        ["access", "key"],
    )
    is_secret = is_secret or words[-2:] == ["access", "signature"]
    return f"{name}={HIDDEN}" if is_secret else found[0]
