"""The lists of tests that take long name tests that exist."""

from __future__ import annotations

import pytest

from tests.conftest import LISTED_MARKS, listed_tests


def test_each_one_is_collected(pytestconfig: pytest.Config) -> None:
    """Each file is collected anew: an id that no test has any more would bring its test back into `make test`."""
    found: list[str] = []

    class Collected:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            found.extend(item.nodeid for item in items)

    listed = set().union(*map(listed_tests, LISTED_MARKS))
    assert len(listed) == sum(len(listed_tests(mark)) for mark in LISTED_MARKS)
    files = sorted({name.partition("::")[0] for name in listed})
    every = " or ".join(("not long", *LISTED_MARKS))
    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", every, *files]
    assert pytest.main([*words, "--rootdir", str(pytestconfig.rootpath)], plugins=[Collected()]) == 0
    assert sorted(listed - set(found)) == []
