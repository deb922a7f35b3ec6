"""Modules of the user that fail in any way, when imported or asked for a name:
one message of the configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.config.functions import find_function
from meshwright.errors import ConfigError
from tests.support.errors import raises

ODD = "class Odd(BaseException):\n    def __str__(self):\n        raise ValueError\n"
FAILING = {
    "an exception": ("raise ValueError('no')", "MW-CONFIG-009"),
    "an exit": ("raise SystemExit(0)", "MW-CONFIG-009"),
    "no exception": ("raise GeneratorExit", "MW-CONFIG-009"),
    "a class without a text": (f"{ODD}raise Odd", "MW-CONFIG-009"),
    "getattr": ("def __getattr__(name):\n    raise RuntimeError(name)", "MW-CONFIG-080"),
    "getattr that exits": ("def __getattr__(name):\n    raise SystemExit(0)", "MW-CONFIG-080"),
    "getattr without a text": (f"{ODD}def __getattr__(name):\n    raise Odd", "MW-CONFIG-080"),
    "getattr without end": (
        "def __getattr__(name):\n    return __getattr__(name)",
        "MW-CONFIG-080",
    ),
    "a long text": ("raise ValueError('x' * 10**6)", "MW-CONFIG-009"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_module_that_fails_is_one_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, code = FAILING[name]
    module = f"failing_{abs(hash(name))}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with raises(code, "train.callbacks") as caught:
        find_function(f"{module}:make", "train.callbacks", "a function", ConfigError)
    assert len(str(caught.value)) < 2500
    sys.modules.pop(module, None)


def test_an_interrupt_is_no_error_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        find_function("interrupted:make", "train.callbacks", "a function", ConfigError)
