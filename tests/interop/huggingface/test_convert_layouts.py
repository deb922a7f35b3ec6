"""What Llama's relatives have beside it, in every layout;
and training that starts from imported weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.data.causal import IGNORE
from meshwright.data.sources import open_sources
from meshwright.run.directory import run_directory
from meshwright.verify import parse_layout
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_launch.cli import main
from meshwright_launch.pool import RankError, RankPool
from meshwright_models.attention import AttentionCore
from tests.end_to_end.driving import changed, differing, layout, lines, tensors, train
from tests.framework.verify.cases import References, assert_agrees, model_config, size_for
from tests.interop.huggingface import theirs
from tests.interop.huggingface.conftest import Written
from tests.interop.huggingface.test_convert_families import files, same_bits
from tests.support.marks import long_row
from tests.support.plain import load_plain

ALL = {
    "head_dim": 6,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "sliding_window": 3,
}


@pytest.mark.parametrize("text", ["tp2", long_row("pp2,tp2,sequence")])
def test_the_options_of_the_relatives_in_every_layout(text: str, pool: RankPool) -> None:
    """Biases of rows and columns, norms over a head's queries and keys, a window,
    a head_dim of its own; float64.
    """
    laid_out = parse_layout(text)
    size = size_for(laid_out)
    config = model_config("llama", size, **ALL)
    assert_agrees(config, laid_out, pool, References(), global_batch=size.global_batch, steps=2)


def test_an_unscaled_head_that_is_tied_in_a_pipeline(pool: RankPool) -> None:
    laid_out = parse_layout("pp2")
    size = size_for(laid_out)
    config = model_config("t5", size, scaled=False, gated=True)
    assert_agrees(config, laid_out, pool, References(), global_batch=size.global_batch, steps=2)


def test_the_window_is_the_same_with_and_without_the_fused_kernel() -> None:
    q, k, v = (torch.randn(2, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
    for window in (1, 3, 9, 20):
        core = AttentionCore(window)
        torch.testing.assert_close(core(q, k, v, nn.Identity()), core(q, k, v, None))
        far = copy.deepcopy(k)
        far[:, :, 0] += 1.0  # seen by the first `window` queries alone
        changed_rows = (core(q, far, v, None) - core(q, k, v, None)).abs().amax(
            dim=(0, 1, 3)
        ) > 1e-12
        # the first query sees one key only, whose share is 1 whatever it is
        assert changed_rows.tolist() == [0 < row < window for row in range(9)]


def fine_tuning(config: RunConfig, text: str, **sections: dict[str, Any]) -> RunConfig:
    return changed(
        config,
        parallel=layout(text) | {"bucket_bytes": 4096},
        batch={"micro_batch_size": 1, "chunks": None, "global_batch": 4},
        train={"steps": 2, "device": "cpu", "validate_steps": 1},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 0},
        tracking={"console": False},
        launch={"processes": "auto"},
        **sections,
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [long_row("gpt2", "dp2,pp2,tp2"), ("mistral, window", "dp2,tp2,zero3,sequence")],
)
def test_fine_tuning_begins_with_their_loss_and_comes_back_from_any_layout(
    name: str,
    text: str,
    written: Callable[..., Written],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
) -> None:
    path, model = written(name, torch.float64)
    words = [f"--data.train={corpus / 'train'}", f"--data.validation={corpus / 'validation'}"]
    words += ["--data.sequence_length=16", "--train.dtype=float64", "--model.options.dropout=0.0"]
    done = import_model(path, tmp_path / "run", words)
    assert done.config.data.tokenizer == str(tmp_path / "run/huggingface/tokenizer.json")
    one = fine_tuning(done.config, text)
    said = train(pool, one)
    assert f"starting from the weights of {done.path}" in said

    # the loss of the first step is that of their model on the same samples
    source = open_sources(one)[0]
    ids, labels = source.read(range(4))
    with torch.no_grad():
        expected = F.cross_entropy(
            model(ids).logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE
        )
    first = lines(one)[0]
    assert first["train/loss"] == pytest.approx(
        float(expected), rel=1e-5 if "rope" in str(model.config) else 1e-10
    )

    # and what this layout has trained is the same, tensor for tensor, in their form and back in
    # ours
    saved = find(run_directory(one.run))[0]
    assert saved.step == 2
    taken = export_checkpoint(saved.path, tmp_path / "out", shard_bytes=40_000)
    back = import_model(taken.path, tmp_path / "back")
    weights = {n: t for n, t in tensors(run_directory(one.run)).items() if n.startswith("weights/")}
    assert not differing(tensors(tmp_path / "back"), weights)
    assert back.config.model.options == one.model.options
    assert any(
        not torch.equal(found, files(path)[key]) for key, found in files(taken.path).items()
    ), "it was trained"


def test_a_run_in_bfloat16_keeps_master_weights_from_the_first_step(
    written: Callable[..., Written], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Weights that were F32 are not rounded on their way into the masters;
    they are what --dtype float32 gives back.
    """
    path, _ = written("llama 3")
    words = [
        f"--data.train={corpus / 'train'}",
        "--data.sequence_length=16",
        "--train.dtype=bfloat16",
    ]
    words += ["--optimizer.learning_rate=1e-30", "--optimizer.min_learning_rate=0.0"]
    done = import_model(path, tmp_path / "run", words)
    one = fine_tuning(done.config, "dp2,pp2")
    one = changed(
        one, optimizer={"learning_rate": 1e-30, "min_learning_rate": 0.0, "weight_decay": 0.0}
    )
    train(pool, one)
    saved = find(run_directory(one.run))[0].path
    same_bits(
        files(export_checkpoint(saved, tmp_path / "float32", dtype="float32").path), files(path)
    )
    rounded = {name: tensor.bfloat16() for name, tensor in files(path).items()}
    same_bits(files(export_checkpoint(saved, tmp_path / "saved").path), rounded)


