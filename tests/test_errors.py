"""Error codes: every error has one, no two share one, golden files hold the texts,
`meshwright errors` prints them.
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from meshwright.errors import ConfigError, DataError, MissingRanksError, UserError
from meshwright_launch.cli import main
from meshwright_launch.error_codes import ROOMS, Site, find_sites, installed_sources
from tests.support import error_codes as codes

MOVE = "`python -m tests.support.error_codes` writes the golden files anew: look at what changes"


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    return find_sites(codes.sources())


def test_every_error_has_a_code_of_its_own(sites: list[Site]) -> None:
    assert codes.without_code() == [], (
        "the first argument of an error is its code, a literal MW-ROOM-NUMBER"
    )
    assert len(sites) > 400  # else the search itself is broken
    assert codes.repeated(sites) == [], (
        "two places raise these codes: take the next free number for one"
    )
    reused = codes.retired() & {site.code for site in sites}
    assert not reused, f"{sorted(reused)} belonged to other errors once: take the next free number"
    unknown = {site.kind for site in sites} - codes.EXIT_CODES.keys() - {"error_type", "kind"}
    assert not unknown, f"{unknown}: give these classes their exit code in EXIT_CODES"


def test_the_texts_are_those_of_the_golden_files(sites: list[Site]) -> None:
    written = {path.name: path.read_text() for path in codes.GOLDEN.glob("*.txt")}
    assert codes.golden(sites, codes.retired()) == written, MOVE


def test_the_command_lists_the_codes_of_all_packages(
    sites: list[Site], capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_sites(installed_sources()) == sites
    assert {site.room for site in sites} <= ROOMS.keys()
    assert main(["errors"]) == 0
    printed = capsys.readouterr().out
    assert "\nDATA: corpora, tokenizers, data preparation\n  MW-DATA-001   2  " in printed
    codes_of_lines = [line.split()[0] for line in printed.splitlines() if line.startswith("  MW-")]
    assert list(dict.fromkeys(codes_of_lines)) == [site.code for site in sites]


@pytest.mark.parametrize("given", ["MW-MESH-001", "mw-mesh-1", "mesh-1", "[MW-MESH-001]"])
def test_the_command_shows_a_code_with_its_place(
    given: str, sites: list[Site], capsys: pytest.CaptureFixture[str]
) -> None:
    [site] = [site for site in sites if site.code == "MW-MESH-001"]
    assert main(["errors", given]) == 0
    head, place, *message = capsys.readouterr().out.splitlines()
    assert (
        head == f"MW-MESH-001  {site.kind}, exit code {site.exit_code}  (MESH: ranks, groups,"
        " collectives)"
    )
    assert place == f"raised in {site.source.module}: {site.source.path}, line {site.line}"
    assert '"MW-MESH-001"' in "".join(
        site.source.path.read_text().splitlines()[site.line - 1 : site.line + 1]
    )
    assert message[0].strip() == site.texts[0].splitlines()[0]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("MW-MESH-999", "near it are MW-MESH-0"),
        ("mw-mehs-1", "near it are MW-MESH-001"),
        ("MW-RESHARD-001", "`meshwright errors` lists all"),
        ("words", "a code is MW-ROOM-NUMBER"),
        ("x" * 5000, "a code is MW-ROOM-NUMBER"),
    ],
)
def test_the_command_refuses_an_unknown_code(
    given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["errors", given]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and hint in printed.err
        and "[MW-LAUNCH-108]" in printed.err
        and len(printed.err) < 400
    )


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from meshwright_launch.cli import main; assert main(['errors', 'MW-DATA-001'])"
        " == 0; assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_message_shows_its_code_at_the_end_of_the_first_line() -> None:
    error = DataError("MW-DATA-001", "corpus.bin: 3 bytes\n  prepare it again")
    assert str(error) == "corpus.bin: 3 bytes [MW-DATA-001]\n  prepare it again"
    assert (error.code, error.message) == ("MW-DATA-001", "corpus.bin: 3 bytes\n  prepare it again")


def test_several_problems_are_one_error_with_all_codes() -> None:
    first, second = ConfigError("MW-CONFIG-001", "a = 1"), ConfigError("MW-CONFIG-002", "b = 2")
    error = ConfigError.join([first, second])
    assert str(error) == "a = 1 [MW-CONFIG-001]\nb = 2 [MW-CONFIG-002]"
    assert (error.code, error.message, error.problems) == (
        "MW-CONFIG-001",
        "a = 1\nb = 2",
        [first, second],
    )
    assert first.problems == [first]


@pytest.mark.parametrize(
    "error",
    [
        DataError("MW-DATA-001", "x"),
        MissingRanksError("MW-MESH-001", "y", ("node1",)),
        ConfigError.join([ConfigError("MW-CONFIG-001", "a"), ConfigError("MW-CONFIG-002", "b")]),
    ],
)
def test_an_error_survives_the_way_between_processes(error: UserError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def test_an_error_without_a_code_is_found(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "framework" / "meshwright" / "data" / "broken.py"
    file.parent.mkdir(parents=True)
    file.write_text('def f(code):\n    raise DataError(f"no code: {code}")\n')
    monkeypatch.setattr(codes, "ROOT", tmp_path)
    assert codes.without_code() == ["framework/meshwright/data/broken.py:2"]
    file.write_text('raise DataError("MW-DATA-1", "too short")\n')
    assert codes.without_code() == ["framework/meshwright/data/broken.py:1"]
    file.write_text('raise DataError("MW-DATA-001", "a")\nraise DataError("MW-DATA-001", "b")\n')
    assert codes.repeated(find_sites(codes.sources())) == ["MW-DATA-001"]
