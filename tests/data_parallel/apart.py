"""A host with memory apart from the device's, on a machine that has but one: what streams allow, at its worst."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.mesh.comm import CollectiveHandle
from meshwright.optimizer.offload import HostMemory


class Apart(HostMemory):
    """A copy has what was there when it was posted, behind its message and nothing after it; and is there only for who
    waits for it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_apart = True
        self.brought: list[tuple[int, bool]] = []
        """Of each copy: where it comes from, and whether it was posted behind a message."""

    def fetch(self, target: Tensor, source: Tensor, after: CollectiveHandle | None = None) -> Callable[[], None]:
        self.brought.append((source.data_ptr(), after is not None))
        target.fill_(torch.nan)
        seen = torch.empty_like(target)
        super().fetch(seen, source, after)

        def arrive() -> None:
            target.copy_(seen)

        return arrive
