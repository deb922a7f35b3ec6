"""Chat templates of families of models, tokenizers for them, and conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEMPLATES = Path(__file__).with_name("chat_templates")
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL = re.compile(
    r"<\|[^|<>']*\|>|<｜[^｜']*｜>|</?s>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z_]+\]"
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as Qwen's."""
SWALLOWS = ("<|end|>", "<|user|>", "<|system|>", "<|assistant|>")
"""Phi-3's tokens, which take the white space after them."""
SENTENCEPIECE = ("llama2", "mistral_v01", "mistral_v03", "vicuna")
"""Templates that are tested with a tokenizer that marks words by the space before them."""
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": "<é>"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ONE = [turn("user", "Hi"), turn("assistant", "Hello there.")]
SEVERAL = [
    turn("user", "What is 2+2?\n\n"),
    turn("assistant", "Four, straße 東京."),
    turn("user", "And then?"),
    turn("assistant", "It's five"),
]
SYSTEM = [turn("system", "Be brief."), *SEVERAL]
THINKING = [
    turn("user", "Hi"),
    turn("assistant", "<think>\nA greeting\n</think>\n\nHello"),
    turn("user", "Bye"),
    turn("assistant", "See you", reasoning_content="They leave."),
]
CALLING = [
    turn("user", "2+2?"),
    turn("assistant", None, tool_calls=[CALL]),
    turn("tool", "4", name="add", tool_call_id="abcdefghi"),
    turn("assistant", "Four"),
    turn("user", "Thanks"),
    turn("assistant", "Welcome"),
]
RECORDS: dict[str, dict[str, Any]] = {
    "one": {"messages": ONE},
    "several": {"messages": SEVERAL},
    "system": {"messages": SYSTEM},
    "thinking": {"messages": THINKING},
    "calling": {"messages": CALLING, "tools": TOOLS},
    "off": {"messages": SEVERAL, "chat_template_kwargs": {"enable_thinking": False}},
    "open": {"messages": SEVERAL[:3]},
}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def special_tokens(name: str) -> list[str]:
    """Return the special tokens that a template writes, those that it builds of roles too."""
    found = set(SPECIAL.findall(template(name))) | {"<s>", "</s>"}
    return sorted(found | {"<|user|>", "<|system|>", "<|assistant|>"})


def folder_of(name: str, place: Path, *, config: bool = False) -> Path:
    """Return a Hugging Face folder with the template, and a tokenizer that knows its tokens.

    ``config``: the template is in ``tokenizer_config.json``, as in older models.
    """
    folder = place / name
    folder.mkdir(parents=True)
    tokenizer = words_tokenizer() if name in SENTENCEPIECE else bytes_with_merges()
    tokenizer.add_special_tokens(
        [
            AddedToken(each, rstrip=name == "phi3" and each in SWALLOWS, normalized=False)
            for each in special_tokens(name)
        ]
    )
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "add_bos_token": True,
    }
    if config:
        settings["chat_template"] = template(name)
    else:
        (folder / "chat_template.jinja").write_text(template(name))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def bytes_with_merges() -> Tokenizer:
    """Return a byte-level BPE with merges over line feeds and over spaces, as Llama 3's has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [str(record) for record in RECORDS.values()] + ["Hello.\n\nWorld\n\n"] * 9
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def words_tokenizer() -> Tokenizer:
    """Return a tokenizer as Llama 2's: a space before the text, bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        limit_alphabet=100,
        show_progress=False,
    )
    texts = [str(record["messages"]) for record in RECORDS.values()] * 3
    tokenizer.train_from_iterator([text.replace("東京", "") for text in texts], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
