"""Golden files of the error codes in the source (``meshwright errors`` prints the codes).

python -m tests.support.error_codes          writes tests/golden/errors/*.txt, prints the last number of each room
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from meshwright_launch.error_codes import (
    CODE,
    EXIT_CODES,
    Site,
    SourceFile,
    called,
    calls,
    code_of,
    find_sites,
    sources_below,
)
from tests.support.sources import SOURCE_ROOTS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "errors"
RETIRED = "retired"


def sources() -> Iterator[SourceFile]:
    """Yield every module of the checkout."""
    for root in SOURCE_ROOTS:
        yield from sources_below(ROOT / root)


def repeated(sites: Sequence[Site]) -> list[str]:
    """Return the codes that occur at several places."""
    codes = [site.code for site in sites]
    return sorted({code for code in codes if codes.count(code) > 1})


def without_code() -> list[str]:
    """Return ``path:line`` for every error for users that is made without a literal code."""
    missing = []
    for _, path in sources():
        for call, _ in calls(ast.parse(path.read_text())):
            is_error = called(call) in EXIT_CODES and not isinstance(call.func, ast.Attribute)
            passes_on = bool(call.args) and ast.unparse(call.args[0]) in (
                "code",
                "each.code",
                "rule.code",
                "division.code",
            )
            if is_error and code_of(call) is None and not passes_on:
                missing.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    return missing


def retired() -> set[str]:
    """Return the codes of removed errors, which no new error may reuse."""
    lines = [line for path in GOLDEN.glob("*.txt") for line in path.read_text().splitlines()]
    return {line.split()[0] for line in lines if line.endswith(f" {RETIRED}")}


def golden(sites: Sequence[Site], gone: set[str]) -> dict[str, str]:
    """Return the golden file of each room: code, class, exit code and texts."""
    entries = [(site.room, site.code, _entry(site)) for site in sites]
    entries += [(code.split("-")[1], code, f"{code} {RETIRED}\n") for code in gone]
    return {
        f"{room.lower()}.txt": "".join(entry for _, _, entry in of_room)
        for room, of_room in groupby(sorted(entries), lambda entry: entry[0])
    }


def _entry(site: Site) -> str:
    texts = "".join("    " + text.replace("\n", "\n    ") + "\n" for text in site.texts)
    return f"{site.code} {site.kind}, exit {site.exit_code}\n{texts}"


def main() -> None:
    """Write the golden files; print the next free number of each room."""
    sites = find_sites(sources())
    lines = [line for path in GOLDEN.glob("*.txt") for line in path.read_text().splitlines()]
    old = {line.split()[0] for line in lines if CODE.match(line)}
    gone = old - {site.code for site in sites}
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, text in golden(sites, gone).items():
        (GOLDEN / name).write_text(text)
    last = {code.split("-")[1]: code for code in sorted(old | {site.code for site in sites})}
    print("last numbers:", ", ".join(last.values()))


if __name__ == "__main__":
    main()
