"""A run starts from the weights of another: the same bits on any layout, in any dtype,
under any optimizer, and nothing else of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.build import build
from meshwright.checkpoint import find
from meshwright.config import RunConfig, resolve
from meshwright.errors import UserError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.run.directory import START, run_directory
from meshwright.run.start import start
from meshwright.step import take_step
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check
from tests.end_to_end.driving import (
    LLAMA,
    MODELS,
    exact_losses,
    layout,
    refused_rank,
    run_config,
    save,
    size,
    tensors,
    train,
)
from tests.support.errors import has_code
from tests.support.marks import long_row

Sources = dict[str, RunConfig]
HALF_FROZEN = {"parameter_groups": [{"names": ["block0.*", "embedding.*"], "frozen": True}]}
OWN_MODELS = MODELS | {"half_frozen": MODELS["gpt2"] | HALF_FROZEN}
WIDER = MODELS["gpt2"]["options"] | {"vocab_size": 311}


@pytest.fixture(scope="module")
def sources(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Sources:
    """Trained runs, by model and dtype."""
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for name, text, dtype in (
        ("gpt2", "dp2,tp2", "bfloat16"),
        ("gpt2", "pp2", "float32"),
        ("llama", "dp2,pp2,zero3", "bfloat16"),
        ("mixture", "dp2,ep2", "float32"),
        ("half_frozen", "", "bfloat16"),
    ):
        config = run_config(
            corpus,
            folder,
            run={"name": f"{name}-{dtype}"},
            model=OWN_MODELS[name],
            parallel=layout(text),
            train={"steps": 3, "dtype": dtype},
            checkpoint={"every": 2},
        )
        train(pool, config)
        found[f"{name}-{dtype}"] = config
    return found


def started(
    source: RunConfig, corpus: Path, runs: Path, text: str, **sections: dict[str, Any]
) -> RunConfig:
    """Return a run of the source's model that starts from its weights."""
    model = source.model.model_dump() | sections.pop("model", {})
    run = {"start": str(run_directory(source.run)), "seed": 77} | sections.pop("run", {})
    return run_config(corpus, runs, run=run, model=model, parallel=layout(text), **sections)


def start_rank(
    rank: int, world_size: int, config: RunConfig, again: str
) -> tuple[list[str], float]:
    """Start one rank, save what it holds, and take a step; what it has said, and the loss."""
    config = resolve(config, world_size)
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    parts = build(config, mesh)
    said: list[str] = []
    directory = Path(again)
    directory.mkdir(parents=True, exist_ok=True)
    start(parts, directory, said.append)
    save(parts, again)
    assert (parts.state.step, parts.state.samples_seen) == (0, 0)
    loss = take_step(parts).loss
    close_mesh(mesh)
    return said, loss


def held(pool: RankPool, config: RunConfig, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return what the ranks of a started run hold before step 1, gathered."""
    again = tmp_path / "again"
    pool.run(start_rank, size(config), config, str(again))
    return tensors(again)


@pytest.mark.parametrize(
    ("source", "text", "dtype", "optimizer"),
    [
        ("gpt2-bfloat16", "dp2,pp2,tp2", "bfloat16", "adamw"),
        long_row("gpt2-bfloat16", "dp2,zero3", "bfloat16", "adamw"),
        ("gpt2-bfloat16", "pp2,tp2,sequence", "float32", "adamw"),
        long_row("gpt2-float32", "dp2,tp2", "bfloat16", "adamw"),
        ("gpt2-float32", "cp2", "float64", "lion"),
        ("gpt2-float32", "dp2,offload", "float32", "adamw"),
        ("llama-bfloat16", "tp2,pp2", "bfloat16", "muon"),
        ("llama-bfloat16", "dp2", "bfloat16", "adamw8bit"),
        long_row("llama-bfloat16", "dp4,zero2,shard2", "float32", "schedule_free_adamw"),
        ("mixture-float32", "dp2,ep2", "bfloat16", "adamw"),
        ("mixture-float32", "pp2,tp2", "float32", "adafactor"),
        ("half_frozen-bfloat16", "dp2,zero3", "bfloat16", "adamw"),
    ],
)
def test_each_layout_dtype_and_optimizer_begins_with_the_same_bits(
    source: str,
    text: str,
    dtype: str,
    optimizer: str,
    sources: Sources,
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
) -> None:
    config = started(
        sources[source],
        corpus,
        tmp_path,
        text,
        train={"dtype": dtype},
        optimizer={"name": optimizer},
    )
    saved = tensors(run_directory(sources[source].run))
    found = held(pool, config, tmp_path)
    names = {name.partition("/")[2] for name in found if name.startswith("weights/")}
    assert names == {name.partition("/")[2] for name in saved if name.startswith("weights/")}
    kept_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    for name in names:
        exact = saved.get(f"master/{name}", saved[f"weights/{name}"])
        weight = found[f"weights/{name}"]
        assert torch.equal(weight, exact.to(weight.dtype)), name
        if weight.dtype == kept_dtype["bfloat16"] and f"master/{name}" in found:
            assert torch.equal(found[f"master/{name}"], exact.float()), name
    assert any(name.startswith("master/") for name in found) == (dtype == "bfloat16")
    moments = [t for name, t in found.items() if name.partition("/")[0] in ("exp_avg", "momentum")]
    assert not any(moment.any() for moment in moments)


@pytest.mark.parametrize(
    ("source", "text"),
    [("gpt2-bfloat16", "dp2,tp2"), ("gpt2-float32", "pp2"), ("mixture-float32", "dp2,ep2")],
)
def test_the_first_loss_is_that_of_the_source(
    source: str, text: str, sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Bit for bit, on the layout of the source: a step that does not move the weights, then a
    validation, and ``eval`` of both.
    """
    of_source = sources[source]
    options = dict(of_source.model.options)
    if "moe" in options:  # a step moves the bias of a router, too
        options["moe"] = options["moe"] | {"bias_rate": 1e-30}
    config = started(
        of_source,
        corpus,
        tmp_path,
        text,
        model={"options": options},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0, "warmup_steps": 0},
        train={"steps": 1, "dtype": of_source.train.dtype, "validate_every": 1},
    )
    train(pool, config)
    assert _validation_hex(config) == _validation_hex(of_source)
    assert _evaluated(config, tmp_path) == _evaluated(of_source, tmp_path)


