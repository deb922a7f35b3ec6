"""The corpus and the shell of the end-to-end tests."""

from tests.end_to_end.conftest import corpus, shell

__all__ = ["corpus", "shell"]
