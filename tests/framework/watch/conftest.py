"""The shell of the end-to-end tests."""

from tests.end_to_end.conftest import shell

__all__ = ["shell"]
