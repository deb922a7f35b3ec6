"""The mask of a template without {% generation %} is that of transformers
for a copy of the template with the tag, written by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.prepare.records import Form
from tests.framework.data.corpora import made, write_lines
from tests.framework.data.prepare.chats import RECORDS, folder_of, template
from tests.framework.data.prepare.test_chat_templates import (
    documents,
    kinds_of,
    rendered,
    transformers_tokenizer,
)

BEGIN, END = "{% generation %}", "{% endgeneration %}"
TAGGED = {
    "chatml": [
        (
            "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'"
            " }}",
            "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
            + BEGIN
            + "{{ message['content'] + '<|im_end|>' }}"
            + END
            + "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
        )
    ],
    "command_r": [
        (
            "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() +"
            " '<|END_OF_TURN_TOKEN|>' }}",
            "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
            + BEGIN
            + "{{ content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
            + END,
        )
    ],
    "gemma": [
        (
            "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
            "{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}"
            + BEGIN
            + "{{ message['content'] | trim + '<end_of_turn>' }}"
            + END
            + "{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}",
        )
    ],
    "llama3_1": [
        (
            "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+"
            " message['content'] | trim + '<|eot_id|>' }}",
            "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
            "{%- if message.role == 'assistant' %}{%- generation %}"
            "{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}"
            "{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}",
        ),
        (
            '        {{- \'{"name": "\' + tool_call.name',
            '{%- generation %}        {{- \'{"name": "\' + tool_call.name',
        ),
        ('        {{- "}" }}\n        {{- "<|eot_id|>" }}', "{{- '}<|eot_id|>' }}" + END),
    ],
    "qwen3": [
        (
            "        {%- if loop.index0 > ns.last_query_index %}",
            "        {{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}"
            "{%- if loop.index0 > ns.last_query_index %}",
        ),
        ("'<|im_start|>' + message.role + '\\n<think>\\n' +", "'<think>\\n' +"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}"),
        (
            "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}",
            "        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n"
            '    {%- elif message.role == "tool" %}',
        ),
    ],
    "vicuna": [
        (
            "{{- 'ASSISTANT: ' + message['content'] + eos_token -}}",
            "{{- 'ASSISTANT:' -}}{%- generation -%}{{- ' ' + message['content'] + eos_token -}}"
            "{%- endgeneration -%}",
        )
    ],
}
"""Template -> replacements that put the tag around what the model writes."""


def tagged(name: str) -> str:
    text = template(name)
    for old, new in TAGGED[name]:
        assert old in text, (name, old)
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", [*TAGGED, "smollm3"])
def test_the_mask_is_that_of_transformers_for_a_tagged_copy(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    copy = tmp_path / "tagged.jinja"
    copy.write_text(tagged(name) if name in TAGGED else template(name))
    kinds = kinds_of(name)
    if name == "qwen3":  # the tag marks the empty reasoning of the prompt too
        kinds.remove("off")
    lines = write_lines(tmp_path / "a.jsonl", [RECORDS[kind] for kind in kinds])
    found = []
    for number, choice in enumerate(["tokenizer", str(copy)]):
        out = tmp_path / f"out{number}"
        made(out, folder, lines, form=Form.MESSAGES, chat_template=choice)
        found.append(documents(out))
    theirs = transformers_tokenizer(folder)
    options = {"chat_template": copy.read_text(), "return_assistant_tokens_mask": True}
    for number, kind in enumerate(kinds):
        marked = rendered(theirs, RECORDS[kind], **options)
        for each in found:
            assert each.ids[number] == marked["input_ids"], kind
            assert each.masks[number] == [bool(one) for one in marked["assistant_masks"]], kind
