"""Each definition that the plain run and the layouts share has an oracle here:
a wrong one is wrong on both sides.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.model.build import build_model
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.sources import VerifySource, random_sample
from tests.framework.verify.cases import config_of
from tests.support.layouts import samples


def test_what_decays_by_name() -> None:
    """Matrices and embeddings; no bias, no norm; in any sharding."""
    config = config_of(
        "meshwright_models.gpt2:build",
        {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_heads": 4},
        8,
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
        # it is the embedding's
        decaying = {name for name, info in infos.items() if info.decays} - {"head.weight"}
        assert decaying == expected, layout


def test_an_initial_value_is_drawn_under_its_name() -> None:
    """BLAKE2b of "seed / initialise / name", 63 bits,
    seeds torch's generator for the whole tensor.
    """
    model = build_model("tests.support.builders:plain", {"vocab_size": 17, "width": 8}, 7)
    digest = hashlib.blake2b(b"7\x1finitialise\x1f1.weight", digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
    assert torch.equal(model.initial("1.weight"), torch.nn.Linear(8, 8).weight.detach())
    assert not torch.equal(model.initial("1.weight"), model.initial("3.weight"))


@pytest.mark.parametrize("length", [4, 6, 8, 32, 33])
def test_labels_that_count_are_uneven_from_the_first_step(length: int) -> None:
    """Among micro-batches of one and two,
    and among two and four replicas of a step of eight samples.
    """
    feed = VerifySource(random_sample(1, 50, length))
    counts = [int((samples(feed, i, 1)[1] != -100).sum()) for i in range(8)]
    for group in (1, 2, 4):
        sums = {sum(counts[at : at + group]) for at in range(0, 8, group)}
        assert len(sums) > 1, (length, group, counts)
