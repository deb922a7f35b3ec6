"""Key-value cache of generation, by the hooks of context parallelism: a forward of the new tokens
alone, which attend to the keys and values that earlier forwards have left.

A context-parallel rank has some tokens of a sample and gathers the keys of the others from other
ranks. Here the others are earlier tokens, and their keys are in memory. So a model that can be cut
over ranks can be cut in time, without a change to its layers.

    forward of W tokens     positions 0 .. W - 1    fills the cache, (B, G, W, d) at each core
    forward of one token    position p              writes its keys at p, attends to 0 .. p

Padding beyond a row's tokens leaves keys too. No query sees them: attention is causal, and a row's
next token overwrites the keys at its position before it attends.

Shapes: B samples, G key-value heads of this rank, W places of the cache, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.context_parallel.cut import TokenCut
from meshwright.mesh.comm import Group


class KeyCache(TokenCut):
    """Cut of samples in time: earlier forwards had some tokens, and this one has the others."""

    def __init__(self, length: int) -> None:
        """Create an empty cache. Until :meth:`begin`, forwards have all ``length`` tokens of a row."""
        self._kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._calls: dict[str, int] = {}
        # "before" and "now", in place of the ranks of a group; nothing is sent
        super().__init__(
            Group("cache", (0, 1), 1), "contiguous", torch.empty(1, length, device="meta")
        )
        self.begin(length, 0, length)

    def begin(self, length: int, first: int, count: int, *, keeps: bool = False) -> None:
        """Set the tokens of the next forward: ``count`` of ``length`` places, from ``first`` on.

        ``keeps``: keep the keys and values of a forward of all places, for later ones.
        """
        self.length, self.share, self._keeps = length, count, keeps
        positions = torch.arange(first, first + count)[None]
        self._positions = {torch.device("cpu"): positions}
        self._calls.clear()

    def extend(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the new tokens, (B, G, n, d), and return those of all places,
        (B, G, W, d).

        ``name``: the core; a core that a forward calls several times has a cache for each call.
        """
        if k.is_meta:
            return tuple(  # type: ignore[return-value]
                each.new_empty(*each.shape[:-2], self.length, each.shape[-1]) for each in (k, v)
            )
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if self.share == self.length:
            if self._keeps:  # copies: k and v may be views of a larger projection
                self._kept[name, call] = (k.clone(), v.clone())
            return k, v
        places = self.positions(k.device)[0]
        kept = self._kept[name, call]
        for whole, new in zip(kept, (k, v), strict=True):
            whole.index_copy_(-2, places, new)
        return kept

    def clear(self) -> None:
        """Free the keys and values."""
        self._kept.clear()
