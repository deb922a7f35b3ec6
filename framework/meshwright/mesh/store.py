"""Small notes between ranks, in the process group's store, independent of collectives.

It has a connection of its own: a main thread that is stuck in the store does not block other
threads here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

PREFIX = "meshwright"


class NoteStore:
    """Notes by name; any thread may use it, one at a time. If the store is gone,
    torch's own errors are raised.
    """

    def __init__(self, store: Any) -> None:
        """Wrap one of torch's stores (Any: its type stubs lack some of the classes)."""
        clone = getattr(store, "clone", None)
        self._store: Any = dist.PrefixStore(PREFIX, clone() if clone is not None else store)  # type: ignore[attr-defined]
        self._there: set[str] = set()

    def put(self, name: str, text: str) -> None:
        """Store a note, and replace the one of this name."""
        self._store.set(name, text)

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the notes that exist among ``names``. Does not wait for missing ones."""
        self._there.update(
            name for name in names if name not in self._there and self._store.check([name])
        )
        present = [name for name in names if name in self._there]
        if not present:
            return {}
        if self._store.has_extended_api():
            texts = self._store.multi_get(present)
        else:
            texts = [self._store.get(name) for name in present]
        return {name: text.decode() for name, text in zip(present, texts, strict=True)}

    def count(self, name: str, more: int = 1) -> int:
        """Add to the count of this name, over all ranks; return the sum."""
        return int(self._store.add(name, more))

    def is_first(self, name: str) -> bool:
        """Return True on one rank only, the first that calls it."""
        return self.count(name) == 1

    def has(self, name: str) -> bool:
        """Return True if some rank has called :meth:`is_first` with this name."""
        return bool(self._store.check([name]))
