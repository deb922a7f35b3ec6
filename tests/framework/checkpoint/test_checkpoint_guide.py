"""docs/checkpoints.md says what is so: its code runs without this project,
its manifest has the right fields.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import TensorKind
from meshwright.checkpoint.check import check
from meshwright.checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry

GUIDE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()


def block(language: str) -> str:
    """Return the one code block of a language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.long
def test_the_code_reads_a_tensor_without_this_project(tmp_path: Path, fake: Any) -> None:
    state = fake.state(3)
    path = fake.save(tmp_path, 3, tp=4, state=state)
    code = block("python")
    assert len(code.strip().splitlines()) <= 12
    program = (
        "import sys\nsys.modules['meshwright'] = None\ntry:\n    import meshwright\nexcept"
        f" ImportError:\n    pass\nelse:\n    raise SystemExit('it can')\n{code}\nfrom"
        " safetensors.torch import save_file\nsave_file({'whole': whole}, sys.argv[3])\n"
    )
    for kind, name in [
        (TensorKind.WEIGHTS, "embedding.weight"),
        (TensorKind("exp_avg"), "block0.mlp.down.weight"),
    ]:
        out = tmp_path / "out.safetensors"
        words = [sys.executable, "-c", program, str(path), kind.of(name), str(out)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        full = state[kind, name]
        assert done.stdout == f"{kind.of(name)} {full.dtype} {tuple(full.shape)}\n"
        assert torch.equal(load_file(out)["whole"], full)


def test_the_manifest_has_the_fields_that_there_are() -> None:
    example = json.loads(block("json"))
    manifest = Manifest.model_validate_json(block("json"))
    assert check(manifest) == [] and list(example) == list(Manifest.model_fields)
    for entry in example["tensors"].values():
        assert list(entry) == list(TensorEntry.model_fields)
        assert all(list(piece) == list(PieceEntry.model_fields) for piece in entry["pieces"])
    assert all(list(file) == list(FileEntry.model_fields) for file in example["files"].values())
    for field in Manifest.model_fields:
        assert f"`{field}`" in GUIDE.partition("| field | content |")[2].partition("## ")[0], field
    assert all(
        f"`{kind}`" in GUIDE for kind in ("weights", "master", "exp_avg", "exp_avg_sq", "momentum")
    )


def test_the_commands_are_those_that_there_are() -> None:
    from meshwright_launch.arguments import build_parser

    shown = re.findall(r"^meshwright (checkpoint .*?)(?:  +#.*)?$", GUIDE, flags=re.MULTILINE)
    parser = build_parser()
    assert {parser.parse_known_args(line.split())[0].what for line in shown} == {
        "list",
        "verify",
        "show",
    }
