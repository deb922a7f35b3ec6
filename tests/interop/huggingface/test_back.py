"""From a directory of transformers through a training of any layout,
and back to where transformers opens it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.data.sources import open_sources
from meshwright.errors import CheckpointError, DataError, ModelError
from meshwright.run.directory import run_directory
from meshwright_interop.commands.conversion import convert
from meshwright_interop.huggingface.restructure.export import export
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.errors import has_code
from tests.support.marks import long_row
from tests.support.plain import load_plain


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kilobytes, 280 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(
        "the ranks of a mesh hold what the stages of a model hand on.\n" * 300
    )
    (folder / "more.txt").write_text(
        "a step is a forward, a backward and a sum over all of them.\n" * 300
    )
    prepare_files(
        [folder / "text.txt", folder / "more.txt"],
        folder / "prepared",
        vocab_size=280,
        validation_share=0.0,
    )
    return folder / "prepared"


def train_rank(rank: int, world_size: int, config: RunConfig) -> None:
    """One rank of a run."""
    work(config)


def trained(pool: RankPool, config: RunConfig) -> Path:
    """The run directory, after two steps."""
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    pool.run(train_rank, parallel.dp * parallel.pp * parallel.tp, config)
    return run_directory(config.run)


@pytest.mark.parametrize(
    ("kind", "dtype", "parallel"),
    [
        long_row("qwen3", "bfloat16", {"dp": 1, "pp": 2, "tp": 2, "sequence": True}),
        pytest.param(
            "gemma2", "float32", {"dp": 2, "pp": 2, "tp": 1}, marks=pytest.mark.all_layouts
        ),
        pytest.param(
            "phi3",
            "float32",
            {"dp": 1, "pp": 2, "tp": 2, "sequence": True},
            marks=pytest.mark.all_layouts,
        ),
    ],
)
def test_a_model_is_brought_trained_and_taken_away(
    kind: str, dtype: str, parallel: dict[str, object], corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    path = directory(
        kind,
        tmp_path,
        weights=True,
        vocab_size=280,
        tie_word_embeddings=True,
        attention_dropout=0.0,
    )
    config = run_config(
        path,
        run={"name": "run", "directory": str(tmp_path)},
        data={"train": str(corpus / "train"), "tokenizer": str(corpus / "tokenizer.json")},
        parallel={**parallel, "bucket_bytes": 8192},
        train={"dtype": dtype},
    )
    run = trained(pool, config)
    done = export(find(run)[0].path, tmp_path / "out", shard_bytes=40_000)
    assert len(done.files) > 1 and done.side_files == ["generation_config.json", "tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        corpus / "tokenizer.json"
    ).read_bytes()

    transformers = import_transformers()
    opened, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert opened.dtype is getattr(torch, dtype)
    before = transformers.AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=torch.float32
    )
    _, layers = load_plain(run)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits, ours = opened.float()(input_ids=ids).logits, layers(ids)
        assert torch.equal(logits, ours)
        assert not torch.allclose(logits, before(input_ids=ids).logits, atol=1e-4), (
            "it has learned nothing"
        )
    with pytest.raises(CheckpointError, check=has_code("MW-INTEROP-042")):
        export(run, tmp_path / "out")
    said = convert(run, None, ("hf", str(tmp_path / "by command")), [], None, None, 40_000)
    assert f"from_pretrained('{tmp_path / 'by command'}')" in said
    for name in done.files:
        assert (tmp_path / "by command" / name).read_bytes() == (
            tmp_path / "out" / name
        ).read_bytes()

    if dtype == "bfloat16":
        full = export(run, tmp_path / "full", dtype="float32")
        assert list(full.files) == ["model.safetensors"]
        with safe_open(tmp_path / "full" / "model.safetensors", framework="pt") as file:
            masters = file.get_tensor("model.norm.weight")
            assert masters.dtype is torch.float32
            assert torch.equal(masters.bfloat16(), opened.model.norm.weight.bfloat16())
        assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"
        with pytest.raises(ModelError, check=has_code("MW-INTEROP-087")):
            export(run, tmp_path / "other", dtype="int8")


@pytest.mark.long
def test_what_options_changed_is_in_the_configuration(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    path = directory("gemma2", tmp_path, vocab_size=280)
    config = run_config(
        path,
        model={"options": {"num_hidden_layers": 2, "final_logit_softcapping": 20.0}},
        run={"name": "run", "directory": str(tmp_path)},
        data={"train": str(corpus / "train"), "tokenizer": str(corpus / "tokenizer.json")},
        parallel={"dp": 1},
    )
    run = trained(pool, config)
    export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["num_hidden_layers"], len(written["layer_types"])) == (2, 2)
    assert written["final_logit_softcapping"] == 20.0
    opened = import_transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True
    )
    _, layers = load_plain(run)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, layers(ids))


def test_a_corpus_that_does_not_fit_the_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    data = {"train": str(corpus / "train"), "tokenizer": str(corpus / "tokenizer.json")}
    config = run_config(directory("llama", tmp_path), data=data)
    with pytest.raises(DataError, match="67", check=has_code("MW-DATA-090")):
        open_sources(config)


def test_a_checkpoint_of_another_builder_is_refused(
    corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    options = {
        "vocab_size": 280,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "max_sequence_length": 16,
    }
    config = run_config(
        tmp_path,
        model={"builder": "meshwright_models.gpt2:build", "options": options},
        run={"name": "run", "directory": str(tmp_path)},
        data={"train": str(corpus / "train"), "tokenizer": str(corpus / "tokenizer.json")},
        parallel={"dp": 1},
    )
    run = trained(pool, config)
    with pytest.raises(
        ModelError,
        match=r"meshwright_models.gpt2:build",
        check=has_code("MW-INTEROP-062"),
    ):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
