"""Error codes: every error has one, no two share one, and the docs and the golden files hold their texts."""

from __future__ import annotations

import pickle

import pytest

from meshwright.errors import ConfigError, DataError, MissingRanksError, UserError
from tests.support import error_codes as codes

MOVE = "`python -m tests.support.error_codes` writes docs/errors.md and the golden files anew: look at what changes"


@pytest.fixture(scope="module")
def sites() -> list[codes.Site]:
    return codes.find_sites()


def test_every_error_has_a_code_of_its_own(sites: list[codes.Site]) -> None:
    assert codes.without_code() == [], "the first argument of an error is its code, a literal MW-ROOM-NUMBER"
    assert len(sites) > 400  # else the search itself is broken
    assert codes.repeated(sites) == [], "two places raise these codes: take the next free number for one"
    reused = codes.retired() & {site.code for site in sites}
    assert not reused, f"{sorted(reused)} belonged to other errors once: take the next free number"
    unknown = {site.kind for site in sites} - codes.error_classes() - {"error_type", "kind"}
    assert not unknown, f"{unknown}: give these classes their exit code in EXIT_CODES"


def test_the_texts_are_those_of_the_golden_files(sites: list[codes.Site]) -> None:
    written = {path.name: path.read_text() for path in codes.GOLDEN.glob("*.txt")}
    assert codes.golden(sites, codes.retired()) == written, MOVE
    assert codes.document(sites, codes.retired()) == codes.DOCUMENT.read_text(), MOVE


def test_a_message_shows_its_code_at_the_end_of_the_first_line() -> None:
    error = DataError("MW-DATA-001", "corpus.bin: 3 bytes\n  prepare it again")
    assert str(error) == "corpus.bin: 3 bytes [MW-DATA-001]\n  prepare it again"
    assert (error.code, error.message) == ("MW-DATA-001", "corpus.bin: 3 bytes\n  prepare it again")


def test_several_problems_are_one_error_with_all_codes() -> None:
    first, second = ConfigError("MW-CONFIG-001", "a = 1"), ConfigError("MW-CONFIG-002", "b = 2")
    error = ConfigError.join([first, second])
    assert str(error) == "a = 1 [MW-CONFIG-001]\nb = 2 [MW-CONFIG-002]"
    assert (error.code, error.message, error.problems) == ("MW-CONFIG-001", "a = 1\nb = 2", [first, second])
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
    assert codes.repeated(codes.find_sites()) == ["MW-DATA-001"]
