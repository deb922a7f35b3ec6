"""Keys given by the user in a TOML file and on the command line, as one flat list: key, value,
place.

Only syntax errors are reported here. ``loading.py`` reports unknown keys, and ``value_checks.py``
values that are not allowed, for both sources alike.

Values of options such as ``model.options`` are written to many places, where secrets must not
appear. An option is refused as a secret by its name or its form, and any value that is a URL with a
password or token: :mod:`meshwright.system.secret_text`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path as File
from typing import Any, NamedTuple

from meshwright.config.keys import KEYS, SECTIONS, Path, accepts_type, split
from meshwright.errors import ConfigError
from meshwright.system.bounded import MAX_TOML_BYTES, parse_toml, read_bytes, shortened
from meshwright.system.secret_text import (
    SECRET_WORDS,
    has_secret,
    hide_secrets,
    is_secret_name,
    split_name,
)

COMMAND_LINE = "command line"
_HEADER = re.compile(r"\s*\[([\w.\-\"\s]+)\]\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"\s*([\w.\-\"]+)\s*=")


class MissingValue(Enum):
    """Value of an override without a value: ``--train.compile``."""

    FLAG = "flag"


class GivenKey(NamedTuple):
    """A key as the user wrote it."""

    path: Path
    value: Any
    place: str
    """File name, or :data:`COMMAND_LINE`."""

    @property
    def key(self) -> str:
        """Dotted key, as written."""
        return ".".join(self.path)


class KeySource(NamedTuple):
    """Keys and problems of one source: the file or the command line."""

    given: list[GivenKey]
    problems: list[ConfigError]


def leaves(table: dict[str, Any], place: str, path: Path = ()) -> Iterator[GivenKey]:
    """Yield the keys of a document. A table at a key of the schema (``model.options``)
    is one value.
    """
    for name, value in table.items():
        below = (*path, name)
        if not isinstance(value, dict) or below in KEYS:
            yield GivenKey(below, value, place)
        elif value:
            yield from leaves(value, place, below)
        elif name not in SECTIONS or path:  # [parallel] with nothing below it is fine
            yield GivenKey(below, value, place)


def _no_such_file(path: File) -> str:
    folder = path.parent
    if not folder.is_dir():
        return (
            f"{path}: there is no such file, nor the folder {folder}: name a TOML file, as in"
            " configs/demo.toml"
        )
    stems = sorted(entry.stem for entry in folder.iterdir() if entry.suffix == ".toml")
    close = get_close_matches(path.stem, stems, n=3)
    if close:
        return (
            f"{path}: there is no such file; did you mean"
            f" {' or '.join(f'{folder / stem}.toml' for stem in close)}?"
        )
    listed = ", ".join(f"{stem}.toml" for stem in stems[:8]) + (", ..." if len(stems) > 8 else "")
    return f"{path}: there is no such file; in {folder} there is {listed or 'no TOML file'}"


def _syntax(path: File, text: str, error: ValueError) -> str:
    problem = re.sub(r" \(at .*\)$", "", str(error))
    position = re.search(r"at line (\d+), column (\d+)", str(error))
    lines = text.splitlines()
    row = int(position[1]) if position else len(lines)
    line = shortened(lines[row - 1].strip()) if 0 < row <= len(lines) else ""
    if any(map(is_secret_name, re.findall(r"[\w-]+", line))):
        line = ""  # the line may contain a secret, and this text goes into logs
    line = hide_secrets(line)
    return f"{path}:{row}: not valid TOML, {problem[:1].lower()}{problem[1:]}" + (
        f", in the line: {line}" if line else ""
    )


def read_file(path: File) -> KeySource:
    """Read the keys of a TOML file. For a file that cannot be read,
    return a problem that names the next move.
    """
    try:
        text = read_bytes(path, MAX_TOML_BYTES).decode()
        return KeySource(list(leaves(parse_toml(text), str(path))), [])
    except FileNotFoundError:
        problem = ConfigError("MW-CONFIG-028", _no_such_file(path))
    except IsADirectoryError:
        problem = ConfigError("MW-CONFIG-029", f"{path}: this is a folder; name a TOML file in it")
    except UnicodeDecodeError as error:
        problem = ConfigError(
            "MW-CONFIG-030",
            f"{path}: not a text file in UTF-8 (byte {error.start}); a configuration is TOML",
        )
    except ValueError as error:
        problem = ConfigError("MW-CONFIG-031", _syntax(path, text, error))
    except OSError as error:
        problem = ConfigError("MW-CONFIG-032", f"{path}: cannot be read: {error.strerror or error}")
    return KeySource([], [problem])


def toml_lines(text: str) -> dict[str, int]:
    """Return the line of each dotted key of a TOML file, from 1; tomllib does not provide it.

    A look-alike inside a long string gives a wrong line. The keys of an inline table share the
    table's line.
    """
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = "".join(header[1].replace('"', "").split()) + "."
        elif assignment := _ASSIGNMENT.match(line):
            found.setdefault(section + assignment[1].replace('"', ""), number)
    return found


def read_value(path: Path, text: str) -> Any:
    """Parse the value of an override as TOML, or else as bare text.

    Three additions to TOML: a key that takes text takes ``2024`` as text, ``none`` unsets a key
    where it may be unset, and an option in a table, such as ``model.options``, takes ``True`` and
    ``False``.
    """
    if path in KEYS and accepts_type(path, type(None)) and text.lower() in ("none", "null"):
        return None
    try:
        document = parse_toml(f"value = {text}")
    except ValueError:
        return text == "True" if path not in KEYS and text in ("True", "False") else text
    value = document["value"]
    only_text = (
        path in KEYS
        and accepts_type(path, str)
        and not (accepts_type(path, list) and isinstance(value, list))
    )
    if len(document) > 1 or (only_text and not isinstance(value, str)):
        return text
    return value


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, str | None] | str]:
    """Parse ``--a.b=v``, ``--a.b v`` and ``--a.b`` as (name, text).
    A bare str is a word that belongs to no key.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.startswith("--=") or word == "--":
            yield word
        elif "=" in word:
            name, _, text = word[2:].partition("=")
            yield name, text
        elif rest and not rest[0].startswith("--"):
            yield word[2:], rest.pop(0)
        else:
            yield word[2:], None


