"""Command ``meshwright errors``: the list of error codes,
or one code with the place that raises it. No torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from itertools import groupby

from meshwright.errors import UserError
from meshwright.system.bounded import shortened
from meshwright.terminal.output import put
from meshwright_launch.error_codes import ROOMS, Site, find_sites, installed_sources

GIVEN = re.compile(r"\[?(?:MW-)?([A-Z]+)-?(\d{1,3})\]?")
"""Code as users type it: ``MW-DATA-001``, ``[MW-DATA-001]`` of a message, ``mw-data-1``,
``data-1``.
"""


def errors(options: argparse.Namespace, _: list[str]) -> int:
    """Print all error codes, or the one that is given."""
    if options.code is None:
        put(describe_all(find_sites(installed_sources())))
    else:
        put(describe(find(options.code)))
    return 0


def find(given: str) -> Site:
    """Return the place of an error code.

    Raises:
        UserError: no error has this code.
    """
    match = GIVEN.fullmatch(given.upper())
    code = f"MW-{match[1]}-{int(match[2]):03}" if match else given.upper()
    for site in find_sites(installed_sources(), code) if match else ():
        if site.code == code:
            return site
    codes = [site.code for site in find_sites(installed_sources())]
    nearest = difflib.get_close_matches(code[:80], codes, n=3)
    hint = (
        f"near it are {', '.join(nearest)}"
        if nearest
        else "a code is MW-ROOM-NUMBER, such as MW-DATA-001"
    )
    raise UserError(
        "MW-LAUNCH-108",
        f"no error has the code {shortened(given, 80)!r} in this version: {hint}; `meshwright"
        " errors` lists all",
    )


def describe(site: Site) -> str:
    """Return the class, the exit code, the place and the message of one error."""
    messages = ["  " + text.replace("\n", "\n  ") for text in site.texts]
    return "\n".join(
        [
            f"{site.code}  {site.kind}, exit code {site.exit_code}  ({_titled(site.room)})",
            f"raised in {site.source.module}: {site.source.path}, line {site.line}",
            "\n  or:\n".join(messages),
        ]
    )


def describe_all(sites: Sequence[Site]) -> str:
    """Return a list of errors by room, a line for each form of a message."""
    lines = ["code, exit code, message; {...} is a value that the message fills in"]
    for room, of_room in groupby(sites, lambda site: site.room):
        lines += ["", _titled(room)]
        for site in of_room:
            lines += [
                f"  {site.code}  {site.exit_code:>2}  {' '.join(text.split())}"
                for text in site.texts
            ]
    return "\n".join(lines)


def _titled(room: str) -> str:
    return f"{room}: {ROOMS[room]}" if room in ROOMS else room
