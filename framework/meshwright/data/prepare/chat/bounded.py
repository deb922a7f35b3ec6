"""A child process that renders conversations, with limits on its CPU time and memory.

    process that prepares    --record (JSON)-->   child: jinja2's sandbox
                             <--text, spans, or the problem--

A template comes from anywhere. jinja2's sandbox keeps it from running code, and limits a ``range``,
but not loops in loops, powers of numbers or the length of a text. The system ends a child that
exceeds its CPU time; memory beyond the limit is refused to it. The child is forked, so that it
starts at once, and it ends with its pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import time
from collections.abc import Sequence
from typing import Any

from meshwright.data.prepare.chat.rendering import Renderer, RenderingError
from meshwright.data.prepare.chat.spans import Conversation, SpanFinder
from meshwright.data.prepare.chat.template import ChatTemplate
from meshwright.system.bounded import read_text

CPU_S = 60
"""CPU seconds for one record."""
MEMORY_BYTES = 1 << 30
"""Memory beyond that of the forking process."""
MAX_PROBLEM = 500
_LENGTH = struct.Struct("<Q")


class TemplateLimitError(Exception):
    """A template that exceeded a limit, so that its process is gone."""


class BoundedRenderer:
    """Renderer of a template in a child process, started at the first call."""

    def __init__(self, template: ChatTemplate, tokens: Sequence[str], now: str) -> None:
        """Keep what the child gets.

        Args:
            template: the template.
            tokens: texts of the tokenizer's added tokens.
            now: ISO date and time that the template may write.
        """
        self.template, self.tokens, self.now = template, tokens, now
        self._child: tuple[int, int, int] | None = None
        """(id, pipe to it, pipe from it)."""

    def open(self) -> None:
        """Compile the template in the child.

        Raises:
            RenderingError: its text is no template.
            TemplateLimitError: compiling it exceeds a limit.
        """
        self._ask({})

    def render(self, conversation: Conversation, *, prompts: bool = False) -> str:
        """Return the text of a conversation. Raises RenderingError, TemplateLimitError.

        ``prompts``: add what precedes the assistant's answer (``add_generation_prompt``).
        """
        return str(self._ask({**conversation._asdict(), "prompts": prompts})["text"])

    def find(self, conversation: Conversation) -> tuple[str, list[list[int]]]:
        """Return the text of a conversation and the spans of its labels.
        Raises RenderingError, TemplateLimitError.
        """
        answer = self._ask({**conversation._asdict(), "finds": True})
        return answer["text"], answer["spans"]

    def closes_turns(self) -> bool:
        """Return False if nothing follows an answer, so that a model does not learn to stop."""
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        try:
            text, spans = self.find(Conversation(talk, [False, True]))
        except (RenderingError, TemplateLimitError):
            return True
        finally:
            self.close()
        return not text[slice(*spans[-1])].endswith("Hello")

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            pid, *pipes = self._child
            self._child = None
            for pipe in pipes:
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = self._start()
        _, to_child, from_child = self._child
        answer: dict[str, Any] | None = None
        with contextlib.suppress(OSError):
            _send(to_child, question)
            answer = _receive(from_child)
        if answer is None:
            raise TemplateLimitError(self._death())
        if "problem" in answer:
            raise RenderingError(answer["problem"])
        return answer

    def _start(self) -> tuple[int, int, int]:
        questions, to_child = os.pipe()
        from_child, answers = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(to_child)
                os.close(from_child)
                _serve(self, questions, answers)
            finally:
                os._exit(1)
        os.close(questions)
        os.close(answers)
        return pid, to_child, from_child

    def _death(self) -> str:
        """Return why the child is gone, and forget it."""
        assert self._child is not None
        pid, *pipes = self._child
        self._child = None
        for pipe in pipes:
            os.close(pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == -signal.SIGXCPU:
            return f"takes more than {CPU_S} s of CPU time"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ended the process that renders it ({how})"


def _serve(bounded: BoundedRenderer, questions: int, answers: int) -> None:
    """Render what the parent sends until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the preparing process ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _limit(resource.RLIMIT_AS, _memory_bytes() + MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    finder = None
    while (question := _receive(questions)) is not None:
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
        try:
            if finder is None:
                template = bounded.template
                renderer = Renderer(template.texts, template.specials, bounded.now)
                finder = SpanFinder(renderer, bounded.tokens)
            answer = _answer(finder, question)
        except RenderingError as error:
            answer = {"problem": _shortened(str(error))}
        except MemoryError:
            answer = {"problem": f"needs more than {MEMORY_BYTES >> 20:,} MiB of memory"}
        except Exception as error:  # of a rendering in a form that nobody has thought of
            answer = {"problem": _shortened(f"fails: {type(error).__name__}: {error}")}
        _send(answers, answer)
    os._exit(0)


def _answer(finder: SpanFinder, question: dict[str, Any]) -> dict[str, Any]:
    finds = question.pop("finds", False)
    if not question:
        return {}
    prompts = question.pop("prompts", False)
    conversation = Conversation(**question)
    if finds:
        text, spans = finder.find(conversation)
        return {"text": text, "spans": spans}
    rendered = finder.renderer.render(
        conversation.messages, conversation.tools, conversation.variables, prompts=prompts
    )
    return {"text": rendered.text}


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_PROBLEM else f"{text[:MAX_PROBLEM]}..."


def _limit(kind: int, soft: int) -> None:
    """Set a soft limit, at most the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _memory_bytes() -> int:
    """Return the size of this process's address space."""
    return int(read_text("/proc/self/statm").split()[0]) * resource.getpagesize()


def _send(pipe: int, value: Any) -> None:
    """Write a JSON value, after its length."""
    content = json.dumps(value).encode()
    rest = memoryview(_LENGTH.pack(len(content)) + content)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int) -> Any:
    """Read a JSON value; None at the end of the pipe."""
    head = _read(pipe, _LENGTH.size)
    if head is None:
        return None
    content = _read(pipe, _LENGTH.unpack(head)[0])
    return None if content is None else json.loads(content)


def _read(pipe: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(pipe, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
