"""Conversations by the templates of families of models: the tokens are those of transformers,
and what counts is what the assistant writes.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshwright.data import indexed
from meshwright.data.prepare.records import Form
from tests.framework.data.corpora import made, write_lines
from tests.framework.data.prepare.chats import (
    NAMES,
    RECORDS,
    folder_of,
)

ANSWERS = {
    "alpaca": "{}",
    "chatml": "{}<|im_end|>",
    "command_r": "{}<|END_OF_TURN_TOKEN|>",
    "deepseek_r1": "{}<｜end▁of▁sentence｜>",
    "falcon": "{}",
    "gemma": "{}<end_of_turn>",
    "glm4": "{}",
    "gptoss": "<|channel|>final<|message|>{}<|end|>",
    "granite": "{}<|end_of_text|>",
    "llama2": "{} </s>",
    "llama3_1": "{}<|eot_id|>",
    "mistral_v01": "{}</s>",
    "mistral_v03": "{}</s>",
    "phi3": "{}<|end|>",
    "qwen2_5": "{}<|im_end|>",
    "qwen3": "{}<|im_end|>",
    "smollm3": "{}<|im_end|>",
    "stablelm": "{}</s>",
    "thinking_prompt": "{}<|im_end|>",
    "tulu": "{}</s>",
    "vicuna": "{}</s>",
    "yi": "{}<|im_end|>",
    "zephyr": "{}</s>",
}
"""What a model writes of an answer within a conversation: its text and the end of the turn."""
LAST = {
    "alpaca": "{}\n\n</s>",
    "gptoss": "<|channel|>final<|message|>{}<|return|>",
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "thinking_prompt": "</think>\n\n{}<|im_end|>",
}
"""The same of the last answer, where that differs."""
CONTENTS = {
    "one": ["Hello there."],
    "several": ["Four, straße 東京.", "It's five"],
    "system": ["Four, straße 東京.", "It's five"],
    "off": ["Four, straße 東京.", "It's five"],
    "open": ["Four, straße 東京."],
    "thinking": ["<think>\nA greeting\n</think>\n\nHello", "See you"],
    "calling": ["", "Four", "Welcome"],
}
CALLED = {
    "glm4": 'add\n{"a": 2, "b": "<é>"}',
    "gptoss": 'to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": "<é>"}<|call|>',
    "granite": (
        '<|tool_call|>[\n    {\n        "name": "add",\n        "arguments": {\n'
        '            "a": 2,\n            "b": "<é>"\n        }\n    }\n]<|end_of_text|>'
    ),
    "llama3_1": '{"name": "add", "parameters": {"a": 2, "b": "<é>"}}<|eot_id|>',
    "mistral_v03": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": "<é>"}, "id": "abcdefghi"}]</s>'
    ),
    "qwen2_5": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "<é>"}}\n</tool_call><|im_end|>'
    ),
    "qwen3": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "<é>"}}\n</tool_call><|im_end|>'
    ),
    "smollm3": '<tool_call>add {"a": 2, "b": "<é>"}</tool_call><|im_end|>',
    "thinking_prompt": "<tool_call>add<arg>a=2</arg><arg>b=<é></arg></tool_call><|im_end|>",
}
"""What a model writes of a call, for the templates with calls."""
OTHERS: dict[tuple[str, str], list[str]] = {
    # reasoning of earlier turns is left out, that of the last turn is written
    ("qwen3", "thinking"): [
        "Hello<|im_end|>",
        "<think>\nThey leave.\n</think>\n\nSee you<|im_end|>",
    ],
    ("thinking_prompt", "thinking"): [
        "Hello<|im_end|>",
        "They leave.\n</think>\n\nSee you<|im_end|>",  # the prompt has <think>
    ],
    ("gptoss", "thinking"): [
        "<|channel|>final<|message|><think>\nA greeting\n</think>\n\nHello<|end|>",
        "<|channel|>analysis<|message|>They leave.<|end|><|start|>assistant<|channel|>final"
        "<|message|>See you<|return|>",
    ],
    ("deepseek_r1", "thinking"): ["Hello<｜end▁of▁sentence｜>", "See you<｜end▁of▁sentence｜>"],
    # with enable_thinking = false the empty reasoning is the prompt's
    ("qwen3", "off"): ["Four, straße 東京.<|im_end|>", "It's five<|im_end|>"],
    ("thinking_prompt", "off"): ["Four, straße 東京.<|im_end|>", "It's five<|im_end|>"],
    ("smollm3", "off"): [
        "<think>\n\n</think>\nFour, straße 東京.<|im_end|>",
        "<think>\n\n</think>\nIt's five<|im_end|>",
    ],
    ("falcon", "thinking"): ["<think>\nA greeting\n</think>\nHello", "See you"],
}
REFUSED = {
    ("gemma", "system"): "System role not supported",
    ("gemma", "calling"): "must alternate",
    ("mistral_v01", "system"): "must alternate",
    # the system message goes into the last user's turn, only where that is the last of all
    ("mistral_v03", "system"): "leaves out message 1 (system)",
    ("yi", "calling"): "",
}


class Prepared(NamedTuple):
    """Documents of a corpus."""

    ids: list[list[int]]
    masks: list[list[bool]]


def documents(out: Path) -> Prepared:
    """Return the tokens and masks of each document, read as naively as can be."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(out / "train"))
    ids = [np.asarray(dataset[i]).tolist() for i in range(len(dataset))]
    flat = np.fromfile(indexed.mask_path(out / "train"), np.uint8)
    assert len(flat) == sum(map(len, ids))
    ends = np.cumsum([len(each) for each in ids])
    return Prepared(ids, [part.astype(bool).tolist() for part in np.split(flat, ends[:-1])])


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def rendered(tokenizer: Any, record: dict[str, Any], **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        **record.get("chat_template_kwargs", {}),
        **options,
    )


