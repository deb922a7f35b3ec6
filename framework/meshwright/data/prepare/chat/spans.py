"""The text that the assistant writes in a rendered conversation.

    {% generation %} in the template     its marks are taken as they are
    otherwise                            rendering      <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                         prompt         <|user|>Hi<|end|><|assistant|>
                                         up to the turn <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                         span                                        ^^^^^^^^^^^^

A span begins where the prompt ends that the model gets when it answers (``add_generation_prompt``).
It ends with the text that closes the turn, without white space after it.

Templates rewrite earlier turns (reasoning is left out), so that a prompt is often no prefix of the
rendering. The places are then found by exchange: a message is rendered again with a character that
occurs nowhere else in place of its text, and what both renderings share before and after is the
text around it. A place that is not found without doubt is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from meshwright.data.prepare.chat.rendering import (
    REASONING_KEYS,
    Message,
    Renderer,
    RenderingError,
)

MARKS = range(0xF0000, 0xF1000)
"""Private characters: one that a conversation lacks stands for a message's text."""
MAX_TOKEN_CHARACTERS = 1000
"""Longest added token that is looked for."""


class Conversation(NamedTuple):
    """A record."""

    messages: list[Message]
    counts: list[bool]
    """For each message: its text is a label."""
    tools: Any = None
    variables: dict[str, Any] | None = None

    def first(self, count: int) -> Conversation:
        """Return the first ``count`` messages."""
        return self._replace(messages=self.messages[:count], counts=self.counts[:count])


class MarkedText(NamedTuple):
    """A rendered conversation."""

    text: str
    spans: list[tuple[int, int]]
    """Characters [start, stop) that are labels, in order."""


class _Region(NamedTuple):
    """Place of a message's text in a rendering, [start, stop)."""

    start: int
    stop: int


class _View(NamedTuple):
    """A rendering, and what it is of."""

    messages: list[Message]
    text: str
    prompts: bool = False


class SpanFinder:
    """Finder of spans, for one template."""

    def __init__(self, renderer: Renderer, tokens: Iterable[str]) -> None:
        """Keep the template and the texts of the tokenizer's added tokens."""
        self.renderer = renderer
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, conversation: Conversation) -> MarkedText:
        """Render a conversation and find its labels.

        Raises:
            RenderingError: the template refuses the conversation, leaves a message out, or hides
                where a message is.
        """
        return _Search(self, conversation).find()


