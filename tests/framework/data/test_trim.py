"""Lengths of trimmed rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.corpus import IGNORE
from meshwright.data.trim import (
    MOST_LENGTHS,
    check_rows,
    length_multiple,
    trim,
    trimmed_length,
)
from tests.support.errors import raises


@settings(max_examples=60, deadline=None)
@given(
    lasts=st.lists(st.integers(-1, 39), min_size=1, max_size=4),
    multiple=st.sampled_from([1, 8, 12, 64]),
)
def test_no_label_that_counts_is_cut(lasts: list[int], multiple: int) -> None:
    """And no shorter length is a multiple that keeps them all."""
    labels = torch.full((len(lasts), 40), IGNORE)
    for row, last in enumerate(lasts):
        if last >= 0:
            labels[row, last] = 1
    length = trimmed_length(labels, multiple)
    assert 0 < length <= 40 and (length % multiple == 0 or length == 40)
    assert (labels[:, length:] == IGNORE).all()
    shorter = (length - 1) // multiple * multiple
    assert shorter == 0 or (labels[:, shorter:] != IGNORE).any()
    inputs, cut = trim(({"tokens": labels, "starts": labels > 0}, labels), length)
    assert cut.shape == inputs["tokens"].shape == (len(lasts), length)


@pytest.mark.parametrize(("length", "tp"), [(16, 1), (32, 2), (4096, 8), (131072, 1), (8192, 6)])
def test_lengths_are_few_and_tp_divides_them(length: int, tp: int) -> None:
    multiple = length_multiple(length, tp)
    assert multiple % tp == 0 and multiple % 8 == 0
    assert length / multiple <= MOST_LENGTHS


def test_other_samples_are_refused() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    check_rows({"tokens": tokens, "starts": tokens > 0}, tokens, "it")
    for inputs, labels in (
        (tokens[:, :5], tokens),
        ({"ids": tokens, "image": torch.zeros(2, 3, 8, 8)}, tokens),
        (tokens, tokens[:, 0]),
        (tokens, tokens.float()),
    ):
        with raises("MW-DATA-141", "data.builder", "batch.padding"):
            check_rows(inputs, labels, "data.builder")
