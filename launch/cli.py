"""The command line: what a user can cause ends with one message on stderr and exit code 2, Ctrl-C with 130."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence

from meshwright.errors import UserError
from meshwright.launch.arguments import build_parser
from meshwright.launch.arguments.common import Command, text
from meshwright.launch.jobs import say

OVERRIDE = re.compile(r"--\w+(\.[\w-]+)+(=.*)?", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and never raises for what a user can cause."""
    _open_standard_streams()
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown and options.takes_overrides and unknown[0].startswith("--"):
            overrides += unknown  # a key without a section, or a name from elsewhere: the configuration knows the hint
        elif unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        for word in overrides:
            text(word)
        if overrides and not options.takes_overrides:
            parser.error(f"{options.command} takes no configuration keys: {' '.join(overrides)}")
    except argparse.ArgumentTypeError as error:
        return say(error, 2)
    except SystemExit as leaving:  # argparse has printed its message
        return int(leaving.code or 0)
    run: Command = options.run
    try:
        if "config" in options and "trust_code" in options:
            from meshwright.run.trust import check_file

            check_file(options.config, overrides, trust_code=options.trust_code)
        return run(options, overrides)
    except UserError as error:
        return say(error, error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `meshwright ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_standard_streams() -> None:
    """Where stdin, stdout or stderr was closed (`>&-`), put /dev/null; and let stdout take any name.

    Otherwise the next pipe that is opened has its number, and what ranks and their libraries print goes into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no UTF-8


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what argparse reads, ``--section.key=value`` and ``--section.key value`` in their order)."""
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
        if "=" not in word and rest and not rest[0].startswith("--") and not rest[0].endswith(".toml"):
            overrides.append(rest.pop(0))
    return words, overrides


if __name__ == "__main__":
    sys.exit(main())
