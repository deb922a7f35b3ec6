"""Modules, hooks and calls of a rank, as ``build`` leaves them: their order decides the numbers.

tests/support/placed_modules.py writes the golden files; read the diff.
"""

from __future__ import annotations

import pytest

import meshwright.placement.rewrite
from tests.support.placed_modules import CASES, GOLDEN, path_of, placed


@pytest.mark.parametrize("name", CASES)
def test_modules_and_hooks_are_those_of_the_golden_file(name: str) -> None:
    assert placed(CASES[name]) == path_of(name).read_text(encoding="utf-8")


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_a_lost_hook_of_the_user_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshwright.placement.rewrite, "CARRIED", ())
    text = placed(CASES["twice"])
    assert text != path_of("twice").read_text(encoding="utf-8")
    assert "double" not in text
