"""Board of small notes between ranks, in the process group's store and independent of collectives.

It has a connection of its own: a main thread that is stuck in the store does not block other threads here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

PREFIX = "meshwright"


class NoteStore:
    """Notes by name; any thread may use it, one at a time. When the store has gone, torch's own errors come out."""

    def __init__(self, store: Any) -> None:
        """Wrap ``store``, one of torch's, whose classes are not all in its type stubs."""
        clone = getattr(store, "clone", None)
        self._store: Any = dist.PrefixStore(PREFIX, clone() if clone is not None else store)  # type: ignore[attr-defined]
        self._there: set[str] = set()

    def put(self, name: str, text: str) -> None:
        """Pin a note, in place of the one of this name."""
        self._store.set(name, text)

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return those of the notes that exist. Does not wait for any."""
        self._there.update(name for name in names if name not in self._there and self._store.check([name]))
        found = [name for name in names if name in self._there]
        if not found:
            return {}
        if self._store.has_extended_api():
            texts = self._store.multi_get(found)
        else:
            texts = [self._store.get(name) for name in found]
        return {name: text.decode() for name, text in zip(found, texts, strict=True)}

    def is_first(self, name: str) -> bool:
        """Return True on one rank only, the first that calls it."""
        return int(self._store.add(name, 1)) == 1

    def has(self, name: str) -> bool:
        """Return True if a rank has called :meth:`is_first`."""
        return bool(self._store.check([name]))
