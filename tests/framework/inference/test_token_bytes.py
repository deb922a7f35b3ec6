"""Bytes of text for each token, by tokenizers of several kinds:
their sum is the text that was encoded.
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.tokenizer import train
from meshwright.inference.token_bytes import bytes_of_tokens

TEXT = "The mesh waits: naïve ranks — 日本 — send\n\tand   receive. a b ab"


def byte_level() -> Tokenizer:
    return train([TEXT] * 4, 300)


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: blanks are ▁, and what is in no token comes byte by byte."""
    pieces = [
        "▁",
        "▁the",
        "a",
        "b",
        "ab",
        "▁a",
        "▁send",
        "e",
        "s",
        "n",
        "d",
        "T",
        "h",
        "m",
        ".",
        ":",
    ]
    vocabulary = {
        token: number
        for number, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *pieces])
    }
    merges = [("a", "b"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_the_tokens_are_those_of_the_text(make) -> None:
    tokenizer = make()
    table = bytes_of_tokens(tokenizer)
    assert len(table) == tokenizer.get_vocab_size()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(set(ids)) > 10
    assert int(table[ids].sum()) == len(TEXT.encode())


def test_special_tokens_are_no_text_and_added_words_are() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("größe")])
    table = bytes_of_tokens(tokenizer)
    assert table[tokenizer.token_to_id("<|endoftext|>")] == 0
    assert table[tokenizer.token_to_id("größe")] == len("größe".encode())
    ids = tokenizer.encode("die größe a").ids
    assert tokenizer.token_to_id("größe") in ids and int(table[ids].sum()) == len(
        "die größe a".encode()
    )


def test_pieces_that_begin_a_word_bring_their_blank() -> None:
    tokenizer = Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1, "mesh": 2, "##es": 3}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    table = bytes_of_tokens(tokenizer)
    ids = tokenizer.encode("a meshes mesh").ids
    assert (
        int(table[ids].sum()) == len(b" a meshes mesh") == len(tokenizer.decode(ids).encode()) + 1
    )
