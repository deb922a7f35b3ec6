"""Fixtures of the tests of reports: the records of the tests of tracking."""

from tests.framework.tracking.conftest import record

__all__ = ["record"]
