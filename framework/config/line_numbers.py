"""Line numbers of the keys in a TOML file, which tomllib does not provide."""

from __future__ import annotations

import re

HEADER = re.compile(r"\s*\[\s*([\w.\-\" ]+?)\s*\]\s*(#.*)?$")
ASSIGNED = re.compile(r"\s*([\w.\-\"]+)\s*=")


def toml_lines(text: str) -> dict[str, int]:
    """Return dotted key -> line, from 1. A look-alike inside a long string gives a wrong line.

    An inline table has one line.
    """
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            section = header[1].replace('"', "").replace(" ", "") + "."
        elif assigned := ASSIGNED.match(line):
            found.setdefault(section + assigned[1].replace('"', ""), number)
    return found
