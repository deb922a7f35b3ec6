"""Rendering of a chat template in jinja2's sandbox,
with the options, filters and functions that transformers gives to a template.

Checked against transformers 5.23, ``utils/chat_template_utils.py``. The sandbox keeps a template
from running code. It bounds neither time nor memory: :mod:`.bounded` does.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 26
"""Most characters of one rendering."""
MAX_DATE_FORMAT = 1000
NO_DATE = "1970-01-01T00:00:00"
"""Date of a template that writes none."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the standard one first."""

Message = dict[str, Any]


class RenderingError(Exception):
    """A conversation that a template refuses or cannot render."""


class Rendering(NamedTuple):
    """The text of a conversation."""

    text: str
    generated: tuple[tuple[int, int], ...]
    """Characters [start, stop) between ``{% generation %}`` and ``{% endgeneration %}``."""


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, whose text the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation = True  # type: ignore[attr-defined]
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text = str(caller())
        marks: list[tuple[int, str]] | None = self.environment.marks  # type: ignore[attr-defined]
        if marks is not None:
            marks.append((self.environment.num_written, text))  # type: ignore[attr-defined]
        return text


class _TemplateDict:
    """``dict`` for a template, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """``namespace`` for a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not store {name!r}")


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without the escapes of HTML that jinja2's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def now_to_the_second() -> str:
    """Return the local date and time in ISO form."""
    return datetime.now().isoformat(timespec="seconds")


class Renderer:
    """A compiled chat template."""

    def __init__(self, texts: dict[str, str], specials: dict[str, str], now: str) -> None:
        """Compile the template.

        Args:
            texts: name of each text of the template -> text.
            specials: variables for every rendering.
            now: ISO date and time that ``strftime_now`` formats.

        Raises:
            RenderingError: a text is no template.
        """
        self._specials, self._now = specials, datetime.fromisoformat(now)
        self._templates: dict[str, jinja2.Template] = {}
        self._has_generation: dict[str, bool] = {}
        for name, text in texts.items():
            environment = self._environment()
            try:
                self._templates[name] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise RenderingError(f"line {error.lineno}: {error.message}") from None
            except Exception as error:
                raise RenderingError(f"{type(error).__name__}: {error}") from None
            self._has_generation[name] = environment.has_generation  # type: ignore[attr-defined]

    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.extend(has_generation=False, marks=None, num_written=0)
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": self._format_now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }
        return environment

    def _format_now(self, form: str) -> str:
        if len(form) > MAX_DATE_FORMAT:
            raise jinja2.TemplateError("a format of a date is too long")
        return self._now.strftime(form)

    def has_generation(self, tools: Any) -> bool:
        """Return True if the template marks what the assistant writes."""
        return self._has_generation[self._name(tools)]

    def _name(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def render(
        self,
        messages: list[Message],
        tools: Any = None,
        variables: dict[str, Any] | None = None,
        *,
        prompts: bool = False,
    ) -> Rendering:
        """Render a conversation.

        Args:
            messages: the conversation.
            tools: schemas of the tools; None: there are none.
            variables: further variables of the template.
            prompts: add what precedes the assistant's answer (``add_generation_prompt``).

        Raises:
            RenderingError: the template refuses the conversation, or fails.
        """
        template = self._templates[self._name(tools)]
        environment: Any = template.environment
        environment.marks, environment.num_written = [], 0
        blocks = []
        given = {**self._specials, **(variables or {})}
        try:
            for block in template.generate(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompts,
                **given,
            ):
                blocks.append(block)
                environment.num_written += len(block)
                if environment.num_written > MAX_CHARACTERS:
                    raise RenderingError(f"more than {MAX_CHARACTERS:,} characters")
        except (RenderingError, MemoryError):
            raise
        except jinja2.TemplateError as error:
            raise RenderingError(str(error) or type(error).__name__) from None
        except Exception as error:  # of the template's expressions: anything
            raise RenderingError(f"{type(error).__name__}: {error}") from None
        text = "".join(blocks)
        marked = []
        for start, inner in environment.marks:
            if text[start : start + len(inner)] != inner:
                raise RenderingError(
                    "{% generation %} stands inside a macro or another block, which hides its place"
                )
            if inner:
                marked.append((start, start + len(inner)))
        return Rendering(text, tuple(marked))


def _with_reasoning(message: Message) -> Message:
    """Return a message without nulls, its reasoning under the names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING_KEYS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}
