"""What cannot work is said before launch where it can be seen there: the value, the place,
the next move.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.data.dataset import open_dataset
from meshwright.errors import DataError, UserError
from meshwright_launch.cli import main
from meshwright_launch.work import check
from tests.support.errors import has_code


def config_of(runs: Path, fault: str = "in_place", sample: str = "", **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": "run", "directory": str(runs)},
        "model": {"builder": "tests.examples.broken:model", "options": {"kind": fault}},
        "data": {"builder": "tests.examples.broken:data", "options": {"kind": sample}},
        "batch": {"micro_batch_size": 2, "global_batch": 8},
        "parallel": {"dp": 1, "pp": 2},
        "pipeline": {"balance": [2, 2]},
        "train": {"device": "cpu"},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    return RunConfig.model_validate(tree)


def said(runs: Path, *args: str, **sections: Any) -> str:
    config = config_of(runs, *args, **sections)
    assert isinstance(config.parallel.dp, int)
    with pytest.raises(UserError) as raised:
        check(config, config.parallel.pp * config.parallel.dp * config.parallel.tp)
    return str(raised.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "in_place",
            "layer 2 (ReLU) overwrites, in place, a tensor (2, 8) that its stage received",
        ),
        ("branch", "layer 2 (Branches) reads values of its input (.item(), a Python `if`"),
        ("item", "layer 2 (Branches) reads values of its input (.item(), a Python `if`"),
        ("pattern", "sharding_plan: 'linaer' matches no module of the model"),
    ],
)
def test_a_model_that_cannot_be_cut(model: str, message: str, tmp_path: Path) -> None:
    assert message in said(tmp_path, model)


def test_a_value_that_is_no_tensor(tmp_path: Path) -> None:
    message = said(tmp_path, "number", pipeline={"balance": [3, 2]})
    assert "layer 2 returns a int: layers pass tensors, or tuples and dicts of tensors" in message


def test_running_statistics_where_they_cannot_be(tmp_path: Path) -> None:
    first = "layer 2 (OwnMean) changes its buffer mean in forward, and "
    message = said(tmp_path, "own_mean", parallel={"dp": 2})
    assert message.startswith(first + "with parallel.dp = 2 each replica would keep its own")
    assert "set parallel.dp = 1" in message and "GroupNorm" in message
    message = said(tmp_path, "own_mean", pipeline={"recompute": "full", "balance": [2, 2]})
    assert message.startswith(first + "pipeline.recompute computes 2 again in backward")
    check(
        config_of(tmp_path, "own_mean", pipeline={"recompute": "full", "recompute_layers": ["1"]}),
        2,
    )
    check(config_of(tmp_path, "batch_norm", pipeline={"recompute": "full"}), 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("raises first", "sample 0 of 16 failed at "),
        ("no pair", "sample 0 is a Tensor: return (inputs, labels)"),
        ("text", "sample 0 holds a value that is no number"),
        (
            "ragged",
            (
                "sample 15 has (1, 15, 16) float32, () int64 where sample 0 has (1, 16, 16)"
                " float32, () int64"
            ),
        ),
    ],
)
def test_samples_that_no_stage_can_take(data: str, message: str, tmp_path: Path) -> None:
    assert message in said(tmp_path, "batch_norm", data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("raises", r"sample 5 of 16 failed at .*broken\.py:\d+: ArithmeticError: no such image"),
        ("ragged inside", r"sample 5 has \(1, 15, 16\) float32.*Pad or crop them"),
        ("other dtype", "sample 5 has .* float64"),
    ],
)
def test_a_sample_in_the_middle(data: str, message: str, tmp_path: Path) -> None:
    """Found when it is read: also where a micro-batch is a single sample,
    which nothing else would notice.
    """
    samples = open_dataset(config_of(tmp_path, sample=data).data, "train")
    assert samples is not None
    with pytest.raises(DataError, match=message, check=has_code("MW-DATA-009", "MW-DATA-013")):
        samples.sample(5)


def test_builders_with_typing_errors(tmp_path: Path) -> None:
    data = {"builder": "tests.examples.broken:dat", "options": {}}
    assert "did you mean tests.examples.broken:data?" in said(tmp_path, "batch_norm", data=data)
    assert "cannot import tests.exmples" in said(
        tmp_path, "batch_norm", data=data | {"builder": "tests.exmples.a:b"}
    )


def test_through_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from meshwright.config import to_toml

    path = tmp_path / "config.toml"
    path.write_text(to_toml(config_of(tmp_path, "own_mean", parallel={"dp": 2})))
    assert main(["train", str(path)]) == 2
    found = capfd.readouterr()
    assert (
        "each replica would keep its own" in found.err and "Traceback" not in found.err + found.out
    )
