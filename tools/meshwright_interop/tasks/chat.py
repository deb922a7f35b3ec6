"""Prompts of a task as a chat template writes them: the texts of lm-evaluation-harness's own class
for transformers (``HFLM.apply_chat_template``), rendered in a bounded process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.data.prepare.chat.bounded import BoundedRenderer, TemplateLimitError
from meshwright.data.prepare.chat.opening import open_chat
from meshwright.data.prepare.chat.rendering import RenderingError
from meshwright.data.prepare.chat.spans import MARKS, Conversation
from meshwright.errors import ConfigError
from meshwright.terminal.output import print_warning

Message = dict[str, Any]


class ChatPrompts:
    """Renderer of prompts, by one template."""

    def __init__(self, choice: str, path: Path, tokenizer: Tokenizer) -> None:
        """Open a template.

        Args:
            choice: ``tokenizer``, for the template beside the tokenizer, or a .jinja file.
            path: the run's ``tokenizer.json``. A corpus beside it gives the date that its
                conversations have.
            tokenizer: that tokenizer.

        Raises:
            DataError: there is no such template, or it is none.
        """
        self._renderer: BoundedRenderer = open_chat(choice, path, tokenizer, path.parent)
        self._has_warned = False

    @property
    def text(self) -> str:
        """Return the text of the template."""
        return self._renderer.template.texts["default"]

    @property
    def name(self) -> str:
        """Return a name that no other template or set of special tokens has."""
        return self._renderer.template.sha256[:16]

    @property
    def path(self) -> Path:
        """Return the file of the template."""
        return self._renderer.template.path

    def render(self, messages: Sequence[Message], *, asks: bool) -> str:
        """Return the prompt of a conversation.

        Without its system message where the template refuses it, as the library does.

        Args:
            messages: the conversation.
            asks: it ends where the assistant's answer begins; False: with the last message, whose
                turn stays open.

        Raises:
            ConfigError: the template refuses the conversation, or exceeds a limit.
        """
        others = [message for message in messages if message["role"] != "system"]
        try:
            try:
                return self._rendered(messages, asks)
            except RenderingError as error:
                if len(others) in (0, len(messages)):
                    raise
                self._warn(error)
                return self._rendered(others, asks)
        except (RenderingError, TemplateLimitError) as error:
            raise ConfigError(
                "MW-INTEROP-176",
                f"the chat template {self.path} cannot write a task's prompt, it {error}: name"
                " another with --chat-template FILE, or leave the option out",
            ) from None

    def close(self) -> None:
        """End the process that renders."""
        self._renderer.close()

    def _rendered(self, messages: Sequence[Message], asks: bool) -> str:
        if asks:
            return self._text(messages, asks=True)
        *before, last = messages
        shown = "".join(str(message["content"]) for message in messages)
        mark = next((char for code in MARKS if (char := chr(code)) not in shown), "")
        if not mark:
            raise RenderingError("cannot be asked to go on: the prompt has every private character")
        # the mark shows where the template has the end of the text, and the blank whether it
        # keeps blanks there
        text = self._text([*before, {**last, "content": f"{last['content']}{mark} "}], asks=False)
        end = text.rfind(mark)
        if end < 0:
            raise RenderingError("leaves the beginning of the answer out")
        keeps_blanks = text.startswith(f"{mark} ", end)
        return text[:end] if keeps_blanks else text[:end].rstrip()

    def _text(self, messages: Sequence[Message], *, asks: bool) -> str:
        conversation = Conversation(list(messages), [False] * len(messages))
        return self._renderer.render(conversation, prompts=asks)

    def _warn(self, error: RenderingError) -> None:
        if not self._has_warned:
            self._has_warned = True
            print_warning(
                f"the chat template {self.path} refuses a system message ({error}): prompts are"
                " written without it, as lm-evaluation-harness does"
            )
