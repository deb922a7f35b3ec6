"""A host with memory apart from the device's, on a machine that has but one: what streams allow,
at its worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.mesh.comm import CollectiveHandle, Group
from meshwright.optimizer.offload import HostMemory


@dataclass
class Summed:
    """A collective whose result is there when it is done, as NCCL's: gloo's,
    and the sum that its handle would do.
    """

    work: Any
    finish: Callable[[], object] | None

    def wait(self) -> None:
        self.work.wait()
        if self.finish is not None:
            self.finish()
            self.finish = None


def as_by_nccl(
    posted: Callable[[Group, Tensor, Tensor], CollectiveHandle],
) -> Callable[..., CollectiveHandle]:
    """Group.reduce_scatter, with handles as NCCL's."""

    def reduce_scatter(group: Group, part: Tensor, whole: Tensor) -> CollectiveHandle:
        handle = posted(group, part, whole)
        if handle.finish is not None:
            handle.work, handle.finish = Summed(handle.work, handle.finish), None
        return handle

    return reduce_scatter


class Apart(HostMemory):
    """A copy has what was there when it was posted, behind its message and nothing after it; and is
    there only for who waits for it.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_apart = True
        self.brought: list[tuple[int, bool]] = []
        """Of each copy: where it comes from, and whether it was posted behind a message."""

    def fetch(
        self, target: Tensor, source: Tensor, after: CollectiveHandle | None = None
    ) -> Callable[[], None]:
        self.brought.append((source.data_ptr(), after is not None))
        target.fill_(torch.nan)
        seen = torch.empty_like(target)
        if after is not None:
            after.join()
        seen.copy_(source)

        def arrive() -> None:
            target.copy_(seen)

        return arrive
