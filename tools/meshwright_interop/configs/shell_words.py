"""Tokenizer of shell scripts: quotes, comments and continued lines by the rules of POSIX and bash."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError

OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "\n", "(", ")")
REDIRECT = re.compile(r"\d*(>>|>&|<<<|<<|>|<|&>)")


class QuotedPart(NamedTuple):
    """Piece of a word with one kind of quoting."""

    text: str
    quote: str
    """Quote character: ``'``, ``"`` or empty."""


class Token(NamedTuple):
    """Word, or operator (without parts), of a script."""

    parts: tuple[QuotedPart, ...]
    operator: str
    line: int

    @property
    def bare(self) -> str:
        """Text as written, without quotes."""
        return self.operator or "".join(part.text for part in self.parts)

    @property
    def keyword(self) -> str:
        """Text that a shell compares with keywords such as ``if``: empty for an operator or a quoted word."""
        return self.bare if self.parts and not any(part.quote for part in self.parts) else ""


def tokens(text: str, path: Path) -> list[Token]:
    """Split a script into words and operators; comments and line continuations are removed.

    Raises:
        ConfigError: a quote or a ``$(`` is never closed.
    """
    result: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = (text.find("\n", at) + len(text) + 1) % (len(text) + 1)
        elif match := REDIRECT.match(text, at):
            result.append(Token((), ">", line))
            at = match.end()
        elif operator := next((each for each in OPERATORS if text.startswith(each, at)), ""):
            result.append(Token((), operator, line))
            at, line = at + len(operator), line + (operator == "\n")
        else:
            parts, end = _word(text, at, f"{path}:{line}")
            result.append(Token(tuple(parts), "", line))
            line += text.count("\n", at, end)
            at = end
    return result


def _word(text: str, at: int, place: str) -> tuple[list[QuotedPart], int]:
    """Parse the word that starts at index ``at``; return its parts and its end index."""
    parts: list[QuotedPart] = []
    start = at

    def plain(end: int) -> None:
        piece = re.sub(r"\\(?!\n)(.)", r"\1", text[start:end]).replace("\\\n", "")
        if piece:
            parts.append(QuotedPart(piece, ""))

    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'\"":
            plain(at)
            end = _closing(text, at, char, place)
            inner = text[at + 1 : end]
            parts.append(QuotedPart(inner if char == "'" else re.sub(r'\\(["$`\\\n])', _escaped, inner), char))
            at = start = end + 1
        elif text.startswith("$(", at) or char == "`" or text.startswith("${", at):
            at = _balanced(text, at, place)
        elif char in " \t\r\n;|&<>()":
            break
        else:
            at += 1
    plain(min(at, len(text)))
    return parts, min(at, len(text))


def _escaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _closing(text: str, at: int, quote: str, place: str) -> int:
    end = at + 1
    while end < len(text):
        if text[end] == "\\" and quote == '"':
            end += 2
        elif text[end] == quote:
            return end
        else:
            end += 1
    raise ConfigError("MW-INTEROP-024", f"{place}: the quote {quote} is never closed")


def _balanced(text: str, at: int, place: str) -> int:
    """Return the index after the ``$(...)``, ``$((...))``, ``${...}`` or backticks that start at index ``at``."""
    if text[at] == "`":
        return _closing(text, at, "`", place) + 1
    opening = text[at + 1]
    closing = {"(": ")", "{": "}"}[opening]
    depth, end = 0, at + 1
    while end < len(text):
        depth += (text[end] == opening) - (text[end] == closing)
        end += 1
        if depth == 0:
            return end
    raise ConfigError("MW-INTEROP-025", f"{place}: ${opening} is never closed")


def split_words(text: str) -> list[str]:
    """Split text at spaces, except inside quotes, also those in a variable's value (``"--split '99,1,0'"``).

    Text with unbalanced quotes is split at spaces only.
    """
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


@lru_cache(maxsize=256)
def words_of(text: str) -> frozenset[str]:
    """Return the words of a variable's text."""
    return frozenset(text.split())
