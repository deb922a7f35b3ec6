"""Flags that a shell script passes to Megatron-LM: the words after the .py file of its training command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright_interop.configs.shell_script import Script, Word
from meshwright_interop.configs.shell_words import split_words
from meshwright_interop.configs.source_keys import SourceKey

LAUNCHER = "launcher."
"""Prefix of the launcher's own flags, such as ``launcher.nproc-per-node``."""


PROGRAM = f"{LAUNCHER}program"
"""Key of the Python file that the launcher starts; the ``key`` of its item is the file's name, the value True."""


VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
"""A word that is an undefined variable; after the value of a flag it is taken for further flags."""


ARGUMENTS = re.compile(r"\$@|\$\*|\$\{[@*]\}|\$\{\w+\[[@*]\]\}")
"""Expansions of the script's arguments or of an undefined array, which are no values of a flag."""


MAX_SCRIPT_CHARACTERS = 2**17


def read_script(path: Path, text: str) -> dict[str, SourceKey]:
    """Read the flags of a script: flag without its dashes -> item.

    The value is True for a flag alone, text for one word, a list for several. The launcher's flags have the prefix
    :data:`LAUNCHER`. Flags of branches that were not followed have the prefix ``skipped.``.

    Raises:
        ConfigError: a quote or bracket is never closed, or the script exceeds a limit of length or nesting.
    """
    if len(text) > MAX_SCRIPT_CHARACTERS:
        raise ConfigError(
            "MW-INTEROP-022",
            f"{path}: {len(text):,} characters; a script may have at most {MAX_SCRIPT_CHARACTERS:,}",
        )
    try:
        script = Script(text, path)
    except RecursionError:
        raise ConfigError("MW-INTEROP-023", f"{path}: its blocks are nested too deeply") from None
    launcher, program, words = _training_command(script)
    keys: dict[str, SourceKey] = {}
    if program is not None:
        keys[PROGRAM] = SourceKey(program.text, True, f"{path}:{program.line}")
    for prefix, arguments in ((LAUNCHER, launcher), ("", words)):
        for flag, values, line in _flags(arguments):
            more = [] if _key(flag).endswith("data-path") else [each for each in values[1:] if VARIABLE.fullmatch(each)]
            values = [values[0], *(each for each in values[1:] if each not in more)] if more else values
            value: object = True if not values else values[0] if len(values) == 1 else values
            keys[prefix + _key(flag)] = SourceKey(flag, value, f"{path}:{line}")
            for each in more:
                keys[f"undefined.{each}"] = SourceKey(each, True, f"{path}:{line}", each)
    for group in script.skipped:
        for flag, values, line in _flags(group):
            if _key(flag) not in keys:
                keys[f"skipped.{flag}"] = SourceKey(" ".join([flag, *values]), True, f"{path}:{line}")
    return keys


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _training_command(script: Script) -> tuple[list[Word], Word | None, list[Word]]:
    """Find the training command, the last one with a .py file and flags after it.

    Returns:
        The launcher's words, the .py file, and Megatron-LM's words. For a file without such a command, all words that
        are flags, or the contents of its arrays and variables with flags.
    """
    for command in reversed(script.commands):
        words = [inner for word in command for inner in script.split_command(word)]
        for at, word in enumerate(words):
            if word.text.endswith(".py") and any(each.text.startswith("--") for each in words[at:]):
                return words[:at], word, words[at + 1 :]
    flags = [word for command in script.commands if command and command[0].text.startswith("--") for word in command]
    if flags:
        return [], None, flags
    lists = [words for name, words in script.variables.items() if name in script.arrays or " --" in f" {words[0].text}"]
    return [], None, [Word(each, word.line) for words in lists for word in words for each in split_words(word.text)]


def _flags(words: list[Word]) -> Iterator[tuple[str, list[str], int]]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--[A-Za-z]", word.text):
            continue
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        if " " in flag:  # one element of an array that holds two words, "--fp8-format hybrid"
            flag, *values = split_words(flag)
        while at < len(words) and not re.match(r"--[A-Za-z]", words[at].text):
            if not ARGUMENTS.fullmatch(words[at].text):
                values.append(words[at].text)
            at += 1
        yield flag, values, word.line
