"""Rows of tokenised Hugging Face datasets as samples: padding,
and columns that say what a label is.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.data.huggingface import Columns, _columns

LENGTH = 6
ROW = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
TOKENS, LABELS = [5, 6, 7, 8, 0, 0], [6, 7, 8, -100, -100, -100]


def sample(row: dict[str, Any], **columns: Any) -> tuple[list[int], list[int]]:
    names = {"tokens": "input_ids", "labels": None, "mask": None, **columns}
    tokens, labels = Columns(length=LENGTH, **names)(row)
    return tokens.tolist(), labels.tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 0), (0, 3), (3, 0), (2, 2), (0, 9)],
    ids=["none", "right", "left", "both", "long"],
)
def test_padding_of_a_tokenizer_is_neither_token_nor_label(before: int, after: int) -> None:
    """Whatever the id of the padding, and on whichever side:
    the sample is that of the row without it.
    """
    padded = {
        "input_ids": [9] * before + ROW["input_ids"] + [9] * after,
        "attention_mask": [0] * before + [1] * 4 + [0] * after,
        "labels": [9] * before + ROW["labels"] + [9] * after,
    }
    assert sample(padded, mask="attention_mask") == (TOKENS, LABELS)
    assert sample(padded, mask="attention_mask", labels="labels") == (
        TOKENS,
        [-100, 7, 8, -100, -100, -100],
    )


@pytest.mark.parametrize(
    "mask", [[1, 0, 1, 1], [1, 1, 2, 2], [1, 1, 1]], ids=["gap", "packed", "short"]
)
def test_a_mask_that_is_no_padding_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask is not 1 for all|a mask of 3"):
        sample({**ROW, "attention_mask": mask}, mask="attention_mask")


def test_labels_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="4 input_ids and 3 labels"):
        sample({**ROW, "labels": [5, 6, 7]}, labels="labels")


@pytest.mark.parametrize("column", ["labels", "completion_mask", "assistant_masks", "loss_mask"])
def test_a_column_that_chooses_labels_is_not_ignored_without_a_word(column: str) -> None:
    asked = Columns("input_ids", None, None, LENGTH)
    with pytest.raises(ValueError, match=f"a column '{column}', which says what counts as a label"):
        _columns(["input_ids", column], asked, [])
    assert _columns(["input_ids", column], asked, [column]).names == ["input_ids"]
    assert (
        _columns(["input_ids", "marks", column], asked._replace(labels="marks"), []).labels
        == "marks"
    )


@pytest.mark.parametrize("column", ["position_ids", "seq_lengths"])
def test_packed_rows_are_refused(column: str) -> None:
    with pytest.raises(ValueError, match=f"a column '{column}', of documents that are packed"):
        _columns(["input_ids", column], Columns("input_ids", None, None, LENGTH), [])


def test_the_mask_is_read_where_there_is_one() -> None:
    asked = Columns("input_ids", None, None, LENGTH)
    assert _columns(["input_ids", "attention_mask", "token_type_ids"], asked, []).names == [
        "input_ids",
        "attention_mask",
    ]
    assert _columns(["input_ids", "attention_mask"], asked, ["attention_mask"]).mask is None
    assert _columns(["input_ids"], asked, []).mask is None
