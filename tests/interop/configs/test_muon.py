"""Muon of Megatron-LM and Megatron-Bridge in an imported file: equal keys, or a refusal that names the flag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.optimizer.matrix import SCALES
from meshwright_interop.configs import ImportedConfig, convert_file
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code

FIELDS = """  optimizer: muon
  muon_momentum: 0.9
  muon_use_nesterov: true
  muon_num_ns_steps: 6
  muon_scale_mode: spectral
  muon_extra_scale_factor: 0.2
  muon_split_qkv: true
  muon_fp32_matmul_prec: medium
  muon_tp_mode: duplicated
"""
FLAGS = "--optimizer muon --muon-momentum 0.9 --muon-scale-mode spectral --muon-extra-scale-factor 0.2 --swiglu"
THEIRS: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""``get_muon_scale_factor`` of emerging_optimizers."""


def bridge(path: Path, fields: str) -> ImportedConfig:
    path.write_text(dumps.BRIDGE.replace("  optimizer: adam\n", fields))
    return convert_file(path)


def with_flags(path: Path, flags: str, *, without: set[str] | None = None) -> ImportedConfig:
    path.write_text(samples.MEGATRON_LLAMA.rstrip("\n") + f" {flags}\n")
    return convert_file(path, without=without or set())


@pytest.mark.parametrize(("mode", "factor"), [("spectral", 0.2), ("shape_scaling", 1.0)])
def test_the_scale_is_theirs(tmp_path: Path, mode: str, factor: float) -> None:
    fields = FIELDS.replace("mode: spectral", f"mode: {mode}").replace("factor: 0.2", f"factor: {factor}")
    found = bridge(tmp_path / "run_config.yaml", fields).config.optimizer
    assert (found.name, found.muon_momentum, found.nesterov, found.ns_steps) == ("muon", 0.9, True, 6)
    assert (found.betas, found.eps, found.weight_decay) == ((0.9, 0.95), 1e-5, 0.033)
    for sides in ((64, 64), (64, 192), (192, 64)):
        assert SCALES[found.scale](*sides) == pytest.approx(factor * THEIRS[mode](*sides), rel=1e-15)


def test_what_differs_and_no_key_says_is_in_the_report(tmp_path: Path) -> None:
    decided = " ".join(bridge(tmp_path / "run_config.yaml", FIELDS).decided)
    assert "Jordan's coefficients here, and the sets of 'quintic' there" in decided
    assert "gate and up are two matrices here" in decided
    split = bridge(tmp_path / "run_config.yaml", FIELDS + "  muon_split_fc1: true\n  muon_coefficient_type: simple\n")
    assert not any("matrix each" in line or "Jordan" in line for line in split.decided)


def test_fields_of_muon_beside_adam_have_no_effect(tmp_path: Path) -> None:
    found = bridge(tmp_path / "run_config.yaml", FIELDS.replace("optimizer: muon", "optimizer: adam"))
    assert found.config.optimizer.name == "adamw"
    assert not any("muon" in row.item.key for row in found.dropped)


def test_flags_without_momentum_is_a_guess(tmp_path: Path) -> None:
    found = with_flags(tmp_path / "a.txt", FLAGS.replace("--muon-momentum 0.9 ", ""), without={"muon-tp-mode"})
    assert (found.config.optimizer.muon_momentum, found.config.optimizer.nesterov) == (0.95, False)
    assert "by version" in found.guessed["optimizer.muon_momentum"]


@pytest.mark.parametrize(
    ("flags", "key", "said"),
    [
        ("--muon-scale-mode unit_rms_norm", "muon-scale-mode", "unit_rms_norm x 0.2 is no scale here"),
        ("--muon-extra-scale-factor 1.0", "muon-extra-scale-factor", "spectral x 1.0 is no scale here"),
        ("--muon-no-split-qkv", "muon-no-split-qkv", "q, k and v are a matrix each here"),
        ("--muon-tp-mode blockwise --tensor-model-parallel-size 2", "muon-tp-mode", "as a whole here"),
        ("--muon-scalar-optimizer lion", "muon-scalar-optimizer", "AdamW steps all"),
    ],
)
def test_another_update_is_refused_by_its_flag(tmp_path: Path, flags: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said, check=has_code("MW-INTEROP-089")) as caught:
        with_flags(tmp_path / "a.txt", f"{FLAGS} {flags}")
    assert f"--without {key}" in str(caught.value)
    assert (
        with_flags(tmp_path / "a.txt", f"{FLAGS} {flags}", without={key, "muon-tp-mode"}).config.optimizer.name
        == "muon"
    )
