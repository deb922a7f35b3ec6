"""Continuation of rows of tokens by a trained model, on the ranks of any layout; greedy tokens are
the same on all.

    rows of ids -> stages -> logits of one token of each row, whole, on the last stage
         ^                            | chosen there, sent to all ranks
         +------ one token more ------+

With a key-value cache the rows run whole once, and then one token of each at a time. All rows of a
forward have the same position: a longer prompt waits until the others have its length. When the
rows outgrow the window, they run whole again in the next longer one; beyond the longest, or without
a cache, the last tokens of each row run whole for every new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.inference.rows import NextTokenLogits, RowForward, Window
from meshwright.pipeline.values import IGNORED_LABEL

Choose = Callable[[Sequence[int], Tensor], Tensor]
"""Function of rows (n) and their logits (n, V) that returns a token for each, (n,) int64."""
IsOver = Callable[[int, Sequence[int]], bool]
"""Function of a row and its new tokens: True if the row ends with them."""


class NewTokens(NamedTuple):
    """Tokens that continue a row."""

    ids: tuple[int, ...]
    """Without the token that ends the row."""
    ended: bool
    """True if such a token came."""


def _never(row: int, ids: Sequence[int]) -> bool:
    return False


def continue_rows(
    forward: RowForward,
    rows: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Collection[int],
    choose: Choose,
    num_tokens: int,
    is_over: IsOver = _never,
) -> list[NewTokens]:
    """Extend at most ``forward.num_rows`` rows. Every rank calls it and gets all; blocks.

    Per token the stages exchange activations along pp, the last one all-gathers (n, V/tp) logits
    over tp, and the chosen tokens, 8 bytes a row, are summed over all ranks.

    Args:
        limits: most new tokens of each row.
        ends: tokens that end a row.
        choose: called on the rank that has the logits of some rows.
        num_tokens: size of the tokenizer's vocabulary, see :class:`NextTokenLogits`.
        is_over: called on every rank after each new token of a row.
    """
    assert all(rows), "a row begins with a token"
    texts = [list(row) for row in rows]
    ended = [False] * len(rows)
    active = {row for row, limit in enumerate(limits) if limit > 0}
    steps = _Steps(forward, num_tokens)
    while active:
        due, logits = steps.logits(texts, active)
        chosen = _chosen(forward, due, logits, choose)
        for row in due:
            token = int(chosen[row])
            ended[row] = token in ends
            if not ended[row]:
                texts[row].append(token)
            new = texts[row][len(rows[row]) :]
            if ended[row] or len(new) == limits[row] or is_over(row, new):
                active.remove(row)
    if forward.cache is not None:
        forward.cache.clear()
    return [
        NewTokens(tuple(text[len(row) :]), is_ended)
        for text, row, is_ended in zip(texts, rows, ended, strict=True)
    ]


def _chosen(
    forward: RowForward, due: Sequence[int], logits: dict[int, Tensor], choose: Choose
) -> Tensor:
    """Return the chosen token of each row that is due, (rows,) int64, the same on every rank."""
    mesh = forward.parts.mesh
    chosen = torch.zeros(forward.num_rows, dtype=torch.int64)
    mine = [row for row in due if row in logits]
    if mine and mesh.at.tp_rank == 0:  # tp ranks have the same logits
        chosen[mine] = choose(mine, torch.stack([logits[row] for row in mine])).cpu()
    chosen = chosen.to(mesh.device)
    mesh.world.all_reduce(chosen).wait()
    return chosen.cpu()


class _Steps:
    """Forwards of growing rows: with the cache where their window has one."""

    def __init__(self, forward: RowForward, num_tokens: int) -> None:
        self._forward = forward
        self._ending = NextTokenLogits(forward.parts, num_tokens)
        self._filled: Window | None = None
        """Window whose keys the cache has."""

    def logits(
        self, texts: Sequence[Sequence[int]], active: Collection[int]
    ) -> tuple[list[int], dict[int, Tensor]]:
        """Run a forward for the next token of some rows: return them, and on the ranks of the last
        stage their logits.
        """
        self._ending.found.clear()
        longest = max(len(texts[row]) for row in active)
        if not self._forward.uses_cache or longest > self._forward.longest:
            due = sorted(active)
            self._run_whole([text[-self._forward.longest :] for text in texts], due)
        else:
            due = self._run_cached(texts, active, longest)
        return due, dict(self._ending.found)

    def _run_cached(
        self, texts: Sequence[Sequence[int]], active: Collection[int], longest: int
    ) -> list[int]:
        """Run the shortest rows, the others beside them; return the shortest."""
        length = min(len(texts[row]) for row in active)
        due = sorted(row for row in active if len(texts[row]) == length)
        if self._filled is None or length > self._filled.length:
            window = self._forward.window(longest)
            self._filled = self._run_whole(texts, due, window, fills=True)
            return due
        labels = torch.full((len(texts), 1), IGNORED_LABEL)
        labels[due] = 0
        filled = self._filled.length
        self._forward.run(
            [text[:filled] for text in texts],
            labels,
            Window(filled, 1),
            self._ending,
            first=length - 1,
        )
        return due

    def _run_whole(
        self,
        texts: Sequence[Sequence[int]],
        due: Sequence[int],
        window: Window | None = None,
        *,
        fills: bool = False,
    ) -> Window:
        """Run all tokens of the rows, for the token after the last one of those that are due."""
        window = window or self._forward.window(max(len(texts[row]) for row in due))
        labels = torch.full((len(texts), window.length), IGNORED_LABEL)
        for row in due:
            labels[row, len(texts[row]) - 1] = 0
        shown = [text[: window.length] for text in texts]
        self._forward.run(shown, labels, window, self._ending, fills=fills)
        return window
