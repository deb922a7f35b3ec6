"""One rank asks, all ranks compute: rank 0 runs lm-evaluation-harness, and the others wait for the
texts that it wants scored or continued.

    rank 0      score(texts), continue_texts(...), ..., end()
    others      follow(), until rank 0 ends

What rank 0 sends is JSON of numbers and texts (mesh/messages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.inference.choice import SamplingRequest, choose, make_generators
from meshwright.inference.generation import NewTokens, continue_rows
from meshwright.inference.rows import RowForward
from meshwright.inference.scoring import Score, ScoredText, score_texts

SHOWN_TOKENS = 16
"""Number of last tokens in which a stop text is searched, beside one for each of its characters."""


class Continued(NamedTuple):
    """Texts to continue."""

    rows: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]
    """Text of each row from which its draws are seeded."""
    most_tokens: int
    until: tuple[str, ...]
    """Texts that end a continuation."""
    temperature: float
    """0: greedy."""
    top_k: int
    top_p: float
    seed: int


class Ended(NamedTuple):
    """End of the evaluation."""

    error: str
    """Message of the error on rank 0; empty: there was none."""


KINDS = (ScoredText, Continued, Ended)


class Ranks:
    """The ranks of a layout, as one model."""

    def __init__(self, forward: RowForward, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """Create it on every rank. ``ends``: tokens that end a document."""
        self.forward = forward
        self.tokenizer = tokenizer
        self.ends = ends
        self._world = forward.parts.mesh.world
        self._num_tokens = max(tokenizer.get_vocab().values()) + 1
        self.has_failed = False
        """True after an error in a forward, which the other ranks have met too."""

    def score(self, texts: Sequence[ScoredText]) -> list[Score]:
        """Score texts, at most ``forward.num_rows``. Called on rank 0; blocks."""
        self._send(list(texts))
        with self._failing():
            return score_texts(self.forward, texts)

    def continue_texts(self, wanted: Continued) -> list[NewTokens]:
        """Extend texts, at most ``forward.num_rows``. Called on rank 0; blocks."""
        self._send(wanted)
        with self._failing():
            return self._continue(wanted)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note an error of a forward."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    def end(self, error: str = "") -> None:
        """End the wait of the other ranks, which raise ``error`` if there is one. Called on rank 0.

        After an error in a forward they do not wait.
        """
        if not self.has_failed:
            self._send(Ended(error))

    def follow(self) -> None:
        """Compute what rank 0 asks for until it ends. Called on all other ranks; blocks.

        Raises:
            ConfigError: rank 0 has failed.
        """
        while True:
            wanted = self._world.gather_objects(None, *KINDS)[0]
            if isinstance(wanted, Continued):
                self._continue(wanted)
            elif isinstance(wanted, list):
                score_texts(self.forward, wanted)
            elif wanted.error:
                raise ConfigError("MW-INTEROP-169", f"rank 0: {wanted.error}")
            else:
                return

    def _send(self, wanted: list[ScoredText] | Continued | Ended) -> None:
        self._world.gather_objects(wanted, *KINDS)

    def _continue(self, wanted: Continued) -> list[NewTokens]:
        request = SamplingRequest(
            wanted.keys, wanted.most_tokens, wanted.temperature, wanted.top_k, wanted.top_p
        )
        generators = make_generators(request, wanted.seed)

        def choose_tokens(due: Sequence[int], logits: Tensor) -> Tensor:
            return choose(logits, request, [generators[row] for row in due])

        def is_over(row: int, ids: Sequence[int]) -> bool:
            return any(self._ends_with(ids, text) for text in wanted.until)

        with torch.no_grad():
            return continue_rows(
                self.forward,
                wanted.rows,
                [wanted.most_tokens] * len(wanted.rows),
                self.ends,
                choose_tokens,
                self._num_tokens,
                is_over,
            )

    def _ends_with(self, ids: Sequence[int], text: str) -> bool:
        """Return whether the last new tokens hold the text."""
        last = ids[-len(text) - SHOWN_TOKENS :]
        return text in self.tokenizer.decode(last, skip_special_tokens=False)
