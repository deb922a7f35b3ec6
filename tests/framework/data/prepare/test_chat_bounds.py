"""A hostile chat template: it runs no code, and ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.data.prepare.chat import bounded, rendering
from meshwright.data.prepare.chat.bounded import BoundedRenderer, TemplateLimitError
from meshwright.data.prepare.chat.rendering import NO_DATE, Renderer, RenderingError
from meshwright.data.prepare.chat.spans import Conversation
from meshwright.data.prepare.chat.template import ChatTemplate
from meshwright.data.prepare.records import Form
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.framework.data.prepare.chats import ONE
from tests.support.errors import raises

TALK = Conversation(ONE, [False, True])


@contextmanager
def opened(text: str) -> Iterator[BoundedRenderer]:
    template = ChatTemplate(Path("x.jinja"), {"default": text}, {})
    one = BoundedRenderer(template, [], NO_DATE)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('touch escaped') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.x}'.format(messages) }}",
        "{{ ('{0.' ~ '__class__.x}').format_map({'0': messages}) }}",
        "{{ dict.__base__ }}{{ dict.mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
        "{{ lipsum.__globals__['os'].popen('touch escaped').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self.__init__ }}{{ joiner.__init__.__globals__ }}",
        "{{ strftime_now('%Y' * 100000) }}",
    ],
)
def test_no_code_is_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(text) as one, pytest.raises(RenderingError):
        one.render(TALK)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) > 1 }}",
        "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = (n.x + 9) ** 999 %}"
        "{% endfor %}",
    ],
    ids=["loops", "constant", "numbers"],
)
def test_time_is_bounded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "CPU_S", 1)
    with opened(text) as one:
        for _ in range(2):  # a new child answers the second time
            with pytest.raises(TemplateLimitError, match="takes more than 1 s of CPU time"):
                one.find(TALK)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for i in range(10 ** 12) %}{% endfor %}", "OverflowError"),
        ("{{ 'a' * 10 ** 10 }}", "MiB of memory"),
        ("{{ '%1000000000d' | format(1) * 9 }}", "MiB of memory"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}{{ n.x }}", "MiB of memory"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{{ 'ab' * 999 }}{% endfor %}"
         "{% endfor %}", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ""),
    ],
    ids=["range", "text", "width", "doubled", "output", "recursion", "depth"],
)  # fmt: skip
def test_memory_and_output_are_bounded(
    text: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MEMORY_BYTES", 1 << 28)
    monkeypatch.setattr(rendering, "MAX_CHARACTERS", 1 << 22)
    began_s = time.process_time()
    with opened(text) as one, pytest.raises((RenderingError, TemplateLimitError)) as caught:
        one.find(TALK)
    assert problem in str(caught.value)
    assert time.process_time() - began_s < 5


def test_after_a_refused_record_the_same_child_goes_on() -> None:
    text = "{% if messages[0].content == 'big' %}{{ 'a' * 10 ** 10 }}{% endif %}"
    text += "{% for m in messages %}{{ m.role + ':' + m.content }}<end>{% endfor %}"
    big = [{"role": "user", "content": "big"}, *ONE[1:]]
    with opened(text) as one:
        before = one.find(TALK)
        with pytest.raises(RenderingError):
            one.find(Conversation(big, [False, True]))
        assert one.find(TALK) == before
        assert one.render(TALK) == before[0]


def test_no_child_is_left() -> None:
    with opened("{% for m in messages %}{{ m.role + m.content }}<end>{% endfor %}") as one:
        one.find(TALK)
        assert one._child is not None
        pid = one._child[0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_record_that_takes_too_long_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its line; broken records are skipped, but not one after the other for a minute each."""
    monkeypatch.setattr(bounded, "CPU_S", 1)
    text = "{% for m in messages %}{{ m.role + ':' + m.content }}<end>{% if m.content == 'slow' %}"
    text += "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "slow.jinja").write_text(text + "{% endif %}{% endfor %}")
    slow = {"messages": [{"role": "user", "content": "slow"}, *ONE[1:]]}
    records = [{"messages": ONE}, {"messages": []}, slow, *[slow] * 50]
    lines = write_lines(tmp_path / "a.jsonl", records)
    choice = str(tmp_path / "slow.jinja")
    tokenizer = bytes_tokenizer(tmp_path / "tokenizer")
    for workers in (1, 2):
        with raises("MW-DATA-140", f"{lines}:3", "slow.jinja", "1 s of CPU time"):
            made(
                tmp_path / "out",
                tokenizer,
                lines,
                form=Form.MESSAGES,
                chat_template=choice,
                num_workers=workers,
                block_bytes=1 << 20,
                skip_broken=True,
            )
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{% for %}", "{{ 'a' * 10 ** 10 }", "{% endgeneration %}"])
def test_what_is_no_template_is_an_error_before_a_record_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text(text)
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": ONE}])
    with raises("MW-DATA-139", "bad.jinja", "line 1"):
        made(
            tmp_path / "out",
            bytes_tokenizer(tmp_path / "tokenizer"),
            lines,
            form=Form.MESSAGES,
            chat_template=str(tmp_path / "bad.jinja"),
        )


def test_a_record_sets_no_variable_of_the_renderer() -> None:
    one = Renderer({"default": "{{ messages }}"}, {}, NO_DATE)
    for name in ("self", "messages"):
        with pytest.raises(RenderingError):
            one.render(ONE, variables={name: 1})
