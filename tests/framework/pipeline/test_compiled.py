"""Which layers ``train.compile`` compiles. Their numbers:
tests/framework/model/test_compiled_layers.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.config import RunConfig
from meshwright.pipeline import compiled
from meshwright.pipeline.compiled import compile_layers
from tests.plan.dryrun.jobs import configured


def is_compiled(device: str, recompute: str = "none", **train: Any) -> bool:
    config = configured().replace(train=train, pipeline={"recompute": recompute})
    layers = nn.Sequential(nn.Linear(2, 2))
    compile_layers(layers, config.train, config.pipeline, torch.device(device), warns=True)
    return layers[0]._compiled_call_impl is not None


def test_auto_is_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(compiled, "missing_tools", list)  # a machine that has all
    assert RunConfig().train.compile == "auto"
    assert is_compiled("cuda") and not is_compiled("cpu")
    assert not is_compiled("cuda", compile=False) and is_compiled("cpu", compile=True)
    assert not is_compiled("cuda", "selective") and not is_compiled("cuda", "pointwise")
    assert is_compiled("cuda", "full")
    assert not [each for each in recwarn if "train.compile" in str(each.message)]


def test_what_is_missing_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(
        UserWarning, match=r"auto.*Triton and a C compiler not found.*set train.compile = false"
    ) as given:
        assert not is_compiled("cuda")
    assert len(given) == 1
    assert is_compiled("cuda", compile=True)  # torch's own error, in the first step


@pytest.mark.long
def test_a_dry_run_compiles_nothing() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    pytest.importorskip("meshwright_plan")
    from meshwright_plan.dryrun.fake_step import profile_rank

    profiles = [
        profile_rank(configured().replace(train={"compile": each}), 0) for each in (True, False)
    ]
    assert not counters["stats"] and profiles[0].peak_bytes == profiles[1].peak_bytes
