"""Entry point of the command line. A UserError prints one message to stderr and exits
with its code; Ctrl-C: 130.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence

from meshwright.errors import UserError
from meshwright.system.bounded import shortened
from meshwright.terminal.output import make_printable
from meshwright_launch.arguments import build_parser
from meshwright_launch.arguments.common import check_output, load_command, text
from meshwright_launch.jobs import print_error

OVERRIDE = re.compile(r"--\w+(\.[\w-]+)+(=.*)?", re.DOTALL)


MAX_WORD_CHARS = 2**17
"""Longest word that Linux passes to a process."""
UNUSABLE_PATH = errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP
"""errno values of a path that the user cannot use: no permission, too long, circular links."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that the user can cause are printed,
    not raised.
    """
    _open_standard_streams()
    given = sys.argv[1:] if argv is None else argv
    words, overrides = split_overrides(given)
    parser = build_parser()
    try:
        for word in given:
            _check_word(word)
        options, unknown = parser.parse_known_args(words)
        if unknown and options.takes_overrides and unknown[0].startswith("--"):
            # no section, or another framework's name: the configuration's error has a hint
            overrides += unknown
        elif unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        overrides = [text(word) for word in overrides]
        if overrides and not options.takes_overrides:
            parser.error(f"{options.command} takes no configuration keys: {' '.join(overrides)}")
    except argparse.ArgumentTypeError as error:
        return print_error(UserError("MW-LAUNCH-055", str(error)), UserError.exit_code)
    except SystemExit as exit_:  # argparse has printed its message
        return int(exit_.code or 0)
    try:
        check_output(options)
        if "config" in options and "trust_code" in options:
            from meshwright.run.trust import check_file

            check_file(options.config, overrides, trust_code=options.trust_code)
        return load_command(options.run)(options, overrides)
    except UserError as error:
        return print_error(error, error.exit_code)
    except BrokenPipeError:  # `meshwright ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in UNUSABLE_PATH or error.filename is None:
            raise
        problem = (
            f"{str(error.filename)[:300]}: {error.strerror}: give another path, or have its owner"
            " grant access"
        )
        return print_error(UserError("MW-LAUNCH-093", problem), UserError.exit_code)
    except UnicodeEncodeError as error:  # a file name
        if sys.getfilesystemencoding() == "utf-8":
            raise
        problem = (
            f"{error.object[:200]!r} cannot be a file name here, where the locale's encoding is"
            f" {error.encoding}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        )
        return print_error(UserError("MW-LAUNCH-104", problem), UserError.exit_code)
    except KeyboardInterrupt:
        return 130


def _check_word(word: str) -> None:
    """Check that a word of the command line can be a path,
    and is no longer than the kernel passes to a process.

    Raises:
        ArgumentTypeError: it has a NUL character, or too many characters.
    """
    if "\0" in word:
        raise argparse.ArgumentTypeError(
            f"{shortened(word, 80)!r} has a NUL character: leave it out"
        )
    if len(word) > MAX_WORD_CHARS:
        raise argparse.ArgumentTypeError(
            f"{shortened(word, 80)!r}: a word has at most {MAX_WORD_CHARS:,} characters"
        )


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream (`>&-`), and let the streams print any text.

    Otherwise the next pipe to be opened gets the free descriptor, and receives the output of ranks
    and libraries.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)
    make_printable()


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into words for argparse and overrides: ``--section.key=value``,
    ``--section.key value``.
    """
    words: list[str] = []
    overrides: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return words + rest, overrides
        if not OVERRIDE.fullmatch(word):
            words.append(word)
            continue
        overrides.append(word)
        if (
            "=" not in word
            and rest
            and not rest[0].startswith("--")
            and not _ends_before(word, rest[0])
        ):
            overrides.append(rest.pop(0))
    return words, overrides


def _ends_before(word: str, following: str) -> bool:
    """Return whether an override is a flag without a value,
    and the word after it the configuration's file.
    """
    if not following.endswith(".toml"):
        return False
    from meshwright.config.keys import KEYS, accepts_type

    key = tuple(word[2:].split("."))
    return key not in KEYS or accepts_type(key, bool)
