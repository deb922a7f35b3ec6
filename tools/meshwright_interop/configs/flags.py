"""Reading of Megatron-LM's flags from a text file: a list of flags,
or a command line as it was printed.

The file is no script: a word that a shell would expand or act on is an error, and nothing is
evaluated.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright_interop.configs.source_keys import SourceKey

LAUNCHER = "launcher."
"""Prefix of the launcher's own flags, such as ``launcher.nproc-per-node``."""
PROGRAM = f"{LAUNCHER}program"
"""Key of the Python file that the launcher starts; the ``key`` of its item is the file's name,
the value True.
"""

FLAG = re.compile(r"--[A-Za-z]")
COMMENT = re.compile(r"(^|\s)#.*")
QUOTED = re.compile(r"'[^']*'|\"[^\"$`]*\"")
SHELL = re.compile(
    r"[$`;|&<>(){}]\S*|^\s*(if|then|else|elif|fi|for|while|until|do|done|case|esac|function)\b"
)
"""Syntax of a shell, outside of quotes."""


MAX_SHOWN = 40
"""Upper limit of the characters of the file in the error."""


class Word(NamedTuple):
    """Word of the file, without quotes, and its line."""

    text: str
    line: int


def read_flags(path: Path, text: str) -> dict[str, SourceKey]:
    """Read a list of flags, or a command line: flag without its dashes -> item.

    The value is True for a flag alone, text for one word, a list for several. Flags before the .py
    file are the launcher's and have the prefix :data:`LAUNCHER`.

    Raises:
        ConfigError: the file is a shell script.
    """
    words = _words(path, text)
    if not any(FLAG.match(word.text) for word in words):
        return {}
    if FLAG.match(words[0].text):
        return _items(path, words)
    start = next((at for at, word in enumerate(words) if word.text.endswith(".py")), None)
    if start is None:
        raise _script_error(path, words[0])
    program, arguments = words[start], words[start + 1 :]
    for before, word in pairwise(arguments):
        if word.text.endswith(".py") and not FLAG.match(before.text):  # a second command
            raise _script_error(path, word)
    items = {PROGRAM: SourceKey(program.text, True, f"{path}:{program.line}")}
    items |= {f"{LAUNCHER}{name}": item for name, item in _items(path, words[:start]).items()}
    return items | _items(path, arguments)


def _words(path: Path, text: str) -> list[Word]:
    """Split the lines into words by the quoting of a shell;
    comments and continuations are left out.

    Raises:
        ConfigError: a line has shell syntax, or a quote that it does not close.
    """
    words: list[Word] = []
    if text.startswith("#!"):
        raise _script_error(path, Word(text.splitlines()[0], 1))
    for number, line in enumerate(text.splitlines(), start=1):
        plain = COMMENT.sub("", line).rstrip().removesuffix("\\")
        found = SHELL.search(QUOTED.sub("''", plain))
        if found is not None:
            raise _script_error(path, Word(found[0].strip(), number))
        try:
            words += [Word(word, number) for word in shlex.split(plain)]
        except ValueError:
            raise ConfigError(
                "MW-INTEROP-151",
                f"{path}:{number}: {_shortened(plain.strip())}: a quote that its line does not"
                " close: write a flag and its value in one line",
            ) from None
    return words


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _script_error(path: Path, word: Word) -> ConfigError:
    return ConfigError(
        "MW-INTEROP-150",
        f"{path}:{word.line}: {_shortened(word.text)}: a shell script, which is not evaluated: save the flags with"
        " their values, one per line or as one line, in a text file and import that (such as the"
        " command line in the log of the run)",
    )


def _items(path: Path, words: list[Word]) -> dict[str, SourceKey]:
    """Group words by the flag before them; of two equal flags the last counts."""
    items: dict[str, SourceKey] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not FLAG.match(word.text):
            continue
        flag, equals, first = word.text.partition("=")
        values = [first] if equals else []
        while at < len(words) and not FLAG.match(words[at].text):
            values.append(words[at].text)
            at += 1
        value: object = True if not values else values[0] if len(values) == 1 else values
        items[flag.lstrip("-").replace("_", "-")] = SourceKey(flag, value, f"{path}:{word.line}")
    return items