def split_overrides(words: Sequence[str], keys: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line for some keys, each ``section.key``, and all other words."""
    of_keys: list[str] = []
    others: list[str] = []
    for word in _overrides(words):
        if isinstance(word, str):
            others.append(word)
            continue
        name, text = word
        written = f"--{name}" if text is None else f"--{name}={text}"
        (of_keys if name in keys else others).append(written)
    return of_keys, others


def given_keys(overrides: Sequence[str]) -> dict[Path, Any]:
    """Return the keys of a command line, each with its last value;
    words that are not keys are left out.
    """
    return {given.path: given.value for given in read_overrides(overrides).given}


def read_overrides(words: Sequence[str]) -> KeySource:
    """Read the keys of the command line, in order; later ones win."""
    source = KeySource([], [])
    for word in _overrides(words):
        if isinstance(word, str):
            like = word.lstrip("-")
            hint = f"; did you mean --{like}?" if "=" in like and not like.startswith("=") else ""
            source.problems.append(
                ConfigError(
                    "MW-CONFIG-033",
                    f"{COMMAND_LINE}: {word} belongs to no key: write --section.key=value{hint}",
                )
            )
            continue
        name, text = word
        path = split(name)
        value = MissingValue.FLAG if text is None else read_value(path, text)
        if path in [(section,) for section in SECTIONS] and isinstance(value, dict):
            source.given.extend(leaves({name: value}, COMMAND_LINE))
        else:
            source.given.append(GivenKey(path, value, COMMAND_LINE))
    return source


def find_secrets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the keys from ``path`` on whose values look like secrets, inside tables and lists too.

    Names count in options alone: below ``path[:2]``.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from find_secrets(inner, (*path, name))
    elif isinstance(value, list | tuple):
        found = {key for inner in value for key in find_secrets(inner, path)}
        yield from sorted(found)
    elif value not in (None, "") and not isinstance(value, bool):
        is_text = isinstance(value, str)
        named = [
            name
            for name in path[2:]
            if is_secret_name(name) and (is_text or SECRET_WORDS & {*split_name(name)})
        ]
        if named or (is_text and has_secret(value)):
            yield path


def secret_message(path: tuple[str, ...], place: str) -> str:
    """Return the error text for a secret, without its value. ``place``: where it was given."""
    name = ".".join(path)
    if path[1:2] != ("options",):
        return (
            f"{place}: {name} has a URL with a password or a token, and the configuration is"
            " written to config.toml, resolved.json, checkpoints and wandb: leave the password out"
            " of it"
        )
    variable = "_".join(split_name(path[-1])).upper()
    return (
        f"{place}: {name} looks like a secret, and options are written to config.toml,"
        " resolved.json, checkpoints and "
        f"wandb: leave it out, and read it in {path[0]}.builder from an environment variable"
        ' (os.environ["'
        f'{variable}"]); if it is none, give it another name'
    )
