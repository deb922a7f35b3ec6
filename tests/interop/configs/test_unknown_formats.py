"""Documents and flags of other programs are unknown; no suffix makes them a supported format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import ConfigError
from meshwright_interop.configs import convert_file
from tests.interop.configs import samples
from tests.support.errors import has_code

UNKNOWN = {
    "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\n",
    "llm-foundry": (
        """
max_seq_len: 2048
model: {name: mpt_causal_lm, d_model: 768, n_heads: 12, n_layers: 12}
optimizer: {name: decoupled_adamw, lr: 6.0e-4}
global_train_batch_size: 256
"""
    ),
    "NeMo": (
        "_target_: x\nmodel: {_target_: nemo.collections.llm.LlamaModel}\ntrainer: {devices: 8}\n"
    ),
    "Hydra": (
        "defaults: [base]\nmodel: {_target_: src.models.Net}\ntrain: {lr: 1}\noptimizer:"
        " {}\nscheduler: {}\n"
    ),
    "picotron": (
        "distributed: {tp_size: 2, pp_size: 1, dp_size: 4}\nmodel: {num_hidden_layers:"
        " 3}\ntraining: {}\n"
    ),
    "DeepSpeed": "train_batch_size: 8\nbf16: {enabled: true}\ngradient_clipping: 1.0\n",
    "a model of Hugging Face": "model_type: llama\narchitectures: [LlamaForCausalLM]\n",
    "own script": (
        "seed: 100\ntrainset_path: /data\nseq_len: 2048\nmodel: pythia-160m\nmicro_batch_size:"
        " 16\nlr: 3.e-3\n"
    ),
    "the four usual sections": (
        "model: {dim: 64, n_layers: 2}\ntrain: {steps: 10}\noptimizer: {lr: 0.1}\nscheduler: {name:"
        " cosine}\n"
    ),
    "sections of torchtitan's names": (
        "training: {epochs: 3, batch_size: 8}\nlr_scheduler: {name: cosine}\njob: {name: x}\n"
    ),
    "sections of nanotron's names": (
        "parallelism: {gpus: 2}\ntokens: {bos: 1}\noptimizer: {lr: 0.1}\ncheckpoints: {every: 3}\n"
    ),
    "a batch size": "train_batch_size: 32\nlr: 1e-4\nhidden: 12\n",
    "a model's name": "model_name: tiny\ntrain: {epochs: 3}\n",
    "no text as keys": "1: 2\ntrue: 3\n",
    "a model's own section": "model: {model_config: {depth: 3}}\ndata: {path: x}\n",
}


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".toml"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_document_of_another_program_is_unknown(tmp_path: Path, name: str, suffix: str) -> None:
    path = written(tmp_path / f"a{suffix}", UNKNOWN[name])
    if path is None:
        return
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-142")) as caught:
        convert_file(path)
    for way in ("--from", "meshwright init", "hf:DIR"):
        assert way in str(caught.value)


def written(path: Path, text: str) -> Path | None:
    """Write a YAML document in the form of the suffix; None: it has none there."""
    document: dict[Any, Any] = yaml.safe_load(text)
    if path.suffix == ".json":
        text = json.dumps(document)
    elif path.suffix == ".toml":
        keys = {key: value for key, value in document.items() if isinstance(key, str)}
        plain = [
            f"{key} = {json.dumps(value)}"
            for key, value in keys.items()
            if not isinstance(value, dict)
        ]
        tables = [
            f"{key} = {inline(value)}" for key, value in keys.items() if isinstance(value, dict)
        ]
        text = "\n".join([*plain, *tables])
        if not keys:
            return None
    path.write_text(text)
    return path


def inline(value: object) -> str:
    """Format a value of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_keys_in_the_message_are_few_and_short(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("".join(f"{'k' * 900}{i}: 1\n" for i in range(50)))
    with pytest.raises(
        ConfigError, match="and 42 more", check=has_code("MW-INTEROP-142")
    ) as caught:
        convert_file(path)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "accelerate launch train.py --model_name_or_path a/b --bf16\n",
            "the flags of train.py are not",
        ),
        (
            "NCCL_DEBUG=INFO deepspeed --num_gpus 8 run.py --deepspeed ds.json\n",
            "the flags of run.py are not",
        ),
        (
            "python train_gpt2.py --input_bin 'a*.bin' --batch_size 64 --num_iterations 9\n",
            "the flags of train_gpt2.py are not",
        ),
        ("--learning-rate 3 --epochs 2\n", "--learning-rate, --epochs"),
    ],
)
def test_flags_of_another_program_are_not_megatrons(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match="--from megatron", check=has_code("MW-INTEROP-143")
    ) as caught:
        convert_file(path)
    assert said in str(caught.value)


def test_the_users_word_counts_where_the_keys_do_not_tell(tmp_path: Path) -> None:
    """The start of a file of nanotron's, and Megatron-LM's flags of a fork:
    read as what ``--from`` names.
    """
    path = tmp_path / "a.yaml"
    path.write_text("tokens:\n  train_steps: 3\n")
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-142")):
        convert_file(path)
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-030")):
        convert_file(path, "nanotron")
    flags = tmp_path / "a.txt"
    flags.write_text("torchrun train.py --bf16\n")
    with pytest.raises(ConfigError, match=r"a.txt:1: train.py: ", check=has_code("MW-INTEROP-030")):
        convert_file(flags, "megatron")


@pytest.mark.parametrize(
    "left_out", ["general", "logging", "tokenizer", "data_stages", "checkpoints", "model"]
)
def test_nanotron_is_found_without_one_of_its_sections(tmp_path: Path, left_out: str) -> None:
    document = yaml.safe_load(samples.NANOTRON)
    del document[left_out]
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(document))
    words = ["--model.builder=mine:build"] if left_out == "model" else []
    assert convert_file(path, overrides=words).framework == "nanotron"
