"""Layouts of several ranks on one GPU, over gloo and host memory:
the numbers of one plain process on CPU.

``MESHWRIGHT_GPU_TESTS=cpu pytest -m gpu tests/gpu/test_shared.py`` rehearses this file on a machine
without a GPU.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Launch, Run
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.compare import compare
from meshwright.verify.rank import merge
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.local import launch
from tests.framework.verify.cases import References, size_for
from tests.gpu import on_gpu
from tests.gpu.test_options import DEVICE, base_of, pytestmark

__all__ = ["pytestmark"]
STEPS = 4
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "dp2", {}),
    ("llama", "tp2,sequence", {}),
    ("gpt2", "pp2,zb_v", {}),
    ("llama", "pp2,interleaved_1f1b", {}),
    ("llama", "dp2,zero3", {}),
    ("gpt2", "dp2,zero2,offload", {}),
    ("gpt2", "dp2,zero1,offload", {}),
    ("llama", "cp2", {}),
    ("llama", "cp2,heads", {}),
    ("gpt2", "dp2,cp2,tp2,sequence", {}),
    ("t5", "pp2,tp2", {}),
    ("llama", "dp2,zero2", {"optimizer": {"name": "muon"}}),
    ("llama", "dp2,zero1", {"optimizer": {"name": "adafactor"}}),
    ("mixture:deepseek", "dp2,ep2", {}),
    ("mixture:mixtral", "tp2,ep2,sequence", {}),
    ("mixture:deepseek", "dp2,pp2,ep2,zb_v,zero0", {}),
    ("llama", "cp2", {"parallel": {"cp_head_groups": 2}}),
    ("llama", "cp2,documents", {"data": {"document_boundaries": True}}),
    ("llama", "cp2,heads", {"data": {"document_boundaries": True}}),
    (
        "llama",
        "dp2,zero3",
        {"adapter": {"rank": 2, "targets": ["block*.attention.*"], "dora": True}},
    ),
    ("mixture:deepseek", "dp2,ep2,zero3", {}),
    ("mixture:deepseek", "dp2,ep2", {"optimizer": {"name": "muon"}}),
    ("mixture:deepseek", "dp2,pp2,ep2,dualpipe_v", {}),
    ("mixture:mixtral", "dp2,pp2,ep2,dualpipe_v,full", {}),
]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "layout", "sections"), LAYOUTS, ids=lambda value: str(value).replace("'", "")
)
def test_layouts(
    model: str,
    layout: str,
    sections: dict[str, Any],
    dtype: str,
    references: References,
    tmp_path: Path,
) -> None:
    parsed = parse_layout(layout)
    base = base_of(model, layout, sections)
    global_batch = 8 if model.startswith("mixture") else size_for(parsed).global_batch
    expected = references.expected(base, global_batch, STEPS, dtype)
    started = Launch(processes=parsed.size, share_devices=DEVICE == "cuda")
    config = layout_config(base, parsed, global_batch, dtype, DEVICE)
    launch(
        on_gpu.findings_to_file,
        config.model_copy(update={"run": Run(directory=str(tmp_path)), "launch": started}),
    )
    found = merge(
        [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(parsed.size)]
    )
    row = compare(
        layout,
        found,
        found,
        expected.findings,
        TOLERANCES[dtype],
        expected.rounding,
        expected.noise,
    )
    assert row.passed, row.problems