class _Search:
    """Search in one conversation."""

    def __init__(self, finder: SpanFinder, conversation: Conversation) -> None:
        self.finder, self.conversation = finder, conversation
        self.messages = conversation.messages
        renderer = finder.renderer
        rendering = renderer.render(self.messages, conversation.tools, conversation.variables)
        self.whole, self.generated = rendering.text, list(rendering.generated)
        self.view = _View(self.messages, self.whole)
        shown = self.whole + _as_text(self.messages)
        self.prompts: dict[str, bool] = {}
        self.mark = next((char for code in MARKS if (char := chr(code)) not in shown), "")
        if not self.mark:
            raise RenderingError("cannot be checked: the record has every private character")

    def _rendered(self, messages: list[Message], *, prompts: bool = False) -> str:
        one = self.conversation
        return self.finder.renderer.render(messages, one.tools, one.variables, prompts=prompts).text

    def _tried(self, messages: list[Message], *, prompts: bool = False) -> str | None:
        try:
            return self._rendered(messages, prompts=prompts)
        except RenderingError:
            return None

    def find(self) -> MarkedText:
        one, renderer = self.conversation, self.finder.renderer
        is_marked = renderer.has_generation(one.tools)
        self._check_all_shown(is_marked)
        if is_marked:
            spans = self._marked_spans()
        else:
            spans = [self._span(n) for n, counts in enumerate(one.counts) if counts]
        for (_, stop), (start, _) in pairwise(spans):
            if start < stop:
                raise RenderingError("writes two messages of the assistant over one another")
        spans = [(start, stop) for start, stop in spans if start < stop]
        if not any(self.whole[start:stop].strip() for start, stop in spans):
            raise RenderingError("writes no text of the assistant: there is nothing to learn from")
        return MarkedText(self.whole, spans)

    # ---- what the template shows

    def _check_all_shown(self, is_marked: bool) -> None:
        """Check that each message is in the rendering, and once unless the template marks spans."""
        last = max((n for n, counts in enumerate(self.conversation.counts) if counts), default=0)
        named = [
            _exchanged(message, f"{self.mark}{n}{self.mark}", in_calls=True)
            for n, message in enumerate(self.messages)
        ]
        try:
            exchanged = self._rendered(named)
        except RenderingError as error:
            raise RenderingError(
                f"refuses the conversation with other texts in it, which show their places: {error}"
            ) from None
        self._check_shown(named, exchanged, is_marked)
        if not is_marked and last:  # a message that shows only with its answer is no prompt
            prompt = self._tried(named[:last], prompts=True)
            if prompt is not None:
                self._check_shown(named[:last], prompt, is_marked)

    def _check_shown(self, named: list[Message], text: str, is_marked: bool) -> None:
        for n, message in enumerate(named):
            name = f"{self.mark}{n}{self.mark}"
            role = message.get("role")
            in_calls = name in _as_text(message.get("tool_calls"))
            if not _has_text(self.messages[n]):
                continue
            found = text.count(name)
            if not found:
                part = "'tool_calls' of " if in_calls else ""
                raise RenderingError(f"leaves out {part}message {n + 1} ({role})")
            if found > 1 and not is_marked and not in_calls:
                raise RenderingError(
                    f"writes message {n + 1} ({role}) {found} times, so that its place is not known"
                )

    # ---- templates with {% generation %}

    def _marked_spans(self) -> list[tuple[int, int]]:
        one = self.conversation
        spans = self.generated
        answers = [n for n, each in enumerate(self.messages) if each.get("role") == "assistant"]
        if len(spans) == len(answers):
            return [span for span, n in zip(spans, answers, strict=True) if one.counts[n]]
        for n in answers:
            if not one.counts[n]:
                # all marks from its text up to the next message
                region = self._place(n)
                after = len(self.whole)
                if n + 1 < len(self.messages):
                    after = self._place(n + 1).start
                spans = [
                    (start, stop) for start, stop in spans if stop <= region.start or after <= start
                ]
        return spans

    # ---- templates without

    def _span(self, n: int) -> tuple[int, int]:
        start = self._after_header(n, self._after_prompt(n))
        stop = self._after_turn(n)
        if stop <= start and _has_text(self.messages[n]):
            raise self._not_found(n)
        return start, max(start, stop)

    def _not_found(self, n: int) -> RenderingError:
        return RenderingError(
            f"hides where the text of message {n + 1} is: mark it in a copy of the template with"
            " {% generation %} and {% endgeneration %}"
        )

    def _after_prompt(self, n: int) -> int:
        """Return where the prompt of message ``n`` ends in the rendering."""
        prompt = self._tried(self.messages[:n], prompts=True)
        if prompt is not None and self.whole.startswith(prompt):
            return len(prompt)
        if n == 0:
            return self._after_first_header()
        if prompt is None:
            raise self._not_found(n)
        # both continue after the message before this one
        views = self.view, _View(self.messages[:n], prompt, True)
        for here, there in self._places(n - 1, *views):
            if self.whole.startswith(prompt[there.stop :], here.stop):
                return here.stop + len(prompt) - there.stop
        return self._after_shorter_header(n, prompt)

    def _after_shorter_header(self, n: int, prompt: str) -> int:
        """Return where the text of a turn begins whose header is shorter than the prompt, which
        goes on with text such as <think>.
        """
        before = self.messages[:n]
        closed = self._rendered(before)
        content = self._place(n).start
        views = self.view, _View(before, prompt, True), _View(before, closed)
        for here, there, end in self._places(n - 1, *views):
            rest, follows = prompt[there.stop :], self.whole[here.stop :]
            tail = closed[end.stop :]
            length = max(0, content - here.stop)
            shared = _common_start(rest, follows[:length])
            if shared < length:
                shared = self._before_token(shared, rest, follows)
            if rest.startswith(tail) and shared > len(tail):
                return here.stop + shared
        raise self._not_found(n)

    def _before_token(self, shared: int, *texts: str) -> int:
        """Return the largest number of characters, at most ``shared``, after which a word or
        a token begins in each text; 0 if there is none.
        """
        for text in texts:
            for found in self.finder.tokens.finditer(text[: shared + MAX_TOKEN_CHARACTERS]):
                if found.start() < shared < found.end():
                    shared = found.start()
        before = texts[0][:shared]
        ends_with_token = any(
            found.end() == shared for found in self.finder.tokens.finditer(before)
        )
        return shared if ends_with_token or before[-1:].isspace() else 0

    def _after_first_header(self) -> int:
        """Return where the prompt ends of an answer with which the conversation begins."""
        user = [{"role": "user", "content": self.mark}]
        asked, plain = self._tried(user, prompts=True) or "", self._tried(user) or ""
        content = self._place(0).start
        header = asked[len(plain) :]
        if not header or not asked.startswith(plain) or not self.whole[:content].endswith(header):
            raise self._not_found(0)
        return content

    def _has_prompt(self, n: int) -> bool:
        """Return True if ``add_generation_prompt`` adds text before message ``n``; looked up once
        for each role of the message before it.
        """
        role = str(self.messages[n - 1].get("role")) if n else ""
        if role not in self.prompts:
            before = self.messages[:n] or [{"role": "user", "content": self.mark}]
            self.prompts[role] = self._tried(before, prompts=True) != self._tried(before)
        return self.prompts[role]

    def _after_header(self, n: int, start: int) -> int:
        """Return where the text after a turn's header begins, in a template that writes headers
        with the answer alone.
        """
        if self._has_prompt(n):
            return start
        before = self.messages[:n]
        plain = self._rendered([*before, {"role": "assistant", "content": self.mark}])
        prompt = self._rendered(before, prompts=True)
        if not plain.startswith(prompt):
            raise self._not_found(n)
        header = plain[len(prompt) :].partition(self.mark)[0]
        if not header.strip():
            return start
        if not self.whole.startswith(header, start):
            raise self._not_found(n)
        return start + len(header)

    def _after_turn(self, n: int) -> int:
        """Return where the text that closes a turn ends, without white space after it."""
        turn, after = self.messages[: n + 1], self.messages
        if len(turn) == len(after):
            after = [*turn, {"role": "user", "content": self.mark * 2}]
        closed = self.whole if len(turn) == len(self.messages) else self._rendered(turn)
        going_on = self.whole if after is self.messages else self._tried(after)
        if going_on is None:  # the template refuses a user's turn here
            return len(closed.rstrip())
        if going_on.startswith(closed) and self.whole.startswith(closed):
            return len(closed.rstrip())
        if len(turn) < len(self.messages) and (stop := self._before_next_prompt(n)) is not None:
            return stop
        is_last = len(turn) == len(self.messages)
        stops = []
        for here, end, other in self._places(
            n, self.view, _View(turn, closed), _View(after, going_on)
        ):
            shared = self._shared(closed[end.stop :], going_on[other.stop :]).rstrip()
            if not shared and is_last:
                shared = closed[end.stop :].rstrip()  # nothing but the end of the conversation
            stops.append(here.stop + len(shared))
        return max(stops)

    def _before_next_prompt(self, n: int) -> int | None:
        """Return where turn ``n`` ends, by what closes it where another answer is asked for;
        None if the prompt itself does not show that.
        """
        user = [{"role": "user", "content": self.mark}]
        plain, asked = self._tried(user) or "", self._tried(user, prompts=True) or ""
        prompt = asked[len(plain) :] if asked.startswith(plain) else ""
        turn = self.messages[: n + 1]
        text = self._tried(turn, prompts=True) or ""
        if not prompt or not text.endswith(prompt):
            return None
        stop = len(text) - len(prompt)
        for here, there in self._places(n, self.view, _View(turn, text, True)):
            tail = text[there.stop : stop]
            if there.stop <= stop and self.whole.startswith(tail, here.stop):
                return here.stop + len(tail.rstrip())
        return None

    def _shared(self, end: str, other: str) -> str:
        """Return the common beginning of what follows a turn at the end of a conversation,
        and of what follows it where the conversation goes on.
        """
        shared = end[: _common_start(end, other)]
        if shared in (end, other):
            return shared
        tokens = [found.end() for found in self.finder.tokens.finditer(shared)]
        # the rest of it may be the beginning of two different tokens
        return shared[: tokens[-1]] if tokens else re.sub(r"\S+$", "", shared)

    def _places(self, n: int, *views: _View) -> Iterator[list[_Region]]:
        """Yield the place of message ``n`` in each rendering, for each way to exchange its text
        that shows one. The same part of it is exchanged in all renderings, so that what follows
        the places can be compared.
        """
        message = self.messages[n]
        ways = [
            _exchanged(message, self.mark),
            _exchanged(message, self.mark, in_calls=True),
            # reasoning may be left out: then the text that a message without one gets
            {**message, "content": self.mark},
        ]
        is_found = False
        for number, changed in enumerate(ways):
            if changed in ways[:number]:
                continue
            regions = [self._region(n, changed, view) for view in views]
            found = [region for region in regions if region is not None]
            if len(found) == len(views):
                is_found = True
                yield found
        if not is_found:
            raise self._not_found(n)

    def _place(self, n: int) -> _Region:
        """Return the place of message ``n`` in the rendering."""
        return next(self._places(n, self.view))[0]

    def _region(self, n: int, changed: Message, view: _View) -> _Region | None:
        """Return the place of message ``n`` in a rendering; None if ``changed``, which takes its
        place, does not show where it is.
        """
        messages, text, prompts = view
        other = self._tried([*messages[:n], changed, *messages[n + 1 :]], prompts=prompts)
        if other is None or other.count(self.mark) != text.count(self.mark) + 1:
            return None
        start = _common_start(text, other)
        stop_in_other = len(other) - _common_end(text[start:], other[start:])
        if not start <= other.index(self.mark) < stop_in_other:
            return None
        return _Region(start, len(text) - (len(other) - stop_in_other))


