"""Benchmarks are run by hand: here all are imported,
and most of `make bench` runs for one turn (guards: minutes).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
RESULTS = sorted((BENCHMARKS / "results").glob("20*.json"))
DATED = re.compile(r"20\d\d-\d\d-\d\d-[a-z0-9-]+\.json")
"""Name of a file of results: the day, the benchmark, and what of it was run."""


def test_results_that_are_named_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SCRIPTS]
    named = {(page, name) for page in pages for name in DATED.findall(page.read_text())}
    kept = {path.name for path in RESULTS}
    assert len(named) > 10 and not [(page, name) for page, name in named if name not in kept]


def test_the_newest_results_of_each_processor_are_kept() -> None:
    """Older ones are in the history."""
    seen: dict[tuple[str, str], str] = {}
    for path in RESULTS:
        results = json.loads(path.read_text())
        processor = results.get("environment", results).get("cpu")
        if processor is not None:
            older = seen.setdefault((path.name[len("2026-11-21-") :], processor), path.name)
            assert older == path.name, (
                f"{path.name} replaces {older}: remove that, and point what names it to this one"
            )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_all_that_it_imports_is_still_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(script), run_name="imported")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "side_by_side.py --only a --only c --repeats 1 --steps 1",
        "executor_overhead.py --only zb_v --repeats 1 --steps 1",
        "expert_layer.py --repeats 1 --calls 1",
        "bubble_measured.py --pp 2 --chunks 2 --steps 1 --ms 1",
    ],
    ids=lambda command: command.split(".")[0],
)
def test_one_turn_of_a_benchmark(command: str, tmp_path: Path) -> None:
    """Bars are for a quiet machine (exit code 1 is allowed here); losses must be equal,
    and figures must be written.
    """
    script, *options = command.split()
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options, "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1)
    problems = json.loads(out.read_text()).get("problems", [])
    assert not [
        problem
        for problem in problems
        if any(each in problem for each in ("loss", "norm", "other numbers", "differ"))
    ]


def test_the_model_as_gpt_neox_ran_it_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss in place is cross-entropy, with its gradient; nobody sees a later token;
    layers take (S, B, D).
    """
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
        neox.loss(logits, labels),
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 8),
    )
    (ours,) = torch.autograd.grad(neox.loss(logits, labels).mean(), logits, retain_graph=True)
    (plain,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)
    torch.testing.assert_close(ours, plain)
