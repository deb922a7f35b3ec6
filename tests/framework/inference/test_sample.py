"""How a token is chosen: temperature, the likeliest few,
and those that have the probability together.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from meshwright.data.tokenizer import ending_ids
from meshwright.inference.choice import SamplingRequest, choose
from meshwright.inference.prompts import encode_prompt, with_starts
from tests.framework.data.corpora import END, bytes_tokenizer, made, write_lines

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]]).log()


def drawn(ask: SamplingRequest, times: int = 2000, logits: Tensor = LOGITS) -> Counter[int]:
    generator = torch.Generator().manual_seed(5)
    return Counter(int(choose(logits, ask, [generator])) for _ in range(times))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(SamplingRequest(("x",), temperature=0), 20) == {0: 20}


def test_shares_are_those_of_the_softmax() -> None:
    found = drawn(SamplingRequest(("x",), temperature=1, top_k=0))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.04, 0.01)):
        assert found[token] / 2000 == pytest.approx(share, abs=0.04)
    assert found[4] > 0


def test_a_low_temperature_sharpens_them() -> None:
    found = drawn(SamplingRequest(("x",), temperature=0.5, top_k=0))
    assert found[0] / 2000 == pytest.approx(
        0.25 / (0.25 + 0.09 + 0.0225 + 0.0016 + 0.0001), abs=0.04
    )


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, {0, 1}),
        (0, 0.49, {0}),
        (0, 0.51, {0, 1}),
        (0, 0.9, {0, 1, 2}),
        (2, 0.99, {0, 1}),
        (99, 1.0, set(range(5))),
    ],
)
def test_only_the_likeliest_are_drawn(top_k: int, top_p: float, kept: set[int]) -> None:
    assert set(drawn(SamplingRequest(("x",), temperature=1, top_k=top_k, top_p=top_p))) == kept


def test_the_last_bits_of_equal_tokens_choose_no_other() -> None:
    """Rows of the head that are equal, such as those of added tokens:
    their logits differ by the layout's rounding.
    """
    logits = torch.tensor([[1.0, 4.0, 9.0, 9.0, 9.0, 4.0, 4.0, 2.0]])
    greedy, few = (
        SamplingRequest(("x",), temperature=0),
        SamplingRequest(("x",), temperature=1e9, top_k=5),
    )
    for seed in range(20):
        noise = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        assert drawn(greedy, 1, logits * (1 + noise)) == {2: 1}
        assert set(drawn(few, 100, logits * (1 + noise))) == {1, 2, 3, 4, 5}


def test_a_token_at_the_limit_of_the_mass_is_beyond_it() -> None:
    ask = SamplingRequest(("x",), temperature=1, top_k=0, top_p=0.5)
    for scale in (1.0, 1.0 - 3e-8, 1.0 + 3e-8):  # the sum of the first two rounds up or down
        logits = torch.tensor([[1.0, scale, scale, 1.0]]).log() + 1
        assert set(drawn(ask, 100, logits)) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-30, 1e-12])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = LOGITS.flip(-1) * 100 + torch.arange(5)
    assert drawn(SamplingRequest(("x",), temperature=temperature, top_k=0), 20, logits) == {
        int(logits.argmax()): 20
    }


@pytest.mark.parametrize("top_p", [1e-320, 1e-45, 1e-9])
def test_a_tiny_share_keeps_the_likeliest(top_p: float) -> None:
    assert drawn(SamplingRequest(("x",), temperature=1, top_k=0, top_p=top_p), 20) == {0: 20}


def test_each_row_draws_by_itself() -> None:
    """A prompt among others gets what it gets alone."""
    ask = SamplingRequest(("x", "y"), temperature=1)
    rows = torch.cat([LOGITS, LOGITS.flip(-1)])
    for seed in range(5):
        together = choose(
            rows, ask, [torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)]
        )
        assert int(together[0]) == int(choose(LOGITS, ask, [torch.Generator().manual_seed(seed)]))


def test_a_document_begins_after_each_end() -> None:
    inputs = with_starts(torch.tensor([[5, 0, 6, 7], [0, 0, 8, 9]]), {0, 9})
    assert inputs["starts"].tolist() == [[True, False, True, False], [True, True, True, False]]
    same = with_starts(torch.tensor([[0, 5, 0, 6]]), {0}, begin=0)
    assert same["starts"].tolist() == [[True, False, False, True]]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([[1]], set()),
        ([{"a": 1}, 7, "8", None, True, 2.0], {7}),
        (7, {7}),
        ({"7": 1}, set()),
        (True, set()),
    ],
)
def test_other_files_of_a_tokenizer_are_data(ids: object, found: set[int], tmp_path: Path) -> None:
    """A downloaded generation_config.json may hold anything."""
    path = bytes_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    (path.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.from_file(str(path))
    assert ending_ids(path, tokenizer) == found | {tokenizer.token_to_id(END)}


def test_a_prompt_is_encoded_as_documents_were(tmp_path: Path) -> None:
    """Whatever the tokenizer puts around a text by itself, or cuts off:
    a corpus has --bos before it, or nothing.
    """
    file = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}])
    folder = bytes_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {END}", special_tokens=[("<s>", first), (END, last)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    for begin in (None, "<s>"):
        known = made(tmp_path / f"out{begin}", folder, file, begin_token=begin).fingerprint
        document = np.fromfile(tmp_path / f"out{begin}/train.bin", np.uint16).tolist()
        again = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert encode_prompt(again, "hello", known, {last}) == document[:-1]
    again = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert encode_prompt(again, "hello", None, {last}) == [first, *document[1:-1]]
