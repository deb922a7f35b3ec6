"""Log-probabilities of continuations of texts by a trained model, on the ranks of any layout; the
same on all up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.build import pick_loss
from meshwright.inference.rows import LabelScores, RowForward
from meshwright.pipeline.values import IGNORED_LABEL


class ScoredText(NamedTuple):
    """Tokens to score, after tokens that are only read."""

    context: tuple[int, ...]
    """At least one."""
    continuation: tuple[int, ...]

    def row(self, longest: int) -> tuple[list[int], list[int]]:
        """Return the ids that run and their labels; of a longer text the last ``longest``."""
        ids = [*self.context, *self.continuation][-longest - 1 :]
        is_read = len(ids) - len(self.continuation)
        return ids[:-1], [IGNORED_LABEL] * (is_read - 1) + list(self.continuation)


class Score(NamedTuple):
    """Score of a continuation."""

    log_probability: float
    """Sum over its tokens, in nats."""
    is_likeliest: bool
    """True if each of its tokens is the likeliest after those before it."""


def score_texts(forward: RowForward, texts: Sequence[ScoredText]) -> list[Score]:
    """Score any number of texts, ``forward.num_rows`` at a time. Every rank calls it and gets all;
    blocks.

    A continuation has at most ``forward.longest`` tokens; of a context only the last tokens are
    read that fit before it.
    """
    loss = pick_loss(forward.parts.blueprint, forward.parts.mesh.tp, training=False)
    found: list[Score] = []
    for start in range(0, len(texts), forward.num_rows):
        batch = [text.row(forward.longest) for text in texts[start : start + forward.num_rows]]
        window = forward.window(max(len(ids) for ids, _ in batch))
        labels = torch.full((len(batch), window.length), IGNORED_LABEL)
        for row, (_, of_row) in enumerate(batch):
            labels[row, : len(of_row)] = torch.tensor(of_row)
        ending = LabelScores(forward, loss)
        forward.run([ids for ids, _ in batch], labels, window, ending)
        if forward.parts.mesh.at.tp_rank != 0:
            ending.sums.zero_()  # tp ranks have the same sums
        forward.parts.mesh.world.all_reduce(ending.sums).wait()
        found += [
            Score(log_probability, missed == 0)
            for log_probability, missed in ending.sums[: len(batch)].tolist()
        ]
    return found
