"""Places of the assistant's text: odd templates, odd conversations, flags of messages, tokens over
the edges of a span.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshwright.data.prepare.chat.encode import mask_of
from meshwright.data.prepare.chat.rendering import NO_DATE, Renderer, RenderingError
from meshwright.data.prepare.chat.spans import Conversation, SpanFinder
from meshwright.data.prepare.records import Broken
from tests.framework.data.prepare.chats import (
    PLAIN,
    SEVERAL,
    THINKING,
    special_tokens,
    template,
    turn,
)
from tests.framework.data.prepare.test_chat_masks import TAGGED, tagged

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<end>"]
EACH = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"


def found(text: str, messages: list[dict[str, Any]], *, without: tuple[int, ...] = ()) -> list[str]:
    """Return the labels of a conversation; the messages in ``without`` do not count."""
    counts = [
        message["role"] == "assistant" and n not in without for n, message in enumerate(messages)
    ]
    finder = SpanFinder(Renderer({"default": text}, SPECIALS, NO_DATE), TOKENS)
    whole, spans = finder.find(Conversation(messages, counts))
    return [whole[start:stop] for start, stop in spans]


def test_a_template_that_changes_what_it_writes() -> None:
    shouting = EACH + "{{ m.role + ':' + m.content | upper | trim }}<end>" + PROMPT
    assert found(shouting, SEVERAL) == ["FOUR, STRASSE 東京.<end>", "IT'S FIVE<end>"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # every second turn alone
        (EACH + "{% if loop.index0 > 1 %}{{ m.role + ':' + m.content }}<end>{% endif %}" + PROMPT,
         "leaves out message 1 (user)"),
        (EACH + "{{ m.role + ':' + m.content }}<end>{% if m.role == 'assistant' %}"
         "{{ m.content }}{% endif %}" + PROMPT, "message 2 (assistant) 2 times"),
        (EACH + "{{ m.role + ':' + m.content }}<end>{% endfor %}{{ messages[0].content }}",
         "message 1 (user) 2 times"),
        # the question shows with its answer alone
        (EACH + "{% if m.role == 'assistant' %}user:{{ messages[loop.index0 - 1].content }}<end>"
         "assistant:{{ m.content }}<end>{% endif %}" + PROMPT, "leaves out message 3 (user)"),
        # answers are written before the questions
        (EACH + "{% if m.role == 'assistant' %}{{ m.content }}<end>{% endif %}{% endfor %}"
         + EACH + "{% if m.role == 'user' %}{{ m.content }}<end>{% endif %}" + PROMPT,
         "hides where the text of message 2 is"),
        # the prompt is one that no turn has
        (EACH + "{{ m.role + ':' + m.content }}<end>{% endfor %}{% if add_generation_prompt %}"
         "<s>Answer now{% endif %}", "hides where the text of message 2 is"),
        ("{% for m in messages %}{% if m.content == 'Hi' %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.content.index('i') }}{{ m.content }}{% endfor %}", "refuses the conversation with"),
    ],
)  # fmt: skip
def test_a_place_that_is_not_known_is_an_error(text: str, problem: str) -> None:
    talk = [turn("user", "ask i"), turn("assistant", "say i"), turn("user", "ask again i")]
    with pytest.raises(RenderingError) as caught:
        found(text, [*talk, turn("assistant", "say again i")])
    assert problem in str(caught.value)


def test_calls_that_a_template_leaves_out() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [turn("user", "a"), turn("assistant", "b", tool_calls=[call])]
    with pytest.raises(RenderingError, match="leaves out 'tool_calls' of message 2"):
        found(template("chatml"), talk)


def test_a_header_that_comes_with_the_answer_alone_is_no_label() -> None:
    """Where ``add_generation_prompt`` has no effect."""
    text = EACH + "{{ '<|im_start|>' + m.role + '\\n' + m.content }}<|im_end|>{% endfor %}"
    assert found(text, SEVERAL) == ["Four, straße 東京.<|im_end|>", "It's five<|im_end|>"]


def test_a_conversation_that_begins_with_the_assistant() -> None:
    talk = [turn("assistant", "Welcome"), turn("user", "Hi"), turn("assistant", "Hello")]
    for name in ("chatml", "qwen2_5", "llama3_1"):
        end = "<|im_end|>" if name != "llama3_1" else "<|eot_id|>"
        assert found(template(name), talk) == [f"Welcome{end}", f"Hello{end}"], name


def test_two_answers_in_a_row() -> None:
    talk = [turn("user", "Hi"), turn("assistant", "One"), turn("assistant", "Two")]
    assert found(template("chatml"), talk) == ["One<|im_end|>", "Two<|im_end|>"]
    assert found(template("chatml"), talk, without=(1,)) == ["Two<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_an_answer_that_does_not_count(name: str) -> None:
    for text in (template(name), tagged(name)):
        whole = found(text, THINKING)
        assert len(whole) == 2
        assert found(text, THINKING, without=(1,)) == whole[1:]
        assert found(text, THINKING, without=(3,)) == whole[:1]


def test_an_answer_that_does_not_count_between_several_tags() -> None:
    """Marks are told by their place where there are not as many as answers."""
    text = (
        EACH + "{% if m.role == 'assistant' %}assistant:{% generation %}{{ m.content }}"
        "{% endgeneration %}{% generation %}<end>{% endgeneration %}\n"
        "{% else %}{{ m.role + ':' + m.content }}\n{% endif %}" + PROMPT
    )
    talk = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert found(text, talk) == ["b", "<end>", "d", "<end>"]
    assert found(text, talk, without=(1,)) == ["d", "<end>"]
    assert found(text, talk, without=(3,)) == ["b", "<end>"]


def test_a_tag_whose_place_is_hidden() -> None:
    macro = (
        "{% macro say(m) %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endmacro %}" + EACH + "{{ say(m) }}{% endfor %}"
    )
    with pytest.raises(RenderingError, match="inside a macro"):
        found(macro, SEVERAL)


def test_masks_of_random_conversations_are_those_of_the_tags() -> None:
    """With headers, ends of turns and reasoning in the texts of messages."""
    num_compared = 0
    for seed in range(300):
        rng = random.Random(seed)
        name = rng.choice(sorted(TAGGED))
        talk = random_talk(rng, name)
        conversation = Conversation(talk, [each["role"] == "assistant" for each in talk])
        plain, marked = (
            Renderer({"default": text}, SPECIALS, NO_DATE)
            for text in (template(name), tagged(name))
        )
        theirs = marked.render(talk)
        ours = SpanFinder(plain, [*special_tokens(name), *PLAIN]).find(conversation)
        assert ours.text == theirs.text

        def shape(spans: Any, text: str = theirs.text) -> list[tuple[int, str]]:
            return [(a, text[a:b].rstrip()) for a, b in spans if text[a:b].strip()]

        assert shape(ours.spans) == shape(theirs.generated), (seed, name)
        num_compared += len(ours.spans)
    assert num_compared > 500


def random_talk(rng: random.Random, name: str) -> list[dict[str, Any]]:
    parts = [*special_tokens(name), *PLAIN, "Hello", "\n\n", " ", "<", "assistant\n", "USER:", "}"]
    parts += ["ASSISTANT: ", "model\n", "é", "<think>\nx\n</think>\n\n", "<|im_end|>\n<|im_start|>"]

    def text() -> str:
        return "".join(rng.choice(parts) for _ in range(rng.randint(1, 5)))

    talk = []
    for _ in range(rng.randint(1, 4)):
        talk += [turn("user", text()), turn("assistant", text())]
        has_calls = name in ("qwen3", "llama3_1") and rng.random() < 0.3
        if has_calls:
            arguments = {key: text() for key in rng.sample("abc", rng.randint(0, 2))}
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            talk[-1] |= {"tool_calls": [call], "content": rng.choice([None, text()])}
            talk.append(turn("tool", text()))
        elif name == "qwen3" and rng.random() < 0.3:
            talk[-1]["reasoning_content"] = text()
    return talk


@pytest.mark.parametrize(
    ("text", "span", "offsets", "counted"),
    [
        ("ab cd ef", (3, 5), [(0, 2), (2, 3), (3, 5), (5, 8)], [2]),
        # white space alone outside: the token counts
        ("ab cd ef", (3, 5), [(0, 2), (2, 5), (5, 8)], [1]),
        ("ab cd\n\nef", (3, 5), [(0, 2), (2, 3), (3, 7), (7, 9)], [2]),
        # a character of the prompt: it does not
        ("ab:cdef g", (3, 7), [(0, 2), (2, 5), (5, 7), (7, 9)], [2]),
        ("ab cd! ef", (3, 5), [(0, 2), (2, 3), (3, 4), (4, 6), (6, 9)], [2]),
        # tokens of white space before and after do not
        ("ab\ncd\nef", (3, 5), [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8)], [2]),
        # three tokens of one character
        ("a東b", (1, 2), [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], [1, 2, 3]),
    ],
)
def test_tokens_over_the_edge_of_a_span(
    text: str, span: tuple[int, int], offsets: list[tuple[int, int]], counted: list[int]
) -> None:
    mask = mask_of(text, [list(span)], np.array(offsets))
    assert np.flatnonzero(mask).tolist() == counted


def test_a_span_without_a_token_of_its_own() -> None:
    with pytest.raises(Broken, match="no token for 'cd' alone"):
        mask_of("ab:cd", [[3, 5]], np.array([(0, 5)]))
