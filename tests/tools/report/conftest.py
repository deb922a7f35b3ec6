"""Fixtures of the tests of reports: the records of the tests of tracking."""

from tests.tracking.conftest import record

__all__ = ["record"]
