"""Benchmarks run by hand, on machines that the tests do not have: here they are only imported."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_all_that_it_imports_is_still_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(script), run_name="imported")


def test_the_model_as_gpt_neox_ran_it_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss in place is cross-entropy, with its gradient; nobody sees a later token; layers take (S, B, D)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import neox

    torch.manual_seed(3)
    model = neox.build(vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, ffn_size=64)
    ids = torch.randint(50, (3, 8))
    logits = model(ids)
    assert logits.shape == (3, 8, 50)
    changed = ids.clone()
    changed[1, 5] = (ids[1, 5] + 1) % 50
    moved = (model(changed) - logits).abs().amax(-1) > 0
    assert moved[1, 5:].all()
    assert moved.sum() == 3
    labels = ids.roll(-1, 1)
    torch.testing.assert_close(
        neox.loss(logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 8)
    )
    (ours,) = torch.autograd.grad(neox.loss(logits, labels).mean(), logits, retain_graph=True)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)
    torch.testing.assert_close(ours, plain)