def test_the_settings_of_an_imported_run_may_change_but_not_its_model(
    written: Callable[..., Written], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    path, _ = written("gpt2")
    done = import_model(
        path, tmp_path / "run", [f"--data.train={corpus / 'train'}", "--data.sequence_length=16"]
    )
    other = fine_tuning(done.config, "pp2,tp2", run={"seed": 5}, data={"sequence_length": 12})
    other = changed(other, model={"options": other.model.options | {"dropout": 0.3}})
    said = train(pool, other)
    for line in (
        "changed: data.sequence_length: 16 -> 12",
        "changed: model.options.dropout: 0.1 -> 0.3",
    ):
        assert line in said
    another = changed(
        done.config, model={"options": done.config.model.options | {"norm_eps": 1e-6}}
    )
    with pytest.raises(
        RankError, match=r"model\.options\.norm_eps was 1e-05 and is 1e-06: it is another model"
    ):
        train(pool, fine_tuning(another, ""))


def test_sample_writes_with_it_until_the_end_that_its_files_name(
    written: Callable[..., Written], tmp_path: Path, capfd: Any
) -> None:
    path, _ = written("llama 2")
    source = tmp_path / "source"
    source.mkdir()
    for file in path.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    import_model(source, tmp_path / "first")
    layers = load_plain(tmp_path / "first")[1]
    tokens = theirs.greedy(layers, [5, 6], 6, set())
    end = next(token for token in tokens[3:] if token not in tokens[:3])
    (source / "generation_config.json").write_text(f'{{"eos_token_id": [98, {end}]}}')
    import_model(source, tmp_path / "run")
    words = [
        "sample",
        str(tmp_path / "run"),
        "--prompt",
        "w5 w6",
        "--tokens",
        "6",
        "--temperature",
        "0",
    ]
    assert main(words) == 0
    expected = theirs.greedy(layers, [5, 6], 6, {98, end})
    assert len(expected) > 3 and expected[-1] == end
    assert capfd.readouterr().out.strip() == "".join(f"w{token}" for token in expected[:-1])
