"""The reference of configuration keys is complete and of today."""

from __future__ import annotations

from meshwright.config.keys import KEYS
from tests.support import combination_table, optimizer_table
from tests.support.configuration_keys import DOCUMENT, document, sentences


def test_every_key_has_a_sentence() -> None:
    text = document()
    assert all(f"| `{key}` |" in text for _, key in KEYS)
    short = [name for name, told in sentences().items() if len(told) < 15 or not told.endswith(".")]
    assert not short, f"no whole sentence: {short}"


def test_the_reference_is_of_today() -> None:
    assert document() == DOCUMENT.read_text(), (
        "`python -m tests.support.configuration_keys` writes it anew"
    )


def test_the_table_of_optimizers_is_that_of_their_specs() -> None:
    assert optimizer_table.DOCUMENT.read_text() == optimizer_table.page(), (
        "`python -m tests.support.optimizer_table` writes it anew"
    )


def test_the_table_of_refused_combinations_is_that_of_the_code() -> None:
    assert combination_table.DOCUMENT.read_text() == combination_table.page(), (
        "`python -m tests.support.combination_table` writes it anew"
    )
