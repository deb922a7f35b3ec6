"""The list of tests that take long names tests that exist."""

from __future__ import annotations

import pytest

from tests.conftest import long_tests


def test_each_one_is_collected(pytestconfig: pytest.Config) -> None:
    """Each file is collected anew: an id that no test has any more would bring its test back into `make test`."""
    found: list[str] = []

    class Collected:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            found.extend(item.nodeid for item in items)

    files = sorted({name.partition("::")[0] for name in long_tests()})
    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "long or not long", *files]
    assert pytest.main([*words, "--rootdir", str(pytestconfig.rootpath)], plugins=[Collected()]) == 0
    assert sorted(long_tests() - set(found)) == []
