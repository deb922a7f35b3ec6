"""A perplexity is shown only where the loss is a cross-entropy over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from meshwright.pipeline.values import MetaMicrobatch
from tests.launch.test_python import made
from tests.support.marks import long_row


def squares(width: int = 8) -> nn.Sequential:
    """Return a regression with a loss of the model's own."""
    model = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, 1))
    model.loss = lambda output, labels: F.mse_loss(output, labels, reduction="none")  # type: ignore[assignment]
    return model


def numbers(split: str) -> list[tuple[Tensor, Tensor]]:
    """32 numbers and their squares."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]
    return list(zip(x, x.square(), strict=True))


def own_loss_of_tokens() -> nn.Sequential:
    """Return a model of tokens whose loss is three times the cross-entropy."""
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    model.loss = lambda output, labels: (
        3
        * F.cross_entropy(  # type: ignore[assignment]
            output.flatten(0, -2), labels.flatten(), reduction="none"
        ).view_as(labels)
    )
    return model


def of(builder: str, data: str) -> dict[str, Any]:
    here = "tests.launch.test_perplexity"
    return {
        "model": {"builder": f"{here}:{builder}", "options": {}},
        "data": {"train": "", "builder": data if ":" in data else f"{here}:{data}"},
    }


TOKENS = "tests.launch.test_python:tokens"


@pytest.mark.parametrize(
    ("sections", "has_perplexity"),
    [
        long_row({}, True),
        long_row(of("squares", "numbers"), False),
        (of("own_loss_of_tokens", TOKENS), False),
    ],
    ids=["cross-entropy", "regression", "own loss of tokens"],
)
def test_a_perplexity_only_of_a_cross_entropy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    has_perplexity: bool,
) -> None:
    config = made(tmp_path, **sections, tracking={"console": True})
    meshwright.run_training(config)
    line = json.loads((tmp_path / "own/metrics.jsonl").read_text().splitlines()[-1])
    assert "validation/loss" in line and ("validation/perplexity" in line) == has_perplexity
    printed = capsys.readouterr().out
    assert (
        "validation at step 6: loss" in printed and (", perplexity " in printed) == has_perplexity
    )
    result = meshwright.evaluate(str(tmp_path / "own"), batches=1, trust_code=True)
    assert result.loss == pytest.approx(line["validation/loss"])
    assert (result.perplexity is not None) == has_perplexity == ("perplexity  " in result.lines())
    assert (
        "nats" not in result.lines() if not has_perplexity else "nats per token" in result.lines()
    )
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.report.page import page
    from meshwright_plan.report.run import read_run

    assert ("nats" in page([read_run(tmp_path / "own")])) == has_perplexity
    meshwright.run_training(config)  # a finished run prints its validation loss
    assert ("nats" in capsys.readouterr().out) == has_perplexity


@pytest.mark.parametrize(
    ("inputs", "labels", "are_tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64), True),
        (
            (torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)),
            torch.zeros(2, 5).long(),
            True,
        ),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), False),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), False),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5), False),
    ],
    ids=[
        "language model",
        "encoder and decoder",
        "class of a text",
        "class of an image",
        "numbers",
    ],
)
def test_labels_that_are_tokens(inputs: Any, labels: Tensor, are_tokens: bool) -> None:
    assert MetaMicrobatch(inputs, labels).has_token_labels == are_tokens
