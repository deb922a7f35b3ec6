"""The example: its models through the same door as anyone's,
and running statistics through verify and checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig, load
from meshwright.errors import CheckpointError
from meshwright.run.directory import run_directory
from meshwright.traits import left_out, traits_of
from meshwright.verify import default_layouts, parse_layout, verify
from meshwright_launch.cli import main
from meshwright_launch.pool import RankError, RankPool
from tests.end_to_end.driving import changed, differing, exact_losses, lines, tensors, train
from tests.support.plain import load_plain

VISION = Path(__file__).parents[2] / "examples" / "vision"


def config_of(name: str, *overrides: str) -> RunConfig:
    return load(str(VISION / name), ["--train.device=cpu", *overrides])


def small(runs: Path, name: str = "run", **sections: Any) -> RunConfig:
    """Return the convolutional network with less of everything."""
    config = config_of("convnet.toml", "--model.options.channels=4", "--model.options.depth=3")
    return changed(
        config,
        run={"name": name, "directory": str(runs)},
        tracking={"console": False},
        batch={"micro_batch_size": 2, "global_batch": 8, "chunks": None},
        checkpoint={"every": 2},
        **({"train": {"steps": 4, "validate_every": 4, "validate_steps": 2}} | sections),
    )


def prove(config: RunConfig, layouts: list[str], pool: RankPool) -> None:
    report = verify(config, [parse_layout(text) for text in layouts], pool, global_batch=8, steps=2)
    assert report.passed, report.table()


@pytest.mark.long
def test_the_transformer_with_and_without_its_plan(pool: RankPool) -> None:
    options = ("--model.options.depth=2", "--model.options.width=16", "--model.options.dropout=0.1")
    prove(config_of("config.toml", *options), ["dp2,pp2,zb_h1"], pool)
    prove(
        config_of("config.toml", *options, "--model.options.sharded=true"),
        ["dp2,pp2,tp2,mbs2"],
        pool,
    )


@pytest.mark.long
def test_running_statistics_are_those_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    prove(
        small(tmp_path), ["pp2,mbs2,zb_h1", "pp4,mbs2,gpipe", "pp2,mbs4", "dp2,pp2,mbs2,full"], pool
    )


def test_running_statistics_that_are_off_are_seen(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference with another momentum: only buffers differ, and verify says which."""
    from meshwright.verify import run

    plain = run.run_reference

    def other(config: RunConfig, *args: Any, **rest: Any) -> Any:
        found = plain(config, *args, **rest)
        found.weights["layer1.norm.running_var"].mul_(1 + 1e-6)
        return found

    monkeypatch.setattr(run, "run_reference", other)
    report = verify(small(tmp_path), [parse_layout("pp2,mbs2")], pool, global_batch=8, steps=1)
    assert [
        problem
        for row in report.rows
        for problem in row.problems
        if "first layer1.norm.running_var" in problem
    ]


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_with_its_statistics_on_any_pipeline(
    pool: RankPool, tmp_path: Path
) -> None:
    whole = small(tmp_path, "whole", parallel={"pp": 2})
    said = train(pool, whole)
    assert "nats per label" in said
    parted = small(
        tmp_path,
        "parted",
        parallel={"pp": 2},
        train={"steps": 2, "validate_every": 4, "validate_steps": 2},
    )
    train(pool, parted)
    train(
        pool,
        changed(parted, train={"steps": 4}, parallel={"pp": 4}, pipeline={"schedule": "zb_h1"}),
    )
    assert exact_losses(parted) == exact_losses(whole)
    assert lines(parted)[-1]["validation/loss"] == lines(whole)[-1]["validation/loss"]
    saved = tensors(run_directory(whole.run))
    assert differing(tensors(run_directory(parted.run)), saved) == []
    assert saved["weights/layer0.norm.num_batches_tracked"] == 4 * 4, (
        "each micro-batch of each step once"
    )
    _, layers = load_plain(run_directory(whole.run))
    assert torch.equal(
        layers.get_buffer("layer2.norm.running_var"), saved["weights/layer2.norm.running_var"]
    )
    evaluated = [
        "eval",
        str(run_directory(whole.run)),
        "--trust-code",
        "--parallel.pp=1",
        f"--out={tmp_path / 'found.json'}",
        "--batches=2",
    ]
    assert main(evaluated) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loss"] == pytest.approx(lines(whole)[-1]["validation/loss"], rel=1e-6)
    assert (found["bytes"], found["bits_per_byte"], found["samples"]) == (None, None, 16)


