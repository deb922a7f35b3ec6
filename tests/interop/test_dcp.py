"""A checkpoint of a sharded run as DCP files: torch's own loader puts them into the plain model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.errors import CheckpointError
from meshwright.parameters import ParameterInfo
from meshwright_interop import dcp as export
from meshwright_interop.dcp import export_dcp
from meshwright_interop.huggingface.destination import check_output_directory
from meshwright_launch.cli import main
from tests.support.errors import has_code

MODEL = """
from collections import OrderedDict
import torch
from torch import nn

def samples(split):
    tokens = torch.arange(64 * 9).view(64, 9) % 17
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])

def build(width=8, vocab_size=17):
    model = nn.Sequential(OrderedDict(
        embedding=nn.Embedding(vocab_size, width),
        up=nn.Linear(width, 4 * width),
        activation=nn.GELU(),
        down=nn.Linear(4 * width, width),
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, vocab_size, bias=False),
    ))
    model.sharding_plan = {"embedding": "vocab", "up": "column", "down": "row", "head": "vocab"}
    return model
"""
CONFIG = """
[run]
name = "plain"
[model]
builder = "plain:build"
[data]
builder = "plain:samples"
[batch]
micro_batch_size = 1
global_batch = 4
[parallel]
pp = 2
tp = 2
[train]
steps = 2
device = "cpu"
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of a user and its run,
    saved by two pipeline stages of two tensor-parallel ranks.
    """
    folder = tmp_path_factory.mktemp("desk")
    (folder / "plain.py").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "meshwright_launch", "train", "run.toml"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def plain_model() -> torch.nn.Sequential:
    names: dict[str, object] = {}
    exec(MODEL, names)
    return names["build"]()  # type: ignore[operator, no-any-return]


@pytest.mark.long
@pytest.mark.slow
def test_a_plain_model_loads_it_and_gives_the_same_logits(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(desk / "runs/plain"), f"--out={desk / 'out'}"]) == 0
    assert f"checkpoint_id='{desk / 'out'}'" in capsys.readouterr().out
    assert {path.name for path in (desk / "out").iterdir()} == {".metadata", "__0_0.distcp"}
    ours, theirs = plain_model(), plain_model()
    with open_checkpoint(find(desk / "runs/plain")[0].path) as checkpoint:
        for name, parameter in ours.named_parameters():
            found = checkpoint.read(TensorKind.WEIGHTS, ParameterInfo(name, tuple(parameter.shape)))
            assert found is not None
            parameter.data.copy_(found)
    state = theirs.state_dict()
    dcp.load(state, checkpoint_id=str(desk / "out"), no_dist=True)
    theirs.load_state_dict(state)
    tokens = torch.arange(16).view(2, 8)
    before = plain_model()(tokens)
    assert torch.equal(ours(tokens), theirs(tokens)) and not torch.equal(before, theirs(tokens))


@pytest.mark.long
@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, those before it are gone."""
    alive: list[torch.Tensor] = []
    most = 0
    plain = export._Tensors.lookup_object

    def counting(self: export._Tensors, index: object) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(sys.getrefcount(each) > 3 for each in alive))
        alive.append(plain(self, index))  # type: ignore[arg-type]
        return alive[-1]

    monkeypatch.setattr(export._Tensors, "lookup_object", counting)
    seen: list[tuple[int, int]] = []
    source = find(desk / "runs/plain")[0].path
    done = export_dcp(source, desk / "again", on_bytes=lambda *numbers: seen.append(numbers))
    assert len(alive) == done.num_tensors == 8 and most <= 1
    assert seen[-1][0] == seen[-1][1] == sum(4 * each.numel() for each in alive)


def test_a_directory_among_the_checkpoints_of_a_run_is_refused(tmp_path: Path) -> None:
    """It would be a checkpoint without a manifest, which ends the next command of this run."""
    (tmp_path / "resolved.json").touch()
    with pytest.raises(CheckpointError, check=has_code("MW-INTEROP-096")) as caught:
        check_output_directory(tmp_path / "checkpoints" / "step-00000040")
    assert caught.value.code == "MW-INTEROP-096" and f"outside of {tmp_path}" in str(caught.value)


@pytest.mark.long
@pytest.mark.slow
def test_another_kind_and_one_that_is_not_there(desk: Path) -> None:
    source = find(desk / "runs/plain")[0].path
    assert export_dcp(source, desk / "moments", kind="exp_avg").num_tensors == 8
    with pytest.raises(CheckpointError) as caught:
        export_dcp(source, desk / "none", kind="../ema")
    assert (
        caught.value.code == "MW-INTEROP-095"
        and "exp_avg" in str(caught.value)
        and not (desk / "none").exists()
    )
    with pytest.raises(CheckpointError) as caught:
        export_dcp(source, desk / "moments")
    assert caught.value.code == "MW-INTEROP-042"


@pytest.mark.long
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_before_a_file_is_written(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(desk / "runs/plain", desk / "runs/damaged")
    shard = next(find(desk / "runs/damaged")[0].path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    for damaged, said in (
        (data[:-1] + bytes([data[-1] ^ 1]), "its sha256 is not"),
        (data[:-1], "the manifest says"),
    ):
        shard.write_bytes(damaged)
        assert (
            main(["checkpoint", "export", str(desk / "runs/damaged"), f"--out={desk / 'refused'}"])
            == 2
        )
        told = capsys.readouterr().err
        assert (
            f"{shard}: " in told and said in told and "choose another checkpoint (--step)" in told
        )
        assert (
            "MW-INTEROP-099" in told and "Traceback" not in told and not (desk / "refused").exists()
        )
