"""Labels of users' datasets: float ones past the end of a validation set,
and integers of any type.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright
from meshwright.checkpoint import CheckpointReader, TensorKind, find, open_checkpoint
from meshwright.parameters import ParameterInfo
from tests.launch.test_perplexity import numbers, of, squares
from tests.launch.test_python import losses_of, made, tokens


def five(split: str) -> list[tuple[Tensor, Tensor]]:
    """Return a validation set that does not fill its last global batch of four."""
    return numbers(split)[: 5 if split == "validation" else None]


def test_float_labels_of_a_batch_that_is_not_full_do_not_count(tmp_path: Path) -> None:
    """Rows past the end have labels of -100, which a model's own loss takes for numbers."""
    config = made(
        tmp_path,
        **of("squares", "tests.end_to_end.test_labels:five"),
        train={"steps": 2, "validate_steps": 2},
    )
    meshwright.run_training(config)
    found = meshwright.evaluate(str(tmp_path / "own"), batches=2, trust_code=True)
    saved = open_checkpoint(find(tmp_path / "own")[0].path)
    model = squares().double()
    model.load_state_dict(
        {name: whole(saved, name) for name in saved.parameters(TensorKind.WEIGHTS)}
    )
    x, y = (torch.stack(part) for part in zip(*five("validation"), strict=True))
    assert found.loss == pytest.approx(float(F.mse_loss(model(x), y)), rel=1e-9)


def whole(saved: CheckpointReader, name: str) -> Tensor:
    """Return a weight of the checkpoint, in float64."""
    tensor = saved.read(
        TensorKind.WEIGHTS, ParameterInfo(name, saved.shape(TensorKind.WEIGHTS, name))
    )
    assert tensor is not None
    return tensor.double()


def classes(split: str, dtype: str) -> list[tuple[Tensor, Tensor]]:
    """Return labels of another integer type, as numpy gives them."""
    return [(ids, labels.to(getattr(torch, dtype))) for ids, labels in tokens(split) or []]


def test_labels_of_any_integer_type_are_classes(tmp_path: Path) -> None:
    losses = []
    for dtype in ("int64", "int32", "uint8"):
        data = {"builder": "tests.end_to_end.test_labels:classes", "options": {"dtype": dtype}}
        meshwright.run_training(made(tmp_path, run={"name": dtype}, data=data, train={"steps": 2}))
        losses.append(losses_of(tmp_path, dtype))
    assert losses[0] == losses[1] == losses[2]