def expected(name: str, kind: str) -> list[str]:
    if (name, kind) in OTHERS:
        return OTHERS[name, kind]
    contents = CONTENTS[kind]
    forms = [ANSWERS[name]] * len(contents)
    if kind != "open":
        forms[-1] = LAST.get(name, forms[-1])
    found = [form.format(content) for form, content in zip(forms, contents, strict=True)]
    return [CALLED[name], *found[1:]] if kind == "calling" else found


def trained_texts(tokenizer: Any, text: str, mask: list[bool]) -> list[str]:
    """Return the characters of each run of tokens that count, without white space around."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = offsets["offset_mapping"]
    runs = [
        [places[i] for i in run]
        for counts, run in groupby(range(len(mask)), key=lambda i: mask[i])
        if counts
    ]
    return [text[min(a for a, _ in run) : max(b for _, b in run)].strip() for run in runs]


def kinds_of(name: str) -> list[str]:
    refused = {kind for family, kind in REFUSED if family == name}
    return [
        kind for kind in RECORDS if kind not in refused and (kind != "calling" or name in CALLED)
    ]


@pytest.mark.parametrize("in_config", [False, True], ids=["file", "config"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers_and_labels_those_of_the_assistant(
    name: str, in_config: bool, tmp_path: Path
) -> None:
    folder = folder_of(name, tmp_path, config=in_config)
    kinds = kinds_of(name)
    lines = write_lines(tmp_path / "a.jsonl", [RECORDS[kind] for kind in kinds])
    made(tmp_path / "out", folder, lines, form=Form.MESSAGES, chat_template="tokenizer")
    prepared = documents(tmp_path / "out")
    theirs = transformers_tokenizer(folder)
    assert len(prepared.ids) == len(kinds) >= 4
    for kind, ids, mask in zip(kinds, *prepared, strict=True):
        assert ids == rendered(theirs, RECORDS[kind])["input_ids"], kind
        text = rendered(theirs, RECORDS[kind], tokenize=False)
        assert trained_texts(theirs, text, mask) == [
            each.strip() for each in expected(name, kind)
        ], kind


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_refuses_or_leaves_out_is_an_error(name: str, tmp_path: Path) -> None:
    """With file and line, and never a mask of all ones."""
    from tests.support.errors import raises

    folder = folder_of(name, tmp_path)
    kinds = kinds_of(name)
    for kind in RECORDS.keys() - set(kinds):
        lines = write_lines(tmp_path / f"{kind}.jsonl", [RECORDS["one"], RECORDS[kind]])
        with raises("MW-DATA-050", f"{lines}:2", REFUSED.get((name, kind), "")):
            made(tmp_path / kind, folder, lines, form=Form.MESSAGES, chat_template="tokenizer")
    assert RECORDS.keys() - set(kinds) <= {"system", "calling"}
