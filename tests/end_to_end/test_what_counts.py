"""Which tokens count, in training and in validation:
against the plain model and the corpus's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import meshwright_models.gpt2
from meshwright.data import fingerprint
from meshwright.data.order import SampleOrder
from meshwright.run.directory import run_directory
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    LATER,
    initial_weights,
    layout,
    lines,
    run_config,
    size,
    tensors,
    train,
)
from tests.support.marks import long_row

LENGTH = 32


def tokens_of(prefix: Path) -> NDArray[np.int64]:
    """Return all tokens of a corpus, from its bytes."""
    return np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64)


def window(stream: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Return the tokens of a sample and, last, the label of its last token."""
    return stream[number * LENGTH : (number + 1) * LENGTH + 1]


def plain_loss(directory: Path, windows: Iterable[NDArray[np.int64]], end: int | None) -> float:
    """Mean loss of the saved weights over the labels that count; plain torch,
    one sample at a time.
    """
    model = meshwright_models.gpt2.build(**GPT2).double().eval()
    saved = {
        name.removeprefix("weights/"): t
        for name, t in tensors(directory).items()
        if name.startswith("weights/")
    }
    assert not model.load_state_dict(saved, strict=False).unexpected_keys
    loss_sum, count = 0.0, 0
    with torch.no_grad():
        for ids in map(torch.from_numpy, windows):
            counts = torch.ones(LENGTH, dtype=torch.bool) if end is None else ids[:-1] != end
            losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
            loss_sum += float(losses[counts].sum())
            count += int(counts.sum())
    return loss_sum / count


def end_of_document(corpus: Path) -> int:
    known = fingerprint.read(corpus)
    assert known is not None
    return known.end_of_document_id


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        long_row("", False),
        ("", True),
        long_row("dp2,pp2,tp2", True),
        long_row("tp2,sequence", False),
        LATER("dp2,pp2,tp2", False),
        LATER("tp2,sequence", True),
    ],
)
def test_validation_sees_every_sample_once_and_the_last_batch_may_be_short(
    text: str, masked: bool, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    held_out = tokens_of(corpus / "validation")
    num_samples = (len(held_out) - 1) // LENGTH
    assert 0 < num_samples % 28 < 14  # of the last batch some replicas have nothing
    end = end_of_document(corpus) if masked else None
    config = run_config(
        corpus,
        tmp_path,
        data={"eod_mask_loss": masked},
        batch={"micro_batch_size": 2, "global_batch": 28},
        parallel=layout(text),
        train={"steps": 2, "dtype": "float64", "validate_steps": 1000},
    )
    said = train(pool, config)
    assert "validation/loss" not in lines(config)[0]
    loss = lines(config)[1]["validation/loss"]
    samples = [window(held_out, number) for number in range(num_samples)]
    assert math.isclose(loss, plain_loss(run_directory(config.run), samples, end), rel_tol=1e-12)
    assert f"validation loss  {loss:.4f} nats per token\nunigram baseline  " in said


def test_the_validation_is_cut_to_what_was_asked(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(
        corpus,
        tmp_path,
        parallel=layout("dp2"),
        train={"steps": 3, "dtype": "float64", "validate_steps": 2, "validate_every": 2},
    )
    train(pool, config)
    assert ["validation/loss" in line for line in lines(config)] == [False, True, True]
    samples = [window(tokens_of(corpus / "validation"), number) for number in range(16)]
    expected = plain_loss(run_directory(config.run), samples, None)
    assert math.isclose(lines(config)[2]["validation/loss"], expected, rel_tol=1e-12)


@pytest.mark.parametrize("text", ["", long_row("dp2,pp2"), LATER("dp2,tp2,sequence")])
def test_labels_after_the_end_of_a_document_do_not_count(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Counted from the bytes; the loss of the first step is the plain model's over the labels that
    count.
    """
    config = run_config(
        corpus,
        tmp_path,
        data={"eod_mask_loss": True},
        model={"options": {**GPT2, "dropout": 0.0}},
        parallel=layout(text),
        train={"steps": 2, "dtype": "float64"},
    )
    train(pool, config)
    stream, end = tokens_of(corpus / "train"), end_of_document(corpus)
    order = SampleOrder((len(stream) - 1) // LENGTH, config.run.seed)
    samples = [window(stream, order(index)) for index in range(16)]
    num_counted = [int((sample[:-1] != end).sum()) for sample in samples]
    assert min(num_counted) < LENGTH
    assert [line["train/tokens"] for line in lines(config)] == [
        sum(num_counted[:8]),
        sum(num_counted),
    ]
    pool.run(initial_weights, size(config), config, str(tmp_path / "initial"))
    expected = plain_loss(tmp_path / "initial", samples[:8], end)
    assert math.isclose(lines(config)[0]["train/loss"], expected, rel_tol=1e-12)
