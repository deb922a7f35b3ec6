"""A run starts from a directory of Hugging Face: the bits of an import, on any layout, and peft's
adapters beside a base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.adapters.attach import is_adapter
from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.run.directory import run_directory
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check
from tests.end_to_end.driving import (
    changed,
    layout,
    refused_rank,
    run_config,
    size,
    tensors,
    train,
)
from tests.end_to_end.test_start import start_rank
from tests.interop.adapters.test_fused import PREFIX, drawn, peft_files
from tests.interop.huggingface import theirs
from tests.interop.huggingface.architectures import directory
from tests.interop.huggingface.conftest import Written, written
from tests.interop.huggingface.test_convert_families import files
from tests.support.errors import has_code
from tests.support.marks import long_row

__all__ = ["written"]
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some documents of random tokens of the vocabulary that all cases have."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("corpus")
    draw = torch.Generator().manual_seed(3)
    for split in ("train", "validation"):
        builder = IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=np.uint16)
        for _ in range(20):
            builder.add_document(torch.randint(1, 67, (40,), generator=draw), [40])
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


def started(
    corpus: Path, runs: Path, model: dict[str, Any], text: str, **sections: Any
) -> RunConfig:
    """Return a run of a model that starts from ``run.start``."""
    data = {"tokenizer": None, "sequence_length": 16}
    return run_config(corpus, runs, model=model, data=data, parallel=layout(text), **sections)


def held(pool: RankPool, config: RunConfig, again: Path) -> dict[str, Tensor]:
    """Return the tensors that a started run holds before step 1, gathered."""
    pool.run(start_rank, size(config), config, str(again))
    return tensors(again)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt2", "dp2,pp2,tp2"),
        ("llama 3.1", "tp2,zero1"),
        long_row("qwen3, tied", "dp2,zero3"),
        ("mixtral", "dp2,ep2"),
        long_row("qwen3_moe, first block dense", "pp2,tp2"),
        long_row("deepseek_v3", "dp2,ep2,zero3"),
    ],
)
def test_a_model_of_theirs_is_what_its_import_is(
    name: str,
    text: str,
    written: Callable[..., Written],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
) -> None:
    path, _ = written(name)
    words = [f"--data.train={corpus / 'train'}", "--data.sequence_length=16"]
    done = import_model(path, tmp_path / "imported", [*words, "--train.dtype=float32"])
    model = done.config.model.model_dump()
    config = started(corpus, tmp_path, model, text, run={"start": str(path)})
    imported, found = tensors(tmp_path / "imported"), held(pool, config, tmp_path / "again")
    for key, weight in imported.items():
        assert torch.equal(found[key], weight.to(found[key].dtype)), key


@pytest.mark.parametrize("text", ["tp2", "dp2,pp2,zero2"])
def test_a_restructured_model_starts_from_another_directory(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """``hf:A`` with the weights of B, in bfloat16: the masters are B's numbers."""
    first = directory("llama", tmp_path / "first", weights=True)
    other = directory("llama", tmp_path / "other", weights=True)
    scaled = {name: weight * 1.25 for name, weight in files(other).items()}
    save_file(scaled, other / "model.safetensors", {"format": "pt"})
    model = {"builder": f"hf:{first}", "options": {}}
    config = started(
        corpus, tmp_path, model, text, run={"start": str(other)}, train={"dtype": "bfloat16"}
    )
    found = held(pool, config, tmp_path / "again")
    masters = {
        name.rpartition("layer.")[2]: weight
        for name, weight in found.items()
        if name.startswith("master/block0.")
    }
    for name, weight in masters.items():
        assert torch.equal(weight, scaled[f"model.layers.0.{name}"].float()), name
    assert masters