@pytest.mark.long
def test_a_run_with_synchronised_statistics_goes_on_where_as_many_samples_are_together(
    pool: RankPool, tmp_path: Path
) -> None:
    of_model = {"model": {"options": {"channels": 4, "depth": 3, "synchronised": True}}}
    two = {"parallel": {"dp": 2, "pp": 2}, "data": {"workers": 2}, **of_model}
    prove(small(tmp_path, **of_model), ["mbs4", "dp2,mbs2,full", "dp4,mbs1,zero3"], pool)
    whole = small(tmp_path, "whole", **two)
    train(pool, whole)
    parted = small(tmp_path, "parted", **two, train={"steps": 2})
    train(pool, parted)
    one = {"parallel": {"dp": 1, "pp": 3}, "batch": {"micro_batch_size": 4}}
    assert "nn.SyncBatchNorm" not in train(pool, changed(parted, train={"steps": 4}, **one))
    losses = [
        [float.fromhex(loss) for loss in exact_losses(each).values()] for each in (parted, whole)
    ]
    assert losses[0][:2] == losses[1][:2] and losses[0] == pytest.approx(losses[1], rel=1e-5)
    found, expected = (tensors(run_directory(each.run)) for each in (parted, whole))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"weights/layer2.norm.{name}"
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert expected["weights/layer0.norm.num_batches_tracked"] == 4 * 2, "each group once"
    other = changed(whole, train={"steps": 5}, parallel={"dp": 1, "pp": 1})
    assert "= 4 samples -> 2, which train other numbers; batch.micro_batch_size = 4" in train(
        pool, other
    )
    evaluated = ["eval", str(run_directory(whole.run)), "--trust-code", "--parallel.dp=1"]
    place = tmp_path / "found.json"
    assert main([*evaluated, "--parallel.pp=1", f"--out={place}", "--batches=2"]) == 0
    assert json.loads(place.read_text())["samples"] == 16


@pytest.mark.long
def test_a_run_does_not_go_on_with_other_images(pool: RankPool, tmp_path: Path) -> None:
    """The dataset's options may change, as where its files lie may; its samples may not."""
    config = small(tmp_path, train={"steps": 2})
    train(pool, config)
    later = changed(config, train={"steps": 4})
    for options, what in (
        ({"classes": 8, "noise": 0.6}, "sample 0"),
        ({"classes": 8, "size": 8}, "sample 8191"),
    ):
        with pytest.raises(RankError, match=f"data fingerprint '{what}' was ") as caught:
            train(pool, changed(later, data={"options": options}))
        assert isinstance(caught.value.__cause__, CheckpointError)
    said = train(pool, changed(later, data={"options": {"classes": 8, "noise": 0.7}}))
    assert "data.options.noise: not set -> 0.7" in said


@pytest.mark.long
def test_the_layouts_that_a_model_can_have() -> None:
    plain = config_of("config.toml")
    layouts = default_layouts(plain, traits_of(plain), 8).layouts
    assert {layout.tp for layout in layouts} == {1} and {layout.dp for layout in layouts} >= {
        1,
        2,
        4,
    }
    assert "tp: the model has no sharding_plan" in left_out(traits_of(plain))

    sharded = config_of("config.toml", "--model.options.sharded=true")
    layouts = default_layouts(sharded, traits_of(sharded), 8).layouts
    assert any(min(layout.dp, layout.pp, layout.tp) == 2 for layout in layouts)
    assert not any(layout.sequence for layout in layouts)
    assert any("sequence: a sample has one label" in line for line in left_out(traits_of(sharded)))

    kept = config_of("convnet.toml")
    layouts = default_layouts(kept, traits_of(kept), 8).layouts
    assert {layout.tp * layout.cp for layout in layouts} == {1} and {
        layout.dp for layout in layouts
    } >= {1, 2}
    assert {layout.micro_batch_size for layout in layouts} == {2}
    assert {layout.pp for layout in layouts} == {1, 2, 4}
    assert {layout.schedule for layout in layouts} >= {"1f1b", "gpipe", "zb_h1"}
