"""A dropout module that is called several times in one forward: another mask for each call,
the same in all layouts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.build import build
from meshwright.config.combinations.layout import parse_layout
from meshwright.current import CurrentMicrobatch
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import StepFeed
from meshwright.seeding import GOLDEN, SeededDropout, keep_mask, key_of, restart_calls
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from tests.framework.verify.cases import config_of

P = 0.5


class Often(nn.Module):
    """Calls one dropout in a loop."""

    def __init__(self, width: int, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(P)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.dropout(torch.tanh(self.linear(x)) + 1.5)
        return x


def often(vocab_size: int = 17, width: int = 8, calls: int = 3) -> nn.Sequential:
    """Return two layers that call their dropouts so often."""
    layers = nn.Sequential(
        nn.Embedding(vocab_size, width),
        Often(width, calls),
        Often(width, calls),
        nn.Linear(width, vocab_size),
    )
    layers.selective_recompute = ["*.dropout"]
    return layers


def mask(name: str, call: int, samples: list[int], *shape: int) -> Tensor:
    key = torch.tensor(key_of(7, name, call))
    return keep_mask(
        P, key, torch.tensor(GOLDEN), torch.tensor(samples), torch.Size((len(samples), *shape))
    )


def test_each_call_has_a_mask_of_its_own() -> None:
    """By the documented keys, also beyond the keys that are held from the start;
    each forward begins anew.
    """
    module = SeededDropout(P, 7, "block", CurrentMicrobatch(torch.tensor([3, 9])))
    x = torch.ones(2, 4, 5)
    for _ in range(2):
        restart_calls([module])
        drawn = [module(x) != 0 for _ in range(40)]
        for call, found in enumerate(drawn):
            assert torch.equal(found, mask("block", call, [3, 9], 4, 5))
        assert len({tuple(found.flatten().tolist()) for found in drawn}) == 40


def test_nothing_counts_in_eval_mode() -> None:
    module = SeededDropout(P, 7, "block", CurrentMicrobatch(torch.tensor([3])))
    module.eval()(torch.ones(1, 4))
    assert torch.equal(module.train()(torch.ones(1, 64)) != 0, mask("block", 0, [3], 64))


def gradients(layout: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(gradients of a step of four micro-batches, first values), through build()
    and the executor's own row.
    """
    config = layout_config(
        config_of(f"{__name__}:often", {}, 6), parse_layout(layout), 4, "float64"
    )
    parts = build(config, open_mesh(Grid(), "cpu"), (open_verify_source(config, True), {}))
    initial = {name: parts.blueprint.model.initial(name).double() for name in parts.blueprint.infos}
    for replica in parts.replicas.values():
        replica.begin_step()
    parts.executor.run(StepFeed(parts, parts.source, 0))
    found = [
        bucket.shard_gradient.clone()
        for replica in parts.replicas.values()
        for bucket in replica.buckets
    ]
    return found, initial


def plain_gradients(initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the untouched model with masks of the documented keys, sample by sample."""
    layers = often().double()
    layers.load_state_dict(initial)
    config = layout_config(config_of(f"{__name__}:often", {}, 6), parse_layout("pp1"), 4, "float64")
    feed = open_verify_source(config, True)
    counts: dict[str, int] = {}
    sample = 0

    def drop(name: str) -> None:
        def forward(x: Tensor) -> Tensor:
            call = counts[name] = counts.get(name, -1) + 1
            key = torch.tensor(key_of(config.run.seed, name, call))
            kept = keep_mask(P, key, torch.tensor(GOLDEN), torch.tensor([sample]), x.shape)
            return x * kept / (1 - P)

        layers.get_submodule(name).forward = forward  # type: ignore[method-assign]

    for name in ("1.dropout", "2.dropout"):
        drop(name)
    for sample in range(4):
        counts.clear()
        inputs, labels = feed.read([sample])
        loss = nn.functional.cross_entropy(
            layers(inputs).flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / 24).backward()
    return {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "layout", ["pp1", "pp1,gpipe,full", "pp1,selective", "pp1,zb_h1,full", "pp1,gpipe,selective"]
)
def test_masks_are_those_of_the_plain_model(layout: str) -> None:
    """Also recomputed, with several micro-batches in flight:
    equal to plain torch with the documented masks.
    """
    found, initial = gradients(layout)
    expected = plain_gradients(initial)
    total = torch.cat([g.flatten() for g in expected.values()])
    ours = torch.cat([g.flatten() for g in found])
    assert ours.sort().values[ours.sort().values != 0].numel() > 0
    torch.testing.assert_close(ours.norm(), total.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        ours[ours != 0].sort().values, total[total != 0].sort().values, rtol=1e-9, atol=1e-14
    )
