"""The reference of configuration keys is complete and of today."""

from __future__ import annotations

import re

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


def test_keys_that_other_trainers_habits_become_exist() -> None:
    """The last column of the tables names keys of this project; the others are of other projects."""
    page = (DOCUMENT.parent / "tasks" / "come-from-elsewhere.md").read_text()
    habits = page.partition("## What you do there")[2].partition("\n## ")[0]
    rows = [line.rsplit(" | ", 1) for line in habits.splitlines() if line.startswith("| ")]
    sections = {section for section, _ in KEYS}
    named = {
        (found[1], found[2])
        for _, here in rows
        for found in re.finditer(r"`(\w+)\.(\w+)", here)
        if found[1] in sections
    }
    assert len(named) > 30
    assert named - KEYS.keys() == set()


def test_each_trainer_has_ten_habits_or_more() -> None:
    page = (DOCUMENT.parent / "tasks" / "come-from-elsewhere.md").read_text()
    habits = page.partition("## What you do there")[2].partition("\n## ")[0]
    tables = habits.split("### From ")[1:]
    rows = [len(re.findall(r"^\| (?!there|---)", table, re.MULTILINE)) for table in tables]
    assert len(rows) == 4 and min(rows) >= 10