def _common_start(one: str, other: str) -> int:
    """Return the number of characters at the beginning that are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(one: str, other: str) -> int:
    """Return the number of characters at the end that are equal."""
    return _common_start(one[::-1], other[::-1])


def _has_text(message: Message) -> bool:
    """Return True if a message has a text that a template has to show."""
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and _is_text(part.get("text")) for part in content)
    return _is_text(content) or bool(message.get("tool_calls"))


def _as_text(value: Any) -> str:
    """Return a value as JSON, its characters as they are: ``str`` escapes private ones."""
    return json.dumps(value, ensure_ascii=False)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _exchanged(message: Message, mark: str, *, in_calls: bool = False) -> Message:
    """Return a message with ``mark`` in place of its text.

    A message without one has it in its last tool call, in its reasoning, or gets a text.
    ``in_calls``: a message with tool calls has the mark there.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(calls, list) and calls and (in_calls or not _is_text(content)):
        changed = _exchanged_call(calls[-1], mark)
        if changed is not None:
            return {**message, "tool_calls": [*calls[:-1], changed]}
    if isinstance(content, list):
        for number in reversed(range(len(content))):
            part = content[number]
            if isinstance(part, dict) and _is_text(part.get("text")):
                parts = [*content]
                parts[number] = {**part, "text": mark}
                return {**message, "content": parts}
    if not _is_text(content):
        key = next((key for key in REASONING_KEYS if _is_text(message.get(key))), None)
        if key is not None:
            return {**message, key: mark}
    return {**message, "content": mark}


def _exchanged_call(call: Any, mark: str) -> Any:
    """Return a tool call with ``mark`` in its arguments; None if it has another form."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict):
        return None
    arguments = inner.get("arguments")
    if isinstance(arguments, dict):
        arguments = {**arguments, (list(arguments) or ["value"])[-1]: mark}
    else:
        arguments = mark
    changed = {**inner, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed
