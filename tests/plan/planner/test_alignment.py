"""Sizes that keep 16-bit products off tensor cores are named, with the next better one,
before any long work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright_launch.cli import main
from meshwright_plan.planner.alignment import alignment_warnings
from meshwright_plan.planner.calibrate import to_toml
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.model_cache import ModelCache
from tests.plan.planner.small import config, hardware
from tests.support.marks import long_row

WITHOUT = "16-bit products use tensor cores inefficiently; the next good size is"


def warned(of: RunConfig, tp: int = 1, **device: Any) -> list[str]:
    of = of.replace(parallel={"tp": tp})
    return alignment_warnings(ModelCache(of, ExecutionOptions()), hardware(**device), of)


def test_sizes_that_are_multiples_of_8_are_silent() -> None:
    assert warned(config()) == [] and warned(config(), 4) == []


@pytest.mark.parametrize(
    ("options", "tp", "line"),
    [
        ({"vocab_size": 99}, 1, f"model.options.vocab_size = 99: {WITHOUT} 104"),
        (
            {"ffn_size": 72},
            2,
            f"model.options.ffn_size = 72, 36 on each of 2 tp ranks: {WITHOUT} 80",
        ),
        (
            {"vocab_size": 97},
            4,
            f"model.options.vocab_size = 97, 25 on each of 4 tp ranks: {WITHOUT} 128",
        ),
        ({"ffn_size": 72}, 1, None),
        (
            {"hidden_size": 48, "num_heads": 4},
            1,
            (
                "head dim 12: 16-bit attention uses tensor cores inefficiently; the next good size"
                " is 16"
            ),
        ),
    ],
)
def test_a_misaligned_size_is_named_with_the_next_better(
    options: dict[str, int], tp: int, line: str | None
) -> None:
    assert warned(config(**options), tp) == ([] if line is None else [line])


def test_a_cpu_and_32_bits_have_no_tensor_cores_to_lose() -> None:
    assert warned(config(vocab_size=99), kind="cpu") == []
    assert warned(config(vocab_size=99, dtype="float32")) == []


@pytest.mark.parametrize("command", [long_row("plan --nodes 1 --global-batch 8"), "dryrun"])
def test_the_commands_warn(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu.toml").write_text(to_toml(hardware()))
    (tmp_path / "small.toml").write_text(
        "[model.options]\nvocab_size = 99\nhidden_size = 32\nnum_layers = 2\nnum_heads ="
        ' 4\nmax_sequence_length = 16\n[data]\ntrain = "nowhere"\nsequence_length ='
        ' 16\n[batch]\nmicro_batch_size = 1\nchunks = 2\n[train]\ndtype = "bfloat16"\n'
    )
    name, *rest = command.split()
    assert (
        main([name, str(tmp_path / "small.toml"), *rest, "--cluster", str(tmp_path / "gpu.toml")])
        == 0
    )
    shown = capsys.readouterr()
    assert shown.err.count(f"warning: model.options.vocab_size = 99: {WITHOUT} 104") == 1
    assert "warning" not in shown.out
