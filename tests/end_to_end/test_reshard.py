"""`meshwright checkpoint reshard`: the files that another layout would have written, and a run goes on from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import find, open_checkpoint
from meshwright.checkpoint.manifest import Manifest
from meshwright.config import RunConfig, load, parse
from meshwright.inference.reshard import reshard
from meshwright.run.directory import run_directory
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import (
    GPT2,
    LATER,
    MODELS,
    changed,
    differing,
    initial_weights,
    layout,
    load_rank,
    run_config,
    size,
    tensors,
    train,
)


def words(text: str, **more: object) -> list[str]:
    """``dp2,pp2`` -> the overrides that ask for it; what a layout does not say is as it is by default."""
    keys = {"ep": 1, "sequence": False, "zero": 1} | layout(text) | more
    return [f"--parallel.{name}={str(value).lower()}" for name, value in keys.items()]


def pieces_of(manifest: Manifest) -> dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]:
    """(file, key) -> the box that lies there."""
    return {
        (part.file, part.key): (part.offset, part.shape) for entry in manifest.tensors.values() for part in entry.pieces
    }


@pytest.mark.parametrize(
    ("model", "before", "after", "dtype"),
    [
        ("gpt2", "dp2,pp2,tp2", "", "float32"),
        LATER("gpt2", "", "pp2,tp2", "float32"),
        LATER("gpt2", "tp4,sequence", "dp2,pp4", "bfloat16"),
        ("llama", "dp2,zero1", "pp3,tp2,sequence", "float64"),
        LATER("llama", "pp2,tp2", "dp4", "bfloat16"),
        LATER("frozen", "tp2", "pp2,tp2", "float32"),
        LATER("adafactor", "dp2,tp2", "pp2,tp2", "bfloat16"),
        ("mixture", "dp2,ep2", "dp2,tp2,ep4,sequence", "float32"),
        LATER("mixture", "dp2,tp2,ep4,sequence", "dp2,pp2,ep2", "bfloat16"),
        LATER("mixture", "", "dp2,ep2", "float64"),
    ],
)
def test_the_files_are_those_of_the_layout_itself(
    model: str, before: str, after: str, dtype: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    options = dict(MODELS["gpt2" if model == "adafactor" else model])
    if model == "frozen":
        (tmp_path / "source.txt").write_text("1.5")
        options = options | {"options": {**GPT2, "source": str(tmp_path / "source.txt")}}
    settings: dict[str, Any] = {"model": options, "train": {"steps": 3, "dtype": dtype}}
    if model == "adafactor":  # its states are no tensors per element
        settings["optimizer"] = {"name": "adafactor"}
    first = run_config(corpus, tmp_path, parallel=layout(before), **settings)
    train(pool, first)
    saved = run_directory(first)
    done = reshard(find(saved)[0].path, tmp_path / "out", words(after), trust_code=True)
    assert not differing(tensors(tmp_path / "out"), tensors(saved))

    # the same state, loaded into ranks of that layout and saved by them
    second = run_config(corpus, tmp_path, parallel=layout(after), **settings)
    pool.run(load_rank, size(second), second, str(saved), str(tmp_path / "ranks"), 0)
    expected = open_checkpoint(find(tmp_path / "ranks")[0].path)
    assert pieces_of(done.manifest) == pieces_of(expected.manifest)
    assert done.manifest.files == expected.manifest.files, "byte for byte, order and all"
    before_manifest = open_checkpoint(find(saved)[0].path).manifest
    for name in ("step", "samples_seen", "seed", "data_fingerprint", "state"):
        assert getattr(done.manifest, name) == getattr(before_manifest, name)
    assert any(name.startswith("master/") for name in done.manifest.tensors) == (dtype == "bfloat16")

    # and a run goes on from it
    kept = load(tmp_path / "out" / "config.toml")
    assert kept == done.config == parse((tmp_path / "out" / "resolved.json").read_text())
    assert run_directory(kept) == tmp_path / "out" and kept.parallel == second.parallel
    assert parse(json.dumps(done.manifest.config)) == kept
    pool.run(load_rank, size(kept), kept, str(tmp_path / "out"), str(tmp_path / "again"), 1)
    assert not differing(tensors(tmp_path / "again"), tensors(saved))


def test_one_file_and_training_goes_on(corpus: Path, tmp_path: Path, pool: RankPool, capfd: Any) -> None:
    """Through the doors that users take: the command, then `meshwright train` of what it left."""
    settings: dict[str, Any] = {"optimizer": {"schedule": "constant"}, "train": {"steps": 4, "dtype": "float64"}}
    config = run_config(corpus, tmp_path / "runs", parallel=layout("dp2,pp2,tp2"), **settings)
    train(pool, config)
    train(pool, changed(config, train={"steps": 5}))
    out = tmp_path / "one"
    command = ["checkpoint", "reshard", str(run_directory(config)), "--out", str(out), "--step", "4"]
    assert main([*command, "--parallel.pp=1", "--parallel.tp=1"]) == 0
    said = capfd.readouterr().out
    path = out / "checkpoints" / "step-00000004"
    assert f"{path}: dp2 x pp1 x tp1, 1f1b\n" in said and "dp2 x pp2 x tp2, 1f1b" in said
    assert "\n1 file, " in said and said.endswith(f"meshwright train {out / 'config.toml'}\n")
    shards = sorted(path.glob("*.safetensors"))
    assert [shard.name for shard in shards] == ["pp0-tp0-00000.safetensors"]
    assert main(["checkpoint", "verify", str(out)]) == 0
    kept = load(out / "config.toml")
    assert (kept.parallel.dp, kept.batch.global_batch, kept.launch.processes) == (2, 8, 2)
    said = train(pool, changed(kept, train={"steps": 6}))
    assert f"resuming from {path}: step 4, 32 samples seen" in said and "changed: parallel" not in said
    straight = changed(config, train={"steps": 6})
    train(pool, straight)
    found = tensors(out)
    for name, tensor in tensors(run_directory(straight)).items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm(), name


def test_running_buffers_and_several_files(tmp_path: Path, pool: RankPool) -> None:
    """A network with BatchNorm, cut over a pipeline with two stages on each rank, into files of at most 20 kB."""
    tree = {
        "run": {"name": "first", "directory": str(tmp_path)},
        "model": {"builder": "examples.vision.convnet:build"},
        "data": {"builder": "examples.vision.images:build"},
        "batch": {"micro_batch_size": 2, "global_batch": 8},
        "train": {"steps": 2, "device": "cpu"},
        "parallel": {"dp": 1},
        "tracking": {"console": False},
    }
    config = RunConfig.model_validate(tree)
    pool.run(initial_weights, 1, config, str(tmp_path / "first"))
    source = find(tmp_path / "first")[0].path
    keys = ["--parallel.pp=2", "--pipeline.schedule=interleaved_1f1b"]
    done = reshard(source, tmp_path / "small", keys, max_file_bytes=20_000, trust_code=True)
    assert not differing(tensors(tmp_path / "small"), tensors(tmp_path / "first"))
    assert len(done.manifest.files) > 4
    assert any("running_mean" in name for name in done.manifest.tensors)
    done = reshard(source, tmp_path / "whole", keys, trust_code=True)
    pool.run(initial_weights, 2, done.config, str(tmp_path / "ranks"))
    assert open_checkpoint(find(tmp_path / "ranks")[0].path).manifest.files == done.manifest.files


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """The run directory of one step on two ranks."""
    runs = tmp_path_factory.mktemp("runs")
    config = run_config(corpus, runs, parallel=layout("tp2"), train={"steps": 1}, optimizer={"warmup_steps": 1})
    train(pool, config)
    return run_directory(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--train.steps=9"], "train.steps: resharding changes only the layout"),
        (["--batch.chunks=2", "--model.options.hidden_size=64"], "batch.chunks, model.options: resharding changes"),
        (["--run.seed=5"], "run.seed: resharding changes only the layout"),
        (["--parallel.pq=2"], "parallel.pq = 2: there is no such key"),
        (["--parallel.tp=8"], "parallel.tp = 8 does not divide 4"),
        (["--parallel.pp=9"], "9"),
        (["--parallel.dp=3"], "batch.global_batch = 8 is not a multiple of micro_batch_size 1 x dp 3"),
        (["--parallel.tp=1", "--parallel.sequence"], "parallel.sequence = true has no effect"),
    ],
)
def test_what_may_not_change(overrides: list[str], said: str, trained: Path, tmp_path: Path, capfd: Any) -> None:
    assert said in refused(capfd, trained, tmp_path / "out", *overrides)
    assert not (tmp_path / "out").exists()


def refused(capfd: pytest.CaptureFixture[str], run: Path, out: Path, *more: str) -> str:
    code = main(["checkpoint", "reshard", str(run), "--out", str(out), *more])
    told = capfd.readouterr()
    assert code == 2 and told.out == "" and told.err.startswith("meshwright: error: ") and "Traceback" not in told.err
    return told.err


def test_where_it_may_not_be_written(trained: Path, tmp_path: Path, capfd: Any) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    assert "is the run that the checkpoint is of" in refused(capfd, trained, trained)
    assert "is the run that the checkpoint is of" in refused(capfd, trained / "checkpoints/step-00000001", trained)
    assert "among the checkpoints" in refused(capfd, trained, trained / "checkpoints")
    assert "among the checkpoints" in refused(capfd, trained, trained / "checkpoints/step-00000001/x")
    (tmp_path / "taken").write_text("")
    assert "is a file" in refused(capfd, trained, tmp_path / "taken")
    assert 'run.name = "two words" is not allowed' in refused(capfd, trained, tmp_path / "two words")
    assert "is not a whole number" in str(main(["checkpoint", "reshard", str(trained), "--step=-1", "--out=x"])) + (
        capfd.readouterr().err
    )

    out = tmp_path / "out"
    assert main(["checkpoint", "reshard", str(trained), "--out", str(out), "--parallel.tp=1"]) == 0
    capfd.readouterr()
    made = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "step-00000001 exists and is sound" in refused(capfd, trained, out, "--parallel.tp=1")
    (out / "checkpoints" / "step-00000001").rename(tmp_path / "aside")
    assert "of a run of another configuration" in refused(capfd, trained, out, "--parallel.tp=4")
    (tmp_path / "aside").rename(out / "checkpoints" / "step-00000001")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == made

    shard = out / "checkpoints" / "step-00000001" / "pp0-tp0-00000.safetensors"  # a damaged one makes room
    os.truncate(shard, 100)
    assert main(["checkpoint", "reshard", str(trained), "--out", str(out), "--parallel.tp=1"]) == 0
    assert "is moved to broken-step-00000001" in capfd.readouterr().err
    assert main(["checkpoint", "verify", str(out)]) == 0
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_a_damaged_source(trained: Path, tmp_path: Path, capfd: Any) -> None:
    shard = trained / "checkpoints" / "step-00000001" / "pp0-tp1-00000.safetensors"
    data = shard.read_bytes()
    try:
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        said = refused(capfd, trained, tmp_path / "out")
        assert f"{shard}: its sha256 is not the one in the manifest" in said and "nothing is written" in said
        assert not (tmp_path / "out").exists()
    finally:
        shard.write_bytes(data)


def test_a_model_that_has_changed_since(trained: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """The builder's code gives another model than it gave when the run was trained: nothing is lost without a word."""
    import meshwright_models.gpt2

    build = meshwright_models.gpt2.build

    def with_another_layer(**options: Any) -> torch.nn.Sequential:
        model = build(**options)
        model.block0.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
        return model

    monkeypatch.setattr(meshwright_models.gpt2, "build", with_another_layer)
    said = refused(capfd, trained, tmp_path / "out")
    assert "is not of the model that meshwright_models.gpt2:build builds" in said and "block0.gain" in said
    assert not (tmp_path / "out").exists()