def _evaluated(config: RunConfig, tmp_path: Path) -> dict[str, Any]:
    """Return the results of ``meshwright eval``."""
    out = tmp_path / f"{config.run.name}.json"
    layout = ["--parallel.dp=1", "--parallel.tp=1", "--parallel.pp=1", "--parallel.ep=1"]
    words = ["eval", str(run_directory(config.run)), "--batches", "2", "--out", str(out), *layout]
    assert main(words) == 0
    found = json.loads(out.read_text())
    return {name: value for name, value in found.items() if "loss" in name}


def _validation_hex(config: RunConfig) -> str:
    path = run_directory(config.run) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return float(lines[-1]["validation/loss"]).hex()


def test_a_killed_start_begins_again_with_the_same_weights(
    sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Before its first checkpoint, although the source has newer ones by then; after it without
    the source.
    """
    source = tmp_path / "source"
    shutil.copytree(run_directory(sources["gpt2-float32"].run), source)
    newest, older = find(source)
    kept = tmp_path / "kept"
    newest.path.rename(kept)
    config = started(
        sources["gpt2-float32"],
        corpus,
        tmp_path,
        "dp2",
        run={"start": str(source)},
        train={"steps": 2},
    )
    whole = config.replace(run={"name": "whole"})
    train(pool, whole)
    again = run_directory(config.run)
    pool.run(start_rank, 2, config, str(again))
    shutil.rmtree(again / "checkpoints")  # killed before it has saved one
    kept.rename(newest.path)
    said = train(pool, config)
    assert older.path.name in said and newest.path.name not in said
    assert exact_losses(config) == exact_losses(whole)

    shutil.rmtree(source)
    longer = config.replace(train={"steps": 4})
    assert "is not read: the run has" in train(pool, longer)


def test_weights_that_change_under_a_start_are_refused(
    sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    source = tmp_path / "source"
    shutil.copytree(run_directory(sources["gpt2-float32"].run), source)
    config = started(sources["gpt2-float32"], corpus, tmp_path, "dp2", run={"start": str(source)})
    again = run_directory(config.run)
    pool.run(start_rank, 2, config, str(again))
    shutil.rmtree(again / "checkpoints")
    record = again / START
    text = record.read_text()
    digest = json.loads(text)["sources"][0]["digest"]
    record.write_text(text.replace(digest, "0" * 64))
    for message, code in pool.run(refused_rank, 2, config):
        assert "MW-RUN-056" in message and code == 2
    record.write_text("{")
    for message, code in pool.run(refused_rank, 2, config):
        assert "MW-RUN-041" in message and code == 2
    record.write_text(text.replace(digest, ""))  # no digest would be no comparison
    for message, code in pool.run(refused_rank, 2, config):
        assert "MW-RUN-041" in message and code == 2
    record.write_text(text)
    shutil.rmtree(source / "checkpoints/step-00000003")  # as by keep_last: an older one is left
    for message, code in pool.run(refused_rank, 2, config):
        assert "MW-RUN-060" in message and START in message and code == 2
    with pytest.raises(UserError, check=has_code("MW-RUN-060")):
        check(config, 2)


@pytest.mark.parametrize("text", ["tp2", "dp2,zero3", "dp2,tp2"])
def test_a_vocabulary_grows(
    text: str, sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """The rows of the source, and below them first values; no degree divides either size."""
    source = sources["gpt2-bfloat16"]
    model = {"options": WIDER, "grow_vocabulary": True}
    config = started(source, corpus, tmp_path, text, model=model, train={"dtype": "bfloat16"})
    saved, found = tensors(run_directory(source.run)), held(pool, config, tmp_path)
    (grown,) = [name for name, t in found.items() if name.startswith("master/") and 311 in t.shape]
    assert torch.equal(found[grown][:301], saved[grown])
    plain = run_config(
        corpus, tmp_path / "plain", run={"seed": 77}, model=config.model.model_dump()
    )
    fresh = draw_blueprint_weights(plain, grown.partition("/")[2])
    assert torch.equal(found[grown][301:], fresh[301:].bfloat16().float())


def draw_blueprint_weights(config: RunConfig, name: str) -> torch.Tensor:
    """Return the first value of a parameter."""
    config = config.replace(model={"grow_vocabulary": False}, parallel={"dp": 1, "pp": 1, "tp": 1})
    return check(config, 1)[1].model.initial(name)


@pytest.mark.parametrize("text", ["dp2,pp2", "tp2", "dp2,zero3"])
def test_new_layers_and_renamed_ones(
    text: str, sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Block 1 of the new model is block 2 of the source, its last block is new."""
    source = sources["llama-bfloat16"]
    config = started(
        source,
        corpus,
        tmp_path,
        text,
        run={
            "start_names": {"block1.*": "block2.*"},
            "start_new": ["block2.*"],
            "start_unused": ["block1.*"],
        },
        train={"dtype": "float32"},
    )
    saved, found = tensors(run_directory(source.run)), held(pool, config, tmp_path)
    for name in ("attention.qkv.weight", "mlp.down.weight"):
        assert torch.equal(found[f"weights/block1.{name}"], saved[f"master/block2.{name}"])
        first = draw_blueprint_weights(config, f"block2.{name}")
        assert torch.equal(found[f"weights/block2.{name}"], first)


def test_another_tokenizer_is_in_the_account(
    sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    first, second = list(tokens)[-2:]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for folder, is_named in ((corpus, False), (other, True)):
        config = started(sources["gpt2-float32"], folder, tmp_path, "")
        said, _ = pool.run(start_rank, 1, config, str(tmp_path / folder.name))[0]
        assert any("tokenizer" in line for line in said) is is_named


def test_adapters_beside_the_weights_of_a_run(
    sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """LoRA on a run, then a run that starts from that one: base and adapters."""
    source = sources["llama-bfloat16"]
    adapter = {"rank": 2, "alpha": 4.0, "targets": ["block*.attention.*"]}
    tuned = started(
        source,
        corpus,
        tmp_path,
        "dp2,zero3",
        run={"name": "tuned"},
        adapter=adapter,
        train={"steps": 2, "dtype": "bfloat16"},
    )
    said = train(pool, tuned)
    assert "new" in said and "lora_a" in said
    base, beside = tensors(run_directory(source.run)), tensors(run_directory(tuned.run))
    for name, weight in base.items():
        if name.startswith("weights/"):
            assert torch.equal(beside[name], weight), name
    assert any(
        beside[name].any() for name in beside if name.startswith("weights/") and "lora_b" in name
    )

    next_run = started(tuned, corpus, tmp_path, "tp2", adapter=adapter, train={"dtype": "bfloat16"})
    found = held(pool, next_run, tmp_path)
    for name, weight in beside.items():
        if name.startswith(("weights/", "master/")):
            assert torch.equal(found[name], weight), name

    louder = next_run.replace(adapter={"alpha": 8.0})
    with pytest.raises(UserError, match="alpha / rank = 2", check=has_code("MW-RUN-047")):
        check(louder, 2)

    without = next_run.replace(
        run={"name": "without", "start_unused": ["*lora*"]},
        adapter={"rank": 0, "alpha": None, "targets": []},
    )
    held_alone = held(pool, without, tmp_path / "without")
    assert not any("lora" in name for name in held_alone)
    half = next_run.replace(run={"name": "half"}, train={"dtype": "float16"})
    assert held(
        pool, half, tmp_path / "half"
    )  # its base comes with it: two roundings are no other base
    others = next_run.replace(
        run={"name": "others", "start_new": ["*lora*"], "start_unused": ["*lora*"]},
        adapter={"rank": 3, "alpha": 1.0, "targets": ["block*.mlp.*"]},
    )
    assert held(pool, others, tmp_path / "others")


def test_what_grows_is_the_vocabulary(
    sources: Sources, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Not the positions, although they may become as many."""
    source = sources["gpt2-float32"]
    for name, options in (
        ("positions", {"max_sequence_length": 301}),
        ("both", {"max_sequence_length": 311, "vocab_size": 311}),
    ):
        model = {"options": source.model.options | options, "grow_vocabulary": True}
        config = started(source, corpus, tmp_path, "", run={"name": name}, model=model)
        with pytest.raises(UserError, match="positions", check=has_code("MW-RUN-052")):
            check(config, 1)


def test_a_run_without_checkpoints_is_no_source_of_itself(
    sources: Sources, corpus: Path, tmp_path: Path
) -> None:
    source = sources["gpt2-float32"]
    directory = run_directory(source.run)
    copy = tmp_path / "run"
    shutil.copytree(directory, copy)
    start_of_itself = started(source, corpus, tmp_path, "pp2", run={"start": str(copy)})
    # of a run with checkpoints it is not read; without any there is nothing in it
    check(start_of_itself, 2)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, check=has_code("MW-RUN-042")):
        check(start_of_itself, 2)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": {"start": "nowhere"}}, "MW-RUN-045"),
        ({"run": {"start": "SOURCE@1"}}, "MW-RUN-043"),
        ({"run": {"start": "~nobody-of-this-name/x"}}, "MW-RUN-063"),
        ({"run": {"start": "SOURCE@"}}, "MW-RUN-045"),
        ({"model": {"grow_vocabulary": True}}, "MW-RUN-061"),
        ({"run": {"start": ["SOURCE", "SOURCE@2"]}}, "MW-RUN-050"),
        ({"model": {"options": LLAMA | {"ffn_size": 64}}}, "MW-RUN-052"),
        ({"model": {"options": LLAMA | {"num_layers": 4}}}, "MW-RUN-051"),
        ({"model": {"options": LLAMA | {"num_layers": 2}}}, "MW-RUN-054"),
        ({"model": {"options": LLAMA | {"vocab_size": 304}}}, "MW-RUN-052"),
        (
            {"model": {"options": LLAMA | {"hidden_size": 40}, "grow_vocabulary": True}},
            "MW-RUN-052",
        ),
        ({"run": {"start_new": ["block9.*"]}}, "MW-PLACEMENT-001"),
        ({"run": {"start_new": ["*"]}}, "MW-RUN-046"),
        ({"run": {"start_unused": ["block9.*"]}}, "MW-RUN-049"),
        ({"run": {"start_names": {"block0.x": "block1.x"}}}, "MW-RUN-055"),
        ({"run": {"start_names": {"block0.*": "layers0.*"}}}, "MW-RUN-048"),
    ],
)
def test_what_cannot_be_taken_is_named_before_any_rank_exists(
    changes: dict[str, dict[str, Any]], code: str, sources: Sources, corpus: Path, tmp_path: Path
) -> None:
    source = sources["llama-bfloat16"]
    place = str(run_directory(source.run))
    run = dict(changes.get("run", {}))
    given = run.get("start", place)
    several = [given] if isinstance(given, str) else given
    run["start"] = [each.replace("SOURCE", place) for each in several]
    config = started(source, corpus, tmp_path, "", **{**changes, "run": run})
    with pytest.raises(UserError, check=has_code(code)):
        check(config, 1)


def test_a_checkpoint_by_its_bare_name(
    sources: Sources,
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = sources["gpt2-float32"]
    path = find(run_directory(source.run))[0].path
    shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    config = started(source, corpus, tmp_path, "dp2", run={"start": path.name})
    check(config, 2)
    absolute = config.replace(run={"start": str(tmp_path / path.name)})
    assert held(pool, absolute, tmp_path)


def test_a_dcp_export_is_not_unpickled(sources: Sources, corpus: Path, tmp_path: Path) -> None:
    exported = tmp_path / "dcp"
    exported.mkdir()
    (exported / ".metadata").write_bytes(b"cos\nsystem\n(S'touch hit'\ntR.")
    config = started(sources["llama-bfloat16"], corpus, tmp_path, "", run={"start": str(exported)})
    with pytest.raises(UserError, check=has_code("MW-RUN-044")):
        check(config, 1)