@pytest.mark.parametrize("text", ["dp2,zero3", "tp2"])
def test_adapters_of_peft_beside_the_base_of_a_directory(
    text: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    base = directory("llama", tmp_path / "base", weights=True)
    adapter = peft_files(tmp_path / "peft", drawn())
    settings = {
        "rank": 2,
        "alpha": 3.0,
        "targets": ["*.self_attn.*_proj", "*.mlp.*_proj", "*embed_tokens"],
    }
    model = {"builder": f"hf:{base}", "options": {}}
    config = started(corpus, tmp_path, model, text, run={"start": str(adapter)}, adapter=settings)
    found = held(pool, config, tmp_path / "again")
    theirs_of = files_of_adapter(adapter)
    adapters = [n for n in found if n.startswith("weights/") and is_adapter(n.partition("/")[2])]
    assert len(adapters) == len(theirs_of)
    down = found["weights/block1.layer.self_attn.q_proj.lora_a.weight"]
    assert torch.equal(down, theirs_of[f"{PREFIX}.layers.1.self_attn.q_proj.lora_A.weight"].float())

    louder = changed(config, adapter={"alpha": 6.0})
    with pytest.raises(UserError, check=has_code("MW-RUN-047")):
        check(louder, size(louder))
    fewer = changed(config, adapter={"targets": ["*.self_attn.*_proj"]})
    with pytest.raises(UserError, check=has_code("MW-RUN-054")):
        check(fewer, size(fewer))

    drawn_base = changed(config, model={"options": {"weights": False}}, run={"name": "drawn"})
    with pytest.raises(UserError, check=has_code("MW-RUN-051")):
        check(drawn_base, size(drawn_base))


def test_the_base_of_a_start_stays_in_the_checkpoints(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Also when ``run.start`` is left out of a resume: that is refused, since later checkpoints
    would lack it.
    """
    first = directory("llama", tmp_path / "first", weights=True)
    other = directory("llama", tmp_path / "other", weights=True)
    scaled = {name: weight * 1.25 for name, weight in files(other).items()}
    save_file(scaled, other / "model.safetensors", {"format": "pt"})
    config = started(
        corpus,
        tmp_path,
        {"builder": f"hf:{first}", "options": {}},
        "dp2",
        run={"start": str(other)},
        adapter={"rank": 2, "targets": ["*.self_attn.q_proj"]},
        train={"steps": 1},
    )
    train(pool, config)
    without = changed(config, run={"start": None}, train={"steps": 2})
    for message, code in pool.run(refused_rank, 2, without):
        assert "run.start" in message and "MW-RUN-016" in message and code == 2
    shutil.rmtree(other)
    longer = changed(config, train={"steps": 2})
    train(pool, longer)
    held_base = tensors(run_directory(longer.run))["weights/block0.layer.mlp.up_proj.weight"]
    assert torch.equal(held_base, scaled["model.layers.0.mlp.up_proj.weight"].float())


def test_the_scale_of_rslora_is_one_that_can_be_set(corpus: Path, tmp_path: Path) -> None:
    base = directory("llama", tmp_path / "base", weights=True)
    adapter = peft_files(tmp_path / "peft", drawn(), use_rslora=True)
    settings = {"rank": 2, "targets": ["*.self_attn.*_proj", "*.mlp.*_proj", "*embed_tokens"]}
    model = {"builder": f"hf:{base}", "options": {}}
    config = started(corpus, tmp_path, model, "", run={"start": str(adapter)}, adapter=settings)
    with pytest.raises(UserError, check=has_code("MW-RUN-047")) as refused:
        check(config, 1)
    alpha = float(str(refused.value).split("adapter.alpha = ")[1].split()[0])
    check(changed(config, adapter={"alpha": alpha}), 1)


def test_a_model_with_dropout_by_default(
    written: Callable[..., Written], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Whose dropouts the run's model has off: its weights are read all the same."""
    path, _ = written("gpt2")
    fields = json.loads((path / "config.json").read_text())
    other = tmp_path / "with-dropout"
    shutil.copytree(path, other)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    (other / "config.json").write_text(json.dumps(fields | drops))
    options = dict.fromkeys((*drops, "summary_first_dropout"), 0.0)
    model = {"builder": f"hf:{other}", "options": options}
    config = started(corpus, tmp_path, model, "", run={"start": str(other)})
    assert held(pool, config, tmp_path / "again")


def files_of_adapter(path: Path) -> dict[str, Tensor]:
    """Return the tensors of peft's file."""
    from safetensors.torch import load_file

    return load_file(path / "adapter_model.safetensors")


def test_a_model_and_an_adapter_of_it(
    written: Callable[..., Written], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Two sources: an imported Llama has fused linears, whose adapters are joined."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    base = directory(
        "llama", tmp_path / "base", weights=True, attention_dropout=0.0, rope_parameters=rope
    )
    done = import_model(
        base,
        tmp_path / "imported",
        [f"--data.train={corpus / 'train'}", "--data.sequence_length=16"],
    )
    adapter = peft_files(tmp_path / "peft", drawn())
    settings = {
        "rank": 6,
        "alpha": 9.0,
        "targets": ["block*.attention.*", "block*.mlp.*", "embedding.tokens"],
    }
    config = started(
        corpus,
        tmp_path,
        done.config.model.model_dump(),
        "dp2",
        run={"start": [str(base), str(adapter)]},
        adapter=settings,
        train={"steps": 1},
    )
    said = train(pool, config)
    assert f"starting from the weights of {base} and {adapter}" in said
    imported, found = tensors(tmp_path / "imported"), tensors(run_directory(config.run))
    for key, weight in imported.items():
        assert torch.equal(found[key], weight.to(found[key].dtype)), key
    adapter_only = changed(config, run={"start": str(adapter), "name": "adapter"})
    with pytest.raises(UserError, check=has_code("MW-RUN-051")):
        check(adapter_only, 2)


class Words(nn.Module):
    """An embedding as the attribute ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Embedding(theirs.VOCAB, 32))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = getattr(self, self.name)(ids)
        return found


def own_model(word: str) -> nn.Sequential:
    """A user's model, whose embedding is ``transformer.{word}``: "wte" in transformers' GPT-2."""
    layers = nn.Sequential()
    layers.add_module("transformer", Words(word))
    layers.add_module("head", nn.Linear(32, theirs.VOCAB, bias=False))
    return layers


@pytest.mark.parametrize("word", ["wte", "words"])
def test_a_builder_of_the_users_takes_what_it_names(
    word: str, written: Callable[..., Written], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    path, _ = written("gpt2")
    model = {"builder": "tests.interop.test_start:own_model", "options": {"word": word}}
    run: dict[str, Any] = {
        "start": str(path),
        "start_new": ["head.*"],
        "start_unused": ["transformer.h.*", "transformer.ln_f.*", "transformer.wpe.*", "lm_head.*"],
    }
    if word != "wte":
        run["start_names"] = {"transformer.words.weight": "transformer.wte.weight"}
    if "lm_head.weight" not in files(path):
        run["start_unused"].pop()
    config = started(corpus, tmp_path, model, "pp2", run=run)
    found = held(pool, config, tmp_path / "again")
    expected = files(path)["transformer.wte.weight"]
    assert torch.equal(found[f"weights/transformer.{word}.weight"], expected)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "mixtral"}, None),
        ({"model_type": "gpt2"}, "MW-INTEROP-152"),
        ({"model_type": "nothing"}, "MW-INTEROP-031"),
    ],
)
def test_another_architecture_is_refused(
    change: dict[str, Any],
    code: str | None,
    written: Callable[..., Written],
    corpus: Path,
    tmp_path: Path,
) -> None:
    path, _ = written("llama 3")
    done = import_model(path, tmp_path / "imported", [f"--data.train={corpus / 'train'}"])
    other = tmp_path / "other"
    other.mkdir()
    for file in path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(fields | change))
    config = started(
        corpus, tmp_path, done.config.model.model_dump(), "", run={"start": str(other)}
    )
    with pytest.raises(UserError) as refused:
        check(config, 1)
    assert code is None or refused.value.code == code
