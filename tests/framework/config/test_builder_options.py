"""Keys of [optimizer] beside a user's optimizer: not set, they leave its values alone; set,
they may not differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import dump, load, load_saved, parse, to_toml
from tests.support.errors import raises

REST = """
[batch]
micro_batch_size = 1
global_batch = 4
[data]
builder = "mine:samples"
"""
OWN = 'builder = "torch.optim:AdamW"\n'


def _load(folder: Path, text: str, *overrides: str) -> tuple[float | None, float | None]:
    path = folder / "run.toml"
    path.write_text(f"[optimizer]\n{text}\n{REST}")
    optimizer = load(path, overrides).optimizer
    return optimizer.learning_rate, optimizer.weight_decay


def test_keys_that_were_not_set_stay_so(tmp_path: Path) -> None:
    assert _load(tmp_path, OWN) == (None, None)
    assert _load(tmp_path, OWN + "options = { weight_decay = 0.9, lr = 0.1 }") == (None, None)
    assert _load(tmp_path, OWN + "weight_decay = 0.1\nlearning_rate = 3e-4") == (3e-4, 0.1)
    assert _load(tmp_path, OWN + "weight_decay = 0.0") == (None, 0.0)
    assert (
        _load(tmp_path, "") == (3e-4, 0.1) == _load(tmp_path, "", "--optimizer.weight_decay=none")
    )


def test_they_stay_so_when_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[optimizer]\n{OWN}weight_decay = 0.1\n{REST}")
    config = load(path)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load(tmp_path / "again.toml").optimizer.learning_rate is None
    assert parse(dump(config)) == config == load_saved(config.model_dump(mode="json"), [], "saved")
    assert config.optimizer.learning_rate is None and config.optimizer.weight_decay == 0.1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "weight_decay = 0.1\noptions = { weight_decay = 0.9 }",
            ("weight_decay = 0.1", "options.weight_decay = 0.9"),
        ),
        (
            "learning_rate = 3e-4\noptions = { lr = 0.1 }",
            ("learning_rate = 0.0003", "options.lr = 0.1"),
        ),
        (
            "betas = [0.9, 0.95]\noptions = { betas = [0.5, 0.9] }",
            ("betas = [0.9, 0.95]", "options.betas = [0.5, 0.9]"),
        ),
        ("eps = 1e-8\noptions = { eps = 1e-6 }", ("eps = 1e-08", "options.eps = 1e-06")),
        (
            "momentum = 0.9\noptions = { momentum = 0.5 }",
            ("momentum = 0.9", "options.momentum = 0.5"),
        ),
        (
            "nesterov = true\noptions = { nesterov = false }",
            ("nesterov = true", "options.nesterov = false"),
        ),
        ("options = { rate_factor = 2.0 }", ("options.rate_factor = 2.0", "rename the argument")),
    ],
)
def test_a_key_and_an_option_that_differ_are_both_named(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    with raises(("MW-CONFIG-079", "MW-CONFIG-081"), *parts):
        _load(tmp_path, OWN + text)


def test_equal_ones_and_those_of_a_saved_configuration_are_taken(tmp_path: Path) -> None:
    assert _load(tmp_path, OWN + "weight_decay = 0.5\noptions = { weight_decay = 0.5 }") == (
        None,
        0.5,
    )
    assert _load(tmp_path, OWN + "betas = [0.9, 0.95]\noptions = { betas = [0.9, 0.95] }") == (
        None,
        None,
    )
    path = tmp_path / "run.toml"
    path.write_text(f"[optimizer]\n{OWN}options = {{ betas = [0.5, 0.9] }}\n{REST}")
    config = load(path)
    assert load_saved(config.model_dump(mode="json"), ["--train.steps=7"], "saved").train.steps == 7
