"""Model class of lm-evaluation-harness over the ranks of a layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from meshwright.errors import ConfigError
from meshwright.inference.scoring import Score, ScoredText
from meshwright_interop.tasks.chat import ChatPrompts
from meshwright_interop.tasks.ranks import Continued, Ranks
from meshwright_interop.tasks.texts import TextEncoding

MOST_TOKENS = 256
"""Most new tokens of a text, where the task sets none."""
READ = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
"""Options of generation that are read."""


class RanksModel(TemplateLM):  # type: ignore[misc]
    """Model that scores and continues texts on all ranks of a layout.

    Texts are encoded as the training's documents were; a text without a context begins with the
    token before a document. What a chat template writes is encoded as it is, special tokens in it
    as tokens.
    """

    def __init__(
        self, ranks: Ranks, texts: TextEncoding, seed: int, chat: ChatPrompts | None = None
    ) -> None:
        """Create the model on rank 0.

        Args:
            ranks: all ranks.
            texts: encoding of the texts.
            seed: that of texts that are drawn.
            chat: renderer of the prompts; None: there is no chat template.
        """
        super().__init__()
        self._ranks, self._texts, self._seed, self._chat = ranks, texts, seed, chat

    @property
    def eot_token_id(self) -> int:
        """Token before a text without a context."""
        if self._texts.begin is None:
            raise ConfigError(
                "MW-INTEROP-165",
                "a task scores texts without a context, and the tokenizer has no token that begins"
                " or ends a document: leave the task out",
            )
        return self._texts.begin

    @property
    def max_length(self) -> int:
        """Most tokens of a row."""
        return self._ranks.forward.longest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, as the beginning of a document unless it is to have no special tokens, or
        a chat template has written those that it begins with.
        """
        is_whole = add_special_tokens is not False and self._chat is None
        return self._texts.encode(string, is_whole=is_whole)

    @property
    def tokenizer_name(self) -> str:
        """Name of the template and its special tokens, for the library's cache."""
        return "" if self._chat is None else self._chat.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the template; None: there is none."""
        return None if self._chat is None else self._chat.text

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation; without ``add_generation_prompt`` it ends inside
        the last message.
        """
        assert self._chat is not None
        return self._chat.render(chat_history, asks=add_generation_prompt)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score continuations of contexts, without a progress bar."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._text(context, more) for _, context, more in requests]
        for text in texts:
            if len(text.continuation) > self.max_length:
                raise ConfigError(
                    "MW-INTEROP-164",
                    f"a task asks for the probability of {len(text.continuation):,} tokens at once,"
                    f" and the model reads {self.max_length:,} (data.sequence_length): leave the"
                    " task out",
                )
        return [tuple(score) for score in self._scores(texts)]  # type: ignore[misc]

    def _text(self, context: Sequence[int], continuation: Sequence[int]) -> ScoredText:
        """Return a text, with the last tokens of its context that can be read."""
        read = tuple(context) or (self.prefix_token_id,)  # blanks are of the continuation
        most = max(1, self.max_length + 1 - len(continuation))
        return ScoredText(read[-most:], tuple(continuation))

    def _scores(self, texts: Sequence[ScoredText]) -> list[Score]:
        """Score texts of similar length together."""
        by_length = sorted(range(len(texts)), key=lambda at: -sum(map(len, texts[at])))
        found: dict[int, Score] = {}
        size = self._ranks.forward.num_rows
        for start in range(0, len(texts), size):
            batch = by_length[start : start + size]
            scores = self._ranks.score([texts[at] for at in batch])
            found |= dict(zip(batch, scores, strict=True))
        return [found[at] for at in range(len(texts))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, in windows of ``max_length`` tokens."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append(self._text(context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, score in zip(owners, self._scores(windows), strict=True):
            sums[number] += score.log_probability
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Extend contexts up to a stop text, greedily unless the task draws."""
        groups: dict[str, list[int]] = {}
        keys: list[str] = []
        seen: Counter[tuple[str, str]] = Counter()
        for number, request in enumerate(requests):
            text, options = request.args
            group = repr(sorted(options.items()))
            groups.setdefault(group, []).append(number)
            keys.append(f"{seen[text, group]} {text}")  # a repeated question draws anew
            seen[text, group] += 1
        found: dict[int, str] = {}
        for numbers in groups.values():
            rows = {number: self._context(requests[number].args[0]) for number in numbers}
            options = requests[numbers[0]].args[1]
            by_length = sorted(numbers, key=lambda number: len(rows[number]))
            size = self._ranks.forward.num_rows
            for start in range(0, len(by_length), size):
                batch = by_length[start : start + size]
                wanted = self._wanted(
                    [rows[number] for number in batch], [keys[number] for number in batch], options
                )
                found |= dict(zip(batch, self._continued(wanted), strict=True))
        return [found[number] for number in range(len(requests))]

    def _context(self, text: str) -> list[int]:
        return self.tok_encode(text) or [self.prefix_token_id]

    def _wanted(
        self, rows: Sequence[list[int]], keys: Sequence[str], options: dict[str, Any]
    ) -> Continued:
        """Return the texts to continue, with the options of their task.

        Raises:
            ConfigError: an option that is not read, or out of range.
        """
        read = dict(normalize_gen_kwargs(options, MOST_TOKENS))
        if unknown := sorted(read.keys() - set(READ)):
            raise ConfigError(
                "MW-INTEROP-170",
                f"generation_kwargs of a task: {', '.join(unknown)} is not read here; it reads"
                f" {', '.join(READ)}: leave the task out, or evaluate an export",
            )
        temperature, top_p = float(read.get("temperature", 0.0)), float(read.get("top_p", 1.0))
        top_k = int(read.get("top_k") or 0)
        if not (0 <= temperature < math.inf and 0 < top_p <= 1 and top_k >= 0):
            raise ConfigError(
                "MW-INTEROP-171",
                f"generation_kwargs of a task: temperature = {temperature}, top_p = {top_p}, top_k ="
                f" {top_k}: the first is a number from 0 up, the second above 0 and at most 1, the"
                " third from 0 up",
            )
        most_tokens = max(0, min(int(read["max_gen_toks"]), self.max_length - 1))
        return Continued(
            # the last tokens that leave room for the new ones
            tuple(tuple(ids[-(self.max_length - most_tokens) :]) for ids in rows),
            tuple(keys),
            most_tokens,
            tuple(str(text) for text in read["until"] if text),
            temperature if read["do_sample"] else 0.0,
            top_k,
            top_p,
            self._seed,
        )

    def _continued(self, wanted: Continued) -> list[str]:
        """Extend texts up to a stop text."""
        texts = []
        for new in self._ranks.continue_texts(wanted):
            text = self._ranks.tokenizer.decode(list(new.ids), skip_special_tokens=False)
            for stop in wanted.until:
                text = text.split(stop)[0]
            texts.append(text)
        return texts
