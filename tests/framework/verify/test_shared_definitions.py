"""Each definition that the plain run and the layouts share has an oracle here: a wrong one is wrong on both sides."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import Optimizer
from meshwright.data.indexed import write
from meshwright.data.order import SampleOrder
from meshwright.data.sources import open_sources
from meshwright.model.build import build_model
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.sources import VerifySource, random_sample
from tests.framework.verify.cases import config_of
from tests.support.layouts import microbatch, samples

# ------------------------------------------------------------------------------------------------------- learning rate


def documented(kind: str, step: int, steps: int, warmup: int, decay: int, peak: float, low: float) -> float:
    """Of the step-th step, counted from 1: linear warmup to the peak, which its last step has; then down to the
    minimum, which the last step of the run has, along half a cosine or a line; wsd: over the last ``decay`` steps."""
    if step <= warmup:
        return peak * step / warmup
    falling = decay if kind == "wsd" else steps - warmup
    passed = step - (steps - falling)
    if kind == "constant" or passed <= 0:
        return peak
    done = passed / falling
    if kind == "cosine":
        return low + (peak - low) * (math.cos(math.pi * done) + 1) / 2
    return peak - (peak - low) * done


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup", "decay"), [(10, 0, 3), (10, 2, 8), (7, 6, 1), (100, 20, 30)])
def test_the_learning_rate_of_each_step(kind: str, steps: int, warmup: int, decay: int) -> None:
    low = 0.0 if kind == "constant" else 3e-5
    optimizer = Optimizer(
        learning_rate=3e-4,
        min_learning_rate=low,
        schedule=kind,
        warmup_steps=warmup,
        decay_steps=decay if kind == "wsd" else 0,
    )
    for step in range(1, steps + 1):
        expected = documented(kind, step, steps, warmup, decay, 3e-4, low)
        assert learning_rate(optimizer, step - 1, steps) == pytest.approx(expected, rel=1e-12), step


# ---------------------------------------------------------------------------------------------------------- decay rule


def test_what_decays_by_name() -> None:
    """Matrices and embeddings; no bias, no norm; in any sharding."""
    config = config_of(
        "meshwright_models.gpt2:build", {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_heads": 4}, 8
    )
    expected = {
        "embedding.tokens.weight",
        "embedding.positions.weight",
        "block0.attention.qkv.weight",
        "block0.attention.out.weight",
        "block0.mlp.up.weight",
        "block0.mlp.down.weight",
    }
    for layout in ("pp1", "tp2", "tp2,sequence"):
        infos = draw_blueprint(layout_config(config, parse_layout(layout), 2, "float32")).infos
        decaying = {name for name, info in infos.items() if info.decays} - {"head.weight"}  # it is the embedding's
        assert decaying == expected, layout


# --------------------------------------------------------------------------------------------------------------- seeds


def test_an_initial_value_is_drawn_under_its_name() -> None:
    """BLAKE2b of "seed / initialise / name", 63 bits, seeds torch's generator for the whole tensor."""
    model = build_model("tests.support.builders:plain", {"vocab_size": 17, "width": 8}, 7)
    digest = hashlib.blake2b(b"7\x1finitialise\x1f1.weight", digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
    assert torch.equal(model.initial("1.weight"), torch.nn.Linear(8, 8).weight.detach())
    assert not torch.equal(model.initial("1.weight"), model.initial("3.weight"))


# ---------------------------------------------------------------------------------------------------------------- feed


def test_the_samples_of_a_step_are_windows_of_the_corpus_file(tmp_path: Path) -> None:
    """Against the bytes: a step's samples are the same in every layout, follow each other, and each epoch has all."""
    length, size = 8, 20
    tokens = np.random.default_rng(0).integers(0, 97, size * length + 1).astype(np.uint16)
    write(tmp_path / "corpus", [tokens], 97)
    raw = np.frombuffer((tmp_path / "corpus.bin").read_bytes(), dtype=np.uint16)
    assert np.array_equal(raw, tokens)
    config = config_of("tests.support.builders:plain", {"vocab_size": 97, "width": 8}, length)
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": str(tmp_path / "corpus")})})
    feed = open_sources(config)[0]
    seen = []
    for step in range(5):  # one epoch, in steps of four
        rows = []
        for dp, micro, chunks in ((1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)):
            rows.append(
                [
                    (int(index), *inputs[row].tolist(), *labels[row].tolist())
                    for dp_rank in range(dp)
                    for m in range(chunks)
                    for inputs, labels, indices in [microbatch(feed, 4 * step, dp_rank, dp, micro, chunks, m)[:3]]
                    for row, index in enumerate(indices)
                ]
            )
        assert rows[0] == rows[1] == rows[2] == rows[3]
        assert [row[0] for row in rows[0]] == list(range(4 * step, 4 * step + 4))
        for _, *numbers in rows[0]:
            inputs, labels = numbers[:length], numbers[length:]
            starts = [at for at in range(0, size * length, length) if raw[at : at + length].tolist() == inputs]
            assert [raw[at + 1 : at + length + 1].tolist() for at in starts] == [labels]
            seen += starts
    assert sorted(seen) == list(range(0, size * length, length))
    assert seen != sorted(seen) and SampleOrder(size, 1)(0) < size


@pytest.mark.parametrize("length", [4, 6, 8, 32, 33])
def test_labels_that_count_are_uneven_from_the_first_step(length: int) -> None:
    """Among micro-batches of one and two, and among two and four replicas of a step of eight samples."""
    feed = VerifySource(random_sample(1, 50, length))
    counts = [int((samples(feed, i, 1)[1] != -100).sum()) for i in range(8)]
    for group in (1, 2, 4):
        sums = {sum(counts[at : at + group]) for at in range(0, 8, group)}
        assert len(sums) > 1, (length, group, counts)
