"""The user's keys, from the file and from the command line, as one flat list: key, value, place.

Only syntax errors are reported here. Unknown keys and values that are not allowed are found in ``load.py``, where both
sources have the same form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path as File
from typing import Any, NamedTuple

from meshwright.config.keys import KEYS, SECTIONS, Path, accepts_type, split
from meshwright.config.secrets import is_secret_name
from meshwright.errors import ConfigError
from meshwright.system.bounded import MAX_TOML_BYTES, parse_toml, read_bytes, shortened

COMMAND_LINE = "command line"


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
    """Yield the keys of a document. A table at a key of the schema (``model.options``) is one value."""
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
        return f"{path}: there is no such file, nor the folder {folder}: name a TOML file, as in configs/demo.toml"
    stems = sorted(entry.stem for entry in folder.iterdir() if entry.suffix == ".toml")
    close = get_close_matches(path.stem, stems, n=3)
    if close:
        return f"{path}: there is no such file; did you mean {' or '.join(f'{folder / stem}.toml' for stem in close)}?"
    listed = ", ".join(f"{stem}.toml" for stem in stems[:8]) + (", ..." if len(stems) > 8 else "")
    return f"{path}: there is no such file; in {folder} there is {listed or 'no TOML file'}"


def _syntax(path: File, text: str, error: ValueError) -> str:
    said = re.sub(r" \(at .*\)$", "", str(error))
    found = re.search(r"at line (\d+), column (\d+)", str(error))
    lines = text.splitlines()
    row = int(found[1]) if found else len(lines)
    line = shortened(lines[row - 1].strip()) if 0 < row <= len(lines) else ""
    if any(map(is_secret_name, re.findall(r"[\w-]+", line))):
        line = ""  # the line may contain a secret, and this text goes into logs
    return f"{path}:{row}: not valid TOML, {said[:1].lower()}{said[1:]}" + (f", in the line: {line}" if line else "")


def read_file(path: File) -> KeySource:
    """Read the keys of a TOML file. For a file that cannot be read, return a problem that names the next move."""
    try:
        text = read_bytes(path, MAX_TOML_BYTES).decode()
        return KeySource(list(leaves(parse_toml(text), str(path))), [])
    except FileNotFoundError:
        problem = ConfigError("MW-CONFIG-028", _no_such_file(path))
    except IsADirectoryError:
        problem = ConfigError("MW-CONFIG-029", f"{path}: this is a folder; name a TOML file in it")
    except UnicodeDecodeError as error:
        problem = ConfigError(
            "MW-CONFIG-030", f"{path}: not a text file in UTF-8 (byte {error.start}); a configuration is TOML"
        )
    except ValueError as error:
        problem = ConfigError("MW-CONFIG-031", _syntax(path, text, error))
    except OSError as error:
        problem = ConfigError("MW-CONFIG-032", f"{path}: cannot be read: {error.strerror or error}")
    return KeySource([], [problem])


def read_value(path: Path, text: str) -> Any:
    """Parse the value of an override as TOML, or else as bare text.

    Two additions to TOML: a key that takes text takes ``2024`` as text, and ``none`` unsets a key of the file where the
    key may be unset.
    """
    if path in KEYS and accepts_type(path, type(None)) and text.lower() in ("none", "null"):
        return None
    try:
        document = parse_toml(f"value = {text}")
    except ValueError:
        return text
    value = document["value"]
    only_text = path in KEYS and accepts_type(path, str) and not (accepts_type(path, list) and isinstance(value, list))
    if len(document) > 1 or (only_text and not isinstance(value, str)):
        return text
    return value


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, str | None] | str]:
    """Parse ``--a.b=v``, ``--a.b v`` and ``--a.b`` as (name, text). A bare str is a word that belongs to no key."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word.startswith("--=") or word == "--":
            yield word
        elif "=" in word:
            name, _, text = word[2:].partition("=")
            yield name, text
        elif waiting and not waiting[0].startswith("--"):
            yield word[2:], waiting.pop(0)
        else:
            yield word[2:], None


def read_overrides(words: Sequence[str]) -> KeySource:
    """Read the keys of the command line, in order; later ones win."""
    source = KeySource([], [])
    for word in _overrides(words):
        if isinstance(word, str):
            like = word.lstrip("-")
            help_ = f"; did you mean --{like}?" if "=" in like and not like.startswith("=") else ""
            source.problems.append(
                ConfigError(
                    "MW-CONFIG-033", f"{COMMAND_LINE}: {word} belongs to no key: write --section.key=value{help_}"
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
