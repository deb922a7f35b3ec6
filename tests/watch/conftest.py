"""A shell for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose commands leave no process behind: the test fails if one does."""
    shell = Shell(tmp_path)
    try:
        yield shell
        shell.wait_until_none_is_left()
    finally:
        shell.end_all()
