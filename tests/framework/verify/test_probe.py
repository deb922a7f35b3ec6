"""Layers in which samples see each other are found by running them,
and proven at the run's micro-batch size.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.verify import Layout, layout_config, open_verify_source, probe_coupling, traits_of
from meshwright_launch.cli import main
from tests.framework.verify.cases import config_of
from tests.support.errors import raises


def coupling(how: str) -> str:
    config = layout_config(
        config_of("tests.framework.verify.coupled:build", {"how": how}, 6), Layout(), 4, "float64"
    )
    found = probe_coupling(traits_of(config), config, open_verify_source(config, True))
    assert found.couples_samples == bool(found.coupling)
    return found.coupling


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("", ""),
        ("mean", "layer 3 (Block)"),
        ("largest", "layer 3 (Block)"),
        ("capacity", "layer 3 (Block)"),
    ],
)
def test_samples_that_see_each_other(how: str, found: str) -> None:
    """With dropout on, whose masks are those of the samples."""
    assert coupling(how) == found


def test_a_layer_that_counts_its_calls() -> None:
    with raises("MW-VERIFY-008", "layer 3 (Block)"):
        coupling("counting")


@pytest.mark.long
@pytest.mark.slow
def test_they_are_proven_at_the_size_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capacity.toml"
    path.write_text(
        '[model]\nbuilder = "tests.framework.verify.coupled:build"\noptions = {how ='
        ' "capacity"}\n[data]\ntrain = "none"\nsequence_length = 6\n[batch]\nmicro_batch_size ='
        " 4\nglobal_batch = 16\n"
    )
    assert main(["verify", str(path), "--steps", "1", "--layouts", "dp2"]) == 0
    said = capfd.readouterr().out
    assert (
        "micro_batch_size 4, as the run has it: the samples of a micro-batch depend on each other"
        " (layer 3 (Block))" in said
    )
    assert "dp2,pp1,tp1,1f1b,zero1,mbs4" in said and "same numbers" in said
